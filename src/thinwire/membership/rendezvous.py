"""Membership: replicas agree on their members between rounds.

Between rounds a replica calls `Membership.next_view` on the exchange thread. It blocks until the members are found; training continues
meanwhile. It returns a `View`, which is the same on all members: their statuses, a group of exactly these members, and a vote.

    call (one round trip to the rendezvous, and the wait for the last replica)
    → each replica has the presences of all → `judge`: the same members on all
    → if a replica expects another that is missing, alive, and not yet later than the grace: all call again
    → if all of them hold the same group of exactly these members: keep it; otherwise connect again, in a new epoch

The grace is measured here and not by the lighthouse: the lighthouse's wait begins with the first call, so a newcomer that has waited
for long would leave no grace for others.

Replicas find each other at a `Rendezvous`: among threads of one process (`testing/cluster.py`), at a lighthouse (`lighthouse.py`) or
at a hub (`hub.py`). All decisions are made here and in the pure `view.py` and `commit.py`, the same for all three.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from thinwire.comm.group import TAGS, ElasticGroup, Group
from thinwire.errors import ConfigurationError, DisagreementError, EndedError, LinkError, PacketError, PeerError
from thinwire.exchange.record import Rules
from thinwire.membership.channel import mac
from thinwire.membership.commit import VoteStore
from thinwire.membership.shared_keys import LAST, NOTE, REVOKED
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import (
    SPEAKS,
    LeftOut,
    Member,
    Observe,
    Presence,
    Verdict,
    View,
    difference,
    expected,
    fits,
    judge,
    settings,
)
from thinwire.version import PROTOCOLS

MOST_PAST = 7  # views whose votes are kept for members that may come back
ALMOST = 0.9  # of a time-out: what fails later has timed out
CLOSED = "nobody keeps its final state"  # the note of an ended run whose final state is gone
Status = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Check = Callable[[Mapping[str, Any], str], object]  # takes a status and the name of its member; raises `PeerError`


class AnswerLostError(LinkError):
    """The rendezvous has gone during a call of this replica. It may have answered others: with a view of which this replica is a member."""


class AbsentError(LinkError):
    """A group was not built, because the members `absent` did not connect, or did not greet."""

    def __init__(self, text: str, absent: Collection[str]) -> None:
        super().__init__(text)
        self.absent = tuple(absent)


class Rendezvous(Protocol):
    """The place where replicas find each other, seen from one of them."""

    relays: bool  # whether it carries their groups too, so that all that call there reach each other

    @property
    def address(self) -> str:
        """The address at which the others reach this replica, for messages."""

    def clock(self) -> float:
        """Seconds; only differences have a meaning."""

    def sleep(self, seconds: float) -> None: ...

    def arrive(self, name: str, incarnation: str, secret: bytes, timeouts: Timeouts, observe: Observe) -> None:
        """Register and start heartbeats. Only peers that hold `secret` are accepted. Called once, before all other methods."""

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        """Wait until most of the live replicas call, too.

        Returns the presences, which are the same for all of them, and their vote store. Raises `LinkError` after `seconds`, and
        `AnswerLostError` as soon as the rendezvous has gone during the call.
        """

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        """A group of `members`, all of which connect in this `epoch`. Raises `LinkError`; `AbsentError`, if it knows who did not connect."""

    def reaches(self, other: Presence) -> bool:
        """Whether `other` responds to this replica directly."""

    def leave(self) -> None:
        """End the heartbeats and all waits. Idempotent; may be called from any thread."""


class Conduct:
    """What a replica makes of the others' conduct: nothing. A driver may give its `Membership` a subclass."""

    def excluded(self) -> Mapping[str, str]:
        """The names that this replica wants left out, with the reasons. Those that most want left out are no members."""
        return {}

    def meets(self, members: Sequence[Presence]) -> None:
        """These members found each other, and hear the same of all. Their group is built next, which may fail."""

    def absent(self, view_id: str, names: Collection[str]) -> None:
        """No group of this view was built, because the members `names` did not connect, or did not greet."""


class _Past(NamedTuple):
    """A past view. Its keys in the vote store can be deleted once all its members have called again."""

    view: View
    calls: dict[str, int]  # by incarnation


