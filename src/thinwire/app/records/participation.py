"""The membership of an elastic run, read from its events: when replicas were alive, when they took part, and which rounds were held.

Three numbers differ: how many replicas are *living* (a process that trains), how many are *taking part* (members
of a round whose deltas were counted within a cycle), and how many *rounds* were committed. A replica may live and
train for days without taking part.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinwire.app.records.events import Event, steps_in
from thinwire.app.records.sessions import Span, finite, number, whole
from thinwire.app.records.units import text_of_seconds


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round, from the events of its members. `committed`: None if no member could learn it."""

    number: int
    fragment: int
    seconds: float
    members: tuple[str, ...]
    counted: tuple[str, ...]
    committed: bool | None
    reason: str

    @classmethod
    def of(cls, event: Event, offset: float = 0.0) -> RoundSeen:
        committed = event["committed"] if isinstance(event["committed"], bool) else None
        seconds = offset + finite(event["seconds"])
        members, counted = _names(event["members"]), _names(event["counted"])
        reason = _by_name(str(event["reason"]), members)
        return cls(whole(event["round"]), whole(event["fragment"]), seconds, members, counted, committed, reason)

    @property
    def place(self) -> tuple[int, bool]:
        """In the order of rounds; where nobody had anything to exchange, they met before the round of that number."""
        return self.number, self.fragment >= 0


class Steps:
    """Inner steps of the replica `name`, from its events in their order; `trained` plus `jumped` is its present step.

    trained   steps that it took itself; a step that it repeated after a restart counts once
    jumped    steps that it skipped, because it continued at the step of the others
    counted   trained steps that are in the agreed weights: the mean over the fragments, which travel one by one
    """

    def __init__(self, name: str) -> None:
        self.name, self.at, self.trained, self._fragments = name, 0, 0, 1
        # steps of this session; of them, by fragment, those that are counted, and those of its delta in flight; both at its last checkpoint
        self._own, self._done = 0, Counter[int]()
        self._saved: tuple[int, Counter[int]] = 0, Counter()
        self._departed, self._counted = Counter[int](), Counter[int]()
        self.jumps: list[tuple[int, int]] = []  # the step before each jump, and its last step

    @property
    def jumped(self) -> int:
        return self.at - self.trained

    @property
    def counted(self) -> int:
        return min(self.trained, round(sum(self._counted.values()) / self._fragments))

    def take(self, event: Event) -> None:
        """Learn from one event."""
        kind, step = event["event"], event["step"]
        if kind == "start":
            listed = event["fragments"]
            self._fragments = max(1, len(listed) if isinstance(listed, list) else 0)
            self._own, self._done = 0, Counter()
        elif kind == "step":
            self.trained += steps_in(event) * (step > self.at)
            self._own += steps_in(event)
        elif kind == "checkpoint":
            self._saved = self._own, self._done.copy()
        elif kind == "back" and event["path"]:
            self._own, self._done = self._saved[0], self._saved[1].copy()
        elif kind == "depart":  # said before the step after which it departs
            fragment = whole(event["fragment"])
            self._departed[fragment] = self._own - self._done[fragment] + (step > self.at)
        elif kind == "round" and event["committed"] and self.name in _names(event["counted"]):
            fragment = whole(event["fragment"])
            self._counted[fragment] += self._departed[fragment]
            self._done[fragment] += self._departed[fragment]
            self._departed[fragment] = 0
            self._saved[1][fragment] = self._saved[0]
        if kind in ("step", "back", "end"):
            begin = step - steps_in(event) if kind == "step" else step
            branched = kind == "back" and event["path"] and not self.trained  # from a checkpoint of another folder
            if begin > self.at and not branched:
                self.jumps.append((self.at, begin))
            self.at = max(self.at, step)


def jumped_by_all(each: Sequence[Steps]) -> int:
    """The steps that none of these replicas trained."""
    if not each:
        return 0
    last = max(steps.at for steps in each)
    edges = [
        edge for steps in each for begin, end in [*steps.jumps, (steps.at, last)] for edge in ((begin, 1), (end, -1))
    ]
    count, before, alone = 0, 0, 0
    for at, change in sorted(edges):
        alone += (at - before) * (count == len(each))
        count, before = count + change, at
    return alone


