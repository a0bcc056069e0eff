"""Speed and memory of a machine, in a file `machine.toml` that a person can read and edit.

    name = "oslo"
    memory = "16GB"                    # that a replica may use
    flops_per_second = 2.1e10          # sustained in training; a file written by hand needs only these three

`thinwire probe` adds measured step times and memory peaks, and the speed of codecs and disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from thinwire.app.plan.links import read, store
from thinwire.app.plan.outline import Shape
from thinwire.app.plan.scaling import Outside
from thinwire.comm import quantities
from thinwire.errors import ConfigurationError

USABLE_MEMORY = 0.9  # share of the memory that a plan may use, because predictions are within a tenth
BASE_NBYTES = 500_000_000  # resident bytes of a process with torch and its kernels, if not measured
DEVICES = ("cpu", "cuda")


def _check(what: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise ConfigurationError(f"{what}={value}: more than 0 is needed.")


@dataclass(frozen=True)
class Step:
    """Forward and backward of one micro-batch of `batch` sequences. `peak_nbytes` is the growth of the process's memory since its start."""

    batch: int
    seconds: float
    peak_nbytes: int | None = None


@dataclass(frozen=True)
class CodecSpeed:
    """Parameters a second on one core, or on the machine's GPU, encoding and decoding a fragment of `parameters`."""

    encode: float
    decode: float
    parameters: int = 1

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            _check(f"a codec's {what}", value)


@dataclass(frozen=True)
class RoundPrice:
    """CPU seconds that a round of a fragment takes, besides encoding and decoding: of the main thread for each round, for each tensor and for
    each parameter, and of the threads beside it for each round.

    The default is that of the machine on which Thinwire is developed, as `thinwire probe` measures it.
    """

    main_seconds: float = 8e-4
    tensor_seconds: float = 4e-5
    parameter_seconds: float = 2e-9
    beside_seconds: float = 1.5e-3

    def __post_init__(self) -> None:
        for what, value in vars(self).items():
            if not (isfinite(value) and value >= 0):
                raise ConfigurationError(f"{what}={value} of a round: 0 or more is needed.")

    def taken_seconds(self, tensors: int, parameters: int, codec_seconds: float, threads: int) -> float:
        """Seconds that training on `threads` cores loses by a round: its main thread does the one part, and the other takes turns with it on
        those cores.
        """
        main = self.main_seconds + tensors * self.tensor_seconds + parameters * self.parameter_seconds
        return main + (self.beside_seconds + codec_seconds) / threads


