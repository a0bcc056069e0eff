"""The syncer's computation: the estimate of a round from its deltas, its bytes, and the next agreed state. No I/O, no clock.

w_m  = weigh(tokens, steps, staleness);   Δ_m ← correct(Δ_m, outer momentum, staleness)
z    = Σ w_m·Δ_m / Σ w  + e                           (Σ w over all replicas that take part, so that a late one loses no weight)
c    = decode(encode(z)), the same on every replica;   e ← z − c
anchor, outer state ← outer step on c                 (here and on every replica, the same bits)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.handshake import digest
from thinwire.drivers.unequal.composition import Composition
from thinwire.drivers.unequal.messages import COUNTED, DELTA, LAST, LEFT_OUT, MERGE, MOVE, Down, SyncerMessages, Up
from thinwire.errors import NonFiniteError, PacketError
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Fragment, local
from thinwire.rng import Key
from thinwire.types import State


@dataclass
class AgreedFragment:
    """The state of a fragment on all replicas after `version` rounds."""

    anchor: Tensor
    state: State
    version: int = 0
    residual: Tensor | None = None  # the syncer's feedback

    def step(self, outer: Outer, estimate: Tensor) -> None:
        """Apply an estimate. Raises `NonFiniteError` if the next anchor would not be finite; then nothing has changed."""
        anchor, state = outer.step(self.anchor, estimate, self.state)
        if not bool(torch.isfinite(anchor).all()):
            raise NonFiniteError("the anchor would not be finite; the round was dropped.")
        self.anchor, self.state, self.version = anchor, state, self.version + 1

    def digest(self) -> bytes:
        """A digest of anchor and outer state, 8 bytes."""
        return digest([self.anchor, *(self.state[name] for name in sorted(self.state))])[:8]


def decode_body(codec: Codec, body: Tensor, numel: int, key: Key) -> Tensor:
    """Decode the body of a message into fp32 values."""
    out = torch.zeros(numel)
    codec.decode_add(body, out, key)
    return out


def encode_delta(
    codec: Codec, feedback: Feedback | None, state: State, delta: Tensor, key: Key
) -> tuple[Tensor, State]:
    """The body of a message with `delta`, and the next state of the sender's feedback. Raises `NonFiniteError`."""
    signal = feedback.signal(delta, state) if feedback else delta
    body = torch.empty(codec.nbytes(delta.numel()), dtype=torch.uint8)
    codec.encode(signal, body, key)
    if feedback is None:
        return body, state
    after = {name: torch.empty_like(kept) for name, kept in state.items()}
    sent = decode_body(codec, body, delta.numel(), key)
    feedback.settle(delta, sent, sent.clone(), state, after)
    return body, after


def first_state(method: Composition, fragment: Fragment, index: int) -> FragmentState:
    """The state of `fragment` on a replica at the start."""
    anchor = torch.cat([local(p.detach()).reshape(-1).cpu().float() for _, p in fragment.parameters])
    feedback = method.feedback.init(anchor.numel()) if method.feedback else {}
    codec = method.codec.fitted(fragment.shapes)
    return FragmentState(fragment, index, anchor, method.outer.init(anchor), feedback, codec)


@dataclass(frozen=True)
class Given:
    """A delta that waits for its round; None if it was not finite."""

    up: Up
    delta: Tensor | None


