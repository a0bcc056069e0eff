"""What this machine can hold of a run, and how fast: checks before training, and the defaults that follow from link and GPU."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from thinwire.app.cli import checks
from thinwire.app.plan.by_link import by_link, follows_link
from thinwire.app.plan.compute import optimizers_and_loss
from thinwire.app.plan.machine import BASE_NBYTES
from thinwire.app.plan.memory import Memory, by_place, kept_nbytes, replica_memory
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.trainer.launch import threads_each
from thinwire.app.trainer.model import Transformer
from thinwire.app.trainer.run import Run
from thinwire.codecs import Shapes
from thinwire.drivers.fragment import stays_on_device
from thinwire.errors import ConfigurationError
from thinwire.files import existing
from thinwire.pieces.partition import Fragment
from thinwire.strategy import Strategy

_SHARE_OF_GPU = 0.5  # of the free memory: anchors that nobody asked to be there take no more with all the rest
_MEASURED_SECONDS = 3.0  # seconds after which no further step is timed
_PAGE_NBYTES = 5_000_000  # the report page


@dataclass(frozen=True)
class Needs:
    """What a replica of `run` needs of a machine (predicted), with this `model` and `strategy`."""

    run: Run
    model: nn.Module
    strategy: Strategy

    @classmethod
    def of(cls, run: Run, model: nn.Module) -> Needs:
        """Raises `ConfigurationError` for a method with its own loop, of which only the weights are known."""
        return cls(run, model, run.make_strategy())

    @cached_property
    def fragments(self) -> list[Fragment]:
        return list(self.strategy.partition.fragments(self.model))

    @property
    def shapes(self) -> list[Shapes]:
        return [fragment.shapes for fragment in self.fragments]

    @cached_property
    def numels(self) -> list[int]:
        return [fragment.numel for fragment in self.fragments]

    @property
    def kept(self) -> dict[str, int]:
        """Bytes of what a replica keeps from step to step."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return kept_nbytes(trained, self.strategy, self.numels, self.run.placement.replicas)

    @property
    def knows_activations(self) -> bool:
        """Whether the model is Thinwire's own."""
        return isinstance(self.model, Transformer) and self.run.model.lora is None

    @cached_property
    def memory(self) -> Memory:
        """The memory of a replica; without activations if the model is not Thinwire's."""
        run, model, strategy = self.run, self.model, self.strategy
        if isinstance(model, Transformer) and self.knows_activations:
            bf16 = run.model.precision == "bf16" or (run.model.precision == "auto" and torch.cuda.is_available())
            coded = [strategy.coded(shapes) for shapes in self.shapes]
            return replica_memory(
                model.architecture, strategy, self.numels, run.placement.replicas,
                batch=run.data.largest_batch, sequence=run.data.sequence, accumulate=run.data.accumulate, bf16=bf16,
                payload_nbytes=sum(codec.nbytes(n) for codec, n in coded) if strategy.codec.needs_shapes else None,
            )  # fmt: skip
        own = {"parameters": model.parameters(), "gradients": filter(lambda p: p.requires_grad, model.parameters())}
        needs = self.kept | {name: 4 * sum(p.numel() for p in each) for name, each in own.items()}
        return Memory(by_place(needs, strategy, self.numels), {"": {}})

    @property
    def available(self) -> int:
        """The memory that a replica can use: this machine's, and its GPU's."""
        gpu = torch.cuda.is_available()
        host = 0 if gpu and self.strategy.anchors == "device" else checks.memory()[1]
        return host + (torch.cuda.mem_get_info()[0] if gpu else 0)

    @property
    def too_much_for_gpu(self) -> str:
        """What a replica needs of its GPU, and what is free, if that is less; empty if it fits, or torch sees no GPU."""
        if not torch.cuda.is_available():
            return ""
        needed, free = self.memory.peak("device"), torch.cuda.mem_get_info()[0]
        told = f"{text_of_nbytes(needed)} on its GPU (predicted), and {text_of_nbytes(free)} are free"
        return told if needed > free else ""

    def of_process(self, libraries: int = BASE_NBYTES) -> tuple[int, str]:
        """Most bytes of a replica's process, and their purposes in words. `libraries` are the bytes of a process without a model."""
        gpu = torch.cuda.is_available()
        base, kept = 0 if gpu else libraries, self.memory.in_memory()
        total = self.memory.peak() if gpu else self.memory.process_nbytes(base)
        kept |= {"libraries": base} if base else {}
        parts = ", ".join(f"{name} {text_of_nbytes(nbytes)}" for name, nbytes in kept.items())
        if not self.knows_activations:
            return total, f", without activations: {parts}"
        return total, f": {parts}, at its worst moment {text_of_nbytes(total - sum(kept.values()))} more"


