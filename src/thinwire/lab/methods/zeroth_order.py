"""Just One Byte (per gradient): Zelikman, Huang, Liang, Haber, Goodman, 2023. Zeroth-order training with shared randomness.

    iteration t, replica m, sample j:   z = N(0, I), drawn from (t, m, j), and never sent
    ρ = (L(x + εz) − L(x − εz)) / 2ε    two forward passes on the replica's own data; E ρz → ∇L as ε → 0
    one byte: the sign and 7 bits of ⌊8 ln |ρ|⌉, or zero, or "no value" where a loss was not finite
    x ← x − η/√n · Σ ρ·z                over the n values of all replicas, in one order, on every replica

The `Log` keeps all updates of x, one byte for each value: the first weights (or any snapshot) and the log give the present weights,
bit for bit. So a replica that joins needs only the log. The log also repairs an iteration that failed on some replicas: if one
replica has applied it, the others take it from that replica's log.

*Differs* from the paper's code: one byte is sent, not text. A replica decodes its own value as all others do. An iteration counts
all replicas of the group, or changes nothing. No backup or hash of rounded weights is needed, because x itself is not shifted: for
the loss, a layer reads x ± εz from a buffer.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group, gather
from thinwire.comm.state_transfer import give, take
from thinwire.drivers.attached import Attached, Method, donor_and_behind, nbytes_to_all, silent
from thinwire.drivers.handshake import agree_on_start, digest
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError, ModelError
from thinwire.lab.methods.perturbed import Shifted, begins
from thinwire.packet import Header, identity
from thinwire.rng import derive, normals, quantiles
from thinwire.types import Observer

LOSSES = Callable[[int], Tensor]
_CHUNK = 1 << 18  # elements that are updated at a time
_LIMIT = 1 << 28  # most bytes (values) of a log that is accepted from another replica

# ---- one value, one byte

ZERO, INVALID = 0, 128  # codes 1 … 127 are e^(−63/8) … e^(63/8), adding 128 gives the negative value


@lru_cache(maxsize=1)
def magnitudes() -> tuple[float, ...]:
    """The 127 magnitudes of a byte, in fp32, from 3.8e-4 to 2.6e3, each 13.3 % above the one before."""
    return tuple(torch.tensor([math.exp(p / 8) for p in range(-63, 64)], dtype=torch.float32).tolist())


@lru_cache(maxsize=1)
def _edges() -> list[float]:
    """Bounds between rounded values: half of the least magnitude (below is zero), then the middle of neighbours in the logarithm."""
    levels = magnitudes()
    return [levels[0] / 2, *(math.sqrt(low * high) for low, high in pairwise(levels))]


def encode(value: float) -> int:
    """The byte for `value`: the error is at most 6.5 %, values beyond the range are cut off at 2.6e3.

    >>> [decode(encode(x)) for x in (0.0, 1.0, -1.0)]
    [0.0, 1.0, -1.0]
    """
    if not math.isfinite(value):
        return INVALID
    level = bisect_left(_edges(), abs(value))
    return level + (128 if value < 0 and level else 0)


def decode(code: int) -> float | None:
    """The value of a byte; None for "no value"."""
    if code in (ZERO, INVALID):
        return 0.0 if code == ZERO else None
    magnitude = magnitudes()[(code & 127) - 1]
    return -magnitude if code & 128 else magnitude


# ---- the log of a run


class Entry(NamedTuple):
    """One iteration: the learning rate (fp32), the names of its replicas in rank order, and their bytes in the same order."""

    lr: float
    names: tuple[str, ...]
    codes: bytes


@dataclass
class Log:
    """All iterations of a run. First weights + log = present weights, bit for bit.
    It takes a byte for each value and 8 for each iteration: the 16,000 values of the paper's run are less than 20 kB.

    Args:
        samples: number J of values of a replica in an iteration.
        entries: one for each iteration.

    >>> log = Log(samples=1, entries=[Entry(lr=0.01, names=("0", "1"), codes=bytes([64, 192]))])
    >>> log.chain(0) == Log(samples=4).chain()
    True
    """

    samples: int
    entries: list[Entry] = field(default_factory=list)

    def chain(self, upto: int | None = None) -> bytes:
        """A digest of the first `upto` iterations, 16 bytes."""
        state = blake2b(digest_size=16)
        for entry in self.entries[:upto]:
            state.update(repr(entry).encode())
        return state.digest()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, and values for JSON."""
        members = list(dict.fromkeys(entry.names for entry in self.entries))
        place = {names: index for index, names in enumerate(members)}
        codes = b"".join(entry.codes for entry in self.entries)
        tensors = {
            "codes": torch.frombuffer(bytearray(codes), dtype=torch.uint8) if codes else torch.empty(0).byte(),
            "lrs": torch.tensor([entry.lr for entry in self.entries], dtype=torch.float32),
            "members": torch.tensor([place[entry.names] for entry in self.entries], dtype=torch.int32),
        }
        return tensors, {"members": [list(names) for names in members], "samples": self.samples}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Log:
        """Read from `state()`. Raises `CheckpointError` if it is no such state."""
        try:
            members = [tuple(map(str, names)) for names in facts["members"]]
            codes, samples, begin, entries = bytes(tensors["codes"].numpy().tobytes()), int(facts["samples"]), 0, []
            if min(tensors["members"].tolist(), default=0) < 0 or samples < 1:
                raise ValueError("a number is below 0")
            for lr, index in zip(tensors["lrs"].tolist(), tensors["members"].tolist(), strict=True):
                end = begin + samples * len(members[index])
                entries.append(Entry(lr, members[index], codes[begin:end]))
                begin = end
            if begin != len(codes) or any(not math.isfinite(entry.lr) for entry in entries):
                raise ValueError(f"it has {len(codes)} bytes of values; {begin} are needed, and finite learning rates")
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"the log of a zeroth-order run cannot be read ({error}); run the same version on every replica."
            ) from None
        return cls(samples, entries)


