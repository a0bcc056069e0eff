"""The driver of an elastic replica, whose group may change: the main thread's work between inner steps.

A departure passes a delta to `RoundThread`. An outcome is taken over between inner steps after it has arrived; no inner step waits:

    on time, own delta counted    parameters ← the strategy's merge
    late, own delta counted       parameters ← anchor′ + α·(departed − anchor′) + κ·(parameters − departed)
    not counted, or caught up     parameters ← parameters + (anchor′ − anchor)             (the delta does not change)
    counted, then revoked         parameters ← parameters + (anchor′ − anchor) − delta     (the delta is not in anchor′, and is sent again)
    not counted, then recalled    as late                                                  (its round comes back; later progress is kept)
    new, or own progress dropped  parameters ← anchor′                                     (feedback ← 0 if a counted delta held that progress)

"Late" is later than τ = `delay` inner steps after departure; `departed` are the parameters at departure. After a flight of t steps
κ = 1 − (1 − α)·τ/t: `Mix(α)` keeps the share α of τ steps of a flight, and at most (1 − α)·τ steps are lost; the others are kept
whole. A delta that is too late for its round waits for the next round of its fragment. Until then the fragment does not depart
again, and its further training is sent afterwards. A departure that was due meanwhile is made up for then.

The weight of a delta in the mean over all training members is 1, or the number of its tokens, if the loop sets the tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.data_ledger import DataLedger
from thinwire.drivers.base import Driver, Training
from thinwire.drivers.deltas import start_again
from thinwire.drivers.elastic.data import tell_reader
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import NOTHING, Outcome, Point, Ready
from thinwire.drivers.elastic.plan import MOST_WEIGHT
from thinwire.drivers.elastic.round_thread import RoundThread
from thinwire.drivers.elastic.states import State
from thinwire.drivers.fragment import first_state
from thinwire.drivers.handshake import check_start, introduction
from thinwire.drivers.token_weights import check_saved, check_unchanged, tokens_of_step
from thinwire.errors import ConfigurationError, EndedError, LinkError
from thinwire.membership.rendezvous import Membership
from thinwire.pieces.partition import Fragment
from thinwire.pieces.schedule import Schedule
from thinwire.strategy import Strategy

VIEWS_ALONE = 5  # views in a row without other members, after which the end of a run is abandoned


class ElasticDriver(Driver):
    """The main thread's side of elastic rounds; see `Driver`. The weight of a delta is the number of its tokens if `training` has tokens,
    otherwise 1; it must be the same kind on all replicas. Call `join` before the first inner step.
    """

    def __init__(self, training: Training, membership: Membership, thread: Executor | None = None) -> None:
        strategy = training.strategy
        self._schedule = check(strategy)
        self.by_tokens = counts_tokens(training)
        self.training, self.strategy, self._fragments = training, strategy, training.fragments
        self._observe = training.observe
        self._waiting: dict[int, Ready] = {}  # by fragment
        self._trained = 0.0  # tokens or steps of this replica
        self._in_anchors = [0.0] * len(self._fragments)  # the part of `_trained` that is in the anchors, by fragment
        # outcomes after which older deltas must not be counted, by fragment
        self._renewals = [0] * len(self._fragments)
        self._owed: set[int] = set()  # fragments whose departure was due but not possible
        self._seen: int | None = None  # the last step at which departures were checked
        self._own_steps = 0  # inner steps of this replica
        self._reader = training.reader
        self._at = Point()  # the agreed state that the fragments hold
        anchors = [one.anchor for one in self._fragments]
        agreed = GlobalState(anchors, [one.state for one in self._fragments])
        if self._reader and (template := self._template()):
            agreed.set_ledger(template)
            self._reader.connect(membership.name, len(self._fragments), self._ask_for_samples, self._await_split)
        codecs = [one.codec for one in self._fragments]
        self.rounds = RoundThread(
            strategy,
            membership,
            agreed,
            codecs,
            in_turn(self._schedule, len(self._fragments)),
            observe=self._observe,
            most_weight=MOST_WEIGHT if self.by_tokens else 1.0,
            clock=training.clock,
            thread=thread,
        )
        self._stop_requested = False

    def join(self, resume: Callable[[], object] = lambda: None) -> None:
        """Meet the others, take over their state, and continue at their step. Blocks. `resume` may `load_state` before that: then only
        the fragments that have moved since are taken over, and the progress of the checkpoint is kept.

        Raises `LinkError` if too few members are there; the membership stays open for another try.
        """
        try:
            resume()
            self.rounds.join(self.training.step)
        except BaseException as error:
            self.rounds.close(leave=not isinstance(error, LinkError))
            raise
        self._pick_up(self.training.step)
        self._adopt(self.rounds.report.ledger)
        self.training.step = max(self.training.step, self.rounds.report.step)

    def _template(self) -> DataLedger | None:
        """The ledger before the first view."""
        schedule = self._schedule
        return self._reader.template(len(self._fragments), schedule.every, schedule.delay) if self._reader else None

    def _ask_for_samples(self) -> None:
        """Hold one more round to get a lease, because this replica is new or others have its samples. Raises `EndedError`, and the error
        that ended the rounds. Waits for rounds in progress first: the state after them decides which command is possible.
        """
        self.rounds.wait(lambda: self.rounds.idle or self._stop_requested)
        self._pick_up(self.training.step)
        if self.rounds.over or self._stop_requested:
            raise EndedError("no samples are left to read: the run has ended, or was asked to stop.")
        if self.rounds.report.state is State.IN_DOUBT:
            self.rounds.depart(own_steps=self._own_steps)
        else:
            self.rounds.ask(self.training.step)
        self.rounds.wait(lambda: self.rounds.idle or self._stop_requested)
        self._pick_up(self.training.step)
        self._adopt(self.rounds.report.ledger)

    def _await_split(self, end: int) -> None:
        """Wait before the reader reads to `end`, if the samples beyond its fence may be given to others in this moment."""
        reader = self._reader
        assert reader is not None

        def free() -> bool:
            fence = self.rounds.fence(reader.generation)
            return fence is None or end <= fence or self._stop_requested or self.rounds.report.failure is not None

        if not free():
            self.rounds.wait(free)
            reader.adopt(self.rounds.report.ledger)

    def _adopt(self, ledger: DataLedger | None) -> None:
        """Take the ledger before the first outcome, or if there is no lease. Later ledgers come with outcomes."""
        if self._reader and (self._at.ledger is None or self._reader.read_count.serial < 0):
            self._at = replace(self._at, ledger=ledger)
            self._reader.adopt(ledger)

    def after_inner_step(self) -> None:
        """Send the deltas that are due, and take over the outcomes that have arrived."""
        step, tokens = self.training.step, self.training.tokens
        check_unchanged(self.by_tokens, tokens)
        self._trained += tokens_of_step(tokens) if self.by_tokens else 1
        self._own_steps += 1
        self.rounds.trained(step, *((self._reader.generation, self._reader.read_count) if self._reader else ()))
        due = self._schedule.departs(step, len(self._fragments))
        late = [index for index in due if index in self._waiting]
        for index in late:
            self._observe("late", step, fragment=index)
        self._owed.update(late)
        made_up = [index for index in self._owed - self._waiting.keys() if index == self.rounds.report.next]
        leaving = dict.fromkeys([*self._missed(step), *due, *made_up])
        brought = [self._bring(index, step) for index in leaving if index not in self._waiting]
        if brought or late:
            self._tell_what_was_read(step)
            self.rounds.depart(*brought, own_steps=self._own_steps)
        self._seen = step
        self._pick_up(step)
        self.training.step = max(step, self.rounds.report.step)

    def _tell_what_was_read(self, step: int) -> None:
        if self._reader and (ranges := self._reader.fresh()):
            self._observe("read", step, ranges=[list(pair) for pair in ranges])

    def _missed(self, step: int) -> list[int]:
        """Fragments that were due at steps which this replica skipped because it was behind, without those that depart now."""
        seen = step - 1 if self._seen is None else self._seen
        over = range(max(seen, step - self._schedule.every) + 1, step)
        departs, count = self._schedule.departs, len(self._fragments)
        due = {index for s in over for index in departs(s, count)} - set(departs(step, count))
        return sorted(due - self._waiting.keys())

    def finish(self, keep_seconds: float = 0.0) -> bool:
        """Take part until all members have trained all their steps, and no deltas are left. See `Replica.finish`.

        Raises `LinkError` if the others cannot be reached for long; the anchors hold the last agreed values.
        """
        step = self.training.step
        self._tell_what_was_read(step)
        late = step + self.strategy.schedule.delay  # so that all outcomes land
        while not self.rounds.over:
            self.rounds.wait(lambda: self.rounds.idle or self.rounds.over or self._stop_requested)
            self._pick_up(late)
            report = self.rounds.report
            if self.rounds.over:
                break
            if report.alone >= VIEWS_ALONE or self._stop_requested:
                why = "asked to stop." if self._stop_requested else report.reason
                raise LinkError(f"the last exchange was abandoned: {why} The anchors hold the last agreed values.")
            if report.state in (State.TRAINING, State.IN_DOUBT):
                self.rounds.finish(keep_seconds)
            else:
                left = [i for i, travelled in enumerate(self._in_anchors) if travelled < self._trained]
                self.rounds.meet(*(self._bring(index, step) for index in left if index not in self._waiting))
        self._pick_up(late)
        return self.rounds.report.state is not State.KEEPING

    def request_stop(self) -> None:
        """Stop this replica now, without waiting for others at the end of the run; the others continue. May be called from any thread."""
        self._stop_requested = self.training.stopping = True
        self.rounds.wake()

    def close(self) -> None:
        self.rounds.close()

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state between inner steps. Deltas in flight are still in the parameters."""
        tensors, facts = self.training.state()
        return tensors, facts | {"agreed": self.facts()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.training.load_state(tensors, facts)
        self.load(facts["agreed"])

    def facts(self) -> dict[str, Any]:
        """The values to save beside the fragments' tensors, for JSON."""
        at, run = self._at, self.rounds.report.run
        agreed = GlobalState([], [], at.round, at.state_digest, dict(at.counted), run, at.ledger)
        return agreed.facts() | {
            "by_tokens": self.by_tokens,
            "trained": self._trained,
            "travelled": self._in_anchors,
            "reader": self._reader.state() if self._reader else {},
            "held_since": {str(index): number for index, number in at.held_since.items()},
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Resume from `facts` and the fragments that were saved with them, before or after `join`. No delta may have departed yet."""
        check_saved(facts["by_tokens"], self.by_tokens)
        states = [one.state for one in self._fragments]
        agreed = GlobalState([one.anchor for one in self._fragments], states, ledger=self._template())
        agreed.load(facts)
        agreed.use_computed_digest()  # of the tensors that were read, whatever was saved beside them
        number, before = agreed.round, facts["held_since"]
        held_since = {index: min(number, before.get(str(index), number)) for index in range(len(self._fragments))}
        self._at = Point(number, agreed.state_digest, dict(agreed.counted), agreed.ledger, held_since)
        self._trained, self._in_anchors = facts["trained"], list(facts["travelled"])
        held = self._trained - min(self._in_anchors)
        if self._reader and not self._reader.load(facts["reader"], agreed.ledger, self.rounds.report.ledger):
            if held:
                why = "others have the samples that its checkpoint held"
                self._note_dropped(self.training.step, held, self._reader.held_by(facts["reader"]), why)
            self.training.load_anchors()  # other replicas train the samples that were in the parameters
            self._in_anchors = [self._trained] * len(self._fragments)
        self.rounds.load(agreed, held_since)
        if self._reader:  # its status says from now on where it reads
            self.rounds.trained(self.training.step, self._reader.generation, self._reader.read_count)
        if self.rounds.over:  # the state that it took over at the join is final; no checkpoint is newer
            self._pick_up(self.rounds.report.step)

    # ---- deltas and outcomes

    @torch.no_grad()
    def _bring(self, index: int, step: int) -> Ready:
        fragment = self._fragments[index]
        behind = self._trained - self._in_anchors[index]
        weight = behind if self.by_tokens else min(1.0, behind)
        delta = fragment.delta(torch.empty_like(fragment.anchor))
        if self.strategy.guard and self.strategy.guards:
            periods = behind / (self.training.tokens or 1.0) / self.strategy.schedule.every
            if clipped := fragment.guarded(self.strategy.guard, delta, periods):
                self.training.report_clipped(fragment, *clipped)
        claim, generation = (self._reader.claim(index), self._reader.generation) if self._reader else (None, 0)
        renewals = self._renewals[index]
        ready = Ready(index, delta, weight, step, fragment.feedback, claim, generation, self._trained, renewals, behind)
        self._waiting[index] = ready
        self._owed.discard(index)
        self._observe("depart", step, fragment=index, round=fragment.rounds, nbytes=0, seconds_spent=0.0)
        return ready

    def _pick_up(self, step: int) -> None:
        """Take over the outcomes that are due at `step`."""
        with self.training.copies.following():
            self._take_outcomes(step)

    def _take_outcomes(self, step: int) -> None:
        dropped, samples, why = 0.0, self._reader.in_flight if self._reader else 0, ""
        for outcome in self.rounds.outcomes(step):
            self._at = outcome.after
            if outcome.anew:
                dropped = max(dropped, self._trained - self._in_anchors[outcome.fragment])
                why = why or (
                    "a delta that was counted holds part of it"
                    if outcome.spent
                    else "others took over the samples that it read"
                )
            if outcome.broken:
                self._observe(
                    "refused",
                    step,
                    fragment=outcome.fragment,
                    round=outcome.round,
                    by=[],
                    reason="NaN or infinity in the delta",
                )
                if start_again(self.training):
                    self._forget_own()
            if outcome.anchor is not None:
                self._take_over(outcome, outcome.anchor, step)
            if outcome.ready is not None and outcome.fragment in self._waiting:
                del self._waiting[outcome.fragment]
                if outcome.counted is None and outcome.after.round == outcome.round:  # its round is still to come
                    self._owed.add(outcome.fragment)
            if self._reader and outcome.dropped:
                self._reader.begin_again(outcome.after.ledger)
            elif self._reader:
                self._reader.adopt(outcome.after.ledger)
        if dropped:
            self._note_dropped(step, dropped, samples - (self._reader.in_flight if self._reader else 0), why)

    def _note_dropped(self, step: int, trained: float, samples: int, why: str) -> None:
        """Report that training of this replica is in no delta, and never will be."""
        unit = "tokens" if self.by_tokens else "steps"
        self._observe("dropped", step, trained=trained, samples=samples, reason=why)
        message = f"{trained:,.0f} {unit} that this replica trained are dropped ({samples:,} samples): {why}"
        self._observe("warning", step, message=message)

    @torch.no_grad()
    def _forget_own(self) -> None:
        """The parameters are at the anchors again: tokens and samples since then are in no delta. Deltas that wait still count, so the
        parameters hold what they hold.
        """
        for index, fragment in enumerate(self._fragments):
            ready = self._waiting.get(index, NOTHING)
            sound = ready.renewals == self._renewals[index] and bool(torch.isfinite(ready.delta).all())
            kept = ready if sound else NOTHING
            self._in_anchors[index] = self._trained - kept.behind
            if kept is not NOTHING:
                fragment.load_into_parameters(fragment.base - kept.delta)
            if self._reader:
                self._reader.dropped(index)
            if self._reader and kept.claim:
                self._reader.returned(index, kept.claim)

    @torch.no_grad()
    def _take_over(self, outcome: Outcome, anchor: Tensor, step: int) -> None:
        fragment, counted, merge = self._fragments[outcome.fragment], outcome.counted, self.strategy.merge
        before, fragment.anchor, fragment.state = fragment.anchor, anchor, outcome.state
        fragment.rounds += 1
        if counted is not None:
            fragment.feedback = outcome.feedback
            self._in_anchors[outcome.fragment] += counted.behind
            self._renewals[outcome.fragment] += outcome.recalled
        if self._reader:
            tell_reader(self._reader, outcome)
        if counted is not None:
            flight, delay = step - counted.step, self.strategy.schedule.delay
            if flight and merge.keeps_flight:
                fragment.carry_over(fragment.held(before) - counted.delta)
            elif flight == delay:
                merge.on_land(fragment.landing(anchor))
            else:  # as `Mix(alpha)` for the planned part of the flight; later training is kept whole
                kept = 1 - (1 - merge.alpha) * delay / flight
                fragment.carry_over(fragment.held(before) - counted.delta, merge.alpha, kept)
            return
        if outcome.anew:
            self._renewals[outcome.fragment] += 1
            if outcome.spent:
                fragment.feedback = {name: torch.zeros_like(kept) for name, kept in fragment.feedback.items()}
            fragment.load_into_parameters(anchor)
            self._in_anchors[outcome.fragment] = self._trained
            return
        moved = fragment.held(anchor) - fragment.held(before)
        if outcome.returned is not None:
            moved -= outcome.returned.delta
            fragment.feedback = outcome.returned.feedback
            self._in_anchors[outcome.fragment] -= outcome.returned.behind
        for part, values in fragment.slices(moved):
            part.copy_(part.to(values) + values)


def elastic_driver(
    training: Training, fragments: list[Fragment], membership: Membership, site: Group | None
) -> ElasticDriver:
    """The driver of a replica whose membership requires the same strategy and model of all members. Raises `ConfigurationError`,
    `ModelError`.
    """
    if site is not None:
        raise ConfigurationError(
            "site= with a Membership: a sharded replica needs the same ranks in every round; give a fixed group, or a whole replica."
        )
    strategy = training.strategy
    check(strategy)
    training.fragments += [first_state(strategy, fragment, index, 0, 1) for index, fragment in enumerate(fragments)]
    check_start(fragments, [fragment.anchor for fragment in training.fragments])
    weights = "by tokens" if counts_tokens(training) else "alike"
    membership.require(introduction(strategy, fragments, training.frozen.facts()) | {"weights": weights})
    return ElasticDriver(training, membership)


def in_turn(schedule: Schedule, fragments: int) -> list[int]:
    """All fragments in the order in which they first depart.

    >>> from thinwire.pieces.schedule import Staggered
    >>> in_turn(Staggered(every=10, offsets=(7, 3, 3)), 3)
    [1, 2, 0]
    """
    first: dict[int, None] = {}
    for step in range(1, 3 * schedule.every + 1):
        first |= dict.fromkeys(schedule.departs(step, fragments))
    return [*first, *(index for index in range(fragments) if index not in first)]


def counts_tokens(training: Training) -> bool:
    """Whether the weight of a delta is the number of its tokens. Raises `ConfigurationError` like `tokens_of_step`."""
    return training.tokens is not None and tokens_of_step(training.tokens) > 0


def check(strategy: Strategy) -> Schedule:
    """Refuse strategies whose pieces declare that they need the same replicas in every round. Returns the schedule."""
    for piece in strategy.pieces:
        if piece.needs_fixed_group:
            raise ConfigurationError(
                f"this strategy cannot run elastically: {piece} {piece.needs_fixed_group}. "
                "Choose another, or a fixed group."
            )
    if strategy.anchors == "disk":
        raise ConfigurationError(
            "anchors='disk' in an elastic run: members give all anchors to those that join; choose 'host'."
        )
    if not isinstance(strategy.schedule, Schedule):
        raise ConfigurationError(
            f"this strategy cannot run elastically: {strategy.schedule} has no `departs`, so it must "
            "declare needs_fixed_group. Choose another, or a fixed group."
        )
    return strategy.schedule