def check_capacity(run: Run, model: nn.Module, here: int, folder: Path, console: Console) -> None:
    """Print warnings about useless settings, and about too small a disk. Raise `ConfigurationError` if `here` replicas do not fit into this
    machine's memory, or the trained model not on the disk of `folder`.
    """
    if run.make_method():
        needs = Needs(run, model, Strategy())
        total, parts = sum(4 * p.numel() for p in model.parameters()), " for its weights"
    else:
        needs = Needs.of(run, model)
        total, parts = needs.of_process()
        if here and (short := needs.too_much_for_gpu):
            raise ConfigurationError(
                f"model={run.model.label!r}: a replica needs {short}; choose a smaller model or --batch, or shards (thinwire docs machines)."
            )
        for warning in needs.strategy.warnings(needs.shapes, run.placement.replicas):
            console.print(f"warning: {run.method.strategy}: {warning}.", soft_wrap=True, highlight=False)
    available = needs.available
    if torch.cuda.is_available():  # the replicas may share several
        here = min(here, 1)
    if total * here > available:
        raise ConfigurationError(
            f"model={run.model.label!r}: {text_of_nbytes(total)} a replica (predicted{parts}), {here} of them here, and "
            f"{text_of_nbytes(available)} of memory are free; choose a smaller model or --batch, fewer replicas on this machine, or shards "
            f"(thinwire docs machines).{_advice(needs, available // here)}"
        )
    room_on_disk(run, model, here, folder, console)


def _advice(needs: Needs, available: int) -> str:
    """What to do if host memory is too short for the outer state, and the rest fits into the `available` bytes of a replica."""
    if needs.run.make_method() or needs.strategy.anchors != "host":
        return ""
    try:
        total, _ = Needs.of(needs.run.changed(anchors="disk"), needs.model).of_process()
    except ConfigurationError:
        return ""
    return f" With --anchors disk a replica takes {text_of_nbytes(total)}, which fits." if total <= available else ""


def room_on_disk(run: Run, model: nn.Module, here: int, folder: Path, console: Console) -> None:
    """Compare the free bytes where `folder` is or will be with those of the trained model, of the checkpoints of the `here` replicas on this
    machine, and of the report page; print a warning if not all fit. What a run in `folder` has written already counts as free.

    Raises `ConfigurationError` if not even the trained model fits.
    """
    held = sum(file.stat().st_size for file in folder.glob("checkpoints/*/step-*/*") if file.is_file())
    free = shutil.disk_usage(existing(folder)).free + held
    room = f"{text_of_nbytes(free)} of the disk are free{' or have its checkpoints' if held else ''}"
    elsewhere = "" if held else ", or choose another --out"  # a run that has begun stays where it is
    weights = sum(v.numel() * v.element_size() for v in model.state_dict().values() if isinstance(v, Tensor))
    if free < weights:
        raise ConfigurationError(
            f"{folder}: {room}, and the trained model needs {text_of_nbytes(weights)} (predicted); "
            f"free some space{elsewhere}."
        )
    if run.make_method():  # about the moments of AdamW
        each = weights + 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    else:
        kept = Needs.of(run, model).kept
        each = weights + sum(nbytes for purpose, nbytes in kept.items() if purpose != "parameters")
    writes = run.placement.checkpoint_every
    at_once = here * (min(run.placement.keep, run.optimizer.steps // writes) + 1 if writes else 1)
    needed = weights + at_once * each + _PAGE_NBYTES
    if free < needed:
        console.print(
            f"warning: {folder}: {room}, and the run needs {text_of_nbytes(needed)} (predicted): "
            f"{text_of_nbytes(weights)} for the model, {text_of_nbytes(each)} for a checkpoint, of which {at_once} are there at once, "
            f"and {text_of_nbytes(_PAGE_NBYTES)} for the page. Without a checkpoint a run that ends early cannot be resumed. Free some space, "
            f"or --keep fewer{elsewhere}.",
            soft_wrap=True,
            highlight=False,
        )  # fmt: skip


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
    needs, sharing = Needs.of(there, model), -(-run.placement.replicas // torch.cuda.device_count())
    return sharing * needs.of_process(0)[0] if stays_on_device(needs.strategy) else 0


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