def text_of_steps(each: Sequence[Steps]) -> str:
    """The sums over several replicas, as text."""
    sums = (sum(getattr(steps, name) for steps in each) for name in ("trained", "jumped", "counted"))
    return "{:,} trained, {:,} jumped, {:,} counted".format(*sums)


def explained_steps(each: Sequence[Steps]) -> str:
    """An explanation of the numbers of steps, with those of each replica; empty for none."""
    if not each:
        return ""
    of_each = "; ".join(f"{steps.name} {text_of_steps([steps])}" for steps in each)
    return (
        "Jumped steps were not trained by that replica, because the others had continued without it. Counted: its trained steps that "
        f"are in the agreed weights. {of_each}."
    )


def _names(given: object) -> tuple[str, ...]:
    names = tuple(map(str, given)) if isinstance(given, list) else ()
    return _shared(names)


@lru_cache(256)
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same tuple for the same names: a long run has many rounds of few members."""
    return names


def _by_name(reason: str, members: Sequence[str]) -> str:
    """A group's error with ranks replaced by the names of replicas; without advice for groups that end by it."""

    def name(found: re.Match[str]) -> str:
        rank = int(found[1])
        return members[rank] if rank < len(members) else found[0]

    told = re.sub(r"\breplica (\d{1,4})\b", name, reason.split(". ")[0])
    return re.sub(r"(?<![a-z0-9-])([a-z0-9-]+) \(\1\)", r"\1", told)  # a hub's group names it, too


class Participation:
    """Which replicas are members and which take part, from rounds in their order, of a model of `fragments` fragments."""

    def __init__(self, fragments: int) -> None:
        self.members: tuple[str, ...] = ()
        self.committed = 0
        self._counted: deque[tuple[str, ...]] = deque(maxlen=2 * max(1, fragments))
        self._here: dict[str, int] = {}  # committed rounds in a row that a replica was a member of
        self._last = (-1, False)

    def take(self, seen: RoundSeen) -> tuple[list[str], list[str]]:
        """Learn from a round; return the replicas that joined and left with it. A round that is known already changes nothing."""
        if seen.place <= self._last:
            return [], []
        self._last = seen.place
        before, self.members = self.members, seen.members
        if seen.committed and seen.fragment >= 0:
            self.committed += 1
            self._counted.append(seen.counted)
            self._here = {name: self._here.get(name, 0) + 1 for name in seen.members}
        joined = [name for name in seen.members if name not in before]
        return joined, [name for name in before if name not in seen.members]

    @property
    def idle(self) -> tuple[str, ...]:
        """Members of whom nothing was counted for two cycles."""
        part, long = self.taking_part, self._counted.maxlen or 0
        return tuple(name for name, rounds in self._here.items() if rounds >= long and name not in part)

    @property
    def taking_part(self) -> tuple[str, ...]:
        """Members whose deltas were counted within the last two cycles of fragments."""
        counted = {name for names in self._counted for name in names}
        return tuple(name for name in self.members if name in counted)


