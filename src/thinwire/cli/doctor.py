"""`thinwire doctor`: checks this machine and a set-up before a run. Verbs that train call `ready` and `fitted` first."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from thinwire.cli import checks as machine
from thinwire.cli import options
from thinwire.cli.checks import CheckResult, warn_unless
from thinwire.cli.disk import room_on_disk
from thinwire.cli.firewall import rules
from thinwire.codecs import Shapes
from thinwire.comm import Link, parse_link
from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.lm import member
from thinwire.lm.job import open_job
from thinwire.lm.launch import threads_each
from thinwire.lm.model import Transformer
from thinwire.lm.run import Run
from thinwire.lm.settings import Placement
from thinwire.lm.setup import outline_model
from thinwire.lm.tokenizer import make_tokenizer, open_corpus
from thinwire.lm.tokens import Bytes, find
from thinwire.plan.base import base_nbytes
from thinwire.plan.by_link import by_link, follows_link
from thinwire.plan.compute import timed
from thinwire.plan.machine import BASE_NBYTES
from thinwire.plan.memory import Memory, kept_nbytes, placed, replica_memory
from thinwire.records.printable import reason
from thinwire.records.units import text_of_count, text_of_nbytes, text_of_rate, text_of_seconds
from thinwire.runtime.on_device import stays_on_device
from thinwire.strategy import Strategy

_SHARE_OF_GPU = 0.5  # of the free memory: anchors that nobody asked to be there take no more with all the rest
_MEASURED_SECONDS = 3.0  # seconds after which no further step is timed
LARGE = 1 << 28  # bytes of text above which it is not tokenised


@dataclass(frozen=True)
class Options:
    """The options of `thinwire doctor`."""

    run: tyro.conf.Positional[Path | None] = None
    """A run file to check against this machine. Default: this machine alone is checked."""
    link: str | None = None
    """The real link, such as 50mbit or 50mbit,30ms. Default: the run file's."""
    step_seconds: float | None = None
    """Seconds of an inner step. Default: measured, with the run's own model."""
    master_addr: str | None = None
    """The address of rank 0, as given to torchrun. Default: that address is not checked."""
    master_port: int = 29500
    """The port of rank 0, as given to torchrun."""
    firewall: tuple[str, ...] = ()
    """Addresses of the machines of a run. Only prints nftables rules that let these machines alone reach the ports of replicas. Default: no
    rules are printed."""
    runs: Path = Path("runs")
    """The folder that holds run folders."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.ask(Options, "thinwire doctor", arguments, "Check this machine, and report problems.")
    if asked.step_seconds is not None and not asked.step_seconds > 0:
        raise ConfigurationError(f"step_seconds={asked.step_seconds}: more than 0 is needed.")
    if not 0 < asked.master_port < 1 << 16:
        raise ConfigurationError(f"--master-port {asked.master_port}: a port, 1 to 65535, is needed.")
    if asked.firewall:
        print(rules(asked.firewall, asked.master_port))
        return 0
    link = parse_link(asked.link) if asked.link is not None else None
    console = options.console(asked.json)
    findings = list(examine(asked, link, options.teller(console)))
    console.print(_table(findings))
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    console.print(f"{counts['problem']} problem(s), {counts['warning']} warning(s)", highlight=False)
    if asked.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"findings": found, "problems": counts["problem"], "warnings": counts["warning"]}))
    return 1 if counts["problem"] else 0


def examine(asked: Options, link: Link | None, tell: Callable[[str], object]) -> Iterator[CheckResult]:
    """All checks, those of the machine first. `tell` gets a line about each step, because some take many seconds."""
    tell("looking at processors, memory and extras")
    yield from machine.offers()
    tell("testing the network of this machine")
    yield from machine.network()
    tell(f"looking at the disk of {asked.runs}")
    yield machine.disk(asked.runs)
    if asked.master_addr is not None:
        tell(f"dialling {asked.master_addr}:{asked.master_port}")
        yield from machine.meeting_point(asked.master_addr, asked.master_port)
    if asked.run is not None:
        yield from set_up(asked.run, link, asked.step_seconds, tell)


def set_up(
    file: Path, link: Link | None, step_seconds: float | None, tell: Callable[[str], object]
) -> Iterator[CheckResult]:
    """Check a run file on this machine: file, text, model, memory, cores, link."""
    tell(f"reading {file}")
    try:
        run = Run.load(file, options.advise)
    except ConfigurationError as error:
        yield CheckResult("run file", "problem", reason(error))
        return
    about = f"{file}: {run.placement.replicas} replicas, {run.optimizer.steps} steps, {run.method.strategy}"
    yield CheckResult("run file", "ok", about)
    yield warn_unless(
        run.placement.replicas <= machine.cores(),
        "replicas",
        f"{run.placement.replicas} on {machine.cores()} core(s), {_threads(run)} thread(s) each",
        "if they all run here they take turns: fewer replicas, or more machines (thinwire docs machines)",
    )
    what, vocabulary = "job" if run.model.job else "text", 0
    tell(f"reading the {what}, making the model")
    try:
        if run.model.job:
            run = run.counted_in_samples()
            model = open_job(run).try_out(run.placement.replicas)
        else:
            vocabulary = yield from text(run)
            what = "model"
            model = outline_model(run.model, run.data.sequence, run.seed, vocabulary)
        strategy = run.make_strategy()
        fragments = strategy.partition.fragments(model)
    except ThinwireError as error:
        yield CheckResult(what, "problem", str(error))
        return
    tell("predicting the memory of a replica")
    fits = yield from room(run, model, strategy, [fragment.numel for fragment in fragments])
    word = "measured" if step_seconds is None else "given"
    if step_seconds is None and fits:
        tell("timing an inner step")
        step_seconds = measured_step(run, vocabulary)
        yield CheckResult("inner step", "ok", f"{text_of_seconds(step_seconds)} (measured)")
    if step_seconds is not None:
        told: set[str] = set()
        if follows_link(run):
            told.add("delay")
            run, says = by_link(run, model, step_seconds, word)
            strategy = run.make_strategy()
            fragments = strategy.partition.fragments(model)
            yield CheckResult("rounds", "ok", f"thinwire train takes {says}")
        shapes, wire = [fragment.shapes for fragment in fragments], link or parse_link(run.placement.link)
        found = enough(strategy, shapes, run.placement.replicas, wire, step_seconds)
        yield from (finding for finding in found if finding.what not in told)
        yield timeouts(run.placement, strategy, shapes, wire, step_seconds)


def text(run: Run) -> Generator[CheckResult, None, int]:
    """Check the text, and return the size of the vocabulary. Large text is not tokenised."""
    nbytes = sum(source.nbytes for source in find(run.data.text)) if run.data.text else 0
    if nbytes > LARGE and isinstance(make_tokenizer(run.data, run.model.model), Bytes):
        yield CheckResult("text", "ok", f"{text_of_nbytes(nbytes)}; not tokenised here, the run does that first")
        return 256
    corpus = open_corpus(run.data, run.model.model)
    corpus.batch(run.seed, 0, run.placement.replicas, 0, run.data.largest_batch, run.data.sequence)
    corpus.held_out(1, run.data.sequence, 1)
    epochs = (
        run.optimizer.steps
        * run.data.tokens
        / run.data.sequence
        * run.placement.replicas
        / max(1, corpus.windows(run.data.sequence))
    )
    yield warn_unless(
        epochs <= 4,  # more passes than that are worth much less than new text (arXiv 2305.16264)
        "text",
        f"{text_of_count(corpus.manifest.tokens)} tokens of {corpus.manifest.name}; the run reads them {epochs:.2g} times",
        "more text, or fewer steps",
    )
    return corpus.vocabulary


def room(run: Run, model: nn.Module, strategy: Strategy, numels: Sequence[int]) -> Generator[CheckResult, None, bool]:
    """Predicted memory of one replica; returns whether it fits."""
    parameters = sum(p.numel() for p in model.parameters())
    total, parts = predicted_nbytes(run, model, strategy, numels, base_nbytes())
    available = available_nbytes(strategy)
    says = f"{text_of_count(parameters)} parameters: {text_of_nbytes(total)} a replica (predicted{parts})"
    what = "memory of a replica"
    if total > available:
        says += f"; {text_of_nbytes(available)} are free"
        yield CheckResult(what, "problem", says, "a smaller model, or shards: thinwire docs machines")
    else:
        yield warn_unless(
            total * run.placement.replicas <= available,
            what,
            says,
            f"not all {run.placement.replicas} replicas fit here",
        )
    return total <= available


def available_nbytes(strategy: Strategy) -> int:
    """The memory that a replica can use: this machine's, and its GPU's."""
    available = 0 if torch.cuda.is_available() and strategy.anchors == "device" else machine.memory()[1]
    return available + (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)


def ready(run: Run, model: nn.Module, here: int, folder: Path, console: Console) -> None:
    """Print warnings about useless settings, and about too small a disk. Raise `ConfigurationError` if `here` replicas do not fit into this
    machine's memory, or the trained model not on the disk of `folder`.
    """
    if run.make_method():
        strategy, total, parts = Strategy(), sum(4 * p.numel() for p in model.parameters()), " for its weights"
    else:
        strategy = run.make_strategy()
        cut = strategy.partition.fragments(model)
        total, parts = predicted_nbytes(run, model, strategy, [fragment.numel for fragment in cut], BASE_NBYTES)
        for warning in strategy.warnings([fragment.shapes for fragment in cut], run.placement.replicas):
            console.print(f"warning: {run.method.strategy}: {warning}.", soft_wrap=True, highlight=False)
    available = available_nbytes(strategy)
    if torch.cuda.is_available():  # the replicas may share several
        here = min(here, 1)
    if total * here > available:
        raise ConfigurationError(
            f"model={run.model.label!r}: {text_of_nbytes(total)} a replica (predicted{parts}), {here} of them here, and "
            f"{text_of_nbytes(available)} of memory are free; choose a smaller model or --batch, fewer replicas on this machine, or shards "
            f"(thinwire docs machines).{_advice(run, model, strategy, available // here)}"
        )
    room_on_disk(run, model, here, folder, console)


def _advice(run: Run, model: nn.Module, strategy: Strategy, available: int) -> str:
    """What to do if host memory is too short for the outer state, and the rest fits into the `available` bytes of a replica."""
    if run.make_method() or strategy.anchors != "host":
        return ""
    try:
        strategy = run.changed(anchors="disk").make_strategy()
    except ConfigurationError:
        return ""
    cut = strategy.partition.fragments(model)
    total, _ = predicted_nbytes(run, model, strategy, [fragment.numel for fragment in cut], BASE_NBYTES)
    return f" With --anchors disk a replica takes {text_of_nbytes(total)}, which fits." if total <= available else ""


def predicted_nbytes(
    run: Run, model: nn.Module, strategy: Strategy, numels: Sequence[int], libraries: int
) -> tuple[int, str]:
    """Most bytes of a replica's process, and their purposes in words. `libraries` are the bytes of a process without a model."""
    gpu = torch.cuda.is_available()
    base = 0 if gpu else libraries
    if isinstance(model, Transformer) and run.model.lora is None:
        bf16 = run.model.precision == "bf16" or (run.model.precision == "auto" and gpu)
        needed = replica_memory(
            model.architecture, strategy, numels, run.placement.replicas,
            batch=run.data.largest_batch, sequence=run.data.sequence, accumulate=run.data.accumulate, bf16=bf16,
        )  # fmt: skip
        kept = needed.in_memory()
        total, aside = needed.peak() if gpu else needed.process_nbytes(base), ""
    else:
        parameters = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needs = kept_nbytes(trained, strategy, numels, run.placement.replicas) | {"parameters": 4 * parameters}
        kept = Memory(placed(needs, strategy, numels), {}).in_memory() | {"gradients": 4 * trained}
        total, aside = base + sum(kept.values()), ", without activations"
    kept |= {"libraries": base} if base else {}
    parts = ", ".join(f"{name} {text_of_nbytes(nbytes)}" for name, nbytes in kept.items())
    rest = f", at its worst moment {text_of_nbytes(total - sum(kept.values()))} more" if not aside else ""
    return total, f"{aside}: {parts}{rest}"


