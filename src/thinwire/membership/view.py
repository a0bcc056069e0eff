"""A view: the members of a run until the next view, and their votes.

`judge` selects the members from the presences of all replicas. It is pure, so all replicas get the same result. A presence is sent as
JSON. Only its form is checked: sizes, types and finite numbers.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thinwire.comm.group import Group
from thinwire.errors import ConfigurationError, LinkError, PacketError, UndecidedError
from thinwire.membership.channel import (
    MOST_PRESENCE as LIMIT,  # bytes of one replica's presence as JSON: status, facts and all
)
from thinwire.membership.channel import NAME
from thinwire.membership.commit import NO, YES, Electorate, VoteStore, ballot, carry_out, keys_of, view_id
from thinwire.version import Protocols, common, unlike_releases

Observe = Callable[[str, Mapping[str, Any]], None]
SPEAKS = "protocols"  # the fact that need not be equal: that ranges overlap is enough
NOT_VOTED, UNLIKE = "did not vote in time", "has another result"
_MOST = 1 << 53  # most calls and views
_FIRST_LOOK = 0.5  # seconds after which a member that waits for ballots looks whose are missing; then at twice the time, and so on


@dataclass(frozen=True)
class Presence:
    """The message of a replica that asks for a view.

    `incarnation` is random and new at every start, so that a restarted replica differs from the one that died. `calls` counts its
    calls in this incarnation, and `views` the views of which it was a member. `holds` names its present group; "" is none. `facts` must
    be equal on all members, but protocols need only overlap; the caller sets `status`. `unreachable` are the incarnations that it
    cannot reach, and `expects` those that it waits for; `excludes` are names that it wants left out, with the reasons; `address` is its address.
    """

    name: str
    incarnation: str
    calls: int
    views: int = 0
    holds: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    unreachable: Sequence[str] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    expects: Sequence[str] = ()
    address: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"the name {self.name!r} was given to a replica; 1 to 64 letters, digits, dots, dashes and "
                "underscores are needed, the first a letter or digit."
            )

    def to_json(self) -> str:
        """As JSON. Raises `ConfigurationError` if it is not JSON, contains NaN or infinity, or is too large."""
        try:
            text = json.dumps(vars(self), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"replica {self.name!r}: facts and status are no plain JSON ({error}); numbers, texts, lists and mappings are needed."
            ) from None
        if len(text) > LIMIT:
            raise ConfigurationError(
                f"replica {self.name!r}: facts and status are {len(text)} bytes; at most {LIMIT} are allowed. Send digests instead of large values."
            )
        return text

    @classmethod
    def from_json(cls, text: str | bytes) -> Presence:
        """Read from JSON. Raises `PacketError` for text that `to_json` cannot have written."""
        try:
            if len(text) > LIMIT:
                raise ValueError(f"{len(text)} bytes, at most {LIMIT} are allowed")
            said = json.loads(text, parse_constant=_refuse, parse_float=_finite)
            presence = cls(**said)
            kinds: dict[str, Any] = {
                "incarnation": str, "calls": int, "views": int, "holds": str, "facts": dict, "status": dict,
                "unreachable": list, "excludes": dict, "expects": list, "address": str,
            }  # fmt: skip
            for name, kind in kinds.items():
                if type(getattr(presence, name)) is not kind:
                    raise ValueError(f"{name} is no {kind.__name__}")
            if not (0 <= presence.calls < _MOST and 0 <= presence.views < _MOST):
                raise ValueError("calls or views are not counts")
            if not all(
                isinstance(value, str)
                for value in (
                    *presence.facts.values(),
                    *presence.excludes.values(),
                    *presence.unreachable,
                    *presence.expects,
                )
            ):
                raise ValueError("facts, unreachable or expects hold values that are not texts")
        except (ValueError, TypeError, RecursionError) as error:  # a ConfigurationError is a ValueError
            raise PacketError(f"a presence cannot be read ({error}); run the same version on every replica") from None
        return presence


@dataclass(frozen=True)
class LeftOut:
    """A replica that is present but no member, and the reason. `foreign`: its facts differ from those of the replica that judges."""

    presence: Presence
    reason: str
    foreign: bool = False


@dataclass(frozen=True)
class Verdict:
    """`members` in rank order, and the replicas that are left out."""

    members: tuple[Presence, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def electorate(self) -> Electorate:
        """The members, in the form for votes."""
        return [(p.name, p.incarnation, p.calls) for p in self.members]

    @property
    def id(self) -> str:
        """The unique name of this view."""
        return view_id(self.electorate)

    def replica_of_others(self, trusted: bool) -> Presence | None:
        """A replica with other facts, if such replicas hold a group or are in the majority, and no member holds a group. A group that fits
        some replicas of it alone is the others', too. Without `trusted` two of them are needed, and more than such members: one may be a
        stranger.
        """
        foreign = [out.presence for out in self.left_out if out.foreign]
        theirs = Counter(presence.holds for presence in foreign if presence.holds)
        held = Counter(member.holds for member in self.members if member.holds)
        enough = {group: 1 if trusted else max(2, held[group] + 1) for group in (*held, *theirs)}
        if any(theirs[group] < enough[group] for group in held):
            return None
        most = max(2, len(self.members) + 1)
        alike = {p.incarnation: sum(fits(p.facts, other.facts) for other in foreign) for p in foreign}
        return next(
            (p for p in foreign if (p.holds and theirs[p.holds] >= enough[p.holds]) or alike[p.incarnation] >= most),
            None,
        )


def judge(present: Iterable[Presence], facts: Mapping[str, str]) -> Verdict:
    """Select the members from the presences, as a replica with these `facts` does. The verdict is the same on all replicas with the same
    facts, in any order of `present`.

    A replica that more than half of the others want left out is left out, if three names or more are there: of two neither can outvote the
    other. Members must have the same facts, and speak one protocol: of those in the range of `facts`, the one that most replicas of one group
    speak, then most of all, then the oldest. If two replicas have one name, the elder stays: the one that reports more views in
    this incarnation. If two cannot reach each other, the one with fewer broken links stays, then, among three or more, the one that does not
    say so itself: nobody puts another out by its word alone. Then the elder stays.
    """
    eldest_first = sorted(present, key=lambda p: (-p.views, p.name, p.incarnation))
    spoken = _spoken([p for p in eldest_first if fits(p.facts, facts)], facts)
    left_out: list[LeftOut] = []
    members: list[Presence] = []
    refused = _refused([p for p in eldest_first if fits(p.facts, facts)])
    for presence in eldest_first:
        same = next((other for other in members if other.name == presence.name), None)
        if not fits(presence.facts, facts) or not _speaks(presence, spoken):
            left_out.append(LeftOut(presence, difference(presence.facts, facts), foreign=True))
        elif presence.name in refused:
            left_out.append(
                LeftOut(presence, f"most others leave it out for a while, because {refused[presence.name]}")
            )
        elif same is not None:
            left_out.append(LeftOut(presence, f"{_the_other(same)} has the name {same.name!r}"))
        else:
            members.append(presence)
    while broken := _broken_links(members):
        counts = Counter(incarnation for link in broken for incarnation in link)
        said = [p.incarnation for p in members for other in p.unreachable if {p.incarnation, other} in broken]
        says = Counter(said if len(members) > 2 else [])
        worst = max(members[::-1], key=lambda p: (counts[p.incarnation], says[p.incarnation]))  # in a tie the youngest
        others = sorted(p.name for p in members if any({p.incarnation, worst.incarnation} == link for link in broken))
        members.remove(worst)
        left_out.append(LeftOut(worst, f"no link between it and {', '.join(others)}"))
    members.sort(key=lambda p: p.name)
    return Verdict(tuple(members), tuple(left_out))


def _refused(alike: Sequence[Presence]) -> dict[str, str]:
    """The names that more than half of the other names want left out, with the most frequent reason."""
    names = {p.name: p for p in reversed(alike)}  # the eldest of each name
    if len(names) < 3:
        return {}
    reasons: dict[str, list[str]] = {}
    for name, presence in names.items():
        for other in presence.excludes.keys() & names.keys() - {name}:
            reasons.setdefault(other, []).append(presence.excludes[other])
    return {
        name: max(sorted(set(said)), key=said.count)[:200]
        for name, said in reasons.items()
        if 2 * len(said) > len(names) - 1
    }


def expected(alike: Sequence[Presence]) -> set[str]:
    """The incarnations that these replicas wait for: those that two names expect, where three names or more are there, because one alone could
    keep all from meeting.
    """
    by_name = {(p.name, incarnation) for p in alike for incarnation in p.expects}
    least = 2 if len({p.name for p in alike}) > 2 else 1
    return {incarnation for incarnation, count in Counter(who for _, who in by_name).items() if count >= least}


def _broken_links(members: Sequence[Presence]) -> set[frozenset[str]]:
    incarnations = {p.incarnation for p in members}
    return {
        frozenset((p.incarnation, other))
        for p in members
        for other in p.unreachable
        if other in incarnations - {p.incarnation}
    }


def settings(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts that must be equal."""
    return {name: text for name, text in facts.items() if name != SPEAKS}