@dataclass(frozen=True)
class Machine:
    """The machine of one replica. `steps` were measured with `model` at `sequence` tokens; those of other models are scaled by
    operations. `codecs` are by name, the smallest timed fragment first; `on_gpu` are those of rounds that stay on a GPU. `base_nbytes`
    is the memory of a replica's process without its model; `threads` is the number of cores that train."""

    name: str
    memory_nbytes: int
    flops_per_second: float
    device: str = "cpu"
    model: str = ""
    sequence: int = 0
    flops_per_token: float = 0.0
    parameters: int = 0
    steps: tuple[Step, ...] = ()
    update_seconds: float = 0.0
    codecs: Mapping[str, tuple[CodecSpeed, ...]] = field(default_factory=dict)
    on_gpu: Mapping[str, tuple[CodecSpeed, ...]] = field(default_factory=dict)
    disk_nbytes_per_second: float | None = None
    base_nbytes: int = BASE_NBYTES
    threads: int = 1
    price: RoundPrice = RoundPrice()
    word: str = "given"

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigurationError(f"device={self.device!r} of {self.name!r}: {' or '.join(DEVICES)} is needed.")
        for step in self.steps:
            if step.batch < 1 or not (isfinite(step.seconds) and step.seconds > 0):
                raise ConfigurationError(f"a step of batch {step.batch} in {step.seconds} s: both must be more than 0.")
        for what, value in (
            ("memory", self.memory_nbytes),
            ("flops_per_second", self.flops_per_second),
            ("base", self.base_nbytes),
            ("threads", self.threads),
        ):
            _check(f"{self.name}: {what}", value)
        if self.disk_nbytes_per_second is not None:
            _check(f"{self.name}: disk", self.disk_nbytes_per_second)
        if not (isfinite(self.update_seconds) and self.update_seconds >= 0):
            raise ConfigurationError(f"{self.name}: update_seconds={self.update_seconds}: 0 or more is needed.")
        if self.steps:
            for what in ("sequence", "parameters", "flops_per_token"):
                _check(f"{self.name}: {what} of the measured steps", getattr(self, what))

    def micro_seconds(self, shape: Shape, sequence: int, batch: int) -> float:
        """Seconds of forward and backward of `batch` sequences: measured, interpolated between two measured sizes, or from operations."""
        own = self._is_own(shape, sequence)
        for step in self.steps:
            if own and step.batch == batch:
                return step.seconds
        return batch * sequence * shape.flops_per_token(sequence) / self._rate(batch * sequence)

    def inner_seconds(self, shape: Shape, sequence: int, batch: int, accumulate: int = 1, ranks: int = 1) -> float:
        """Seconds of an inner step: `accumulate` micro-batches, each divided among `ranks`, and the optimizer's update."""
        share = max(1, -(-batch // ranks))
        update = self.update_seconds * shape.parameters() / self.parameters if self.parameters else 0.0
        return accumulate * self.micro_seconds(shape, sequence, share) + update / ranks

    def codec_seconds(self, names: Sequence[str], parameters: int, packets: int, on_gpu: bool = False) -> float:
        """Seconds to encode a fragment and to decode `packets` of it, at a speed interpolated between the timed sizes. `names` are those of
        the codec and of the codecs inside it; the first that was timed counts for all. 0 if none was timed."""
        codecs = self.on_gpu if on_gpu else self.codecs
        timed = next((codecs[name] for name in names if name in codecs), ())
        if not timed or not parameters:
            return 0.0
        of, numels = math.log(parameters), [math.log(speed.parameters) for speed in timed]
        encode, decode = (
            math.exp(np.interp(of, numels, [math.log(getattr(speed, what)) for speed in timed]))
            for what in ("encode", "decode")
        )
        return parameters / encode + packets * parameters / decode

    def taken_seconds(self, tensors: int, parameters: int, codec_seconds: float) -> float:
        """Seconds that training loses by a round of a fragment; none on a GPU, which trains meanwhile."""
        return (
            0.0 if self.device == "cuda" else self.price.taken_seconds(tensors, parameters, codec_seconds, self.threads)
        )

    def warnings(self, shape: Shape, sequence: int) -> tuple[Outside, ...]:
        """A warning if step times are scaled from another model's."""
        if self._is_own(shape, sequence):
            return ()
        of = (
            f"{self.model} at {self.sequence} tokens"
            if self.model
            else f"{self.flops_per_second:.3g} operations a second"
        )
        return (Outside("step-time-scaled", f"{self.name}'s step time is scaled by operations from {of}"),)

    def _is_own(self, shape: Shape, sequence: int) -> bool:
        return (self.parameters, self.sequence) == (shape.parameters(), sequence)

    def _rate(self, tokens: int) -> float:
        """Operations a second of a micro-batch of so many tokens, interpolated between two measured sizes; outside of them, of the nearest."""
        if not self.steps:
            return self.flops_per_second
        sizes = [step.batch * self.sequence for step in self.steps]
        near = min(max(tokens, sizes[0]), sizes[-1])
        return near * self.flops_per_token / float(np.interp(near, sizes, [step.seconds for step in self.steps]))

    def save(self, path: Path, comment: str = "") -> None:
        """Write `machine.toml`, with `comment` at its top."""
        facts: dict[str, Any] = {
            "word": self.word, "name": self.name, "device": self.device,
            "memory": f"{self.memory_nbytes / 1e9:.4g}GB", "base": f"{self.base_nbytes / 1e6:.4g}MB",
            "flops_per_second": float(f"{self.flops_per_second:.4g}"), "threads": self.threads,
            "round": {name: float(f"{seconds:.4g}") for name, seconds in vars(self.price).items()},
        }  # fmt: skip
        if self.disk_nbytes_per_second:
            facts["disk"] = f"{self.disk_nbytes_per_second / 1e6:.4g}MB"
        if self.steps:
            facts["steps"] = {
                "model": self.model, "sequence": self.sequence, "parameters": self.parameters,
                "flops_per_token": self.flops_per_token, "update_seconds": float(f"{self.update_seconds:.4g}"),
            }  # fmt: skip
        rows = [
            {"batch": s.batch, "seconds": float(f"{s.seconds:.4g}")}
            | ({"peak": f"{s.peak_nbytes / 1e6:.4g}MB"} if s.peak_nbytes else {})
            for s in self.steps
        ]
        facts["step"] = rows
        for table, codecs in (("codec", self.codecs), *([("codec_on_gpu", self.on_gpu)] if self.on_gpu else [])):
            facts[table] = [
                {
                    "name": name,
                    "parameters": c.parameters,
                    "encode": float(f"{c.encode:.4g}"),
                    "decode": float(f"{c.decode:.4g}"),
                }
                for name, timed in codecs.items()
                for c in timed
            ]
        store(path, "".join(f"# {line}\n" for line in comment.splitlines()) + tomli_w.dumps(facts))

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read `machine.toml`. Raises `ConfigurationError` naming what is wrong."""
        facts = read(path, "`thinwire probe` writes one as machine.toml")
        missing = [name for name in ("memory", "flops_per_second") if name not in facts]
        if missing:
            raise ConfigurationError(
                f'{path}: {", ".join(missing)} missing; memory = "16GB" and flops_per_second = 2e10 are needed at least.'
            )
        try:
            of, disk = facts.get("steps", {}), facts.get("disk")
            return cls(
                name=str(facts.get("name", path.stem)),
                memory_nbytes=quantities.nbytes(facts["memory"]),
                flops_per_second=float(facts["flops_per_second"]),
                device=str(facts.get("device", "cpu")),
                model=str(of.get("model", "")),
                sequence=int(of.get("sequence", 0)),
                flops_per_token=float(of.get("flops_per_token", 0.0)),
                parameters=int(of.get("parameters", 0)),
                steps=tuple(
                    Step(
                        int(row["batch"]),
                        float(row["seconds"]),
                        quantities.nbytes(row["peak"]) if "peak" in row else None,
                    )
                    for row in sorted(facts.get("step", []), key=lambda row: row["batch"])
                ),
                update_seconds=float(of.get("update_seconds", 0.0)),
                codecs=_codecs(facts.get("codec", [])),
                on_gpu=_codecs(facts.get("codec_on_gpu", [])),
                disk_nbytes_per_second=None if disk is None else quantities.nbytes(disk),
                base_nbytes=quantities.nbytes(facts["base"]) if "base" in facts else BASE_NBYTES,
                threads=int(facts.get("threads", 1)),
                price=RoundPrice(**{name: float(seconds) for name, seconds in facts.get("round", {}).items()}),
                word=str(facts.get("word", "given")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"{path}: {str(error).rstrip('.')}; compare with what `thinwire probe` writes."
            ) from None


def _codecs(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[CodecSpeed, ...]]:
    """Speeds by the codec's name, the smallest fragment first."""
    found: dict[str, list[CodecSpeed]] = {}
    for row in rows:
        speed = CodecSpeed(float(row["encode"]), float(row["decode"]), int(row.get("parameters", 1)))
        found.setdefault(str(row["name"]), []).append(speed)
    return {name: tuple(sorted(timed, key=lambda speed: speed.parameters)) for name, timed in found.items()}
