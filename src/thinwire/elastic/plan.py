"""Elastic rounds, the part that is arithmetic: from what all members say of themselves to what all will do.

Rounds are numbered through all fragments, which take turns: **round** q is the next one, about fragment order[q mod P]. Members who
committed the same rounds hold the same anchors and the same **state digest**, a hash over all anchors that these rounds moved. A
member with fewer rounds, or with another digest, is *behind*: it takes over the agreed state of those who are *sound* before it is
counted again. Its own progress is not lost by that: a delta is relative to its own anchor.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from thinwire.data_ledger import Claim, ReadCount
from thinwire.errors import PeerError

MOST_ROUNDS = 1 << 31  # a packet's header has 32 bits
MOST_STEPS = 1 << 40
MOST_WEIGHT = 1e18
MOST_RECORD = 8192  # bytes
MOST_NUMBERS = 512  # in a claim
_MOST_COUNT = 1 << 60  # of samples


@dataclass(frozen=True)
class MemberStatus:
    """What a replica says of itself when it asks for a round.

    round         the first round that it has not seen decided
    state_digest  of its anchors, see `next_digest`
    step          inner steps, for the learning rate of those who join
    fresh         it holds nothing but random weights
    finishing     it has trained all its steps
    run           which run it is in: the id of its first view; "" before that
    over          the run has ended; what it holds is the final state, which no round changes any more
    brings        what the deltas count that it has ready, by fragment: 1, or the tokens behind them; 0: not at all
    record        what it saw of its last round, as JSON, and
    suspect       whom it would go on without (eviction.py); "" nothing, nobody
    reads         how far it has read along its lease: serial, version, count (data_ledger); empty: it has none
    claims        the samples behind the deltas that it has ready, by fragment: serial, version, and counts from, to, from, to, ...
    """

    round: int
    state_digest: str
    step: int = 0
    fresh: bool = False
    finishing: bool = False
    run: str = ""
    over: bool = False
    brings: Mapping[str, float] = field(default_factory=dict)
    record: str = ""
    suspect: str = ""
    reads: Sequence[int] = field(default_factory=list)
    claims: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any], name: str) -> MemberStatus:
        """What `name` said. Its bytes are a peer's: raises `PeerError` where they are no status."""
        kinds = {each.name: _KINDS[str(each.type)] for each in fields(cls)}
        fits = facts.keys() == kinds.keys() and all(type(facts[name]) in kind for name, kind in kinds.items())
        if not fits:
            raise PeerError(f"{name} sent a status that cannot be read; run the same version on every replica.")
        status = cls(**facts)
        bounds = {
            "round": 0 <= status.round < MOST_ROUNDS,
            "step": 0 <= status.step < MOST_STEPS,
            "state_digest": len(status.state_digest) <= 64,
            "run": len(status.run) <= 64,
            "record": len(status.record) <= MOST_RECORD,
            "suspect": len(status.suspect) <= 64,
            "brings": all(
                key.isascii() and key.isdecimal() and len(key) < 10 and type(w) in (int, float) and 0 <= w < MOST_WEIGHT
                for key, w in status.brings.items()
            ),
            "reads": len(status.reads) in (0, 3) and _are_counts(status.reads),
            "claims": status.claims.keys() <= status.brings.keys()
            and all(
                type(numbers) is list
                and 2 <= len(numbers) <= MOST_NUMBERS
                and len(numbers) % 2 == 0
                and _are_counts(numbers)
                for numbers in status.claims.values()
            ),
        }
        for what, within in bounds.items():
            if not within:
                raise PeerError(
                    f"{name} sent a status out of bounds: {what} {getattr(status, what)!r:.60}; check that replica."
                )
        return status

    @property
    def read_count(self) -> ReadCount:
        """`reads`, in words."""
        return ReadCount(*self.reads) if self.reads else ReadCount()

    def claim(self, fragment: int) -> Claim:
        """What stands behind its delta of `fragment`; nothing, if it says nothing."""
        serial, version, *counts = self.claims.get(str(fragment), (0, 0))
        return Claim(serial, version, tuple(zip(counts[::2], counts[1::2])))

    def check(self, name: str, fragments: Collection[int], most: float, most_steps: int | None = None) -> None:
        """Raises `PeerError` if `name` brings what there is not among `fragments`, or one that counts more than `most`; or says that
        it has trained more than the run's `most_steps`, to which all others would jump.
        """
        if most_steps is not None and self.step > most_steps:
            raise PeerError(
                f"{name} sent a status out of bounds: step {self.step} of a run of {most_steps}; check that replica."
            )
        for key, weight in self.brings.items():
            if str(int(key)) != key or int(key) not in fragments or weight > most:
                raise PeerError(
                    f"{name} sent a status out of bounds: fragment {key} that counts {weight:g}, of {len(fragments)} fragments "
                    f"and at most {most:g}; check that replica."
                )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "Mapping[str, float]": (dict,),
    "Sequence[int]": (list,), "Mapping[str, Sequence[int]]": (dict,),
}  # fmt: skip


