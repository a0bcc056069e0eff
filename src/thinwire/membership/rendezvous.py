"""Who is there: members found between rounds, and what they decide together.

Between rounds, on the exchange thread, a replica calls `Membership.next_view`. It blocks until those who are there have been
found; training goes on meanwhile. The `View` that comes back is the same on all members: their statuses, a group over
just them, and a joint vote.

    call (one round trip to the rendezvous, and as long as the last one takes)
    → everybody has everybody's presence → `judge`: the same members on all
    → some expect one that is missing, alive, and not yet late beyond the grace: all call again
    → all of them hold one group of just these: keep it; else connect anew, in an epoch that nobody used before

The grace is counted here and not by the lighthouse, whose own begins with whoever called first: a newcomer that had
waited for long would leave nobody else any.

Where replicas find each other is a `Rendezvous`: threads of one process (`testing/cluster.py`) or a lighthouse
(`lighthouse.py`). All that is decided, is decided here or in the pure `view.py` and `commit.py`, once for both.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from thinwire.comm.group import Group, gather
from thinwire.diagnosis import Rules
from thinwire.errors import ConfigurationError, DisagreementError, EndedError, LinkError, PacketError, PeerError
from thinwire.membership.channel import mac
from thinwire.membership.commit import VoteStore
from thinwire.membership.shared_keys import NOTE
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import LeftOut, Member, Observe, Presence, Verdict, View, difference, judge
from thinwire.packet import VERSION
from thinwire.version import __version__

CLOSED = "nobody keeps its final state"  # noted of a run that has ended
Status = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Check = Callable[[Mapping[str, Any], str], object]  # of a status, and the name of its member; raises `PeerError`


class Rendezvous(Protocol):
    """Where replicas find each other, seen from one of them."""

    @property
    def address(self) -> str:
        """Where the others reach this replica, for messages."""

    def clock(self) -> float:
        """Seconds; only differences mean something."""

    def sleep(self, seconds: float) -> None: ...

    def arrive(self, name: str, incarnation: str, secret: bytes, timeouts: Timeouts, observe: Observe) -> None:
        """Register and start heartbeats; only those who hold `secret` are believed. Called once, before all else."""

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        """Wait until most of those who are there call, too.

        The same list for all in it, and where these vote. Raises `LinkError` after `seconds`, saying why.
        """

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        """A group over `members`, all of which are called upon to come to `epoch`. Raises `LinkError`."""

    def reaches(self, other: Presence) -> bool:
        """Whether `other` answers this replica, directly."""

    def leave(self) -> None:
        """End the heartbeats, and whatever waits here. Idempotent. From any thread."""


class _Past(NamedTuple):
    """What a view wrote in its vote store is of no use once all its members have called again."""

    view: View
    calls: dict[str, int]  # by incarnation


class Membership:
    """One replica's membership of an elastic run: it agrees with the others on views. For one thread; `close` and `use_timeouts` may be called
    from any.

    With a `secret` only replicas that hold it are heard. The facts and the name of another replica never end a replica that was a member
    once: replicas with other facts are left out.

    Args:
        rendezvous: where the replicas find each other: a lighthouse, a hub, or a simulated cluster.
        name: no other replica has it, and this replica keeps it when it comes back.
        facts: texts that must be equal on all members; the code version and the wire format are added.
        least: number of members that a view needs, unless the status of one says that the run is `over`.
        secret: the same bytes on all replicas and at the lighthouse; empty: anybody is heard.
        run: the run that this replica's checkpoint is of; empty: it has none.
        timeouts: seconds for each wait; None: the defaults.
        evict: rules by which rounds go on without a member that most find to delay them (elastic/eviction.py); None: never.
        most_steps: number of inner steps of the whole run; a member that claims more is left out. None: not known.
        wrap: goes around every group that is built, to count or to emulate a link.
        observe: is told, as kind and fields: retry, call, connect, view, ballot, decided.

    Raises:
        ConfigurationError: a name or a number that cannot be.

    >>> from thinwire.membership.testing import SimulatedCluster
    >>> cluster = SimulatedCluster()
    >>> cluster.play({name: lambda name: len(cluster.membership(name).next_view({"round": 0}).members) for name in ("oslo", "paris")})["oslo"]
    2
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        name: str,
        *,
        facts: Mapping[str, str] | None = None,
        least: int = 2,
        secret: bytes = b"",
        run: str = "",
        timeouts: Timeouts | None = None,
        evict: Rules | None = None,
        most_steps: int | None = None,
        wrap: Callable[[Group], Group] = lambda group: group,
        observe: Observe = lambda kind, fields: None,
    ) -> None:
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ConfigurationError(f"least={least!r}: a whole number of at least 1 member is needed.")
        self.name, self.least, self.timeouts, self.evict = name, least, timeouts or Timeouts(), evict
        self.most_steps = most_steps
        self.clock, self.sleep = rendezvous.clock, rendezvous.sleep
        self.facts = {"code version": __version__, "wire format": str(VERSION), **(facts or {})}
        self._run = run
        self._rendezvous, self._wrap, self._observe, self._secret = rendezvous, wrap, observe, secret
        self._incarnation = secrets.token_hex(8)
        self._calls, self._views, self._holds = 0, 0, ""
        self._group: Group | None = None
        self._members: tuple[Presence, ...] = ()  # of the group
        self._suspects: tuple[Presence, ...] = ()  # may be out of reach
        self._namesakes: dict[str, int] = {}  # by incarnation: its calls when it was last seen
        self._past: list[_Past] = []
        self._refused: set[str] = set()  # names whose statuses could not be read
        self._vote_store: VoteStore | None = None  # of the last call
        self._left = False
        Presence(name, self._incarnation, 0, facts=self.facts).to_json()  # a name or facts that cannot work fail here
        rendezvous.arrive(name, self._incarnation, secret, self.timeouts, observe)

    def require(self, facts: Mapping[str, str]) -> None:
        """These, too, must be equal on all members. To be called before the first view."""
        self.facts = {**self.facts, **facts}

    def use_timeouts(self, timeouts: Timeouts) -> None:
        """Wait by these from the next view and vote on. From any thread."""
        self.timeouts = timeouts

    def enter(self, run: str) -> None:
        """This replica is in `run` now. Where nobody of it is there, `next_view` finds out whether it has ended."""
        self._run = run

    def next_view(self, status: Status, seconds: float | None = None, check: Check = lambda status, name: None) -> View:
        """Find out who is there; `status` (a small JSON mapping) is told to all of them. One that changes while others are
        waited for is a function, asked whenever this replica calls. Whose status `check` refuses is no member.

        Unchanged members that hold their group keep it, and pay one round trip. `seconds` is `timeouts.view`
        unless given. Raises `LinkError` (not enough came in time, no lighthouse: the reason is in the message; the
        replica may train on, and call again), `EndedError` (see `note_end`) and `DisagreementError` (this replica cannot
        take part: other facts, or a name that is taken; it has left then).
        """
        if self._left:
            raise self._gone()
        seconds = self.timeouts.view if seconds is None else seconds
        found = self._rendezvous.clock()  # since when the others can be waited for
        until = found + seconds
        expected = self._members
        said = status if callable(status) else lambda: status
        self._presence(said(), expected).to_json()
        check(said(), self.name)
        reason, pause = "", 0.1
        while (left := until - self._rendezvous.clock()) > 0 and not self._left:
            self._suspects = tuple(p for p in self._suspects if not self._rendezvous.reaches(p))
            self._calls += 1
            self._observe("call", {"calls": self._calls, "holds": self._holds})
            try:
                present, vote_store = self._rendezvous.call(self._presence(said(), expected), left)
            except LinkError as error:
                reason = reason or str(error).rstrip(".")
                break
            if (
                vote_store is not self._vote_store
            ):  # of a server that was away: others may find it later than this replica
                self._vote_store, found = vote_store, self._rendezvous.clock()
            here = {p.incarnation for p in present}
            self._suspects = tuple(p for p in self._suspects if p.incarnation in here)
            verdict = self._judge(present, check)
            alike = [p for p in present if p.facts == self.facts]
            reason = self._obstacle(verdict, {incarnation for p in alike for incarnation in p.expects} - here)
            try:
                reason = self._past_the_end(verdict, reason)
                if not reason:
                    return self._take(verdict, vote_store)
            except (LinkError, PacketError) as error:
                reason = f"no group could be built: {error}"
            patient = self._rendezvous.clock() - found < self.timeouts.grace
            expected = (
                tuple(p for p in expected if p.incarnation in here or self._rendezvous.reaches(p)) if patient else ()
            )
            self._observe("retry", {"reason": reason, "seconds": pause})
            self._rendezvous.sleep(min(pause, max(0.0, until - self._rendezvous.clock())))
            pause = min(2 * pause, 0.25)  # so that all call again within what the lighthouse waits
        if self._left:
            raise self._gone()
        raise LinkError(f"replica {self.name!r} found no view within {seconds:g} s: {reason}.")

    def note_end(self, *what: str) -> None:
        """Write at the rendezvous that a run with these facts has ended; with `run`: that this one has; and more of its end.

        From then on `next_view` raises `EndedError` in a replica of this run, where nobody is there who keeps its final
        state. Raises `LinkError`.
        """
        if self._vote_store is not None:
            self._vote_store.put(self._end_of(*what))

    def ended(self, *what: str) -> bool:
        """Whether that was noted. Raises `LinkError`."""
        return self._vote_store is not None and self._vote_store.all([self._end_of(*what)])

    def _end_of(self, *what: str) -> str:
        said = json.dumps([sorted(self.facts.items()), what]).encode()
        return f"{NOTE}{hashlib.blake2b(said, digest_size=16).hexdigest()}"

    def _past_the_end(self, verdict: Verdict, reason: str) -> str:
        """`reason` why this is no view, or another: this run has ended. Raises `EndedError` if nobody keeps its final state."""
        held = not reason and len(verdict.members) > 1 and all(p.holds == self._holds != "" for p in verdict.members)
        if held or any(p.status.get("over") is True for p in verdict.members):
            return reason
        if self._run and self.ended(self._run):
            if len(verdict.members) == 1 or self.ended(self._run, CLOSED):
                raise EndedError(
                    f"the run has ended without replica {self.name!r}, and no member keeps its final state any longer."
                )
            return "the run has ended, and who keeps its final state has not answered yet"
        if reason and not self._run and self.ended():
            return f"{reason}; a run with these settings has ended here, and this would be another"
        return reason

    @property
    def closed(self) -> bool:
        """Whether this replica has left."""
        return self._left

    def close(self) -> None:
        """Leave: the others go on without this replica. Idempotent. From any thread: one that waits for a view gets a `LinkError`."""
        self._left = True
        self._let_go(self._group)
        self._past = []  # views hold their membership, and would hold its connections
        self._rendezvous.leave()

    def _gone(self) -> LinkError:
        return LinkError(f"replica {self.name!r} has left its membership; make a new one to come back.")

    def _presence(self, status: Mapping[str, Any], expected: Sequence[Presence]) -> Presence:
        return Presence(
            self.name, self._incarnation, self._calls, self._views, self._holds, self.facts, status,
            [p.incarnation for p in self._suspects],
            [p.incarnation for p in expected if p.incarnation != self._incarnation],
            self._rendezvous.address,
        )  # fmt: skip

    def _judge(self, present: Sequence[Presence], check: Check) -> Verdict:
        """Without those whose statuses `check` refuses: they are named once."""
        broken = []
        for presence in present:
            try:
                if presence.facts == self.facts:
                    check(presence.status, presence.name)
            except PeerError as error:
                broken.append(LeftOut(presence, str(error)))
                if presence.name not in self._refused:
                    self._refused.add(presence.name)
                    self._observe("retry", {"reason": str(error), "seconds": 0.0})
        out = {left.presence.incarnation for left in broken}
        verdict = judge((p for p in present if p.incarnation not in out), self.facts)
        return replace(verdict, left_out=(*verdict.left_out, *broken))

    def _others(self, verdict: Verdict) -> Presence | None:
        """One of those with other facts who hold a group, or are more, where nobody holds one with this replica's. It takes
        two: one may be a stranger, unless all hold the secret.
        """
        foreign = [out.presence for out in verdict.left_out if out.foreign]
        if any(member.holds for member in verdict.members):
            return None
        held = Counter(presence.holds for presence in foreign if presence.holds)
        alike = Counter(frozenset(presence.facts.items()) for presence in foreign)
        enough, most = 1 if self._secret else 2, max(2, len(verdict.members) + 1)
        return next((p for p in foreign if held[p.holds] >= enough or alike[frozenset(p.facts.items())] >= most), None)

    def _obstacle(self, verdict: Verdict, missing: Collection[str]) -> str:
        """Why this cannot be a view; "" if it can. Raises `DisagreementError` if it never can."""
        if self._views == 0 and (other := self._others(verdict)):
            self.close()
            raise DisagreementError(
                f"replica {self.name!r} cannot take part: {difference(self.facts, other.facts, f'at {other.name!r}')}. "
                "Its code, model and settings must be what the others have."
            )
        own = next((out for out in verdict.left_out if out.presence.incarnation == self._incarnation), None)
        if own is not None:
            namesakes = {p.incarnation: p.calls for p in verdict.members if p.name == self.name}
            # One that died while it called is still in the registry once; one that calls again is alive.
            alive = any(self._namesakes.get(incarnation, calls) != calls for incarnation, calls in namesakes.items())
            self._namesakes = namesakes
            if alive and self._views == 0:
                self.close()
                raise DisagreementError(
                    f"replica {self.name!r} cannot take part: {own.reason}. Every replica needs its own name."
                )
            return f"it was left out: {own.reason}"
        if len(verdict.members) < self.least and not any(p.status.get("over") is True for p in verdict.members):
            there = ", ".join(p.name for p in verdict.members)
            out = "".join(f"; {out.presence.name} was left out: {out.reason}" for out in verdict.left_out)
            return f"{len(verdict.members)} of at least {self.least} members came ({there}){out}. Start the others, or ask for fewer"
        late = [p.name for p in self._members if p.incarnation in missing] or [f"{len(missing)} replica(s)"]
        return f"{', '.join(late)} of the last round: late" if missing else ""

    def _take(self, verdict: Verdict, vote_store: VoteStore) -> View:
        members = verdict.members
        group, rebuilt = self._group, False
        if group is None or group.size != len(members) or any(p.holds != self._holds for p in members):
            self._let_go(group)
            self._observe("connect", {"epoch": verdict.id, "members": [p.name for p in members]})
            group, rebuilt = self._connected(verdict), True
        self._views += 1
        view = View(
            id=verdict.id,
            members=tuple(Member(p.name, p.status) for p in members),
            group=group,
            rebuilt=rebuilt,
            left_out=tuple(f"{out.presence.name}: {out.reason}" for out in verdict.left_out),
            vote_store=vote_store,
            electorate=verdict.electorate,
            _observe=self._observe,
            _end=partial(self._let_go, group),
        )
        self._sweep(view, {p.incarnation: p.calls for p in members})
        fields = {"id": view.id, "members": [m.name for m in view.members], "left_out": list(view.left_out)}
        self._observe("view", fields | {"rebuilt": rebuilt})
        return view

    def _connected(self, verdict: Verdict) -> Group:
        """A group in which everybody has heard everybody."""
        members = self._suspects = self._members = verdict.members
        group = self._wrap(
            self._rendezvous.connect(verdict.id, members, [p.incarnation for p in members].index(self._incarnation))
        )
        try:
            hellos = [mac(self._secret, "hello", verdict.id.encode(), p.incarnation.encode())[:16] for p in members]
            heard = gather(group, hellos[group.rank], 64, "view")
            if heard != hellos:
                raise LinkError("the members that answered are not those that were called")
        except BaseException:
            group.close()
            raise
        self._group, self._holds, self._suspects = group, verdict.id, ()
        if self._left:  # meanwhile, on another thread
            self._let_go(group)
            raise self._gone()
        return group

    def _let_go(self, group: Group | None) -> None:
        """End `group`; if it is the one that is held, its members are to be tried before the next view."""
        if group is not None:
            group.close()
        if group is self._group:
            self._group, self._holds, self._suspects = None, "", self._members

    def _sweep(self, view: View, calls: dict[str, int]) -> None:
        """Remove what past views wrote, if all their members are here again: nobody will read it any more."""
        kept: list[_Past] = []
        for past in self._past:
            if past.view.vote_store is not view.vote_store:
                continue  # that lighthouse is gone, and all that was written with it
            if all(calls.get(incarnation, 0) > then for incarnation, then in past.calls.items()):
                view.vote_store.forget(past.view.written())
            else:
                kept.append(past)
        self._past = [*kept[-7:], _Past(view, calls)]