def measured_step(run: Run, vocabulary: int) -> float:
    """Seconds of one inner step of the run's model on a replica's share of the cores: the fastest of a few, without the first one."""
    threads = torch.get_num_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizers, loss_of = timed(run, vocabulary, device)
    bf16 = run.model.precision == "bf16" or (run.model.precision == "auto" and device.type == "cuda")
    try:
        torch.set_num_threads(_threads(run))
        taken: list[float] = []
        while len(taken) < 2 or (len(taken) < 6 and sum(taken) < _MEASURED_SECONDS):
            began = time.perf_counter()
            for _ in range(run.data.accumulate):
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    loss = loss_of(run.data.largest_batch)
                torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loss.item()  # wait for the GPU
            taken.append(time.perf_counter() - began)
        return min(taken[1:])
    finally:
        torch.set_num_threads(threads)


def fitted(run: Run, model: nn.Module, begun: Run | None = None) -> tuple[Run, list[str]]:
    """`run` with the rounds that its link chooses, and with its anchors where its GPU has room, unless it gives them or has `begun`; and lines
    about the choices.
    """
    lines = []
    if follows_link(run):
        if begun:
            taken = begun.method
            run = run.changed(every=taken.every, codec=taken.codec, delay=taken.delay)
        else:
            run, rounds = fitted_to_link(run, model)
            lines.append(f"rounds: {rounds}")
    if begun and not run.method.anchors:
        return run.changed(anchors=begun.method.anchors), lines
    nbytes = nbytes_on_gpu(run, model)
    if nbytes and nbytes <= _SHARE_OF_GPU * torch.cuda.mem_get_info()[0]:
        run = run.changed(anchors="device")
        lines.append(f"anchors: --anchors device, because the GPU has room for {text_of_nbytes(nbytes)} (predicted)")
    return run, lines


