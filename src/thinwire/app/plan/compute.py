"""Measure this machine: step time and memory of the run's model over micro-batch sizes, codecs, disk."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from thinwire.app.jobs.own import OwnJob, functions
from thinwire.app.plan import machine
from thinwire.app.plan.base import base_nbytes, resident_nbytes
from thinwire.app.plan.machine import Machine, Step
from thinwire.app.plan.outline import Outline, Shape, outline_of, outline_of_job
from thinwire.app.trainer.huggingface import outline
from thinwire.app.trainer.model import Transformer
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import DataSpec
from thinwire.app.trainer.setup import make_model
from thinwire.app.trainer.tokens import BPE
from thinwire.codecs import Codec
from thinwire.codecs.base import whole_anywhere
from thinwire.comm import Group, gather, run_threads
from thinwire.errors import ConfigurationError
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.pieces.partition import Whole
from thinwire.recipes import streaming_sign
from thinwire.replica import Replica
from thinwire.rng import Key

FRAGMENTS = (1 << 20, 1 << 22, 1 << 25)  # sizes of the timed fragments: caches hold the first, not the last
_DISK_NBYTES = 64 << 20
_PRICED_STEPS = 32


def vocabulary(data: DataSpec) -> int:
    """Size of the tokenizer's vocabulary, without reading the text."""
    kind, _, what = (data.tokenizer or "bytes").partition(":")
    if kind == "bytes":
        return 256
    if kind != "bpe" or not what.isdecimal():
        raise ConfigurationError(
            f"tokenizer={data.tokenizer!r}: bytes or bpe:SIZE is needed here, so that its size is known."
        )
    return BPE(int(what)).vocabulary


def shape_of(run: Run) -> Shape:
    """The shape of the run's model: exact for Thinwire's models, an outline for a Hugging Face model or a job's. Raises
    `ConfigurationError`, `JobError`."""
    if run.model.job:
        return _job_outline(run.model.job, run.seed)
    if run.model.model.startswith("hf:"):
        return _outline(run.model.model.removeprefix("hf:"), vocabulary(run.data), run.data.sequence)
    model = skeleton(run)
    assert isinstance(model, Transformer)
    return model.architecture


_outline = lru_cache(maxsize=64)(outline_of)


@lru_cache(maxsize=64)
def _job_outline(job: str, seed: int) -> Outline:
    return outline_of_job(OwnJob(job, seed))


def skeleton(run: Run, tokens: int | None = None) -> nn.Module:
    """The run's model without storage, with a vocabulary of `tokens` (default: `vocabulary(run.data)`). Reads no text, and fetches no
    weights of a Hugging Face model. A job's model has values."""
    if run.model.job:
        return OwnJob(run.model.job, run.seed).make_model()
    tokens = vocabulary(run.data) if tokens is None else tokens
    if run.model.model.startswith("hf:"):
        return outline(run.model.model.removeprefix("hf:"), tokens)
    with torch.device("meta"):
        return make_model(run.model, run.data.sequence, run.seed, tokens)


Timed = tuple[Sequence[torch.optim.Optimizer], Callable[[int], torch.Tensor]]


def optimizers_and_loss(run: Run, tokens: int, device: torch.device) -> Timed:
    """The optimizers of the run's model on `device`, which are the job's own if it has any, and a function from a number of sequences to the
    loss of such a micro-batch (of arbitrary tokens). `tokens` is the size of the vocabulary."""
    if run.model.job:
        job = OwnJob(run.model.job, run.seed)
        model = job.make_model().to(device)
        return job.make_optimizer(model) or _adamw(model), lambda batch: job.trial(model, batch, device)
    model = make_model(run.model, run.data.sequence, run.seed, tokens).to(device)

    def loss(batch: int) -> torch.Tensor:
        text = torch.randint(0, min(tokens, 256), (batch, run.data.sequence), device=device)
        found: torch.Tensor = model(text, text).loss
        return found

    return _adamw(model), loss


def _adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [AdamW().make(model, lr=1e-3, weight_decay=0.01)]


def probe_machine(
    run: Run, name: str, memory_nbytes: int, codecs: Sequence[Codec], seconds: float, place: Path
) -> Machine:
    """Time the steps of `run`'s model, then the optimizer, the codecs and the disk.

    Micro-batches have 1, 2, 4, … sequences, as long as one takes less than `seconds` and fits. Each figure is the median of at least
    three calls. torch's number of threads is not changed. `place` is the folder in which the disk is timed.
    """
    if not seconds > 0:
        raise ConfigurationError(f"seconds={seconds}: more than 0 is needed.")
    shape = shape_of(run)
    before = 0 if torch.cuda.is_available() else resident_nbytes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    optimizers, loss = optimizers_and_loss(run, shape.vocabulary, device)
    bf16 = run.model.precision == "bf16" or (run.model.precision == "auto" and device.type == "cuda")
    most = 1 if run.model.job and "collate" not in functions(run.model.job) else 1024
    steps = list(_steps(loss, device, bf16, seconds, before, memory_nbytes, most))
    update = _median(lambda: [optimizer.step() for optimizer in optimizers], seconds / 4)
    best = (
        max(step.batch / step.seconds for step in steps) * run.data.sequence * shape.flops_per_token(run.data.sequence)
    )
    numels = sorted({min(numel, shape.parameters()) for numel in FRAGMENTS})  # no fragment is larger than the model

    def speeds(codecs: Iterable[Codec], device: torch.device) -> dict[str, tuple[machine.CodecSpeed, ...]]:
        return {
            repr(codec): tuple(codec_speed(codec, seconds / 8, numel, device) for numel in numels) for codec in codecs
        }

    there = filter(whole_anywhere, codecs) if device.type == "cuda" else ()
    base = base_nbytes()
    return Machine(
        name=name, memory_nbytes=memory_nbytes, flops_per_second=best, device=device.type, model=run.model.label,
        sequence=run.data.sequence, flops_per_token=float(shape.flops_per_token(run.data.sequence)), parameters=shape.parameters(),
        steps=tuple(steps), update_seconds=update,
        codecs=speeds(codecs, torch.device("cpu")), on_gpu=speeds(there, device),
        disk_nbytes_per_second=disk_speed(place), base_nbytes=base, threads=torch.get_num_threads(), price=round_price(),
        word="measured",
    )  # fmt: skip