def _are_counts(numbers: Sequence[object]) -> bool:
    return all(type(number) is int and 0 <= number < _MOST_COUNT for number in numbers)


@dataclass(frozen=True)
class RoundPlan:
    """What follows from the statuses of a view, in rank order; the same on every member.

    round     that this is
    step      where training has got to: whoever has trained less goes on from here
    fragment  that this round is about; −1: nobody has anything ready, and the round is not used up
    sound     ranks that hold the agreed state; the first one gives it to those behind
    behind    ranks that take it over first
    weights   what each counts in this round
    whole     what all who train would count together: the round divides by it
    finished  all have trained all their steps: what is left of a period is averaged (`Outer.last`)
    over      all have finished, and nobody has anything left: they vote on it; or it has `ended`
    ended     somebody sound knows that the run has ended
    """

    round: int
    step: int
    fragment: int
    sound: tuple[int, ...]
    behind: tuple[int, ...]
    weights: tuple[float, ...]
    whole: float
    finished: bool
    over: bool
    ended: bool

    @property
    def counted(self) -> tuple[int, ...]:
        return tuple(rank for rank, weight in enumerate(self.weights) if weight > 0)

    def without(self, ranks: Collection[int]) -> RoundPlan:
        """The same round, in which the deltas of `ranks` are not counted."""
        if not any(rank in ranks for rank in self.counted):
            return self
        weights = tuple(0.0 if rank in ranks else weight for rank, weight in enumerate(self.weights))
        train = self.whole * len(self.counted) / sum(self.weights)
        counted = sum(weight > 0 for weight in weights)
        return replace(self, weights=weights, whole=sum(weights) * train / max(1, counted))


def reconcile(statuses: Sequence[MemberStatus], order: Sequence[int]) -> RoundPlan:
    """Who is sound, what this round is about, and what each delta counts. `order`: in which fragments take turns.

    Sound are those with the most rounds whose state digest most of them share (of equally many: the lowest rank's). If nobody
    has trained yet the lowest rank is sound. The round is about the fragment whose turn it is, or the next one that anybody
    has ready. Who is behind is counted all the same: its delta is what that replica has trained, whatever the others did
    meanwhile; but not who is fresh. So is who came too late for an earlier round of this fragment, and has its delta still.

    The mean is over all who train, those too who have nothing of this fragment ready: with M of them a delta moves the
    anchor by 1/M, in whichever round it comes, and rounds that count one each make what one that counts all does.

    >>> ahead, late = MemberStatus(round=7, state_digest="b", brings={"1": 1.0}), MemberStatus(round=5, state_digest="a", brings={"0": 1.0, "1": 1.0})
    >>> plan = reconcile([ahead, late, MemberStatus(round=7, state_digest="b")], order=[0, 1])
    >>> plan.round, plan.fragment, plan.sound, plan.behind, plan.counted, plan.whole
    (7, 1, (0, 2), (1,), (0, 1), 3.0)
    """
    trained = [rank for rank, status in enumerate(statuses) if not status.fresh]
    number = max((statuses[rank].round for rank in trained), default=0)
    ahead = [rank for rank in trained if statuses[rank].round == number] or [0]
    counts = Counter(statuses[rank].state_digest for rank in ahead)
    shared = max(counts, key=lambda digest: counts[digest])  # of equally many the first counted: the lowest rank's
    candidates = ahead if trained else range(len(statuses))
    sound = tuple(rank for rank in candidates if statuses[rank].state_digest == shared)
    ended = any(statuses[rank].over for rank in sound)
    ready = set() if ended else {int(key) for rank in trained for key in statuses[rank].brings}
    open_rounds = (t for t in range(number, number + len(order)) if order[t % len(order)] in ready)
    chosen = next(open_rounds, None)
    fragment = -1 if chosen is None else order[chosen % len(order)]
    weights = tuple(0.0 if status.fresh else status.brings.get(str(fragment), 0.0) for status in statuses)
    counted = sum(weight > 0 for weight in weights)
    finished = all(status.finishing for status in statuses)
    behind = tuple(rank for rank in range(len(statuses)) if rank not in sound)
    return RoundPlan(
        round=number if chosen is None else chosen,
        step=max((statuses[rank].step for rank in trained), default=0),
        fragment=fragment,
        sound=sound,
        behind=behind,
        weights=weights,
        whole=sum(weights) * len(trained) / max(1, counted),
        finished=finished,
        over=ended or (finished and not ready and not behind),
        ended=ended,
    )


def next_digest(state_digest: str, number: int, fragment: int, anchor: Tensor) -> str:
    """The state digest after `fragment`'s anchor has moved in round `number`: BLAKE2b, 16 bytes, as hexadecimal digits."""
    state = hashlib.blake2b(f"{state_digest}/{number}/{fragment}/".encode(), digest_size=16)
    state.update(anchor.detach().cpu().contiguous().view(-1).numpy().data)
    return state.hexdigest()
