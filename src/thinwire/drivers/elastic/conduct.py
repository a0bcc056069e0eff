"""Which member makes rounds fail: counted by name from what all members report, and left out for a while after a bound.

In its next status a member names those that its last round failed of, or waited for, with a reason: whose packet was damaged or not
finite, who voted no, who has another result; and for whom alone it waited, whether for a call, a packet or a ballot, if that delayed
training or the next round by more than `SHARE` of the time since the round before. So all members of a view hear the same reports, and count alike:

    most of the others name it, and it names nobody      its fault
    most of the others name it, and it names somebody    a dispute between the two: one of them is wrong
    one member alone names it                            a dispute between the two, unless it only waited, or another is at fault

A member that did not vote in time has no excuse: nobody else can keep it from that, so whom it names does not matter.

A dispute is the fault of the one of the two that disputes with more members. If both have one opponent, one of them is left out: the one
that was left out less often, then the later name. An honest member that is wronged so loses one time-out; then the other has two opponents.

A member that reaches `BOUND` faults is left out for `FIRST_SECONDS`, twice as long each time up to `LONGEST_SECONDS`, if enough remain
(`Membership.least`). A round that failed after `LONG_SECONDS` counts twice, so whoever keeps the others waiting until their time is over is out
after three such rounds. It comes back by itself; then one more fault is enough, until rounds that commit with it have forgiven the
others. Members say whom they leave out, and `membership.view.judge` obeys more than half of a member's others, of three names or more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from thinwire.drivers.elastic.plan import MOST_BLAMES, MOST_REASON, MemberStatus
from thinwire.membership.rendezvous import Conduct as MembershipConduct
from thinwire.membership.rendezvous import Membership
from thinwire.membership.view import NOT_VOTED, UNLIKE, Presence

BOUND = 5.0  # faults: a machine that dies or stalls now and then has fewer, and whoever spoils every round reaches it in minutes
FORGIVEN = 0.125  # faults that a committed round with the member takes off: one spoilt round in nine is borne
LONG_SECONDS = (
    8.0  # the least time-outs of a message and a vote are 10 and 15 s: a member that answers nothing costs more
)
FIRST_SECONDS, LONGEST_SECONDS = 60.0, 3600.0
SAID_SECONDS = 60.0  # between two warnings of one member
WAITED = "the others waited"
EXCUSE = "at little cost, it waited"  # is no blame, but shows that another one made this member late
SHARE = 0.25  # of the time, which the others may wait for one member: the grace of a schedule without slack is a tenth of its period


class Conduct(MembershipConduct):
    """One member's count of the others' faults."""

    def __init__(self, membership: Membership, observe: Callable[..., None]) -> None:
        self._membership, self._observe = membership, observe
        self._failed, self._blames, self._received = "", dict[str, str](), dict[str, str]()
        self._levelled = set[str]()  # members that were behind in the last view
        self._faults: defaultdict[str, float] = defaultdict(float)  # by name
        self._disputes: defaultdict[frozenset[str], float] = defaultdict(float)
        self._times: Counter[str] = Counter()  # how often each name was left out
        self._out: dict[str, tuple[float, str]] = {}  # by name: until when it is left out, and why
        self._said: dict[str, float] = {}
        self._count: Counter[str] = Counter()  # faults since the last warning
        # of the last round: its view, and for whom this member waited
        self._waits: tuple[str, dict[str, float]] = ("", {})
        self._began, self._step, self._still = membership.clock(), 0, False
        self._met, self._cost = self._began, 0.0  # when it heard of the others last; seconds from then to its report

    def blame(self, view_id: str, blames: Mapping[str, str], sums: Mapping[str, str]) -> None:
        """This member's round in the view `view_id` failed of these members, or waited for them; `sums` are of the packets that it received."""
        unlike = UNLIKE in blames.values()
        self._received = dict(list(sums.items())[:MOST_BLAMES]) if unlike else {}
        self._failed, self._cost = view_id, self._membership.clock() - self._met
        self._blames = {name: reason[:MOST_REASON] for name, reason in list(blames.items())[:MOST_BLAMES]}

    def begins(self, step: int, backlog: float) -> None:
        """A round begins at this inner `step`, and its delta has waited for `backlog` seconds for the round before. Blame those that the
        round before waited for, if that cost much: training went on meanwhile, and the next delta may have been due later anyway. If it cost
        little, it may still explain why others waited for this member.
        """
        now = self._membership.clock()
        elapsed, (view_id, waits) = now - self._began, self._waits
        self._began, self._step, self._waits = now, step, ("", {})
        for name, seconds in waits.items():
            cost = seconds if self._still else min(seconds, backlog)
            # nobody waits longer than the grace for a call; one that is back after an outage takes a little of it
            lasting = seconds > self._membership.timeouts.grace / 2
            if lasting and self._failed in ("", view_id):
                if not self._failed:  # the round did not fail
                    self._failed, self._cost = view_id, 0.0
                waited = WAITED if cost > SHARE * elapsed else EXCUSE
                self._blames.setdefault(name, f"{waited} {seconds:.1f} s for it alone")

    def waited(self, view_id: str, seconds: Mapping[str, float], step: int) -> None:
        """The round of this view is over at this inner `step`; this member waited so long for others, by name. With rules for eviction these
        alone judge delays.
        """
        if self._membership.evict is None:
            self._waits, self._still = (view_id, dict(seconds)), step == self._step

    def says(self) -> dict[str, Any]:
        """Fields of the next status."""
        return {"failed": self._failed, "blames": self._blames, "received": self._received}

    def excluded(self) -> dict[str, str]:
        """The members that this one leaves out now, with the reason."""
        now = self._membership.clock()
        for name in [name for name, (until, _) in self._out.items() if until <= now]:
            del self._out[name]
            self._faults[name] = BOUND - 1  # on probation
        return {name: reason for name, (_, reason) in self._out.items()}

    def committed(self, names: Collection[str]) -> None:
        """A round with the members `names` was committed."""
        for name in names:
            self._faults[name] = max(0.0, self._faults[name] - FORGIVEN)
        for pair in [pair for pair, count in self._disputes.items() if count > 0 and pair <= set(names)]:
            self._disputes[pair] -= FORGIVEN
            # those that reached the bound stay: whoever had many opponents loses the next one
            if self._disputes[pair] <= 0:
                del self._disputes[pair]

    def behind(self, names: Sequence[str], behind: Collection[str]) -> None:
        """In this view the members `behind` take over the state. One that has just done so, and is behind again, delays every round and
        the end: that is its fault.
        """
        again = self._levelled & set(behind)
        self._levelled = set(behind)
        for name in sorted(again):
            self._fault(name, "it asked for the state again, which it had just taken over", len(names))

    def absent(self, view_id: str, names: Collection[str]) -> None:
        """See `membership.rendezvous.Conduct`."""
        self.blame(
            view_id, dict.fromkeys(names, "it did not connect to the group of a view, or did not greet there"), {}
        )

    def meets(self, members: Sequence[Presence]) -> None:
        """Count what these members report of the last round of which most report. They do so before their group is built, because it may never be."""
        names, statuses = [p.name for p in members], [MemberStatus.of(p.status, p.name) for p in members]
        failed, cost = self._failed, self._cost
        self._met = self._membership.clock()
        if self._membership.name in names:  # all have heard its report
            self._failed, self._blames, self._received = "", {}, {}
        views = Counter(status.failed for status in statuses if status.failed)
        if not views or len(names) < 3:
            return
        last = max(views, key=lambda view: (views[view], view))
        weight = 2.0 if failed == last and cost >= LONG_SECONDS else 1.0
        blames = {name: status.blames for name, status in zip(names, statuses) if status.failed == last}
        faults = self._unlike_packets({name: s.received for name, s in zip(names, statuses) if s.failed == last})
        if faults is None:
            faults = {}
        else:  # that explains why results differ
            blames = {name: {who: why for who, why in named.items() if why != UNLIKE} for name, named in blames.items()}
        absent = {who for named in blames.values() for who in named}.difference(names)
        single = dict[str, list[str]]()  # those that only some name, by whom
        for name in [*names, *sorted(absent)]:
            by = {other: named[name] for other, named in blames.items() if other != name and name in named}
            by = {other: why for other, why in by.items() if not why.startswith(EXCUSE)}
            waited = all(why.startswith(WAITED) for why in by.values())
            usual = max(by.values(), key=list(by.values()).count, default="")
            accused = [
                other
                for other, why in blames.get(name, {}).items()
                if other in names and other != name and (waited or not why.startswith((WAITED, EXCUSE)))
            ]
            if 2 * len(by) <= len({*names, name}) - 1:  # a slow link between two makes them wait for each other
                single[name] = [other for other, why in by.items() if not why.startswith(WAITED)]
            elif not accused or usual == NOT_VOTED:
                faults[name] = usual
            else:
                self._dispute(name, accused)
        explained = any(not why.startswith(WAITED) for why in faults.values())  # why the round failed
        for name, others in single.items():
            if name in names and not explained:  # whoever is at fault is no witness
                self._dispute(name, [other for other in others if other not in faults])
        for pair in [pair for pair, count in self._disputes.items() if count >= BOUND]:
            self._disputes[pair] = 0
            if pair <= set(names):
                name = self._loser(pair)
                (other,) = pair - {name}
                self._faults[name] = BOUND
                faults[name] = f"it and {other} contradict each other about rounds that failed"
        for name, reason in faults.items():
            self._fault(name, reason, len(names), 1.0 if reason.startswith(WAITED) else weight)

    def _unlike_packets(self, received: Mapping[str, Mapping[str, str]]) -> dict[str, str] | None:
        """Those that sent unlike bytes to the others, by what these `received`; None if all packets were alike. If one alone has other bytes, it
        or the sender is wrong: a dispute.
        """
        faults, unlike = dict[str, str](), False
        for sender in received:
            sums = {name: own[sender] for name, own in received.items() if name != sender and sender in own}
            if len(set(sums.values())) < 2:
                continue
            unlike = True
            usual, count = Counter(sums.values()).most_common(1)[0]
            if 2 * count > len(sums):
                self._dispute(sender, [name for name, value in sums.items() if value != usual])
            else:
                faults[sender] = "it sent unlike bytes to the others"
        return faults if unlike else None

    def _dispute(self, name: str, others: Collection[str]) -> None:
        for other in others:
            self._disputes[frozenset((name, other))] += 1.0

    def _loser(self, pair: Collection[str]) -> str:
        opponents = {name: sum(name in other for other in self._disputes) for name in pair}
        return max(pair, key=lambda name: (opponents[name], -self._times[name], name))

    def _fault(self, name: str, reason: str, members: int, weight: float = 1.0) -> None:
        """Count a fault of `name`, and leave it out at the bound."""
        now = self._membership.clock()
        self._faults[name] += weight
        self._count[name] += 1
        enough = members - 1 - len(self._out) >= self._membership.least
        if self._faults[name] >= BOUND and enough and name not in self._out:
            seconds = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(self._times[name], 16))
            self._times[name] += 1
            self._out[name] = now + seconds, reason
            text = f"{name} is left out for {seconds:.0f} s: {self._count[name]} rounds failed of it or waited for it, the last because {reason}"
            self._observe("left_out", name=name, seconds=seconds, reason=reason)
        elif self._count[name] >= 2 and now - self._said.get(name, -SAID_SECONDS) >= SAID_SECONDS:
            text = f"{self._count[name]} rounds failed of {name} or waited for it, the last because {reason}"
        else:
            return
        self._said[name], self._count[name] = now, 0
        self._observe("warning", message=text)
        self._membership.report(text)