def _steps(
    loss_of: Callable[[int], torch.Tensor],
    device: torch.device,
    bf16: bool,
    seconds: float,
    before: int | None,
    limit: int,
    most: int,
) -> Iterator[Step]:
    """Time forward and backward passes of micro-batches that double in size."""
    batch, peak = 1, 0
    while True:

        def once(batch: int = batch) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = loss_of(batch)
            torch.autograd.backward(loss)
            loss.item()  # waits until the GPU has finished

        forget_peak()
        try:
            once()
            took = _median(once, seconds / 2)
        except torch.OutOfMemoryError:
            return
        seen = peak_nbytes()
        peak = max(0, seen - (before or 0)) if seen is not None else 0
        yield Step(batch, took, peak or None)
        if 2 * took > seconds or 2.2 * peak > limit or batch >= most:
            return
        batch *= 2


def codec_speed(
    codec: Codec, seconds: float, numel: int = 1 << 22, device: torch.device = torch.device("cpu")
) -> machine.CodecSpeed:
    """Parameters a second when a fragment of `numel` is encoded on `device`, and when it is decoded there."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    payload, out = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device), torch.zeros_like(values)
    key = Key(0, 0, 0, 0)

    def encode() -> None:
        codec.encode(values, payload, key)
        payload[:1].tolist()  # waits until a GPU has finished

    def decode() -> None:
        codec.decode_add(payload, out, key)
        out[:1].tolist()

    return machine.CodecSpeed(numel / _median(encode, seconds), numel / _median(decode, seconds), numel)


def round_price() -> machine.RoundPrice:
    """CPU seconds of rounds of the default method, of two replicas that are threads of this process; those of all its encoding and decoding are taken
    off. A measurement takes about a tenth of a second, and counts CPU, so that other work on the machine changes it little.
    """
    few, many, large = (
        min(_round_seconds(*shape) for _ in range(2)) for shape in ((2, 1 << 10), (32, 1 << 10), (2, 1 << 20))
    )
    tensor = max(0.0, many[0] - few[0]) / 30
    parameter = max(0.0, large[0] - few[0]) / (1 << 20)
    speed = codec_speed(streaming_sign().codec, 0.0, 1 << 10)
    beside = max(0.0, few[1] - (1 << 10) * (1 / speed.encode + 2 / speed.decode))
    return machine.RoundPrice(max(0.0, few[0] - 2 * tensor), tensor, parameter, beside)


def _round_seconds(tensors: int, parameters: int) -> tuple[float, float]:
    """CPU seconds of a round of a fragment of so many tensors and parameters: of a replica's main thread, and of its other threads."""

    def replica(group: Group) -> tuple[float, float]:
        model = nn.ParameterList([torch.zeros(parameters // tensors) for _ in range(tensors)])
        draws = torch.Generator().manual_seed(group.rank)
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        weights = torch.randn(192, 192, generator=draws, requires_grad=True)

        def main_seconds() -> float:
            gather(group, b"", 0, "probe")  # so that the process does this alone
            began = time.thread_time()
            for _ in range(_PRICED_STEPS):
                # as training does: a round finds other code and data in the caches
                (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return time.thread_time() - began

        bare = main_seconds()
        with Replica(streaming_sign(every=2, partition=Whole()), model, optimizer, group):
            main_seconds()
            gather(group, b"", 0, "probe")
            whole = time.process_time()
            main = main_seconds()
            gather(group, b"", 0, "probe")
            whole = time.process_time() - whole
        rounds = _PRICED_STEPS / 2
        return max(0.0, main - bare) / rounds, max(0.0, whole / group.size - main) / rounds

    return run_threads(2, replica)[0]


def disk_speed(place: Path) -> float:
    """Bytes a second that a checkpoint is written with: a file of 64 MiB, flushed to the disk."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=place) as file:
        began = time.perf_counter()
        for _ in range(_DISK_NBYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _DISK_NBYTES / (time.perf_counter() - began)


def _median(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call: at least three calls, more if `seconds` allow, after one call that does not count."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 100):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def forget_peak() -> None:
    """Reset `peak_nbytes`, if the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # not Linux, or not allowed: the peak covers the whole life of the process
        Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int | None:
    """Most bytes in use since `forget_peak`: allocated on a GPU, resident on a CPU; None if the system does not report it."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), None)
