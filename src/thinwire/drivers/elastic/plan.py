"""The plan of an elastic round: a pure function of the statuses of all members.

Fragments take turns, and rounds are numbered over all fragments: **round** q exchanges fragment order[q mod P]. Members that
committed the same rounds hold the same anchors and the same **state digest**, a hash over all of the agreed state. A
member with fewer rounds, or with another digest, is *behind*: it takes over the agreed state of the *sound* members before it is
counted again. It keeps its own progress, because a delta is relative to its own anchor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from thinwire.data_ledger import Claim, ReadCount
from thinwire.errors import PeerError

MOST_ROUNDS = 1 << 31  # a packet's header has 32 bits
MOST_REPORTED = 1 << 30  # rounds in a status: whoever takes such a state over has as many rounds left
MOST_STEPS = 1 << 40
MOST_WEIGHT = 1e18
MOST_RECORD = 8192  # bytes
MOST_NUMBERS = 512  # in a claim
MOST_BLAMES, MOST_REASON = 16, 120  # members that a status blames, and characters of a reason
MOST_READY = 64  # deltas in a status; one delta takes up to 75 bytes of the 16,384 that a replica may say
_MOST_COUNT = 1 << 60  # of samples


@dataclass(frozen=True)
class MemberStatus:
    """The status that a replica sends when it asks for a round.

    round         the first round whose decision it does not know
    state_digest  digest of its anchors, see `GlobalState.computed_digest`
    step          inner steps, for the learning rate of members that join
    fresh         it holds only random weights
    finishing     it has trained all its steps
    run           the run's id, which is the id of its first view; "" before that
    over          the run has ended, and it holds the final state, which no round changes
    brings        weights of the first deltas in turn that it has ready, by fragment: 1, or the number of their tokens; 0: not counted
    record        its record of its last round, as JSON (eviction.py); "" if none
    suspect       the member that it votes to evict; "" if none
    reads         how far it has read along its lease: serial, version, count (data_ledger); empty if it has no lease
    failed        the id of the last view whose round failed, or waited, because of others; "" if none
    blames        these members by name, with what they did (conduct.py)
    received      checksums of the packets that it received in that round, by member, if the members had unlike results
    claims        samples of the deltas that it has ready, by fragment: serial, version, and counts from, to, from, to, ...
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
    failed: str = ""
    blames: Mapping[str, str] = field(default_factory=dict)
    received: Mapping[str, str] = field(default_factory=dict)
    reads: Sequence[int] = field(default_factory=list)
    claims: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    @classmethod
    def of(cls, facts: Mapping[str, Any], name: str) -> MemberStatus:
        """Read the status of `name`. Its bytes come from a peer: raises `PeerError` if they are no status."""
        kinds = {each.name: _KINDS[str(each.type)] for each in fields(cls)}
        fits = facts.keys() == kinds.keys() and all(type(facts[name]) in kind for name, kind in kinds.items())
        if not fits:
            raise PeerError(f"{name} sent a status that cannot be read; run the same version on every replica.")
        status = cls(**facts)
        bounds = {
            "round": 0 <= status.round < MOST_REPORTED,
            "step": 0 <= status.step < MOST_STEPS,
            "state_digest": len(status.state_digest) <= 64,
            "run": len(status.run) <= 64,
            "record": len(status.record) <= MOST_RECORD,
            "suspect": len(status.suspect) <= 64,
            "failed": len(status.failed) <= 64,
            "received": len(status.received) <= MOST_BLAMES
            and all(len(key) <= 64 and type(sum) is str and len(sum) == 8 for key, sum in status.received.items()),
            "blames": len(status.blames) <= MOST_BLAMES
            and all(
                len(key) <= 64 and type(why) is str and len(why) <= MOST_REASON for key, why in status.blames.items()
            ),
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
        """`reads` as a `ReadCount`."""
        return ReadCount(*self.reads) if self.reads else ReadCount()

    def claim(self, fragment: int) -> Claim:
        """The samples of its delta of `fragment`; an empty claim if the status has none."""
        serial, version, *counts = self.claims.get(str(fragment), (0, 0))
        return Claim(serial, version, tuple(zip(counts[::2], counts[1::2])))

    def check(
        self, name: str, fragments: Collection[int], most: float, most_steps: int | None = None, most_reads: int | None = None
    ) -> None:  # fmt: skip
        """Raises `PeerError` if `name` brings a delta of a fragment that is not in `fragments`, or one whose weight is more than `most`, or
        if its step is more than the run's `most_steps`, to which all others would jump, or if it says that it has read more samples than
        `most_reads`, which all others would look up.
        """
        if most_steps is not None and self.step > most_steps:
            raise PeerError(
                f"{name} sent a status out of bounds: step {self.step} of a run of {most_steps}; check that replica."
            )
        read = max((*self.reads[2:], *(end for claim in self.claims.values() for end in claim[2:])), default=0)
        if most_reads is not None and read > most_reads:
            raise PeerError(
                f"{name} sent a status out of bounds: {read} samples read in a run in which a replica reads {most_reads} at most; check that "
                "replica."
            )
        for key, weight in self.brings.items():
            if str(int(key)) != key or int(key) not in fragments or weight > most:
                raise PeerError(
                    f"{name} sent a status out of bounds: fragment {key} with weight {weight:g}, of {len(fragments)} fragments "
                    f"and a weight of at most {most:g}; check that replica."
                )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "Mapping[str, float]": (dict,),
    "Mapping[str, str]": (dict,),
    "Sequence[int]": (list,), "Mapping[str, Sequence[int]]": (dict,),
}  # fmt: skip


