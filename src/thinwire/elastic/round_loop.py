"""Rounds among replicas that come and go: what happens on the exchange thread when the group is a `Membership`.

One round after another: ask who is there (`Membership.next_view`), conclude from all statuses what the round is (`reconcile`), let
those behind take over the agreed state, exchange, decide together (`View.decide`), and only then believe it. A round
that fails anywhere changes nothing: its delta is still in the parameters and travels in the next one. Fragments take turns,
in the order in which they depart, and a replica asks for a round when it has the delta whose turn it is: so all bring the
same fragment, however long a round takes. A delta that comes too late for its round waits for the next turn of its fragment.
Training waits for none of it; outcomes are picked up between inner steps, in the order of turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import Group
from thinwire.elastic.ending import check_final, keep, level, note_end
from thinwire.elastic.eviction import EvictionVoter
from thinwire.elastic.global_state import Agreed
from thinwire.elastic.plan import MOST_WEIGHT, MemberStatus, RoundPlan, reconcile
from thinwire.errors import CheckpointError, EndedError, LinkError, NonFiniteError, PacketError, UndecidedError
from thinwire.exchange import Buffers, Round, SendContext
from thinwire.membership.rendezvous import Membership, View
from thinwire.packet import REFUSED
from thinwire.rng import Key
from thinwire.runtime.update import RoundUpdate
from thinwire.state import State
from thinwire.strategy import Strategy

NEVER = 1 << 62


@dataclass(frozen=True)
class Ready:
    """A delta that waits for its round. `step` is the inner step that it departed after."""

    fragment: int
    delta: Tensor
    weight: float
    step: int
    feedback: State


NOTHING = Ready(-1, torch.empty(0), 0.0, 0, {})  # to take part without a delta


@dataclass(frozen=True)
class Outcome:
    """What became of one fragment, for the main thread to take over.

    anchor     the agreed one now; None: nothing has changed
    counted    this replica's delta that is in it, if any: the rest of its progress still is to travel
    feedback   what is held back now, if one was counted
    ready      the delta whose round this was
    broken     it held NaN or infinity, and was not sent
    returned   this replica's delta that was believed to be counted, and is not: it is still to travel
    anew       nothing of this replica's own progress still is to travel: it goes on from the anchor
    after      turn and state_digest of the agreed state that this belongs to
    """

    fragment: int
    turn: int
    anchor: Tensor | None = None
    state: State = field(default_factory=dict)
    counted: Ready | None = None
    feedback: State = field(default_factory=dict)
    ready: Ready | None = None
    returned: Ready | None = None
    broken: bool = False
    anew: bool = False
    after: tuple[int, str] = (0, "")


class Rounds:
    """Flies this replica's rounds over `membership`, one after another, on a thread of its own; fragments take turns in `order`.

    `agreed` is what this replica holds at the start; `fresh`: random weights that nobody should take over from a
    replica that has trained. `step` is set by the main thread and by those that are ahead. `observe(event, **fields)`
    hears round, wire, evicted, caught_up, given, alone, doubt. `thread` runs what is submitted one after another.
    """

    def __init__(
        self,
        strategy: Strategy,
        membership: Membership,
        agreed: Agreed,
        codecs: Sequence[Codec],
        order: Sequence[int],
        *,
        fresh: bool,
        observe: Callable[..., None],
        most_weight: float = MOST_WEIGHT,
        clock: Callable[[], float] = time.monotonic,
        thread: Executor | None = None,
    ) -> None:
        self.strategy, self.membership, self.agreed, self.fresh = strategy, membership, agreed, fresh
        self.codecs, self.order = codecs, order
        self.step, self.finishing = 0, False
        self.saved_at = NEVER  # the turn of the checkpoint that it went on from: what was counted since, counts
        self.over = False  # see RoundPlan
        self.keep_seconds = 0.0  # for how long one replica keeps the final state for those who are missing at the end
        self.late: set[str] = set()  # for whom this one does
        self._met: set[str] = set()  # names of members
        self._observe, self._clock = observe, clock
        self._outcomes: deque[Outcome] = deque()
        self._doubt: tuple[int, Ready, State] | None = None  # a turn that this replica said yes to, and heard no answer
        self._waiting: dict[int, Ready] = {}  # deltas whose rounds are to come, by fragment
        self._believed: tuple[int, Ready, str] | None = None  # a turn that counted its delta; only it says so as yet
        self._settled = False  # all had finished, and after the last round nobody had anything left
        self.alone, self.why_alone = 0, ""  # views in a row that were none
        self._context: SendContext | None = None
        self._asked = self._done = 0  # one written by the main thread, one by the exchange thread
        self._failure: BaseException | None = None
        self.voter = EvictionVoter(membership, observe)
        membership.check = lambda status, name: MemberStatus.of(status, name).check(name, order, most_weight)
        self._thread = thread or ThreadPoolExecutor(1, f"thinwire-rounds-{membership.name}")

    # ---- the main thread

    def join(self) -> None:
        """Meet the others in a round of theirs, to which this replica brings nothing but takes over what they hold. Blocks.

        Raises `LinkError` if too few are there, `DisagreementError` if this replica is not one of them.
        """
        reason = self._round()
        if reason:
            raise LinkError(f"replica {self.membership.name!r} could not join: {reason}")
        self.fresh = False

    @property
    def next(self) -> int:
        """The fragment whose turn it is, as far as this replica knows."""
        return self.order[self.agreed.turn % len(self.order)]

    def depart(self, *brought: Ready) -> None:
        """Let deltas wait for their rounds, and hold those whose turn it is. Never blocks."""
        if brought:
            self.voter.departs()
        self._submit(brought, self._calls)

    def meet(self, *brought: Ready) -> None:
        """Let deltas wait, and hold one round whatever is ready. Never blocks."""
        once = iter([True])
        self._submit(brought, lambda: next(once, False))

    def finish(self) -> None:
        """All steps are trained: what waits comes back, to be brought once more with all that is left. Never blocks."""
        self._submit((), self._finish)

    def _submit(self, brought: Sequence[Ready], more: Callable[[], bool]) -> None:
        self._asked += 1
        self._thread.submit(self._work, brought, more)

    def outcomes(self, step: int) -> Iterator[Outcome]:
        """What has come in, in order, up to the first that is not due at `step`. Never blocks; raises what ended the rounds."""
        if self._failure is not None:
            raise self._failure
        while self._outcomes:
            counted = self._outcomes[0].counted
            if counted is not None and counted.step + self.strategy.schedule.delay > step:
                return
            yield self._outcomes.popleft()

    @property
    def idle(self) -> bool:
        """Whether every delta that departed has had its round, if not its outcome."""
        return self._asked == self._done

    def close(self) -> None:
        """Leave the others. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._leave_air()
        self.membership.close()

    # ---- the exchange thread

    def _put(self, outcome: Outcome) -> None:
        self._outcomes.append(replace(outcome, after=(self.agreed.turn, self.agreed.state_digest)))

    def _work(self, brought: Sequence[Ready], more: Callable[[], bool]) -> None:
        try:
            for ready in brought:
                self._waiting[ready.fragment] = self._sound(ready)
            while self._failure is None and not self.over and more():
                self._round()
                if self.alone:  # nobody came, and to ask at once again is of no use
                    break
            if self.late:
                keep(self.membership, self.agreed, self.step, self.order, self.late, self.keep_seconds, self._observe)
        except BaseException as error:  # whoever asks for outcomes gets it
            self._failure = error
        finally:
            self._done += 1

    def _calls(self) -> bool:
        """Whether it is this replica's to ask for a round: also where a turn does not come, as if its fragment departed seldom."""
        long = self.strategy.schedule.every
        waited = any(self.step - ready.step >= long for ready in self._waiting.values())
        return self._doubt is not None or self.next in self._waiting or waited

    def _finish(self) -> bool:
        self.finishing = True
        self._give_back()
        return False

    def _give_back(self) -> None:
        while self._waiting:
            index, ready = self._waiting.popitem()
            self._put(Outcome(index, self.agreed.turn, ready=ready))

    def _sound(self, ready: Ready) -> Ready:
        """As it is; if it is no number it takes part without being counted."""
        if bool(torch.isfinite(ready.delta).all()):
            return ready
        self._put(Outcome(ready.fragment, self.agreed.turn, broken=True))
        return replace(ready, weight=0.0)

    @torch.no_grad()
    def _round(self) -> str:
        """One turn, from who is there to what is believed. Returns what went wrong, if anything did."""
        began = self._clock()
        try:
            status = self._status()
            view = self.membership.next_view(lambda: replace(status, step=self.step).facts())  # it trains on meanwhile
            plan, statuses = self._plan(view)
            self.voter.judge(view, statuses)
        except EndedError as error:
            check_final(self.membership, self.agreed, error)
            self.over = True
            return ""
        except (LinkError, PacketError) as error:
            if self.finishing and self._settled:  # the others know already, and have left
                self._end(keeps=True, there=[])
            self.alone, self.why_alone = self.alone + 1, str(error)
            self._observe("alone", reason=str(error))
            self._give_back()
            return str(error)
        ready, names = self._waiting.pop(plan.fragment, NOTHING), [member.name for member in view.members]
        self.alone = 0
        self._met.update(names)
        reason, moved = "", None
        try:
            self._level(view, plan, statuses)
            if plan.counted:
                moved = self._fly(view, plan, ready)
        except (LinkError, PacketError, NonFiniteError, CheckpointError) as error:
            reason = f"{type(error).__name__}: {error}"
        committed = self._decide(view, plan, ready, moved, reason) if plan.counted else False
        if reason:
            self._leave_air()
            view.close()
        if committed is not None:
            self._believe(view, plan, ready, moved if committed else None, reason)
        self._observe(
            "round", turn=plan.turn, fragment=plan.fragment, members=names, counted=[names[rank] for rank in plan.counted],
            committed=committed, nbytes=self._sent(view.group, plan.fragment) if moved else 0, reason=reason,
            seconds_spent=self._clock() - began,
        )  # fmt: skip
        if plan.over and not reason:
            self._end(view.group.rank == 0 and not any(status.over for status in statuses), names)
        return reason

    def _status(self) -> MemberStatus:
        agreed, finishing = self.agreed, self.finishing and not self._doubt
        brings = {str(index): ready.weight for index, ready in self._waiting.items()}
        return MemberStatus(
            agreed.turn,
            agreed.state_digest,
            self.step,
            self.fresh,
            finishing,
            agreed.run,
            False,
            brings,
            **self.voter.says(),
        )

    def _plan(self, view: View) -> tuple[RoundPlan, list[MemberStatus]]:
        statuses = [MemberStatus.of(member.status, member.name) for member in view.members]
        return reconcile(statuses, self.order), statuses

    def _level(self, view: View, plan: RoundPlan, statuses: Sequence[MemberStatus]) -> None:
        """Those behind take over what the first sound member holds; after it all stand at the same turn."""
        if donor := level(view, plan, statuses, self.agreed, self._observe):
            self._catch_up(donor)
        elif self._doubt is not None:  # whoever heard yes would have another state_digest, and be ahead
            self._settle_doubt(counted=False)
        self.agreed.turn, self.saved_at, self._believed = plan.turn, NEVER, None
        self.agreed.run = self.membership.run = statuses[plan.sound[0]].run or view.id
        self.step = max(self.step, plan.step)

    def _catch_up(self, donor: str) -> None:
        if self._doubt is not None:
            turn, ready, _ = self._doubt
            self._settle_doubt(counted=self.agreed.counts(turn, self.membership.name, ready.fragment))
        since = {
            index
            for turn, (index, who, _) in self.agreed.counted.items()
            if turn >= self.saved_at and self.membership.name in who
        }
        returned = None
        if self._believed is not None:  # heard before the lighthouse died, and the others went on without it
            turn, ready, mark = self._believed
            returned = None if self.agreed.counts(turn, self.membership.name, ready.fragment, mark) else ready
        for index, (anchor, state) in enumerate(zip(self.agreed.anchors, self.agreed.states)):
            anew, back = self.fresh or index in since, returned if returned and returned.fragment == index else None
            self._put(Outcome(index, self.agreed.turn, anchor, state, returned=back, anew=anew))
        self._observe("caught_up", turn=self.agreed.turn, donor=donor)

    def _settle_doubt(self, counted: bool) -> None:
        assert self._doubt is not None
        (turn, ready, feedback), self._doubt = self._doubt, None
        if counted:
            anchor, state = self.agreed.anchors[ready.fragment], self.agreed.states[ready.fragment]
            self._put(Outcome(ready.fragment, turn, anchor, state, ready, feedback, ready))
        else:
            self._put(Outcome(ready.fragment, turn, ready=ready))

    def _fly(self, view: View, plan: RoundPlan, ready: Ready) -> RoundUpdate:
        """Exchange the round's fragment.

        Every delta is sent times weight · M / `RoundPlan.whole`, so that the mean over all M members is the weighted one.
        """
        strategy, group, fragment = self.strategy, view.group, plan.fragment
        anchor, own = self.agreed.anchors[fragment], group.rank in plan.counted
        share = plan.weights[group.rank] * group.size / plan.whole
        delta = ready.delta if own else torch.zeros_like(anchor)
        held = self.agreed.fragment(fragment, self.codecs[fragment], ready.feedback if own else {})
        moved = RoundUpdate(held, delta, strategy.outer, strategy.feedback if own else None, Buffers())

        def signal(begin: int, end: int) -> Tensor:
            values = moved.signal(begin, end)
            return values if share in (0.0, 1.0) else values * share

        def settle(begin: int, mean: Tensor, sent: Callable[[], Tensor]) -> None:
            moved.settle(begin, mean, sent if share in (0.0, 1.0) else lambda: sent() / share)

        air = self._air_over(group)
        key = Key(strategy.seed, fragment, plan.turn, group.rank)
        round_ = Round(air, self.codecs[fragment], anchor.numel(), key, signal)
        with self.voter.watches(round_, view):
            arrival = strategy.exchange.arrive(strategy.exchange.depart(round_, {}), settle)
        if any(flags & REFUSED for flags in arrival.flags):
            who = [view.members[rank].name for rank, flags in enumerate(arrival.flags) if flags & REFUSED]
            raise PacketError(
                f"{', '.join(who)} sent no values after having said that they are finite; the round is dropped."
            )
        if arrival.void or not moved.finish():
            raise NonFiniteError("the anchor would not be finite; the round is dropped.")
        moved.close()
        return moved

    def _end(self, keeps: bool, there: Sequence[str]) -> None:
        """All is agreed, and nothing changes any more."""
        if self.keep_seconds:
            here = {self.membership.name, *there, *self.voter.put_out}
            self.late = note_end(self.membership, self.agreed, keeps, self._met, here)
        self.over = True

    def _sent(self, group: Group, fragment: int) -> int:
        codec, numel = self.codecs[fragment], self.agreed.anchors[fragment].numel()
        return self.strategy.exchange.nbytes_sent(codec, numel, group.size, group.rank)

    def _air_over(self, group: Group) -> SendContext:
        """Kept as long as the group is."""
        if self._context is None or self._context.group is not group:
            self._leave_air()
            self._context = SendContext(group, self.membership.clock)
        return self._context

    def _leave_air(self) -> None:
        if self._context is not None:
            self._context.close()
        self._context = None

    def _decide(self, view: View, plan: RoundPlan, ready: Ready, moved: RoundUpdate | None, reason: str) -> bool | None:
        """Whether all members have all that the round needs; None: this one cannot learn it now, and waits for the next statuses."""
        try:
            return view.decide(f"turn {plan.turn}", moved is not None, self.membership.timeouts.vote)
        except UndecidedError as error:
            assert moved is not None
            if view.group.rank in plan.counted:
                self._doubt = (plan.turn, ready, moved.feedback)
            else:
                self._put(Outcome(ready.fragment, plan.turn, ready=ready))
            self._observe("doubt", turn=plan.turn, reason=str(error))
            return None

    def _believe(self, view: View, plan: RoundPlan, ready: Ready, moved: RoundUpdate | None, reason: str) -> None:
        own = ready if view.group.rank in plan.counted else None
        if moved is not None:
            names = tuple(view.members[rank].name for rank in plan.counted)
            assert moved.anchor is not None  # it has finished
            self.agreed.commit(plan.fragment, moved.anchor, moved.outer, names)
            self._believed = None if own is None else (plan.turn, own, self.agreed.mark)
        if self.agreed.turn == plan.turn and plan.fragment >= 0:  # not, if it could not take over what it lacks
            self.agreed.turn += 1
        if moved is not None:
            feedback = moved.feedback if own else {}
            self._put(Outcome(plan.fragment, plan.turn, moved.anchor, moved.outer, own, feedback, own))
        if moved is None or own is None:
            self._put(Outcome(ready.fragment, plan.turn, ready=ready))
        self._settled = plan.last and moved is not None
