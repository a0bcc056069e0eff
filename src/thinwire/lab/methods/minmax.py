"""MASHA1 and MASHA2: Beznosikov, Richtárik, Diskin, Ryabinin, Gasnikov, *Distributed Methods with Compressed
Communication for Solving Variational Inequalities*, NeurIPS 2022 (arXiv 2110.03313).

Find z* with ⟨F(z*), z − z*⟩ + h(z) − h(z*) ≥ 0 for all z, where F = (1/M)·Σ F_m is monotone; for min over x, max over y
of f(x, y): F = (∇x f, −∇y f). Replica m knows F_m. The reference w, F(w) and the coin are the same on all replicas:

    z̄ = (1 − p)·z + p·w,  u = prox(z̄ − γ·F(w))                       nothing is sent
    MASHA1   Δ = mean of C(F_m(u) − F_m(w)),  z ← prox(z̄ − γ·(F(w) + Δ))     C unbiased
    MASHA2   c_m = C(γ·(F_m(u) − F_m(w)) + e_m),  e_m ← the error of C,
             z ← u − mean of c_m                                              C contractive, h = 0
    with probability p:   w ← z, and all send F_m(w) uncompressed

The difference is compressed because it is zero at the solution, so its noise is too; F_m itself is not zero there. Extragradient
(Korpelevich, 1976) is the control; with a codec it is the naive method, which does not converge.

*Differs*: there is no server, so there is no second compression and no residual on a server. All replicas draw the coin from the
shared seed, so it is not sent. All refuse a step in which the values of any replica are not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, RandomK, TopK
from thinwire.comm.group import Group, gather
from thinwire.comm.state_transfer import give, take
from thinwire.drivers.attached import Participant, donor_and_behind, nbytes_to_all, silent
from thinwire.drivers.handshake import agree_on_start, compare_settings, digest
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError, ModelError, NonFiniteError
from thinwire.lab.methods.control_rules import check_contractive, check_unbiased
from thinwire.lab.methods.saddle_points import Free, Operator, Prox
from thinwire.packet import REFUSED, Header, identity
from thinwire.rng import Key, derive
from thinwire.types import Observer


class Next(NamedTuple):
    """The next z, and the codec's error."""

    z: Tensor
    residual: Tensor


@runtime_checkable
class Saddling(Protocol):
    """A method for saddle points, a frozen value. Its text identifies it on the wire. `refresh` is p, 0 without a reference."""

    @property
    def codec(self) -> Codec: ...

    @property
    def refresh(self) -> float: ...

    @property
    def seed(self) -> int: ...

    def advance(self, at: Saddle) -> Next | None:
        """One iteration; None if it was refused."""

    def messages(self) -> int:
        """Number of packets in `codec` that a replica sends in an iteration."""