def nbytes_on_gpu(run: Run, model: nn.Module) -> int:
    """Bytes on one GPU of the replicas that share it, with their anchors there (predicted); 0 if `run` has another place for them, or rounds
    cannot run there.
    """
    if not torch.cuda.is_available() or run.make_method() or run.placement.elastic or run.method.anchors:
        return 0
    try:
        there = run.changed(anchors="device")
    except ConfigurationError:  # a composition, or a recipe that has no anchors
        return 0
    strategy = there.make_strategy()
    numels = [fragment.numel for fragment in strategy.partition.fragments(model)]
    sharing = -(-run.placement.replicas // torch.cuda.device_count())
    return sharing * predicted_nbytes(there, model, strategy, numels, 0)[0] if stays_on_device(strategy) else 0


def fitted_to_link(run: Run, model: nn.Module) -> tuple[Run, str]:
    """`run`, of which `follows_link` is true, with the rounds for its link and for the time of an inner step here; and a line about them."""
    with torch.random.fork_rng():  # its random draws do not change those of the run
        seconds = measured_step(run, getattr(model, "vocabulary", 256))
    return by_link(run, model, seconds)


def enough(
    strategy: Strategy, fragments: Sequence[int | Shapes], replicas: int, link: Link | None, seconds: float
) -> Iterator[CheckResult]:
    """Compare the link with the least sustained rate b·N/(H·T), and the time of a flight with its delay τ·T."""
    every, delay = strategy.schedule.every, strategy.schedule.delay
    nbytes = strategy.nbytes_per_period(fragments, replicas)
    floor = 8 * nbytes / (every * seconds)
    says = f"{text_of_nbytes(nbytes)} in {every} steps of {text_of_seconds(seconds)}: at least {text_of_rate(floor)} up (predicted)"
    says += f"; {strategy.bound}" if strategy.bound else ""
    if link is None or not floor:  # a single replica sends nothing
        yield CheckResult("link", "ok", says, "give --link RATE to compare with yours" if floor else "")
        return
    share = link.bits_per_second / floor
    advice = f"at most {min(share, 1):.0%} of the time would be training (predicted): larger --every, fewer bits (--codec), or a larger --batch"
    yield warn_unless(share >= 1, "link", f"{says}; {link} is given", advice)
    flight = link.seconds(member.largest_round(strategy, fragments, replicas))
    says = f"the largest fragment flies {text_of_seconds(flight)}, {delay} steps last {text_of_seconds(delay * seconds)} (predicted)"
    if delay:
        advice = f"every round would wait: --delay {min(every - 1, int(flight / seconds) + 1)}, or smaller fragments"
    else:
        advice = "every round waits: streaming_diloco trains on meanwhile"
    # 5 % of the time is no problem
    yield warn_unless(flight <= max(delay, 0.05 * every) * seconds, "delay", says, advice)


def timeouts(
    placement: Placement, strategy: Strategy, fragments: Sequence[int | Shapes], link: Link | None, seconds: float
) -> CheckResult:
    """The heartbeat time-out of an elastic run with these settings."""
    of = member.timeouts(placement, strategy, fragments, link, seconds)
    texts = {name.replace("_", " "): text_of_seconds(value) for name, value in dataclasses.asdict(of).items()}
    return CheckResult(
        "timeouts",
        "ok",
        ", ".join(f"{name} {text}" for name, text in texts.items()) + " (predicted)",
        f"for replicas that come and go: thinwire lighthouse --heartbeat-timeout {of.heartbeat_timeout:.3g}",
    )


def _threads(run: Run) -> int:
    return torch.get_num_threads() if run.placement.carrier == "threads" else threads_each(run.placement.replicas)


def _table(findings: Sequence[CheckResult]) -> Table:
    styles = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        says = Text(finding.says)
        if finding.do:
            says.append(f"\n→ {finding.do}", style="dim" if finding.level == "ok" else "")
        table.add_row(Text(finding.level, style=styles[finding.level]), Text(finding.what), says)
    return table