def fits(there: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether replicas with these facts can be members of one view: settings are equal, and protocols overlap."""
    stated = there.get(SPEAKS, ""), here.get(SPEAKS, "")
    return settings(there) == settings(here) and (stated[0] == stated[1] or common([*map(Protocols.parse, stated)]))


def _spoken(alike: Sequence[Presence], facts: Mapping[str, str]) -> int | None:
    """The protocol of the members; None if these `facts` state none."""
    own = Protocols.parse(facts.get(SPEAKS, ""))

    def support(number: int) -> tuple[int, int, int]:
        there = [p for p in alike if _speaks(p, number)]
        return max(Counter(p.holds for p in there if p.holds).values(), default=0), len(there), -number

    return max(range(own.oldest, own.newest + 1), key=support) if own else None


def _speaks(presence: Presence, number: int | None) -> bool:
    stated = Protocols.parse(presence.facts.get(SPEAKS, ""))
    return number is None or (stated is not None and number in stated)


def difference(there: Mapping[str, str], here: Mapping[str, str], where: str = "here") -> str:
    """The first fact that differs, with both values, and both releases if they differ; protocols without a common one before all, with what
    to do.
    """
    names = [n for n in [*settings(here), *settings(there)] if here.get(n) != there.get(n)]
    stated = there.get(SPEAKS, "absent"), here.get(SPEAKS, "absent")
    if not names or (stated[0] != stated[1] and not common([*map(Protocols.parse, stated)])):
        said = f"{SPEAKS}: {stated[0]} there, {stated[1]} {where}"
        return f"{said}; install one release on all, or one that speaks a protocol of each"
    said = f"{names[0]}: {there.get(names[0], 'absent')} there, {here.get(names[0], 'absent')} {where}"
    return f"{said}{unlike_releases(*stated, where)}"


def _the_other(presence: Presence) -> str:
    return f"the replica at {presence.address}" if presence.address else "another replica"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:60]} is too large a number")
    return number


class Member(NamedTuple):
    """A member of a view.

    >>> Member("replica-0", {"step": 30}).status["step"]
    30
    """

    name: str
    """Name of the replica."""
    status: Mapping[str, Any]
    """The status that it sent when it called for this view."""


@dataclass(frozen=True)
class View:
    """The members until the next view.

    Args:
        id: the unique name of this view.
        members: in rank order, the same on all of them.
        group: carries bytes between just these members.
        rebuilt: whether the group is new.
        left_out: sentences that name replicas that were present but are no members, with the reason.
        vote_store: where the members vote.
        electorate: name, incarnation and number of calls of each member, which are sent with each vote.
        waited: seconds for which this member waited for one other alone, by name: for its call, and for its ballots.
        clock: seconds; only differences have a meaning.

    >>> from thinwire import ThreadGroup
    >>> view = View("view 7", (Member("paris", {}),), ThreadGroup.create(1)[0], True, (), None, (), print, lambda: None)
    >>> view.decide("commit round 30?", yes=True, seconds=1.0)
    True
    """

    id: str
    members: tuple[Member, ...]
    group: Group
    rebuilt: bool
    left_out: tuple[str, ...]
    vote_store: VoteStore = field(repr=False)
    electorate: Electorate = field(repr=False)
    _observe: Observe = field(repr=False)
    _end: Callable[[], None] = field(repr=False)
    _cast: dict[str, bool] = field(repr=False, default_factory=dict)
    waited: dict[str, float] = field(repr=False, default_factory=dict)
    clock: Callable[[], float] = field(repr=False, default=time.monotonic)

    def decide(self, question: str, yes: bool, seconds: float, what: str = "1") -> bool:
        """Whether all members voted yes on `question` within `seconds` of this call, and for the same `what`, a digest. The result is the same
        on all, and never changes.

        Takes at most two round trips to the lighthouse beyond the wait for the others, and none for a single member. A second call with
        the same question keeps the first ballot. Raises `UndecidedError` if this member cannot learn the result: it may be yes or no, and
        only the others know. A member that voted no always knows.
        """
        first = self._cast.setdefault(question, yes)
        if len(self.members) == 1:
            return first
        self._observe("ballot", {"question": question, "yes": first})
        steps = ballot(f"{self.id}/{question}", self.group.rank, len(self.members), first, what)
        try:
            answer = carry_out(steps, self.vote_store.of(self.electorate), seconds, self._await_ballots)
        except LinkError as error:
            if not first:
                return False
            raise UndecidedError(
                f"{question!r}: this replica voted yes and cannot learn the outcome ({error}). "
                "The others' next status shows it."
            ) from error
        self._observe("decided", {"question": question, "yes": answer})
        return answer

    def _await_ballots(self, vote_store: VoteStore, outcome: str, seconds: float) -> bytes | None:
        """`VoteStore.wait`, which looks now and then whose ballots are missing: time for one member alone is noted in `waited`."""
        _, ballots = keys_of(outcome.rpartition("/")[0], len(self.members))
        until, pause, missing = self.clock() + seconds, _FIRST_LOOK, list[str]()
        while True:
            began = self.clock()
            part = max(0.0, min(pause, until - began))
            value = vote_store.wait(outcome, part)
            now = self.clock()
            if len(missing) == 1:
                self.waited[missing[0]] = self.waited.get(missing[0], 0.0) + now - began
            if value == YES or now - began < part or now >= until:
                return value  # a wait that ends before its time has all ballots, or waits in vain
            cast = zip(self.members, vote_store.values(ballots))
            missing, pause = [member.name for member, ballot in cast if ballot is None], 2 * pause

    def dissenters(self, question: str, what: str = "1") -> dict[str, str]:
        """The members that cast no ballot for `what`, by name, with what they did instead; of a vote whose outcome was no. Raises `LinkError`."""
        _, ballots = keys_of(f"{self.id}/{question}", len(self.members))
        cast = zip(self.members, self.vote_store.of(self.electorate).values(ballots))
        did = {None: NOT_VOTED, NO.decode(): "voted no"}
        return {member.name: did.get(value, UNLIKE) for member, value in cast if value != what}

    def close(self) -> None:
        """End the group after a failure, so that the next view connects again. Idempotent."""
        self._end()

    def written(self) -> list[str]:
        """The ballots of this member."""
        keys = [keys_of(f"{self.id}/{question}", len(self.members)) for question in self._cast]
        return [ballots[self.group.rank] for _, ballots in keys]
