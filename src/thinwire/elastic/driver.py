"""A replica whose group may change: what its main thread does between inner steps.

Departures hand a delta to `RoundThread`; outcomes are picked up when they are there. No inner step waits for them:

    on time, own delta counted    parameters ← as the strategy merges
    late, own delta counted       parameters ← anchor′ + α·(departed − anchor′) + κ·(parameters − departed)
    not counted, or caught up     parameters ← parameters + (anchor′ − anchor)             (the delta stays what it was)
    counted, as it seemed         parameters ← parameters + (anchor′ − anchor) − delta     (it is not in anchor′: it travels again)
    new, or back from long ago    parameters ← anchor′

"Late" is later than τ = `delay` inner steps after departure; `departed` are the parameters as they were then. After a flight of t steps
κ = 1 − (1 − α)·τ/t: `Mix(α)` keeps the share α of τ steps in the air, and so many are lost at most; the others are kept whole. A delta
that comes too late for its round waits for the next of its fragment. Until then the fragment does not depart again: what is trained
meanwhile travels after it, and where the schedule would have had it depart, that is made up for when its turn comes.

In the mean over all who train a delta counts 1, or the tokens behind it, if the loop says how many a step has.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.data_ledger import DataLedger, layout
from thinwire.elastic.data import note
from thinwire.elastic.global_state import GlobalState
from thinwire.elastic.messages import Outcome, Point, Ready
from thinwire.elastic.plan import MOST_WEIGHT
from thinwire.elastic.round_thread import RoundThread
from thinwire.elastic.states import State
from thinwire.errors import CheckpointError, ConfigurationError, EndedError, LinkError
from thinwire.membership.rendezvous import Membership
from thinwire.pieces.partition import Fragment
from thinwire.pieces.schedule import Schedule
from thinwire.runtime.driver import Driver, Training
from thinwire.runtime.fragment_state import hold
from thinwire.runtime.handshake import check_start, digest, introduction
from thinwire.runtime.recovery import start_again
from thinwire.runtime.weighing import tokens_of_step
from thinwire.strategy import Strategy

VIEWS_ALONE = 5  # views in a row that nobody else comes to, at the end of a run


class ElasticDriver(Driver):
    """The main thread's side; see `Driver`. Whether a delta counts 1 or the tokens behind it is settled here, on all replicas alike, by
    whether `training` has tokens. `join` is to be called before the first inner step.
    """

    def __init__(self, training: Training, membership: Membership, thread: Executor | None = None) -> None:
        strategy = training.strategy
        self._schedule = check(strategy)
        self.by_tokens = counts_tokens(training)
        self.training, self.strategy, self.pieces = training, strategy, training.fragments
        self._observe = training.observe
        self._waiting: dict[int, tuple[Ready, float]] = {}  # by fragment; and what was trained when it departed
        self._trained = 0.0  # by this replica: tokens, or steps
        self._travelled = [0.0] * len(self.pieces)  # of that, what the anchors have, by fragment
        self._owed: set[int] = set()  # fragments that were to depart when they could not
        self._seen: int | None = None  # the last step after which it was looked for what departs
        self._own_steps = 0  # inner steps of this replica
        self._reader = training.reader
        self._at = Point()  # what the fragments hold
        anchors = [piece.anchor for piece in self.pieces]
        agreed = GlobalState(anchors, [piece.state for piece in self.pieces], state_digest=digest(anchors).hex())
        if self._reader and (template := self._template()):
            agreed.set_ledger(template)
            self._reader.connect(membership.name, len(self.pieces), self._ask_for_samples)
        codecs = [piece.codec for piece in self.pieces]
        self.rounds = RoundThread(
            strategy,
            membership,
            agreed,
            codecs,
            in_turn(self._schedule, len(self.pieces)),
            observe=self._observe,
            most_weight=MOST_WEIGHT if self.by_tokens else 1.0,
            clock=training.clock,
            thread=thread,
        )
        self._stop_requested = False

    def join(self) -> None:
        """Meet the others, take over what they hold, and go on at their step. Blocks.

        Raises `LinkError` where too few are there; then the membership is still open, for another try.
        """
        try:
            self.rounds.join(self.training.step)
        except BaseException as error:
            self.rounds.close(leave=not isinstance(error, LinkError))
            raise
        self._pick_up(self.training.step)
        self._adopt(self.rounds.report.ledger)
        self.training.step = max(self.training.step, self.rounds.report.step)

    def _template(self) -> DataLedger | None:
        """The ledger as it is before the first view."""
        schedule = self._schedule
        return self._reader.template(len(self.pieces), schedule.every, schedule.delay) if self._reader else None

    def _ask_for_samples(self) -> None:
        """Hold one more round: this replica has no lease, because it is new or others have its samples. Raises `EndedError`."""
        if self.rounds.over or self._stop_requested:
            raise EndedError("there is nothing left to read: the run has ended, or was asked to stop.")
        if self.rounds.report.state is State.IN_DOUBT:
            self.rounds.depart(own_steps=self._own_steps)
        else:
            self.rounds.ask(self.training.step)
        self.rounds.wait(lambda: self.rounds.idle or self._stop_requested)
        self._pick_up(self.training.step)
        self._adopt(self.rounds.report.ledger)

    def _adopt(self, ledger: DataLedger | None) -> None:
        """Before the first outcome, and where there is no lease: later ones come with the outcomes."""
        if self._reader and (self._at.ledger is None or self._reader.read_count.serial < 0):
            self._at = replace(self._at, ledger=ledger)
            self._reader.adopt(ledger)

    def after_inner_step(self) -> None:
        """Depart what is due, and pick up what has come."""
        step, tokens = self.training.step, self.training.tokens
        if self.by_tokens != (tokens is not None):
            raise ConfigurationError(
                "tokens were set for a replica that began without them, or removed: all replicas weigh deltas in one "
                "way from the first round on. Give Replica(tokens=...) at the start."
            )
        self._trained += tokens_of_step(tokens) if self.by_tokens else 1
        self._own_steps += 1
        self.rounds.trained(step, *((self._reader.generation, self._reader.read_count) if self._reader else ()))
        due = self._schedule.departs(step, len(self.pieces))
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
        """Fragments that were to depart at steps which this replica stepped over, being behind; not what departs now."""
        seen = step - 1 if self._seen is None else self._seen
        over = range(max(seen, step - self._schedule.every) + 1, step)
        departs, count = self._schedule.departs, len(self.pieces)
        due = {index for s in over for index in departs(s, count)} - set(departs(step, count))
        return sorted(due - self._waiting.keys())

    def finish(self, keep_seconds: float = 0.0) -> bool:
        """Take part until all have trained all their steps, and nobody has anything left to bring. See `Replica.finish`.

        Raises `LinkError` where the others are not heard for long; the anchors hold what was agreed until then.
        """
        step = self.training.step
        self._tell_what_was_read(step)
        late = step + self.strategy.schedule.delay  # all that has come lands
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
                left = [i for i, travelled in enumerate(self._travelled) if travelled < self._trained]
                self.rounds.meet(*(self._bring(index, step) for index in left if index not in self._waiting))
        self._pick_up(late)
        return self.rounds.report.state is not State.KEEPING

    def request_stop(self) -> None:
        """This replica stops now, and at the end of a run waits for nobody; the others go on without it. From any thread."""
        self._stop_requested = self.training.stopping = True
        self.rounds.wake()

    def close(self) -> None:
        self.rounds.close()

    # ---- to be saved and to go on

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Between inner steps. What is in the air is still in the parameters."""
        tensors, facts = self.training.state()
        return tensors, facts | {"agreed": self.facts()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.training.load_state(tensors, facts)
        self.load(facts["agreed"])

    def facts(self) -> dict[str, Any]:
        """What to save beside the fragments' tensors: JSON."""
        return {
            "round": self._at.round,
            "state_digest": self._at.state_digest,
            "run": self.rounds.report.run,
            "counted": {str(number): who for number, who in self._at.counted.items()},
            "by_tokens": self.by_tokens,
            "trained": self._trained,
            "travelled": self._travelled,
            "ledger": layout.encoded(self._at.ledger).hex() if self._at.ledger else "",
            "reader": self._reader.state() if self._reader else {},
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Go on from `facts` and the fragments as they were saved with them. Nothing may have departed yet."""
        if facts["by_tokens"] != self.by_tokens:
            ways = {True: "the tokens behind it", False: "1"}
            raise CheckpointError(
                f"the checkpoint is of a run in which a delta counts {ways[facts['by_tokens']]}, here it counts "
                f"{ways[self.by_tokens]}; resume with the run's own setting."
            )
        states = [piece.state for piece in self.pieces]
        agreed = GlobalState([piece.anchor for piece in self.pieces], states, ledger=self._template())
        agreed.load(facts)
        self._at = Point(agreed.round, agreed.state_digest, dict(agreed.counted), agreed.ledger)
        self._trained, self._travelled = facts["trained"], list(facts["travelled"])
        if self._reader and not self._reader.load(facts["reader"], agreed.ledger, self.rounds.report.ledger):
            self.training.load_anchors()  # others train the samples that were in the parameters
            self._travelled = [self._trained] * len(self.pieces)
        self.rounds.load(agreed)
        if self.rounds.over:  # what was taken over when it joined is final: no checkpoint is newer
            self._pick_up(self.rounds.report.step)

    # ---- both ways

    @torch.no_grad()
    def _bring(self, index: int, step: int) -> Ready:
        piece = self.pieces[index]
        behind = self._trained - self._travelled[index]
        weight = behind if self.by_tokens else min(1.0, behind)
        delta = piece.delta(torch.empty_like(piece.anchor))
        if self.strategy.guards:
            self.training.guard(piece, delta, behind / (self.training.tokens or 1.0))
        claim, generation = (self._reader.claim(index), self._reader.generation) if self._reader else (None, 0)
        ready = Ready(index, delta, weight, step, piece.feedback, claim, generation)
        self._waiting[index] = ready, self._trained
        self._owed.discard(index)
        self._observe("depart", step, fragment=index, round=piece.rounds, nbytes=0, seconds_spent=0.0)
        return ready

    def _pick_up(self, step: int) -> None:
        """Take over what is due at `step`."""
        for outcome in self.rounds.outcomes(step):
            self._at = outcome.after
            if outcome.broken:
                self._observe(
                    "refused",
                    step,
                    fragment=outcome.fragment,
                    round=outcome.round,
                    by=[],
                    reason="NaN or infinity in the delta",
                )
                start_again(self.training)
            if outcome.anchor is not None:
                self._take_over(outcome, outcome.anchor, step)
            if outcome.ready is not None and outcome.fragment in self._waiting:
                _, departed = self._waiting.pop(outcome.fragment)
                if outcome.counted is not None:
                    self._travelled[outcome.fragment] = departed
                elif outcome.after.round == outcome.round:  # its turn is still to come
                    self._owed.add(outcome.fragment)
            if self._reader and outcome.dropped:
                self._reader.begin_again(outcome.after.ledger)
            elif self._reader:
                self._reader.adopt(outcome.after.ledger)

    @torch.no_grad()
    def _take_over(self, outcome: Outcome, anchor: Tensor, step: int) -> None:
        piece, counted, merge = self.pieces[outcome.fragment], outcome.counted, self.strategy.merge
        before, piece.anchor, piece.state = piece.anchor, anchor, outcome.state
        piece.rounds += 1
        if counted is not None:
            piece.feedback = outcome.feedback
        if self._reader:
            note(self._reader, outcome)
        if counted is not None:
            flight, delay = step - counted.step, self.strategy.schedule.delay
            if flight and merge.keeps_flight:
                piece.carry_over(before - counted.delta)
            elif flight == delay:
                for part, values in piece.slices(anchor):
                    merge.into(part, values.to(part.device))
            else:  # as `Mix(alpha)` for the share of the flight that was to be; what was trained later is kept whole
                kept = 1 - (1 - merge.alpha) * delay / flight
                piece.carry_over(before - counted.delta, merge.alpha, kept)
            return
        if outcome.anew:
            piece.load_into_parameters(anchor)
            self._travelled[outcome.fragment] = self._trained
            return
        moved = anchor - before
        if outcome.returned is not None:
            moved -= outcome.returned.delta
            piece.feedback = outcome.returned.feedback
            self._travelled[outcome.fragment] -= outcome.returned.weight
        for part, values in piece.slices(moved):
            part.copy_(part.to(values) + values)


def join(
    training: Training, fragments: list[Fragment], membership: Membership, site: Group | None = None
) -> ElasticDriver:
    """A driver that is one of those who are there now. Blocks. Raises `ConfigurationError`, `DisagreementError`, `ModelError`, `LinkError`."""
    if site is not None:
        raise ConfigurationError(
            "site= with a Membership: a sharded replica needs the same ranks in every round; give a fixed group, or a whole replica."
        )
    strategy = training.strategy
    check(strategy)
    training.fragments += [hold(strategy, fragment, index, 0, 1) for index, fragment in enumerate(fragments)]
    check_start(fragments, [fragment.anchor for fragment in training.fragments])
    weights = "by tokens" if counts_tokens(training) else "alike"
    membership.require(introduction(strategy, fragments) | {"weights": weights})
    driver = ElasticDriver(training, membership)
    driver.join()
    return driver


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
    """Whether a delta counts the tokens behind it. Raises `ConfigurationError` as `tokens_of_step`."""
    return training.tokens is not None and tokens_of_step(training.tokens) > 0


def check(strategy: Strategy) -> Schedule:
    """Refuse what needs the same replicas in every round, as the pieces declare it; the schedule is fine."""
    for piece in strategy.pieces:
        if piece.needs_fixed_group:
            raise ConfigurationError(
                f"this strategy cannot run among replicas that come and go: {piece} {piece.needs_fixed_group}. "
                "Choose another, or a fixed group."
            )
    if not isinstance(strategy.schedule, Schedule):
        raise ConfigurationError(
            f"this strategy cannot run among replicas that come and go: {strategy.schedule} has no `departs`, so it must "
            "declare needs_fixed_group. Choose another, or a fixed group."
        )
    return strategy.schedule
