"""Which member makes rounds fail: counted by name from what all members report, and left out for a while after a bound.

In its next status a member names those that its last round failed of, or waited for, with a reason: whose packet was damaged or not
finite, who voted no, who has another result; and for whom alone it waited, whether for a call, a packet or a ballot, if that delayed
training or the next round by more than `SHARE` of the time since the round before. So all members of a view hear the same reports, and count alike:

    most of the others name it, and it names nobody      its fault
    most of the others name it, and it names somebody    a dispute between the two: one of them is wrong
    one member alone names it                            a dispute between the two, unless it only waited

A dispute is the fault of the one of the two that disputes with more members. If both have one opponent, one of them is left out: the one
that was left out less often, then the later name. An honest member that is wronged so loses one time-out; then the other has two opponents.

A member that reaches `BOUND` faults is left out for `FIRST_SECONDS`, twice as long each time up to `LONGEST_SECONDS`, if enough remain
(`Membership.least`). It comes back by itself; then one more fault is enough, until rounds that commit with it have forgiven the
others. Members say whom they leave out, and `membership.view.judge` obeys more than half of a member's others, of three names or more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from thinwire.drivers.elastic.plan import MOST_BLAMES, MOST_REASON, MemberStatus
from thinwire.membership.rendezvous import Membership
from thinwire.membership.view import UNLIKE

BOUND = 5.0  # faults: a machine that dies or stalls now and then has fewer, and whoever spoils every round reaches it in minutes
FORGIVEN = 0.125  # faults that a committed round with the member takes off: one spoilt round in nine is borne
FIRST_SECONDS, LONGEST_SECONDS = 60.0, 3600.0
SAID_SECONDS = 60.0  # between two warnings of one member
WAITED = "the others waited"
SHARE = 0.25  # of the time, which the others may wait for one member: the grace of a schedule without slack is a tenth of its period


class Conduct:
    """One member's count of the others' faults."""

    def __init__(self, membership: Membership, observe: Callable[..., None]) -> None:
        self._membership, self._observe = membership, observe
        self._failed, self._blames, self._received = "", dict[str, str](), dict[str, str]()
        self._levelled = set[str]()  # members that were behind in the last view
        self._faults: defaultdict[str, float] = defaultdict(float)  # by name
        self._disputes: Counter[frozenset[str]] = Counter()
        self._times: Counter[str] = Counter()  # how often each name was left out
        self._out: dict[str, tuple[float, str]] = {}  # by name: until when it is left out, and why
        self._said: dict[str, float] = {}
        self._count: Counter[str] = Counter()  # faults since the last warning
        # of the last round: its view, and for whom this member waited
        self._waits: tuple[str, dict[str, float]] = ("", {})
        self._began, self._step, self._still = membership.clock(), 0, False

    def blame(self, view_id: str, blames: Mapping[str, str], sums: Mapping[str, str]) -> None:
        """This member's round in the view `view_id` failed of these members, or waited for them; `sums` are of the packets that it received."""
        unlike = UNLIKE in blames.values()
        self._received = dict(list(sums.items())[:MOST_BLAMES]) if unlike else {}
        self._failed = view_id
        self._blames = {name: reason[:MOST_REASON] for name, reason in list(blames.items())[:MOST_BLAMES]}

    def begins(self, step: int, backlog: float) -> None:
        """A round begins at this inner `step`, and its delta has waited for `backlog` seconds for the round before. Blame those that the
        round before waited for, if that cost much: training went on meanwhile, and the next delta may have been due later anyway.
        """
        now = self._membership.clock()
        elapsed, (view_id, waits) = now - self._began, self._waits
        self._began, self._step, self._waits = now, step, ("", {})
        for name, seconds in waits.items():
            cost = seconds if self._still else min(seconds, backlog)
            # nobody waits longer than the grace for a call; one that is back after an outage takes a little of it
            lasting = cost > SHARE * elapsed and seconds > self._membership.timeouts.grace / 2
            if lasting and self._failed in ("", view_id):
                self._failed = view_id
                self._blames.setdefault(name, f"{WAITED} {seconds:.1f} s for it alone")

    def waited(self, view_id: str, seconds: Mapping[str, float], step: int) -> None:
        """The round of this view is over at this inner `step`; this member waited so long for others, by name. With rules for eviction these
        alone judge delays.
        """
        if self._membership.evict is None:
            self._waits, self._still = (view_id, dict(seconds)), step == self._step

    def says(self) -> dict[str, object]:
        """Fields of the next status; each report is sent once."""
        said: dict[str, object] = {"failed": self._failed, "blames": self._blames, "received": self._received}
        self._failed, self._blames, self._received = "", {}, {}
        return said

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

    def behind(self, names: Sequence[str], behind: Collection[str]) -> None:
        """In this view the members `behind` take over the state. One that has just done so, and is behind again, delays every round and
        the end: that is its fault.
        """
        again = self._levelled & set(behind)
        self._levelled = set(behind)
        for name in sorted(again):
            self._fault(name, "it asked for the state again, which it had just taken over", len(names))

    def absent(self, view_id: str, names: Collection[str], members: int) -> None:
        """The members `names` of a view did not connect to its group, so that no round began. It counts at once: there may be no view in
        which the others could hear of it.
        """
        reason = "it did not connect to the group of a view"
        if members > 2 and 2 * len(names) < members:
            self.blame(view_id, dict.fromkeys(names, reason), {})
            for name in names:
                self._fault(name, reason, members)

    def hear(self, names: Sequence[str], statuses: Sequence[MemberStatus]) -> None:
        """Count what all members of a view report of the last round of which most report."""
        views = Counter(status.failed for status in statuses if status.failed)
        if not views or len(names) < 3:
            return
        last = max(views, key=lambda view: (views[view], view))
        blames = {name: status.blames for name, status in zip(names, statuses) if status.failed == last}
        faults = self._unlike_packets({name: s.received for name, s in zip(names, statuses) if s.failed == last})
        if faults is None:
            faults = {}
        else:  # that explains why results differ
            blames = {name: {who: why for who, why in named.items() if why != UNLIKE} for name, named in blames.items()}
        absent = {who for named in blames.values() for who in named}.difference(names)
        for name in [*names, *sorted(absent)]:
            by = [other for other, named in blames.items() if other != name and name in named]
            only_waited = all(blames[other][name].startswith(WAITED) for other in by)
            accused = [
                other
                for other, why in blames.get(name, {}).items()
                if other in names and other != name and (only_waited or not why.startswith(WAITED))
            ]
            most = 2 * len(by) > len({*names, name}) - 1
            if most and not accused:
                faults[name] = Counter(blames[other][name] for other in by).most_common(1)[0][0]
            elif most:
                self._disputes.update(frozenset((name, other)) for other in accused)
            elif name in names:  # a slow link between two makes them wait for each other
                wronged = [other for other in by if not blames[other][name].startswith(WAITED)]
                self._disputes.update(frozenset((name, other)) for other in wronged)
        for pair in [pair for pair, count in self._disputes.items() if count >= BOUND]:
            self._disputes[pair] = 0
            if pair <= set(names):
                name = self._loser(pair)
                (other,) = pair - {name}
                self._faults[name] = BOUND
                faults[name] = f"it and {other} contradict each other about rounds that failed"
        for name, reason in faults.items():
            self._fault(name, reason, len(names))

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
                self._disputes.update(frozenset((sender, name)) for name, value in sums.items() if value != usual)
            else:
                faults[sender] = "it sent unlike bytes to the others"
        return faults if unlike else None

    def _loser(self, pair: Collection[str]) -> str:
        opponents = {name: sum(name in other for other in self._disputes) for name in pair}
        return max(pair, key=lambda name: (opponents[name], -self._times[name], name))

    def _fault(self, name: str, reason: str, members: int) -> None:
        """Count a fault of `name`, and leave it out at the bound."""
        now = self._membership.clock()
        self._faults[name] += 1
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