@torch.no_grad()
def apply(parameters: Sequence[Tensor], entry: Entry, seed: int, iteration: int) -> int:
    """x ← x − η/√n · Σ ρ·z for one iteration; returns n. The bits are the same on every machine and device, because each operation is
    one of IEEE 754, in a fixed order.
    """
    samples = len(entry.codes) // len(entry.names)
    values = [
        (name, j, decode(entry.codes[m * samples + j])) for m, name in enumerate(entry.names) for j in range(samples)
    ]
    known = [(name, j, value) for name, j, value in values if value is not None]
    scale = entry.lr / math.sqrt(max(1, len(known)))
    steps = [(name, j, _fp32(scale * value)) for name, j, value in known if value]
    streams = [(direction(seed, iteration, name, j), by) for name, j, by in steps]
    for parameter, offset in zip(parameters, begins(parameters)):
        flat = parameter.detach().view(-1) if parameter.is_contiguous() else parameter.detach().reshape(-1)
        for begin in range(0, flat.numel(), _CHUNK):
            part = flat[begin : begin + _CHUNK]
            update = torch.zeros(part.numel(), device=part.device)
            for stream, by in streams:
                update.add_(normals(stream, offset + begin, part.numel(), part.device).mul_(by))
            part.copy_(part.float().sub_(update))
        if not parameter.is_contiguous():
            parameter.copy_(flat.view_as(parameter))
    return len(known)


def direction(seed: int, iteration: int, name: str, sample: int) -> int:
    """The random stream of z, unique to this iteration, replica and sample."""
    return derive(seed, f"direction of {name}", iteration, sample)


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


# ---- the method