def check_status(
    bounds: tuple[Collection[int], float, int | None, int | None], said: Mapping[str, Any], name: str
) -> None:
    """Raises `PeerError` if `name` said what is no status, or is out of `bounds`: see `MemberStatus.check`."""
    MemberStatus.of(said, name).check(name, *bounds)


def _are_counts(numbers: Sequence[object]) -> bool:
    return all(type(number) is int and 0 <= number < _MOST_COUNT for number in numbers)


@dataclass(frozen=True)
class RoundPlan:
    """The plan that follows from the statuses of a view, in rank order; the same on every member.

    round     number of the round
    step      the largest step that enough members have reached (`least_witnesses`); members with fewer steps continue from here
    fragment  the fragment that is exchanged; −1: no member has a delta ready, and the number of the round is not used
    sound     ranks that hold the agreed state; one of them gives it to those behind
    behind    ranks that take it over first
    weights   weight of each member's delta in this round
    whole     sum of the weights if all training members had a delta; the round divides by it
    finished  all have trained all their steps: the rest of a period is averaged (`Outer.last`)
    over      all have finished, and no deltas are left, so members vote on the end; or the run has `ended`
    ended     enough sound members know that the run has ended, or one whose end is noted
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


def reconcile(statuses: Sequence[MemberStatus], order: Sequence[int], final: Collection[str] = ()) -> RoundPlan:
    """Plan a round: the sound members, the fragment, and the weight of each delta. Fragments take turns in `order`.

    The sound members hold the agreed state, round and state digest, by the first of these rules that finds one:

    - a member says that the run is `over`, and the rendezvous has noted that end (its state digest is in `final`);
    - more than half of the trained members hold it;
    - of the states that most trained members hold, the one with most rounds has it (in a tie, that of the lowest rank).

    If no member has trained yet, the most frequent digest of all decides in the same way. So of three trained members or more that agree, no
    single other one replaces their state, whatever it reports.

    The round exchanges the fragment whose turn it is, or the next one of which a member has a delta ready. A member that is behind is
    counted too, because its delta is its own training, whatever the others did meanwhile. So is a member that was late for an earlier
    round of this fragment. A fresh member is not counted.

    The mean is over all members that train, also those without a delta of this fragment. So each of M deltas moves the anchor by 1/M
    of itself in any round, and M rounds with one delta each have the same effect as one round with all.

    >>> ahead, late = MemberStatus(round=7, state_digest="b", brings={"1": 1.0}), MemberStatus(round=5, state_digest="a", brings={"0": 1.0, "1": 1.0})
    >>> plan = reconcile([ahead, late, MemberStatus(round=7, state_digest="b")], order=[0, 1])
    >>> plan.round, plan.fragment, plan.sound, plan.behind, plan.counted, plan.whole
    (7, 1, (0, 2), (1,), (0, 1), 3.0)
    >>> liar = MemberStatus(round=1000, state_digest="c", step=10**6, over=True)
    >>> plan = reconcile([liar, ahead, ahead], order=[0, 1])
    >>> plan.round, plan.sound, plan.step, plan.over
    (7, (1, 2), 0, False)
    """
    trained = [rank for rank, status in enumerate(statuses) if not status.fresh]
    candidates = trained or list(range(len(statuses)))
    states = [(statuses[rank].round if trained else 0, statuses[rank].state_digest) for rank in candidates]
    held = Counter(states)
    ends = [state for rank, state in zip(candidates, states) if statuses[rank].over and state[1] in final]
    # `max` takes the first of equals: the lowest rank's
    number, digest = state = (
        ends[0] if ends else max(held, key=lambda one: (2 * held[one] > len(states), held[one], one[0]))
    )
    sound = tuple(rank for rank, of in zip(candidates, states) if of == state)
    enough = 1 if digest in final else least_witnesses(len(candidates))
    ended = sum(statuses[rank].over for rank in sound) >= enough
    ready = set() if ended else {int(key) for rank in trained for key in statuses[rank].brings}
    open_rounds = (t for t in range(number, number + len(order)) if order[t % len(order)] in ready)
    chosen = next(open_rounds, None)
    fragment = -1 if chosen is None else order[chosen % len(order)]
    weights = tuple(0.0 if status.fresh else status.brings.get(str(fragment), 0.0) for status in statuses)
    counted = sum(weight > 0 for weight in weights)
    finished = all(status.finishing for status in statuses)
    behind = tuple(rank for rank in range(len(statuses)) if rank not in sound)
    steps = sorted((statuses[rank].step for rank in trained), reverse=True)
    return RoundPlan(
        round=number if chosen is None else chosen,
        step=steps[least_witnesses(len(steps)) - 1] if steps else 0,
        fragment=fragment,
        sound=sound,
        behind=behind,
        weights=weights,
        whole=sum(weights) * len(trained) / max(1, counted),
        finished=finished,
        over=ended or (finished and not ready and not behind),
        ended=ended,
    )


def least_witnesses(members: int) -> int:
    """The members of `members` that must report an end or a step before the others take it over: two of three or more, because one may
    lie. Of two, neither can outvote the other, so one is enough.
    """
    return 2 if members > 2 else 1


def first_in_turn(ready: Collection[int], order: Sequence[int], number: int) -> list[int]:
    """The fragments of `ready` whose turns come first from round `number` on, as many as a status names.

    >>> first_in_turn({0, 1, 2}, order=[2, 0, 1], number=4)
    [0, 1, 2]
    """
    turns = (order[turn % len(order)] for turn in range(number, number + len(order)))
    return list(islice((index for index in turns if index in ready), MOST_READY))