@dataclass
class Syncer:
    """The waiting deltas, and the agreed state. `counted` is the number of the next delta that is due, by replica and fragment."""

    method: Composition
    agreed: list[AgreedFragment]
    up: Sequence[Codec]
    down: Sequence[Codec]
    host: int
    given: dict[tuple[int, int, int], Given] = field(default_factory=dict)  # by kind, fragment, replica
    counted: dict[tuple[int, int], int] = field(default_factory=dict)
    until: dict[tuple[int, int], int] = field(default_factory=dict)  # by replica and fragment: its steps in held rounds
    # by fragment and replica: the weight of its last delta
    weights: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, method: Composition, states: Sequence[FragmentState], messages: SyncerMessages) -> Syncer:
        """A syncer with a replica's first state."""
        agreed = [
            AgreedFragment(
                one.anchor.clone(),
                method.outer.init(one.anchor),
                0,
                torch.zeros_like(one.anchor) if method.feedback else None,
            )
            for one in states
        ]
        return cls(method, agreed, messages.up, messages.down, messages.host)

    def take(self, up: Up) -> bool:
        """Store a delta for its round; return whether the message has one. Raises `PacketError` if it is not the next of its replica."""
        due = self.counted.get((up.sender, up.fragment), 0)
        if up.number != due or (up.kind, up.fragment, up.sender) in self.given:
            raise PacketError(
                f"replica {up.sender} sent delta {up.number} of fragment {up.fragment}, {due} was due; no delta is counted twice."
            )
        self.counted[up.sender, up.fragment] = due + 1
        if up.body is None:
            return False
        numel = self.agreed[up.fragment].anchor.numel()
        key = Key(self.method.seed, up.fragment, up.number, up.sender, up.kind)
        delta = decode_body(self.up[up.fragment], up.body, numel, key)
        sound = bool(torch.isfinite(delta).all()) and up.base <= self.agreed[up.fragment].version
        self.given[up.kind, up.fragment, up.sender] = Given(up, delta if sound else None)
        return True

    def hold(self, fragment: int, there: set[int], kind: int = DELTA) -> tuple[Down, dict[int, int]]:
        """Hold the round of all deltas of `fragment` that wait. Returns the message to all replicas, without times, and the outcome by replica.

        A replica that is `there` and has sent none counts as a zero delta with the weight of its last one.
        """
        agreed = self.agreed[fragment]
        given = {rank: self.given.pop((kind, fragment, rank)) for rank in self._waiting(kind, fragment)}
        outcomes = {rank: LEFT_OUT if one.delta is None else COUNTED for rank, one in given.items()}
        self.until |= {(rank, fragment): one.up.taken for rank, one in given.items()}
        total = self._estimate(fragment, given, there, kind)
        before = agreed.digest()
        said = Down(MOVE if kind == DELTA else LAST, fragment, agreed.version, before)
        if COUNTED not in outcomes.values():
            return said, outcomes
        try:
            return self._moved(said, total), outcomes
        except NonFiniteError:
            return said, dict.fromkeys(outcomes, LEFT_OUT)

    def merge(self, fragment: int, total: Tensor) -> Down:
        """Move the anchor by −`total`, without the outer step. Returns the message to all replicas. Raises `NonFiniteError`."""
        agreed = self.agreed[fragment]
        return self._moved(Down(MERGE, fragment, agreed.version, agreed.digest()), total)

    def _waiting(self, kind: int, fragment: int) -> list[int]:
        return sorted(rank for of, where, rank in self.given if (of, where) == (kind, fragment))

    def _estimate(self, fragment: int, given: Mapping[int, Given], there: set[int], kind: int) -> Tensor:
        """Σ w·Δ / Σ w, added in rank order; the plain mean if all replicas have sent one and the weights are equal."""
        agreed = self.agreed[fragment]
        total, weights = torch.zeros_like(agreed.anchor), dict[int, float]()
        deltas: dict[int, Tensor] = {}
        for rank, one in given.items():
            stale = max(0, agreed.version - one.up.base)  # one from a later version is left out
            weights[rank] = self.method.weigh.weight(one.up.tokens, one.up.steps, stale)
            if one.delta is not None:
                deltas[rank] = one.delta
                if self.method.correct and kind == DELTA:
                    deltas[rank] = self.method.correct.corrected(one.delta, agreed.state.get("momentum"), stale)
        absent = there - weights.keys()
        known = [self.weights[fragment, rank] for rank in absent if (fragment, rank) in self.weights]
        unknown = len(absent) - len(known)
        mean = sum(weights.values()) / max(1, len(weights))
        whole = sum(weights.values()) + sum(known) + unknown * mean
        self.weights |= {(fragment, rank): weight for rank, weight in weights.items()}
        alike = not absent and len(deltas) == len(weights) and len(set(weights.values())) == 1
        for rank in sorted(deltas):
            total.add_(deltas[rank], alpha=1.0 if alike else weights[rank] / whole if whole else 0.0)
        return total.div_(len(deltas)) if alike and len(deltas) > 1 else total

    def _moved(self, said: Down, total: Tensor) -> Down:
        """Encode an estimate, with the feedback added, and apply what was decoded. Returns `said` with its bytes. Raises `NonFiniteError`."""
        agreed, codec = self.agreed[said.fragment], self.down[said.fragment]
        total = total if agreed.residual is None else total + agreed.residual
        body = torch.empty(codec.nbytes(total.numel()), dtype=torch.uint8)
        key = Key(self.method.seed, said.fragment, agreed.version, self.host, said.kind)
        codec.encode(total, body, key)
        estimate = decode_body(codec, body, total.numel(), key)
        agreed.step(self.method.outer if said.kind == MOVE else self.method.outer.last, estimate)
        if self.method.feedback:
            agreed.residual = total.sub_(estimate)
        return replace(said, body=body)