@dataclass(frozen=True, kw_only=True)
class JustOneByte(Method):
    """Fine-tune with forward passes only, one byte a value on the wire.

    The optimizer must be plain SGD; its learning rate is scaled by 1/√n as in the paper, so more replicas take longer steps.

    *Wire*: (M−1)·(48 + J) bytes an iteration from each replica, whatever the size of the model. *Memory*: the weights,
    the largest layer's once more, activations of a forward pass without gradients, the log. *Cost*: 2·J forward passes
    on a replica, and M·J draws of the model's size.

    Args:
        samples: number J of values of a replica in an iteration, each on its own micro-batch.
        radius: ε, the factor of the direction z in both forward passes, (0, 1).
        seed: of the directions; an integer number.

    Raises:
        ConfigurationError: a number is out of range.

    >>> JustOneByte(samples=4).nbytes_per_period(numel=7_000_000_000, size=3)
    104
    """

    samples: int = 4
    radius: float = 1e-3
    seed: int = 0

    every = 1

    def check_run(self, run: Any, job: Any) -> None:
        if run.data.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={run.data.accumulate} with {run.method.label}: its samples are its micro-batches; raise those instead."
            )

    def __post_init__(self) -> None:
        if type(self.samples) is not int or not 1 <= self.samples <= 4096 or not 0 < self.radius < 1:
            raise ConfigurationError(
                f"{self}: 1 to 4096 samples and a radius in (0, 1) are needed; 4 and 1e-3 are usual."
            )

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        names: Sequence[str] | None = None, observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> ZerothOrder:  # fmt: skip
        return ZerothOrder(self, model, optimizer, group, names, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int = 0) -> int:
        return nbytes_to_all(self.samples, size)


