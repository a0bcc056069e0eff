"""What this machine can hold of a run, and how fast: checks before training, and the defaults that follow from link and GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from thinwire.app.cli import checks
from thinwire.app.cli.disk import room_on_disk
from thinwire.app.plan.by_link import by_link, follows_link
from thinwire.app.plan.compute import optimizers_and_loss
from thinwire.app.plan.machine import BASE_NBYTES
from thinwire.app.plan.memory import Memory, by_place, kept_nbytes, replica_memory
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.trainer.launch import threads_each
from thinwire.app.trainer.model import Transformer
from thinwire.app.trainer.run import Run
from thinwire.drivers.fragment import stays_on_device
from thinwire.errors import ConfigurationError
from thinwire.strategy import Strategy

_SHARE_OF_GPU = 0.5  # of the free memory: anchors that nobody asked to be there take no more with all the rest
_MEASURED_SECONDS = 3.0  # seconds after which no further step is timed


def available_nbytes(strategy: Strategy) -> int:
    """The memory that a replica can use: this machine's, and its GPU's."""
    available = 0 if torch.cuda.is_available() and strategy.anchors == "device" else checks.memory()[1]
    return available + (torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0)


def check_capacity(run: Run, model: nn.Module, here: int, folder: Path, console: Console) -> None:
    """Print warnings about useless settings, and about too small a disk. Raise `ConfigurationError` if `here` replicas do not fit into this
    machine's memory, or the trained model not on the disk of `folder`.
    """
    if run.make_method():
        strategy, total, parts = Strategy(), sum(4 * p.numel() for p in model.parameters()), " for its weights"
    else:
        strategy = run.make_strategy()
        cut = strategy.partition.fragments(model)
        numels = [fragment.numel for fragment in cut]
        total, parts = predicted_nbytes(run, model, strategy, numels, BASE_NBYTES)
        if here and (short := too_large_for_gpu(run, model, strategy, numels)):
            raise ConfigurationError(
                f"model={run.model.label!r}: a replica needs {short}; choose a smaller model or --batch, or shards (thinwire docs machines)."
            )
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


def memory_of(run: Run, model: nn.Module, strategy: Strategy, numels: Sequence[int]) -> Memory:
    """The predicted memory of a replica of the run; without activations if the model is not Thinwire's."""
    if isinstance(model, Transformer) and run.model.lora is None:
        bf16 = run.model.precision == "bf16" or (run.model.precision == "auto" and torch.cuda.is_available())
        coded = [strategy.coded(one.shapes) for one in strategy.partition.fragments(model)]
        return replica_memory(
            model.architecture, strategy, numels, run.placement.replicas,
            batch=run.data.largest_batch, sequence=run.data.sequence, accumulate=run.data.accumulate, bf16=bf16,
            payload_nbytes=sum(codec.nbytes(n) for codec, n in coded) if strategy.codec.needs_shapes else None,
        )  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    needs = kept_nbytes(trained, strategy, numels, run.placement.replicas)
    return Memory(
        by_place(needs | {"parameters": 4 * parameters, "gradients": 4 * trained}, strategy, numels), {"": {}}
    )


def too_large_for_gpu(run: Run, model: nn.Module, strategy: Strategy, numels: Sequence[int]) -> str:
    """What a replica needs of its GPU, and what is free, if that is less; empty if it fits, or torch sees no GPU."""
    if not torch.cuda.is_available():
        return ""
    needed, free = memory_of(run, model, strategy, numels).peak("device"), torch.cuda.mem_get_info()[0]
    return (
        f"{text_of_nbytes(needed)} on its GPU (predicted), and {text_of_nbytes(free)} are free" if needed > free else ""
    )


def predicted_nbytes(
    run: Run, model: nn.Module, strategy: Strategy, numels: Sequence[int], libraries: int
) -> tuple[int, str]:
    """Most bytes of a replica's process, and their purposes in words. `libraries` are the bytes of a process without a model."""
    gpu, needed = torch.cuda.is_available(), memory_of(run, model, strategy, numels)
    base, kept = 0 if gpu else libraries, needed.in_memory()
    total = needed.peak() if gpu else needed.process_nbytes(base)
    aside = "" if isinstance(model, Transformer) and run.model.lora is None else ", without activations"
    kept |= {"libraries": base} if base else {}
    parts = ", ".join(f"{name} {text_of_nbytes(nbytes)}" for name, nbytes in kept.items())
    rest = f", at its worst moment {text_of_nbytes(total - sum(kept.values()))} more" if not aside else ""
    return total, f"{aside}: {parts}{rest}"


def measure_step(run: Run, vocabulary: int) -> float:
    """Seconds of one inner step of the run's model on a replica's share of the cores: the fastest of a few, without the first one."""
    threads = torch.get_num_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizers, loss_of = optimizers_and_loss(run, vocabulary, device)
    bf16 = run.model.precision == "bf16" or (run.model.precision == "auto" and device.type == "cuda")
    try:
        torch.set_num_threads(threads_of(run))
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


def choose_defaults(run: Run, model: nn.Module, begun: Run | None = None) -> tuple[Run, list[str]]:
    """`run` with the rounds that its link chooses, and with its anchors where its GPU has room, unless it gives them or has `begun`; and lines
    about the choices.
    """
    lines = []
    if follows_link(run):
        if begun:
            taken = begun.method
            run = run.changed(every=taken.every, codec=taken.codec, delay=taken.delay)
        else:
            run, rounds = _choose_rounds(run, model)
            lines.append(f"rounds: {rounds}")
    if begun and not run.method.anchors:
        return run.changed(anchors=begun.method.anchors), lines
    nbytes = _nbytes_on_gpu(run, model)
    if nbytes and nbytes <= _SHARE_OF_GPU * torch.cuda.mem_get_info()[0]:
        run = run.changed(anchors="device")
        lines.append(f"anchors: --anchors device, because the GPU has room for {text_of_nbytes(nbytes)} (predicted)")
    return run, lines


def _nbytes_on_gpu(run: Run, model: nn.Module) -> int:
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


def _choose_rounds(run: Run, model: nn.Module) -> tuple[Run, str]:
    """`run`, of which `follows_link` is true, with the rounds for its link and for the time of an inner step here; and a line about them."""
    with torch.random.fork_rng():  # its random draws do not change those of the run
        seconds = measure_step(run, getattr(model, "vocabulary", 256))
    return by_link(run, model, seconds, threads=cores_that_train(run))


def cores_that_train(run: Run) -> int:
    """Cores on which the work of rounds takes turns with training, if all replicas are on this machine; 0 if a GPU trains."""
    return 0 if torch.cuda.is_available() else threads_of(run)


def threads_of(run: Run) -> int:
    """Threads of one replica of the run, if all are on this machine."""
    return torch.get_num_threads() if run.placement.carrier == "threads" else threads_each(run.placement.replicas)
