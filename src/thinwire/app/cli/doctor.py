"""`thinwire doctor`: checks this machine and a set-up before a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table
from rich.text import Text

from thinwire.app.cli import checks as machine
from thinwire.app.cli import options
from thinwire.app.cli.capacity import Needs, cores_that_train, measure_step, threads_of
from thinwire.app.cli.checks import CheckResult, warn_unless
from thinwire.app.cli.firewall import rules
from thinwire.app.plan.base import base_nbytes
from thinwire.app.plan.by_link import by_link, follows_link
from thinwire.app.plan.cost import DEAR
from thinwire.app.plan.machine import RoundPrice
from thinwire.app.records.printable import reason
from thinwire.app.records.units import text_of_count, text_of_nbytes, text_of_rate, text_of_seconds
from thinwire.app.trainer import member
from thinwire.app.trainer.job import open_job
from thinwire.app.trainer.placement import Placement
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import outline_model
from thinwire.app.trainer.texts import find
from thinwire.app.trainer.tokenizer import make_tokenizer, open_corpus
from thinwire.app.trainer.tokens import Bytes
from thinwire.codecs import Shapes
from thinwire.comm import Link, parse_link
from thinwire.errors import ConfigurationError, MissingError, ThinwireError
from thinwire.strategy import Strategy

LARGE_TEXT_NBYTES = 1 << 28  # text above it is not tokenised


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
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
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
    if asked.run is not None and not asked.run.exists():
        raise MissingError(f"{asked.run} is not there; a run file is needed. `thinwire train` writes one as run.toml.")
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
        run = Run.load(file)
    except ConfigurationError as error:
        yield CheckResult("run file", "problem", reason(error))
        return
    about = f"{file}: {run.placement.replicas} replicas, {run.optimizer.steps} steps, {run.method.strategy}"
    yield CheckResult("run file", "ok", about)
    yield warn_unless(
        run.placement.replicas <= machine.cores(),
        "replicas",
        f"{run.placement.replicas} on {machine.cores()} core(s), {threads_of(run)} thread(s) each",
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
        needs = Needs.of(run, model)
        shapes = needs.shapes
    except ThinwireError as error:
        yield CheckResult(what, "problem", str(error))
        return
    tell("predicting the memory of a replica")
    fits = yield from room(needs)
    word = "measured" if step_seconds is None else "given"
    if step_seconds is None and fits:
        tell("timing an inner step")
        step_seconds = measure_step(run, vocabulary)
        yield CheckResult("inner step", "ok", f"{text_of_seconds(step_seconds)} (measured)")
    if step_seconds is not None:
        told: set[str] = set()
        if follows_link(run):
            told.add("delay")
            run, says = by_link(run, model, step_seconds, word, cores_that_train(run))
            needs = Needs.of(run, model)
            shapes = needs.shapes
            yield CheckResult("rounds", "ok", f"thinwire train takes {says}")
        strategy, wire = needs.strategy, link or parse_link(run.placement.link)
        found = enough(strategy, shapes, run.placement.replicas, wire, step_seconds)
        yield from (finding for finding in found if finding.what not in told)
        if run.placement.replicas > 1 and (cores := cores_that_train(run)):
            yield work_of_rounds(run, strategy, shapes, step_seconds, cores)
        yield timeouts(run.placement, strategy, shapes, wire, step_seconds)


def text(run: Run) -> Generator[CheckResult, None, int]:
    """Check the text, and return the size of the vocabulary. Large text is not tokenised."""
    nbytes = sum(source.nbytes for source in find(run.data.text, column=run.data.column)) if run.data.text else 0
    if nbytes > LARGE_TEXT_NBYTES and isinstance(make_tokenizer(run.data, run.model.model), Bytes):
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


def room(needs: Needs) -> Generator[CheckResult, None, bool]:
    """Predicted memory of one replica; returns whether it fits."""
    parameters, replicas = sum(p.numel() for p in needs.model.parameters()), needs.run.placement.replicas
    (total, parts), available, short = needs.of_process(base_nbytes()), needs.available, needs.too_much_for_gpu
    says = f"{text_of_count(parameters)} parameters: {text_of_nbytes(total)} a replica (predicted{parts})"
    what = "memory of a replica"
    if short or total > available:
        says += f"; {short}" if short else f"; {text_of_nbytes(available)} are free"
        yield CheckResult(what, "problem", says, "a smaller model, or shards: thinwire docs machines")
    else:
        yield warn_unless(total * replicas <= available, what, says, f"not all {replicas} replicas fit here")
    return not short and total <= available


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


def work_of_rounds(
    run: Run, strategy: Strategy, fragments: Sequence[Shapes], seconds: float, cores: int
) -> CheckResult:
    """What the work of rounds takes of the time of cores that train, without encoding and decoding."""
    every, price = strategy.schedule.every, RoundPrice()
    taken = sum(price.taken_seconds(len(shapes), sum(map(math.prod, shapes)), 0.0, cores) for shapes in fragments)
    share = taken / (taken + every * seconds)
    rounds = f"{len(fragments)} rounds in {every} steps of {text_of_seconds(seconds)}"
    says = f"{rounds}: their work takes {share:.0%} of the time of {cores} core(s) that train (predicted)"
    enough = math.ceil(taken * (1 - DEAR) / (DEAR * seconds))
    larger = (
        f"--every {enough}"
        if run.method.strategy != "data_parallel"
        else "a method with rarer rounds, such as streaming_diloco"
    )
    return warn_unless(share <= DEAR, "work of rounds", says, f"{DEAR:.0%} with {larger}, or with a larger --batch")


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


def _table(findings: Sequence[CheckResult]) -> Table:
    styles = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        says = Text(finding.says)
        if finding.do:
            says.append(f"\n→ {finding.do}", style="dim" if finding.level == "ok" else "")
        table.add_row(Text(finding.level, style=styles[finding.level]), Text(finding.what), says)
    return table