class ZerothOrder(Attached):
    """`JustOneByte` attached to a model: `iterate(losses)` is one iteration. The loss must depend on weights and batch only: no dropout
    (`model.eval()`), and the same data at both calls. An iteration that ends in a `LinkError` has changed nothing here; see `meet`.

    Args:
        method, model, optimizer: the settings; the model; plain SGD over its trained parameters.
        group, names: the replicas that exchange, and their names in rank order; None: their ranks.
        observer, clock: called with each event; seconds, monotonic.

    Raises:
        ModelError, DisagreementError: the optimizer is not plain SGD; a replica began with other weights.

    >>> from thinwire import run_threads
    >>> def replica(group):
    ...     model, method = nn.Linear(2, 1), JustOneByte(samples=4)
    ...     tuner = method.attach(model, method.optimizer(model, lr=1e-3), group)
    ...     for _ in range(3):
    ...         tuner.iterate(lambda j: model(torch.ones(2)).sum())  # called twice for each j
    ...     return len(tuner.log.entries)
    >>> run_threads(2, replica)
    [3, 3]
    """

    strategy: JustOneByte

    def __init__(
        self, method: JustOneByte, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        names: Sequence[str] | None, observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, names, observer, clock)
        _check_plain(optimizer)
        self._shifted = Shifted(model, self.parameters)
        self.samples, self.log = method.samples, Log(method.samples)
        self._start = digest(self._tensors)
        self.meet(group, self.names)

    def iterate(self, losses: LOSSES) -> float:
        """One iteration; returns the mean of this replica's losses. `losses(j)` is the loss of sample j.

        Raises `LinkError`, `PacketError`: then nothing has changed.
        """
        lr = _fp32(self.optimizer.param_groups[0]["lr"])
        if not math.isfinite(lr):
            raise ConfigurationError(f"lr={lr}: a finite learning rate is needed.")
        method, seen = self.strategy, []
        codes = bytearray()
        for j in range(method.samples):
            stream = direction(method.seed, self.step, self.name, j)
            plus, minus = (self._shifted.loss(losses, j, stream, s * method.radius) for s in (1.0, -1.0))
            codes.append(encode((plus - minus) / (2 * method.radius)))
            seen += [plus, minus]
        header = Header(identity((method, lr)), 0, 0, self.step, 0, method.samples, method.samples)
        body = torch.frombuffer(codes, dtype=torch.uint8)
        heard = self.tell(body, header, range(self.group.size))
        told = b"".join(bytes(packet.numpy().tobytes()) for _, packet in heard.values())
        self._take(Entry(lr, self.names, told))
        return sum(seen) / len(seen)

    def _take(self, entry: Entry) -> None:
        """Apply one iteration, and append it to the log."""
        known = apply(self._tensors, entry, self.strategy.seed, self.step)
        if known < len(entry.codes):
            lost = [name for m, name in enumerate(entry.names) if INVALID in self._of(entry, m)]
            reason = f"{len(entry.codes) - known} of {len(entry.codes)} losses not finite"
            ranks = [self.names.index(name) for name in lost if name in self.names]
            self._observe("refused", self.step, fragment=0, round=self.step, by=ranks, reason=reason)
        self.log.entries.append(entry)
        self.step += 1

    def _of(self, entry: Entry, place: int) -> bytes:
        return entry.codes[place * self.strategy.samples : (place + 1) * self.strategy.samples]

    # ---- the group

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        """Continue with the replicas of `group`. Collective. A replica that is behind takes the log and applies it.

        `names` are in rank order; default: the ranks. Raises `DisagreementError` if replicas began with different weights, or continued
        separately; such a replica must restart from the first weights and take the whole log.
        """
        self.group, self.names = group, self._checked(names, group)
        self.introduce({"names": list(self.names), "tables": _tables()})
        told = self._told()
        if all(step == 0 for step, _, _ in told):
            agree_on_start(group, self._tensors, self._observe)
            self._start = digest(self._tensors)
        elif stranger := next((n for n, (_, _, start) in zip(self.names, told) if start != told[0][2]), None):
            raise DisagreementError(
                f"replica {stranger!r} began with other weights than {self.names[0]!r}; give it the first weights of the run."
            )
        donor, behind = donor_and_behind([step for step, _, _ in told])
        if behind and group.rank == donor:
            nbytes = give(group, behind, *self.log.state())
            self._observe("given", self.step, to=[self.names[rank] for rank in behind], nbytes=nbytes)
        elif group.rank in behind:
            self._catch_up(Log.load(*take(group, donor, _LIMIT)), self.names[donor])
        if len({(step, chain) for step, chain, _ in self._told()}) > 1:
            raise DisagreementError(f"{_APART}; restart that replica from the first weights, so that it takes the log.")
        self.same_weights()

    def _told(self) -> list[tuple[int, bytes, bytes]]:
        """Step, digest of the log, and digest of the first weights of all replicas."""
        own = self.step.to_bytes(8, "little") + self.log.chain() + self._start
        told = gather(self.group, own, len(own), "resume")
        return [(int.from_bytes(text[:8], "little"), text[8:24], text[24:]) for text in told]

    def _catch_up(self, log: Log, donor: str) -> None:
        """Apply the iterations of `log` that this replica lacks, if `log` continues its own; if not, all replicas notice afterwards."""
        if log.samples != self.log.samples or log.chain(self.step) != self.log.chain():
            return
        for entry in log.entries[self.step :]:
            self._take(entry)
        self._observe("caught_up", self.step, round=self.step, donor=donor)

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state beside the model: the log. The model can also be computed from the first weights and the log."""
        tensors, facts = self.log.state()
        return tensors, {"step": self.step, "log": facts, "start": self._start.hex()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`; the caller loads the model's weights. Collective, as `meet`."""
        self.log = Log.load(tensors, facts["log"])
        self._start, self.step = bytes.fromhex(facts["start"]), int(facts["step"])
        if self.step != len(self.log.entries):
            raise CheckpointError(
                f"a log of {len(self.log.entries)} iterations for step {self.step}; use another checkpoint."
            )
        self.meet(self.group, self.names)

    def close(self) -> None:
        self._shifted.close()

    @property
    def _tensors(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.parameters]


_APART = "replicas continued separately, or one does not continue another"


def _tables() -> str:
    """A digest of decoded bytes and random draws. Replicas on machines with another digest are refused."""
    return digest([torch.tensor(magnitudes()), quantiles()]).hex()


def _check_plain(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ModelError` unless `optimizer` is plain SGD with one learning rate, because the update is."""
    groups = optimizer.param_groups
    extras = {k: g[k] for g in groups for k in ("momentum", "weight_decay", "dampening", "maximize") if g.get(k)}
    if type(optimizer) is not torch.optim.SGD or extras or len({group["lr"] for group in groups}) > 1:
        what = ", ".join(f"{k}={v}" for k, v in extras.items()) or f"{len(groups)} group(s)"
        raise ModelError(
            f"JustOneByte with {type(optimizer).__name__} ({what}): torch.optim.SGD with one learning rate and nothing "
            "else is needed; the update is x − lr·g, and a byte has no room for optimizer state."
        )