class MembershipLog:
    """Lines about the members of an elastic run during training, from their events."""

    def __init__(self, fragments: int, asked: int) -> None:
        self._participation, self._asked = Participation(fragments), asked
        self._said = {""}

    def take(self, name: str, event: Event) -> list[str]:
        """Learn from an event of `name`; lines to print."""
        kind = event["event"]
        if kind == "round":
            return self._of_round(RoundSeen.of(event))
        if kind == "caught_up":
            return [f"{name} took over what {event['donor']} held, round {event['round']}"]
        if kind == "keeps":
            late, most = ", ".join(map(str, event["late"])), text_of_seconds(number(event["at_most_seconds"]))
            return [f"{name} has finished, and keeps the final weights for {late}: {most} at most, or until Ctrl-C"]
        if kind == "late":
            return self._once(f"{name} is late: a fragment's last round was not over when it should have left again")
        if kind == "doubt":
            return [f"{name} could not learn what became of round {event['round']}; the next round tells"]
        what = "" if kind == "retry" else " trains on, in no round" if event["step"] else " waits for the others"
        return self._once(f"{name}{what}: {event['reason']}")

    @property
    def committed(self) -> int:
        return self._participation.committed

    def line(self, here: Sequence[str], names: Sequence[str]) -> str:
        """The three numbers: `here` of the replicas `names` are heard; the others are known by the rounds."""
        elsewhere = [name for name in self._participation.members if name not in names]
        part = [name for name in self._participation.taking_part if name in here or name in elsewhere]
        return f"{len(here) + len(elsewhere)} living, {len(part)} taking part, {self._participation.committed} rounds"

    def _of_round(self, seen: RoundSeen) -> list[str]:
        joined, left = self._participation.take(seen)
        there = how_many(seen.members, self._asked)
        lines = [f"{', '.join(names)} {what}; {there}" for what, names in (("joined", joined), ("left", left)) if names]
        for name in self._participation.idle:
            lines += self._once(
                f"{name} is there and trains, but none of its deltas was counted for two cycles", f"idle {name}"
            )
        if seen.committed is False and seen.reason:
            lines += self._once(
                f"round {seen.number} was dropped and changed nothing: {seen.reason}", f"round {seen.number}"
            )
        return lines

    def _once(self, text: str, key: str = "") -> list[str]:
        if (key or text) in self._said:
            return []
        self._said.add(key or text)
        return [text]


def how_many(members: Sequence[str], asked: int) -> str:
    """The number of members, and the requested number."""
    return f"{len(members)} of {asked} are there" if len(members) <= asked else f"{len(members)} are there"


def merge_rounds(rounds: Iterable[RoundSeen]) -> list[RoundSeen]:
    """Each round once, in order. Members agree on the facts that they know; one may know more."""
    best: dict[tuple[int, bool], RoundSeen] = {}
    for seen in sorted(rounds, key=lambda seen: seen.seconds):
        known = best.get(seen.place)
        if known is None or (known.committed is None and seen.committed is not None):
            best[seen.place] = seen
    return [best[place] for place in sorted(best)]


@dataclass(frozen=True)
class Numbers:
    """Over a run: replicas living and taking part, on average, and rounds committed and dropped."""

    living: float
    taking_part: float
    committed: int
    dropped: int


def numbers(rounds: Sequence[RoundSeen], incarnations: Mapping[str, Sequence[Span]], fragments: int) -> Numbers:
    """`incarnations` are those of the replicas whose logs are here; others are known by the rounds that they were members of."""
    participation, took_part = Participation(fragments), list[int]()
    for seen in rounds:
        participation.take(seen)
        if seen.committed and seen.fragment >= 0:
            took_part.append(len(participation.taking_part))
    spans = [span for its in incarnations.values() for span in its]
    length = max((s.end for s in spans), default=0.0) - min((s.begin for s in spans), default=0.0)
    here = sum(span.end - span.begin for span in spans) / length if length > 0 else float(len(incarnations))
    elsewhere = sum(name not in incarnations for seen in rounds for name in seen.members) / max(1, len(rounds))
    return Numbers(
        living=here + elsewhere,
        taking_part=float(np.mean(took_part)) if took_part else 0.0,
        committed=participation.committed,
        dropped=sum(seen.committed is False and seen.fragment >= 0 for seen in rounds),
    )


def session_begins(files: Sequence[Sequence[tuple[float, float]]], ahead: Sequence[float] = ()) -> list[list[float]]:
    """The beginning of each session of each file on one clock: that of the machine, without times in which no session was active.

    A session is given as the times of its first and its last line. Those of replicas on several machines are as far apart as their
    clocks say, each of which is so many seconds `ahead`.
    """
    walls = [
        [(begin - seconds, end - seconds) for begin, end in spans]
        for spans, seconds in zip(files, ahead or [0.0] * len(files))
    ]
    pause, end = 0.0, None
    shifts: dict[tuple[float, float], float] = {}
    for begin, until in sorted({span for spans in walls for span in spans}):
        if end is None or begin > end:
            pause += begin - (0.0 if end is None else end)
        end = until if end is None else max(end, until)
        shifts[begin, until] = begin - pause
    return [[shifts[span] for span in spans] for spans in walls]