@dataclass(frozen=True, kw_only=True)
class Masha1:
    """MASHA1: unbiased compression of differences, with a reference point w. The equations are at the top of this file.

    *Wire*: (M−1)·(48 + nbytes(codec)) bytes an iteration from each of M replicas, and with probability p (M−1)·(48 + 4·n) for n fp32 values.

    Args:
        step: γ, the learning rate, about √p / (L·√(q/M + 1)) for a codec with E‖C(v)‖² ≤ q‖v‖².
        codec: unbiased.
        refresh: p, the probability that w moves; about the share of the values that is sent, in (0, 1].
        prox: the projection onto the constraint.
        seed: of the shared random numbers; an integer number.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Masha1(step=0.3).refresh
    0.2
    """

    step: float
    codec: Codec = field(default_factory=lambda: RandomK(0.2, Identity()))
    refresh: float = 0.2
    prox: Prox = Free()
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, self.step, self.refresh)
        check_unbiased(self.codec, "Masha1", "Masha2")

    def advance(self, at: Saddle) -> Next | None:
        p, step = self.refresh, self.step
        middle = (1 - p) * at.z + p * at.w
        ahead = self.prox(middle - step * at.mean_at_w)
        told = at.mean_of(at.operator(ahead) - at.own_at_w)
        return told and Next(self.prox(middle - step * (at.mean_at_w + told.mean)), at.residual)

    def messages(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Masha2:
    """MASHA2: any contractive codec, with error feedback; no constraint. The equations are at the top of this file.

    *Wire*: as `Masha1`.

    Args:
        step: γ, the learning rate; far smaller than that of `Masha1`, about p·δ/L.
        codec: contractive.
        refresh: p, the probability that w moves, in (0, 1].
        seed: of the shared random numbers; an integer number.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Masha2(step=0.01).refresh
    0.2
    """

    step: float
    codec: Codec = field(default_factory=lambda: TopK(0.2, Identity()))
    refresh: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, self.step, self.refresh)
        check_contractive(self.codec, "Masha2", "Masha1")

    def advance(self, at: Saddle) -> Next | None:
        p, step = self.refresh, self.step
        ahead = (1 - p) * at.z + p * at.w - step * at.mean_at_w
        signal = step * (at.operator(ahead) - at.own_at_w) + at.residual
        told = at.mean_of(signal)
        return told and Next(ahead - told.mean, signal - told.own)

    def messages(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Extragradient:
    """The control: u = prox(z − γ·F(z)), z ← prox(z − γ·F(u)).

    With a codec that loses anything, F_m itself is compressed, which leaves an error that does not vanish at the solution.
    *Wire*: 2·(M−1)·(48 + nbytes(codec)) bytes an iteration from each of M replicas.

    Args:
        step: γ, the learning rate.
        codec: how F_m becomes bytes.
        prox: the projection onto the constraint.
        seed: of what the codec draws; an integer number.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Extragradient(step=0.1).codec
    Identity()
    """

    step: float
    codec: Codec = Identity()
    prox: Prox = Free()
    seed: int = 0

    refresh = 0.0

    def __post_init__(self) -> None:
        _check(self, self.step, 1.0)

    def advance(self, at: Saddle) -> Next | None:
        here = at.mean_of(at.operator(at.z))
        ahead = self.prox(at.z - self.step * here.mean) if here else at.z
        # also after a refusal, which all replicas see, so that messages match
        told = at.mean_of(at.operator(ahead), part=1)
        return here and told and Next(self.prox(at.z - self.step * told.mean), at.residual)

    def messages(self) -> int:
        return 2


def nbytes_sent(method: Saddling, numel: int, size: int, iterations: int) -> int:
    """Bytes that one replica sends in packets, including the first `meet`: predicted = counted.

    Args:
        method: the method, whose seed decides when w moves.
        numel: how many elements z has.
        size: number of replicas.
        iterations: number of iterations.

    >>> nbytes_sent(Extragradient(step=0.1), numel=1000, size=2, iterations=1)  # two fp32 vectors, two headers
    8096
    """
    coded = iterations * method.messages() * nbytes_to_all(method.codec.nbytes(numel), size)
    dense = (1 + sum(coin(method, t) for t in range(iterations))) if method.refresh else 0
    return coded + dense * nbytes_to_all(4 * numel, size)


def coin(method: Saddling, iteration: int) -> bool:
    """Whether w is refreshed at the end of an iteration: one coin for all."""
    return derive(method.seed, "coin", iteration) < method.refresh * 2**63


# ---- the method attached to a problem


class Told(NamedTuple):
    """The mean of all decoded packets, and the decoded packet of this replica."""

    mean: Tensor
    own: Tensor


class Saddle(Participant):
    """A method on one replica: `iterate()` moves `z`, which is the same on all replicas.

    F is the mean over the members of the group: when they change, F(w) is computed again.

    Args:
        method: `Masha1`, `Masha2` or `Extragradient`.
        operator: this replica's F_m: takes z and returns as many values.
        z: flat fp32, the start; all take replica 0's.
        group: the replicas that exchange.
        names: of the replicas, in rank order; None: their ranks.
        observer: called with each event, as in `Replica`.
        clock: gives the time in seconds.

    Raises:
        ConfigurationError, ModelError: z or the group does not fit the method.
        DisagreementError, LinkError: replicas differ, or one was lost.

    >>> from thinwire import run_threads
    >>> from thinwire.lab.methods import saddle
    >>> def replica(group):
    ...     at = Saddle(Masha1(step=0.3, codec=RandomK(0.5)), saddle(lambda x, y: (x * y).sum(), 2), torch.ones(4), group)
    ...     for _ in range(400):
    ...         at.iterate()
    ...     return at.z.norm().item() < 1e-3
    >>> run_threads(2, replica)
    [True, True]
    """

    def __init__(
        self, method: Saddling, operator: Operator, z: Tensor, group: Group, *,
        names: Sequence[str] | None = None, observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(group, names, observer, clock)
        if z.dtype != torch.float32 or z.dim() != 1 or z.device.type != "cpu":
            raise ModelError(f"z of {z.dtype}, shape {tuple(z.shape)} on {z.device}: flat fp32 on the CPU is needed.")
        self.method, self._operator = method, operator
        self.z = z.detach().clone()
        self.w = self.z.clone()
        self.own_at_w, self.mean_at_w = torch.zeros_like(self.z), torch.zeros_like(self.z)
        self.residual = torch.zeros_like(self.z)
        self.meet(group, self.names)

    def operator(self, z: Tensor) -> Tensor:
        """F_m(z). Raises `ModelError` if its shape or dtype is not that of z."""
        value = self._operator(z)
        if not isinstance(value, Tensor) or value.shape != z.shape:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"the operator made {given} of z with shape {tuple(z.shape)}; it must have z's.")
        return value.detach().float()

    def iterate(self) -> bool:
        """One iteration. Returns whether it counted; if a replica's values were not finite, it does not, and z and w stay.

        Raises `LinkError`, `PacketError`: then nothing has changed.
        """
        after = self.method.advance(self)
        sound = after is not None and bool(torch.isfinite(after.z).all())
        reference = None
        if self.method.refresh and coin(self.method, self.step):
            reference = self._reference(after.z if after and sound else self.w)
        if after and sound:
            self.z, self.residual = after
            if reference:
                self.w, self.own_at_w, self.mean_at_w = self.z.clone(), reference.own, reference.mean
        self.step += 1
        return sound

    def mean_of(self, values: Tensor, part: int = 0) -> Told | None:
        """The mean of all replicas' `values` through the codec; None on all replicas if any value is not finite."""
        return self._exchange(self.method.codec, values, 0, part)

    def _reference(self, w: Tensor) -> Told | None:
        return self._exchange(Identity(), self.operator(w), 1, 0)

    def _exchange(self, codec: Codec, values: Tensor, fragment: int, part: int) -> Told | None:
        group, numel = self.group, values.numel()
        key = Key(self.method.seed, fragment, self.step, group.rank, part)
        header = Header(identity((self.method, codec)), 0, fragment, self.step, part, numel, codec.nbytes(numel))
        body = torch.zeros(header.nbytes, dtype=torch.uint8)
        if bool(torch.isfinite(values).all()):
            codec.encode(values, body, key)
        else:
            header = replace(header, flags=REFUSED)
        heard = self.tell(body, header, range(group.size))
        if refused := [rank for rank, (flags, _) in heard.items() if flags & REFUSED]:
            reason = "NaN or infinity in the operator's values"
            self._observe("refused", self.step, fragment=fragment, round=self.step, by=refused, reason=reason)
            return None
        total, own = torch.zeros(numel), torch.zeros(numel)
        for rank, (_, packet) in heard.items():
            codec.decode_add(packet, total, replace(key, sender=rank))
        codec.decode_add(heard[group.rank][1], own, key)
        return Told(total / group.size, own)

    # ---- the group

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        """Continue with the replicas of `group`. Collective. A replica that is behind takes over z and w.

        Raises `DisagreementError` if replicas continued separately, `NonFiniteError` if F(w) is not finite.
        """
        self.group, self.names = group, self._checked(names, group)
        facts = {"method": repr(self.method), "numbers in z": self.z.numel(), "names": list(self.names)}
        compare_settings(group, facts)
        told = self._told()
        if all(step == 0 for step, _ in told):
            agree_on_start(group, [self.z], self._observe, "z")
            self.w = self.z.clone()
        donor, behind = donor_and_behind([step for step, _ in told])
        if behind and group.rank == donor:
            nbytes = give(group, behind, {"z": self.z, "w": self.w}, {"step": self.step})
            self._observe("given", self.step, to=[self.names[rank] for rank in behind], nbytes=nbytes)
        elif group.rank in behind:
            tensors, said = take(group, donor, 8 * self.z.numel() + (1 << 16))
            self._put(tensors, said)
            self._observe("caught_up", self.step, round=self.step, donor=self.names[donor])
        if len({text for _, text in self._told()}) > 1:
            raise DisagreementError(
                "replicas continued separately and differ; resume all from one step, or start again."
            )
        if self.method.refresh:
            reference = self._reference(self.w)
            if reference is None:
                raise NonFiniteError("F(w) holds NaN or infinity at the common reference; start at another point.")
            self.mean_at_w, self.own_at_w = reference

    def _told(self) -> list[tuple[int, bytes]]:
        """Step, and digest of z and w, of all replicas."""
        told = gather(self.group, self.step.to_bytes(8, "little") + digest([self.z, self.w]), 24, "resume")
        return [(int.from_bytes(text[:8], "little"), text[8:]) for text in told]

    def _put(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        if any(name not in tensors or tensors[name].shape != self.z.shape for name in ("z", "w")):
            raise CheckpointError(f"z and w of {self.z.numel()} numbers are needed; the state is of another problem.")
        self.z, self.w, self.step = tensors["z"].clone(), tensors["w"].clone(), int(facts["step"])

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"z": self.z, "w": self.w, "residual": self.residual}, {"step": self.step}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`; F(w) is exchanged again. Raises `CheckpointError`, and the errors of `meet`."""
        self._put(tensors, facts)
        self.residual = tensors["residual"].clone()
        self.meet(self.group, self.names)


def _check(method: object, step: float, refresh: float) -> None:
    if not 0 < step < math.inf or not 0 < refresh <= 1:
        raise ConfigurationError(f"{method}: step above 0 and refresh in (0, 1] are needed.")
