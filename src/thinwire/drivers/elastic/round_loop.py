"""The loop of elastic rounds. It runs on the exchange thread, and its groups come from a `Membership`.

A round has these steps: get a view of the members (`Membership.next_view`), plan the round from all statuses (`reconcile`), let members
that are behind take over the agreed state, exchange, vote (`View.decide`), and commit the result. A round that fails in any step
changes nothing: its delta is still in the parameters, and is sent in a later round. Fragments take turns in the order in which they
depart. A replica asks for a round when it has a delta of the next fragment, so all bring the same fragment, however long a round
takes. A delta that is too late for its round waits for the next turn of its fragment.

A table has the states, events and transitions (states.py). The loop holds the state and executes the table's actions. It exchanges
messages with the main thread (messages.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thinwire.codecs import Codec
from thinwire.comm.group import Group
from thinwire.data_ledger import ReadCount
from thinwire.drivers.elastic.catching_up import caught_up
from thinwire.drivers.elastic.conduct import Conduct
from thinwire.drivers.elastic.data import admit, commit, grants, is_void, most_counts, reads_now, status_fields
from thinwire.drivers.elastic.ending import check_final, end_is_noted, keep, level, note_end, noted_ends
from thinwire.drivers.elastic.eviction import EvictionVoter
from thinwire.drivers.elastic.flying import blamed, fly
from thinwire.drivers.elastic.global_state import GlobalState, digest_of
from thinwire.drivers.elastic.messages import (
    NOTHING,
    Close,
    Command,
    Depart,
    Finish,
    Join,
    Load,
    Mailbox,
    Meet,
    Outcome,
    Point,
    Ready,
    Report,
)
from thinwire.drivers.elastic.past_deltas import Doubt, PastDeltas
from thinwire.drivers.elastic.plan import MemberStatus, RoundPlan, check_status, first_in_turn, reconcile
from thinwire.drivers.elastic.states import Action, Event, State, transition
from thinwire.drivers.flight import Flight
from thinwire.errors import CheckpointError, EndedError, LinkError, NonFiniteError, PacketError, UndecidedError
from thinwire.exchange import SendContext
from thinwire.membership.rendezvous import Membership
from thinwire.membership.view import View
from thinwire.strategy import Strategy
from thinwire.types import Observer
from thinwire.types import State as Tensors


class RoundLoop:
    """Holds the rounds of this replica over `membership`, one after another. Fragments take turns in `order`.

    One thread may use it (`RoundThread`). It owns `agreed`, the replica's state at the start. No delta may weigh more than `most_weight`.
    `observer(event, step, **fields)` is called with round, wire, evicted, caught_up, given, alone, doubt, keeps, data.
    """

    def __init__(
        self, strategy: Strategy, membership: Membership, agreed: GlobalState, codecs: Sequence[Codec],
        order: Sequence[int], mail: Mailbox, observer: Observer, most_weight: float, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.strategy, self.membership, self.codecs, self.order = strategy, membership, codecs, order
        self._mail, self._observer, self._most_weight, self._clock = mail, observer, most_weight, clock
        self.agreed, self._state, self._step, self._done = agreed, State.JOINING, 0, 0
        self._alone, self._reason, self._refusal, self._keep_seconds = 0, "", "", 0.0
        self._failure: BaseException | None = None
        self._past, self._met = PastDeltas(), set[str]()  # names of members that it has met
        self._late = set[str]()  # names of those for which it keeps the final state
        self._waiting: dict[int, Ready] = {}  # deltas that wait for their rounds, by fragment
        self._doubt: Doubt | None = None
        self._unconfirmed: Doubt | None = None  # a commit that counted its delta, not yet confirmed
        self._looked_up: list[Outcome] = []  # what became of a doubt, until the rest is taken over
        self._renewals = [0] * len(codecs)  # outcomes after which older deltas must not be counted, by fragment
        self._generation, self._void = 0, -1  # the reader's, in its last status; the newest that does not count
        self._context: SendContext | None = None
        self._sums, self._backlog = (
            dict[int, str](),
            0.0,
        )  # checksums of the last exchange; seconds for which a delta waited for its end
        self._voter = EvictionVoter(membership, self._observe, clock)
        self._conduct = Conduct(membership, self._observe)
        membership.watch(self._conduct)
        self._actions: dict[Action, Callable[..., object]] = {
            Action.HOLD_DUE: self._hold_due, Action.HOLD_ONE: self._hold_one, Action.ADOPT: self._adopt,
            Action.GIVE_FINAL: self._give_final, Action.GIVE_BACK: self._give_back, Action.REMEMBER: self._remember,
            Action.START_ANEW: partial(self._take_over, anew=True), Action.TAKE_OVER: self._take_over,
            Action.LOOK_UP_DOUBT: self._look_up_doubt, Action.DROP_DOUBT: self._drop_doubt,
            Action.NOTE_END: self._note_end, Action.KEEP: self._keep, Action.END_SENDING: self._end_sending,
        }  # fmt: skip
        self._publish()

    # ---- states and commands

    def handle(self, command: Command) -> None:
        """Execute `command`. An error that it raises is in the report."""
        try:
            if not self._mail.closing.is_set() or isinstance(command, Close):
                self._on(command.event, command)
        except BaseException as error:  # the main thread raises it
            self._failure = error
            self._on(Event.FAILED)
        finally:
            self._done += 1
            self._publish()

    def _on(self, event: Event, *about: Any) -> None:
        """Go to the next state, and execute the table's actions with the arguments `about`."""
        self._state, actions = transition(self._state, event)
        self._publish()
        for action in actions:
            self._actions[action](*about)

    def _publish(self) -> None:
        alone, reason, failure = self._alone, self._reason, self._failure
        run, step, next_, ledger = self.agreed.run, self._step, self._next, self.agreed.ledger
        self._mail.publish(Report(self._state, self._done, step, next_, run, alone, reason, failure, ledger))

    @property
    def _next(self) -> int:
        return self.order[self.agreed.round % len(self.order)]

    def _now(self) -> int:
        """The newest inner step."""
        while self._mail.steps:
            self._step = max(self._step, self._mail.steps.popleft())
        return self._step

    def _observe(self, event: str, **fields: Any) -> None:
        self._observer(event, self._now(), **fields)

    def _put(self, *outcomes: Outcome) -> None:
        """Give the main thread outcomes that it takes over together: with some of them alone it would hold no agreed state."""
        agreed, held_since = self.agreed, self._past.held_since(self._doubt)
        after = Point(agreed.round, agreed.state_digest, dict(agreed.counted), agreed.ledger, held_since)
        for outcome in outcomes:
            self._renewals[outcome.fragment] += outcome.recalled or outcome.anew
        self._mail.outcomes.append([replace(outcome, after=after) for outcome in outcomes])

    def _adopt(self, load: Load) -> None:
        if self.agreed.run:  # it has joined
            load.agreed.keep(self.agreed)
        self.agreed, self._past = load.agreed, PastDeltas(load.held_since)
        self.membership.enter(load.agreed.run)

    def _give_final(self, _: Load | None = None, dropped: bool = False) -> None:
        agreed, last = self.agreed, len(self.agreed.anchors) - 1
        held = enumerate(zip(agreed.anchors, agreed.states))
        self._put(*(Outcome(i, agreed.round, *one, anew=True, dropped=dropped and i == last) for i, one in held))

    def _hold_due(self, depart: Depart) -> None:
        self._backlog = self.membership.clock() - depart.seconds
        if depart.brought:
            self._voter.departs(depart.own_steps, depart.seconds)
        self._await_turn(depart.brought)
        while self._state in (State.TRAINING, State.IN_DOUBT) and self._due():
            self._round()
            if self._alone:  # no other member came, and asking again at once would not help
                return

    def _due(self) -> bool:
        """Whether this replica asks for a round now: its delta is next, it is in doubt, or a delta has waited for a whole period."""
        long, step = self.strategy.schedule.every, self._now()
        waited = any(step - ready.step >= long for ready in self._waiting.values())
        return self._state is State.IN_DOUBT or self._next in self._waiting or waited

    def _hold_one(self, command: Join | Meet) -> None:
        if isinstance(command, Join):
            self._step = command.step
        self._await_turn(() if isinstance(command, Join) else command.brought)
        self._round()

    def _await_turn(self, brought: Sequence[Ready]) -> None:
        """Queue deltas. One with NaN or infinity takes part with weight 0; one that must not be counted is given back."""
        for ready in brought:
            if ready.generation <= self._void or ready.renewals < self._renewals[ready.fragment]:
                self._put(Outcome(ready.fragment, self.agreed.round, ready=ready))
                continue
            finite = bool(torch.isfinite(ready.delta).all())
            if not finite:
                self._past.start_again()
                self._put(Outcome(ready.fragment, self.agreed.round, broken=True))
            self._waiting[ready.fragment] = ready if finite else replace(ready, weight=0.0)

    def _give_back(self, about: Finish | None = None) -> None:
        if about is not None:
            self._keep_seconds = about.keep_seconds
        while self._waiting:
            index, ready = self._waiting.popitem()
            self._put(Outcome(index, self.agreed.round, ready=ready))

    # ---- a round

    @torch.no_grad()
    def _round(self) -> None:
        """Hold one round, from the view to the commit. The reason of a failure is in the report."""
        began = self._clock()
        self._conduct.begins(self._now(), self._backlog)
        self._backlog = 0.0
        try:
            status = self._status()
            view = self._view(lambda: self._newest(status).facts())
            statuses = [MemberStatus.of(member.status, member.name) for member in view.members]
            plan = reconcile(statuses, self.order, noted_ends(self.membership, statuses))
            if (
                len(statuses) < self.membership.least and not plan.ended
            ):  # it let them meet because it says that the run is over
                view.close()
                raise LinkError(
                    f"{len(statuses)} of at least {self.membership.least} members came, and the end of the run is not noted"
                )
            names = [member.name for member in view.members]
            self._conduct.behind(names, {names[rank] for rank in plan.behind if not statuses[rank].fresh})
            if reason := self._voter.judge(view, statuses):
                self._alone, self._reason = 0, reason
                self._on(Event.DECIDED)
                return
        except EndedError as error:
            check_final(self.membership, self.agreed, error)
            self._reason = ""
            self._on(Event.RUN_ENDED)
            return
        except (LinkError, PacketError) as error:
            finishing = self._state in (State.FINISHING, State.FINISHING_IN_DOUBT)
            if finishing and end_is_noted(self.membership, self.agreed):
                self._on(Event.RUN_ENDED)
                return
            self._alone, self._reason = self._alone + 1, str(error)
            if not self.membership.closed:  # a replica that was asked to leave waits for nobody
                self._observe("alone", reason=str(error))
            self._on(Event.ALONE)
            return
        self._alone = 0
        self._met.update(names)
        plan, moved, committed = self._hold(view, plan, statuses)
        self._observe(
            "round", round=plan.round, fragment=plan.fragment, members=names, counted=[names[rank] for rank in plan.counted],
            committed=committed, foreseen=moved.nbytes if moved else 0, nbytes=moved.nbytes_sent if moved else 0,
            reason=self._reason or self._refusal, seconds_spent=self._clock() - began,
        )  # fmt: skip
        if plan.over and not self._reason and (committed or plan.ended):
            self._on(Event.OVER, None if plan.ended else names, not plan.ended and view.group.rank == 0)

    def _view(self, status: Callable[[], dict[str, Any]], seconds: float | None = None) -> View:
        self._known, most, every = self.agreed.counted, self.membership.most_steps, self.strategy.schedule.every
        bounds = self.order, self._most_weight, most, most_counts(self.agreed.ledger, most, every)
        return self.membership.next_view(status, seconds, partial(check_status, bounds))

    def _status(self) -> MemberStatus:
        agreed, finishing = self.agreed, self._state is State.FINISHING
        said = {index: self._waiting[index] for index in first_in_turn(self._waiting, self.order, agreed.round)}
        self._generation, reads = self._mail.reads
        data = status_fields(self._generation > self._void, reads, said) | self._voter.says()
        return MemberStatus(
            agreed.round, agreed.state_digest, self._now(), self._state is State.JOINING, finishing, agreed.run, **data
        )

    def _newest(self, status: MemberStatus) -> MemberStatus:
        """The status now, because training continues while this replica waits for a view, and others may be missing in a group meanwhile."""
        generation, reads = self._mail.reads
        now = replace(status, step=self._now(), **self._conduct.says())
        fresh = status.reads and generation == self._generation
        return replace(now, reads=[reads.serial, reads.version, reads.count]) if fresh else now

    def _hold(
        self, view: View, plan: RoundPlan, statuses: Sequence[MemberStatus]
    ) -> tuple[RoundPlan, Flight | None, bool | None]:
        """Level, exchange, vote, commit. Returns the plan that was followed, the update, and whether the round was committed (None: this
        replica does not know).
        """
        ready, reason = self._waiting.pop(plan.fragment, NOTHING), ""
        rank, void, granted = view.group.rank, False, False
        moved: Flight | None = None
        reads, blames = list[ReadCount](), dict[str, str]()
        self._sums = {}
        names = [member.name for member in view.members]
        try:
            self._level(view, plan, statuses)
            brought, plan = plan.counted, admit(plan, self.agreed, view, statuses)
            if rank in plan.counted and ready.renewals < self._renewals[plan.fragment]:
                raise LinkError("its delta may hold one that was counted; the round is held again without it")
            granted = not plan.counted and not plan.over and grants(self.agreed.ledger, view)
            refused = rank in brought and rank not in plan.counted
            void = is_void(self.agreed.ledger, self.membership.name, statuses[rank], refused)
            if plan.counted:
                moved = self._fly(view, plan, ready)
            reads = self._read_counts(view, statuses, bool(plan.counted or granted))
        except (LinkError, PacketError, NonFiniteError, CheckpointError) as error:
            reason = f"{type(error).__name__}: {error}"
            blames = {names[peer]: str(error) for peer in blamed(error) if peer < len(names) and peer != rank}
        asked = plan.counted or granted or (plan.over and not plan.ended)
        what = self._summary(plan, moved, reads)
        committed = self._decide(view, plan, ready, moved, not reason, what) if asked else False
        refusal = ""
        if asked and committed is False and not reason:
            with suppress(LinkError):
                blames = view.dissenters(f"round {plan.round}", what)
            refusal = "; ".join(f"{name} {did}" for name, did in blames.items())
        elif committed:
            self._conduct.committed(names)
        if blames:
            self._conduct.blame(view.id, blames, {names[peer]: value for peer, value in self._sums.items()})
        self._conduct.waited(view.id, view.waited, self._now())
        if reason:
            view.close()
            self._end_sending()
        self._reason, self._refusal = reason, refusal
        if committed is not None:
            self._believe(view, plan, ready, moved if committed else None, granted and committed, reads)
            self._on(Event.DECIDED)
        self._mail.fence = None  # after the new ledger is in the report
        self._mail.wake()
        if void:
            self._drop()
        return plan, moved, committed

    def _read_counts(self, view: View, statuses: Sequence[MemberStatus], asked: bool) -> list[ReadCount]:
        """How far each member has read. If this round splits the samples anew, they say it now, and read on to the fence at most until the split
        is decided.
        """
        ledger = self.agreed.ledger
        if ledger is None or not asked or not ledger.will_split(member.name for member in view.members):
            return [status.read_count for status in statuses]
        generation, reads = self._mail.reads
        own = statuses[view.group.rank].read_count
        if own.serial >= 0 and generation == self._generation:
            self._mail.fence = generation, reads.count + ledger.ahead
            own = replace(own, count=self._mail.reads[1].count if self._mail.reads[0] == generation else own.count)
        most = most_counts(ledger, self.membership.most_steps, self.strategy.schedule.every)
        return reads_now(view, statuses, own, most)

    def _drop(self) -> None:
        """Drop this replica's own progress, because others train its samples: it continues from the anchors, with its present lease."""
        self._void = self._generation
        self._past.start_again()  # a history that comes later may still have counted what feedback held back
        self._give_back()
        self._give_final(dropped=True)

    def _level(self, view: View, plan: RoundPlan, statuses: Sequence[MemberStatus]) -> None:
        """Members that are behind take over the state of a sound member. Then all are at the same round."""
        donor = level(view, plan, statuses, self.agreed, self._observe, self.membership.clock)
        self._on(*((Event.CAUGHT_UP, donor) if donor else (Event.LEVEL,)))
        if self._unconfirmed is not None:  # all have this round now
            self._past.forget(self._unconfirmed.ready.fragment)
        self.agreed.round, self._unconfirmed = plan.round, None
        runs = Counter(statuses[rank].run for rank in plan.sound if statuses[rank].run)
        self.agreed.run = max(runs, key=lambda run: runs[run]) if runs else view.id
        self.agreed.begin_data(member.name for member in view.members)
        self.membership.enter(self.agreed.run)
        self._step = max(self._now(), plan.step)
        self._publish()

    def _take_over(self, donor: str, anew: bool = False) -> None:
        name, last, found = self.membership.name, self._unconfirmed, self._looked_up
        self._unconfirmed, self._looked_up = None, []
        self._put(*found, *caught_up(self.agreed, self._known, name, self._past, last, self._waiting, anew))
        self._observe("caught_up", round=self.agreed.round, donor=donor)

    def _remember(self, number: int, ready: Ready, feedback: Tensors) -> None:
        self._doubt = Doubt(number, ready, feedback)

    def _look_up_doubt(self, donor: str) -> None:
        assert self._doubt is not None
        number, ready, feedback, _ = self._doubt
        held = ready.renewals == self._renewals[ready.fragment]  # else its progress was dropped since
        if not (held and self.agreed.counts(number, self.membership.name, ready.fragment)):
            self._looked_up = [self._not_counted()]
            return
        self._doubt = None
        self._past.forget(ready.fragment)
        anchor, state = self.agreed.anchors[ready.fragment], self.agreed.states[ready.fragment]
        self._looked_up = [Outcome(ready.fragment, number, anchor, state, ready, False, feedback, ready)]

    def _drop_doubt(self) -> None:
        self._put(self._not_counted())

    def _not_counted(self) -> Outcome:
        """What the main thread learns of a doubt that is dropped."""
        assert self._doubt is not None
        doubt, self._doubt = self._doubt, None
        fragment, ready = doubt.ready.fragment, doubt.ready
        self._past.doubted(doubt, whole=ready.renewals == self._renewals[fragment])
        return Outcome(fragment, doubt.round, ready=ready)

    def _fly(self, view: View, plan: RoundPlan, ready: Ready) -> Flight:
        """Exchange, and note for whom this replica waited."""
        fragment, own = plan.fragment, view.group.rank in plan.counted
        held = self.agreed.fragment(fragment, self.codecs[fragment], ready.feedback if own else {})
        context, timeout = self._sending_over(view.group), self.membership.timeouts.transfer
        moved, waited, self._sums = fly(
            self.strategy, self.codecs[fragment], held, view, plan, ready, context, self._voter, timeout
        )
        view.waited.update({name: view.waited.get(name, 0.0) + seconds for name, seconds in waited.items()})
        return moved

    def _sending_over(self, group: Group) -> SendContext:
        """The send context; it lives as long as the group."""
        if self._context is None or self._context.group is not group:
            self._end_sending()
            self._context = SendContext(group, self.membership.clock)
        return self._context

    def _end_sending(self, _: Close | None = None) -> None:
        if self._context is not None:
            self._context.close(wait=True)  # its group is closed, so its sends fail at once
        self._context = None

    def _decide(
        self, view: View, plan: RoundPlan, ready: Ready, moved: Flight | None, yes: bool, what: str
    ) -> bool | None:
        """Vote on the round: whether all members have all that it needs. None: the result is not known before the next statuses."""
        try:
            return view.decide(f"round {plan.round}", yes, self.membership.timeouts.vote, what)
        except UndecidedError as error:
            if view.group.rank in plan.counted:
                assert moved is not None
                self._on(Event.UNDECIDED, plan.round, ready, moved.feedback)
            else:
                self._put(Outcome(ready.fragment, plan.round, ready=ready))
            self._observe("doubt", round=plan.round, reason=str(error))
            return None

    def _summary(self, plan: RoundPlan, moved: Flight | None, reads: Sequence[ReadCount]) -> str:
        """A digest of what a commit would change, which members vote for: a round in which they have unlike results is not committed."""
        readings = [[one.serial, one.version, one.count] for one in reads]
        text = json.dumps([plan.round, plan.fragment, plan.weights, plan.whole, readings, plan.over])
        summary = hashlib.blake2b(text.encode(), digest_size=16)
        if moved is not None and moved.anchor is not None:
            summary.update(digest_of({"anchor": moved.anchor, **moved.outer}))
        return summary.hexdigest()

    def _believe(
        self,
        view: View,
        plan: RoundPlan,
        ready: Ready,
        moved: Flight | None,
        granted: bool,
        reads: Sequence[ReadCount],
    ) -> None:
        own = ready if view.group.rank in plan.counted else None
        if moved is not None:
            names = tuple(view.members[rank].name for rank in plan.counted)
            assert moved.anchor is not None  # it has finished
            self.agreed.commit(plan.fragment, moved.anchor, moved.outer, names)
        if self.agreed.ledger and (moved is not None or granted):
            self._observe("data", round=plan.round, **commit(self.agreed, view, plan, reads))
        # The round is another one if it could not take over the state that it lacks.
        if self.agreed.round == plan.round and (plan.fragment >= 0 or granted):
            self.agreed.round += 1
        if moved is not None:
            feedback = moved.feedback if own else {}
            self._unconfirmed = Doubt(plan.round, own, feedback, self.agreed.mark) if own else None
            self._put(Outcome(plan.fragment, plan.round, moved.anchor, moved.outer, own, False, feedback, own))
        if moved is None or own is None:
            self._put(Outcome(ready.fragment, plan.round, ready=ready))

    # ---- the end

    def _note_end(self, there: Sequence[str] | None, keeps: bool) -> None:
        """Note the end of the run. If `keeps`, this replica keeps the final state for members that are not `there`; None: another does."""
        out, known = self._voter.put_out, bool(self._keep_seconds)
        self._late, noted = note_end(self.membership, self.agreed, keeps, self._met, out, there, known)
        self._on((Event.SOMEBODY_LATE if self._late else Event.NOBODY_LATE) if noted else Event.UNNOTED)

    def _keep(self) -> None:
        noted = partial(self._on, Event.NOTED) if self._state is State.WAITING else None
        given = self._late, self._keep_seconds, self._observe, noted
        donor = keep(self._view, self.membership, self.agreed, self._now(), self.order, *given)
        self._on(*((Event.OVERTAKEN, donor) if donor else (Event.KEPT,)))