class Membership(ElasticGroup):
    """One replica's membership of an elastic run: it agrees with the others on views. For one thread, except `close` and `use_timeouts`.

    With a `secret` only replicas that hold it are heard. The facts and the name of another replica never end a replica that was a member
    once: replicas with other facts are left out.

    Args:
        rendezvous: where the replicas find each other: a lighthouse, a hub, or a simulated cluster.
        name: unique among the replicas; this replica keeps it over restarts.
        facts: texts that must be equal on all members. The protocols of this release are added, which must overlap.
        least: number of members that a view needs, unless the status of one says that the run is `over`.
        secret: the same bytes on all replicas and at the lighthouse; empty: anybody is heard.
        run: the run that this replica's checkpoint is of; empty: it has none.
        timeouts: seconds for each wait; None: the defaults.
        evict: rules by which rounds go on without a member that most find to delay them (drivers/elastic/eviction.py); None: never.
        most_steps: number of inner steps of the whole run; a member that claims more is left out. None: not known.
        wrap: wraps every group that is built, to count its bytes or to emulate a link.
        observe: called with a kind and its fields: retry, call, connect, view, ballot, decided.

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
        if not isinstance(secret, bytes):
            named = f"secret of type {type(secret).__name__}: bytes are needed"
            raise ConfigurationError(f"{named}, as thinwire.membership.channel.secret_in reads them from the file.")
        self.name, self.least, self.evict, self.most_steps = name, least, evict, most_steps
        self.clock, self.sleep, self.timeouts = rendezvous.clock, rendezvous.sleep, timeouts or Timeouts()
        self.facts = {SPEAKS: str(PROTOCOLS), **(facts or {})}
        self._rendezvous, self._wrap, self._observe, self._secret = rendezvous, wrap, observe, secret
        self._run, self._incarnation = run, secrets.token_hex(8)
        self._calls, self._views, self._holds, self._left = 0, 0, "", False
        self._group: Group | None = None
        self._members: tuple[Presence, ...] = ()  # of the group
        self._suspects: tuple[Presence, ...] = ()  # may be out of reach
        self._namesakes: dict[str, int] = {}  # by incarnation: its calls when it was last seen
        self._past: list[_Past] = []
        self._refused: set[str] = set()  # names whose statuses could not be read
        self._vote_store: VoteStore | None = None  # of the last call
        self._conduct = Conduct()
        Presence(name, self._incarnation, 0, facts=self.facts).to_json()  # a name or facts that cannot work fail here
        rendezvous.arrive(name, self._incarnation, secret, self.timeouts, observe)

    def require(self, facts: Mapping[str, str]) -> None:
        """Add facts that must be equal on all members. Call it before the first view."""
        self.facts = {**self.facts, **facts}

    def watch(self, conduct: Conduct) -> None:
        """Let `conduct` hear of the others at each call, and choose whom this replica wants left out."""
        self._conduct = conduct

    def report(self, text: str) -> None:
        """Write a line to the log of the lighthouse or hub, if that is there."""
        if self._vote_store is not None:
            with suppress(LinkError):
                self._vote_store.report(text)

    def use_timeouts(self, timeouts: Timeouts) -> None:
        """Use these timeouts from the next view and vote on. May be called from any thread."""
        self.timeouts = timeouts

    def enter(self, run: str) -> None:
        """Set the run of this replica. If no other member of it is found, `next_view` checks whether it has ended."""
        self._run = run

    def next_view(self, status: Status, seconds: float | None = None, check: Check = lambda status, name: None) -> View:
        """Find the members, and send them `status`, a small JSON mapping. If it changes during the wait, give a function: it is called
        for every call of this replica. A replica whose status `check` refuses is no member.

        Unchanged members keep their group, which takes one round trip. The default of `seconds` is `timeouts.view`. Raises `LinkError`
        (too few members came in time, or no lighthouse was found: see the message; the replica may continue to train, and call again),
        `EndedError` (see `note_end`) and `DisagreementError` (this replica cannot take part, because its facts differ or its name is
        taken; it has left then).
        """
        if self._left:
            raise self._gone()
        seconds = self.timeouts.view if seconds is None else seconds
        found = self._rendezvous.clock()  # since when the others can be waited for
        until = found + seconds
        awaits = self._members
        said = status if callable(status) else lambda: status
        self._presence(said(), awaits).to_json()
        check(said(), self.name)
        reason, pause = "", 0.1
        waited, late, since = dict[str, float](), list[str](), found  # members that were awaited, and from when on
        while (left := until - self._rendezvous.clock()) > 0 and not self._left:
            suspects = () if self._rendezvous.relays else self._suspects
            self._suspects = tuple(p for p in suspects if not self._rendezvous.reaches(p))
            self._calls += 1
            self._observe("call", {"calls": self._calls, "holds": self._holds})
            try:
                present, vote_store = self._rendezvous.call(self._presence(said(), awaits), left)
            except AnswerLostError as error:
                reason = str(error).rstrip(".")
                self._let_go(self._group)  # so that nobody who was answered waits for packets of this replica
                continue
            except LinkError as error:
                reason = reason or str(error).rstrip(".")
                break
            here, now = {p.incarnation for p in present}, self._rendezvous.clock()
            if len(late) == 1:
                waited[late[0]] = waited.get(late[0], 0.0) + now - since
            if vote_store is not self._vote_store:  # of a server that was away: others may find it later than this one
                self._vote_store, found = vote_store, self._rendezvous.clock()
            self._suspects = tuple(p for p in self._suspects if p.incarnation in here)
            verdict = self._judge(present, check)
            alike = [p for p in present if fits(p.facts, self.facts)]
            missing = expected(alike) - here
            late, since = [p.name for p in self._members if p.incarnation in missing], now
            reason = self._obstacle(verdict, missing)
            try:
                reason = self._past_the_end(verdict, reason)
                if not reason:
                    self._conduct.meets(verdict.members)
                    return self._take(verdict, vote_store, waited)
            except (LinkError, PacketError) as error:
                reason = f"no group could be built: {error}"
                if isinstance(error, AbsentError):
                    self._conduct.absent(verdict.id, error.absent)
            patient = self._rendezvous.clock() - found < self.timeouts.grace
            awaits = tuple(p for p in awaits if p.incarnation in here or self._rendezvous.reaches(p)) if patient else ()
            self._observe("retry", {"reason": reason, "seconds": pause})
            self._rendezvous.sleep(min(pause, max(0.0, until - self._rendezvous.clock())))
            pause = min(2 * pause, 0.25)  # so that all call again within the lighthouse's wait
        if self._left:
            raise self._gone()
        limit = float(f"{seconds:.3g}")  # `timeouts.view` follows from measured times
        raise LinkError(f"replica {self.name!r} found no view within {limit:g} s: {reason}.")

    def note_end(self, *what: str) -> None:
        """Write a note at the rendezvous that a run with these facts has ended. `what` is the run's id, and further details of its end.

        From then on `next_view` raises `EndedError` in a replica of this run, unless a member that keeps the final state is there. In a run
        of three members or more the note counts once two of them have written it.
        Raises `LinkError`.
        """
        if self._vote_store is not None:
            self._vote_store.put(self._end_of(*what))

    def ended(self, *what: str) -> bool:
        """Whether the note `what` exists. Raises `LinkError`."""
        return self._vote_store is not None and self._vote_store.all([self._end_of(*what)])

    def revoked(self, name: str) -> bool:
        """Whether the member with this name was revoked, so that it cannot come back. Raises `LinkError`."""
        return self._vote_store is not None and self._vote_store.all([f"{REVOKED}{name}"])

    def _end_of(self, *what: str) -> str:
        said = json.dumps([sorted(settings(self.facts).items()), what]).encode()
        return f"{NOTE}{LAST if CLOSED in what else ''}{hashlib.blake2b(said, digest_size=16).hexdigest()}"

    def _past_the_end(self, verdict: Verdict, reason: str) -> str:
        """`reason`, or the end of the run as the reason why this is no view. Raises `EndedError` if no member keeps the final state."""
        held = not reason and len(verdict.members) > 1 and all(p.holds == self._holds != "" for p in verdict.members)
        if held or any(p.status.get("over") is True for p in verdict.members):
            return reason
        if self._run and self.ended(self._run):
            if len(verdict.members) == 1 or self.ended(self._run, CLOSED):
                raise EndedError(
                    f"the run has ended without replica {self.name!r}, and no member keeps its final state any longer."
                )
            return "the run has ended, and the member that keeps its final state has not responded yet"
        if reason and not self._run and self.ended():
            return f"{reason}; a run with these settings has ended here, and this would be another"
        return reason

    @property
    def closed(self) -> bool:
        """Whether this replica has left."""
        return self._left

    def driver(self, training: Any, fragments: Any, site: Group | None) -> Any:
        """See `ElasticGroup.driver`."""
        from thinwire.drivers.elastic.driver import elastic_driver

        return elastic_driver(training, fragments, self, site)

    def close(self) -> None:
        """Leave the run; the others continue. Idempotent; may be called from any thread. A wait for a view raises `LinkError`."""
        self._left = True
        self._let_go(self._group)
        self._past = []  # a view refers to its membership, and so to its connections
        self._rendezvous.leave()

    def _gone(self) -> LinkError:
        return LinkError(f"replica {self.name!r} has left its membership; make a new one to come back.")

    def _presence(self, status: Mapping[str, Any], awaits: Sequence[Presence]) -> Presence:
        return Presence(
            self.name, self._incarnation, self._calls, self._views, self._holds, self.facts, status,
            [p.incarnation for p in self._suspects],
            self._conduct.excluded(),
            [p.incarnation for p in awaits if p.incarnation != self._incarnation],
            self._rendezvous.address,
        )  # fmt: skip

    def _judge(self, present: Sequence[Presence], check: Check) -> Verdict:
        """The verdict on the replicas whose statuses `check` accepts; the others are named once."""
        broken = []
        for presence in present:
            try:
                if fits(presence.facts, self.facts):
                    check(presence.status, presence.name)
            except PeerError as error:
                broken.append(LeftOut(presence, str(error)))
                if presence.name not in self._refused:
                    self._refused.add(presence.name)
                    self._observe("retry", {"reason": str(error), "seconds": 0.0})
        out = {left.presence.incarnation for left in broken}
        verdict = judge((p for p in present if p.incarnation not in out), self.facts)
        return replace(verdict, left_out=(*verdict.left_out, *broken))

    def _obstacle(self, verdict: Verdict, missing: Collection[str]) -> str:
        """Why this cannot be a view; "" if it can. Raises `DisagreementError` if it never can."""
        if self._views == 0 and (other := verdict.replica_of_others(trusted=bool(self._secret))):
            self.close()
            raise DisagreementError(
                f"replica {self.name!r} cannot take part: {difference(self.facts, other.facts, f'at {other.name!r}')}. "
                "Its code, model and settings must be what the others have."
            )
        own = next((out for out in verdict.left_out if out.presence.incarnation == self._incarnation), None)
        if own is not None:
            namesakes = {p.incarnation: p.calls for p in verdict.members if p.name == self.name}
            # A replica that died during its call stays in the registry for one view; one that calls again is alive.
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

    def _take(self, verdict: Verdict, vote_store: VoteStore, waited: dict[str, float]) -> View:
        members = verdict.members
        group, rebuilt = self._group, False
        if group is None or group.size != len(members) or any(p.holds != self._holds for p in members):
            self._let_go(group)
            self._observe("connect", {"epoch": verdict.id, "members": [p.name for p in members]})
            group, rebuilt = self._connected(verdict, waited), True
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
            waited=waited,
            clock=self.clock,
        )
        self._sweep(view, {p.incarnation: p.calls for p in members})
        fields = {"id": view.id, "members": [m.name for m in view.members], "left_out": list(view.left_out)}
        self._observe("view", fields | {"rebuilt": rebuilt})
        return view

    def _connected(self, verdict: Verdict, waited: dict[str, float]) -> Group:
        """A group in which every member has received a message from every other. For whom this replica waited is noted in `waited`."""
        members = self._suspects = self._members = verdict.members
        group = self._wrap(
            self._rendezvous.connect(verdict.id, members, [p.incarnation for p in members].index(self._incarnation))
        )
        try:
            for name, seconds in self._greet(group, verdict.id, members).items():
                waited[name] = waited.get(name, 0.0) + seconds
        except BaseException:
            group.close()
            raise
        self._group, self._holds, self._suspects = group, verdict.id, ()
        if self._left:  # another thread left meanwhile
            self._let_go(group)
            raise self._gone()
        return group

    def _greet(self, group: Group, epoch: str, members: Sequence[Presence]) -> dict[str, float]:
        """Exchange greetings. Returns for whom this replica waited (`last_alone`).

        Raises `AbsentError` with the members whose greetings did not come. The first member that waits in vain closes the group, and the
        others hear only of that; but its greeting has come, so they name those that are missing.
        """
        hellos = [mac(self._secret, "hello", epoch.encode(), p.incarnation.encode())[:16] for p in members]
        own = torch.frombuffer(bytearray(hellos[group.rank]), dtype=torch.uint8)
        # a carrier may notice a message only after earlier ones: the first that is awaited changes
        ranks = sorted(set(range(group.size)) - {group.rank}, key=lambda rank: (rank + int(epoch[:8], 16)) % group.size)
        came = {rank: torch.zeros_like(own) for rank in ranks}
        failure: LinkError | PacketError | None = None
        until = self.clock() + ALMOST * self.timeouts.transfer
        transfer = group.post(TAGS, dict.fromkeys(came, own), came, "view")
        try:
            transfer.wait()
        except (LinkError, PacketError) as error:
            failure = error
        silent = [rank for rank, hello in came.items() if bytes(hello.tolist()) != hellos[rank]]
        if failure or silent:
            at_fault = (
                culprits(failure.peer if failure else None, silent, group.size, until <= self.clock()) if silent else ()
            )
            absent = [members[rank].name for rank in at_fault]
            who = ", ".join(absent) or "somebody"
            raise AbsentError(
                f"{who} did not greet the others{f' ({failure})' if failure else ''}", absent
            ) from failure
        return last_alone({members[rank].name: at for rank, at in transfer.arrivals.items()})

    def _let_go(self, group: Group | None) -> None:
        """End `group`. If it is the present one, its members are probed before the next view."""
        if group is not None:
            group.close()
        if group is self._group:
            self._group, self._holds, self._suspects = None, "", self._members

    def _sweep(self, view: View, calls: dict[str, int]) -> None:
        """Delete the keys of past views whose members are all here again, because no member will read them, and those of views long past. The
        server has them still if only a connection to it has ended.
        """
        kept: list[_Past] = []
        for past in self._past:
            if all(calls.get(incarnation, 0) > then for incarnation, then in past.calls.items()):
                view.vote_store.forget(past.view.written())
            else:
                kept.append(past)
        for past in kept[:-MOST_PAST]:
            view.vote_store.forget(past.view.written())
        self._past = [*kept[-MOST_PAST:], _Past(view, calls)]


def last_alone(came: Mapping[str, float]) -> dict[str, float]:
    """The last of the names that `came` at these times, with the seconds for which it alone was awaited; empty if fewer than two came.

    >>> last_alone({"oslo": 1.0, "lima": 4.5, "rome": 2.0}), last_alone({"oslo": 1.0})
    ({'lima': 2.5}, {})
    """
    if len(came) < 2:
        return {}
    (name, last), (_, before) = sorted(came.items(), key=lambda item: -item[1])[:2]
    return {name: last - before}


def culprits(peer: int | None, missing: Collection[int], size: int, timed_out: bool) -> tuple[int, ...]:
    """The ranks, of `size`, that made an exchange fail with an error of `peer`, in which messages of those `missing` did not come.

    If `peer` is one of them, and has left before the exchange `timed_out`, those of the others may still be on their way. If it is none of
    them, it closed the group because of another. If half of the replicas are missing, it may be this one's own link, or the hub.

    >>> culprits(2, [1, 2], 5, False), culprits(2, [1, 2], 5, True), culprits(3, [1], 5, False), culprits(2, [1, 2, 3], 5, True)
    ((2,), (1, 2), (1,), ())
    """
    if peer is not None and (not missing or (peer in missing and not timed_out)):
        return (peer,)
    return tuple(missing) if 2 * len(missing) < size else ()
