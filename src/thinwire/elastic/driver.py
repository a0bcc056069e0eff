"""A replica whose group may change: what its main thread does between inner steps.

Departures hand a delta to `Rounds`; outcomes are picked up when they are there. No inner step waits for them:

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

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import joins
from thinwire.elastic.global_state import Agreed
from thinwire.elastic.messages import Outcome, Point, Ready
from thinwire.elastic.plan import MOST_WEIGHT
from thinwire.elastic.rounds import Rounds
from thinwire.elastic.states import State
from thinwire.errors import CheckpointError, ConfigurationError, LinkError
from thinwire.exchange import AllReduce, Direct, TwoShot
from thinwire.membership.rendezvous import Membership
from thinwire.pieces.merge import Mix
from thinwire.pieces.policy import Constant
from thinwire.pieces.schedule import Schedule
from thinwire.runtime.fragment_state import FragmentState
from thinwire.runtime.handshake import digest
from thinwire.strategy import Gradients, Strategy

PATIENCE = 5  # views in a row that nobody else comes to, at the end of a run
_MOST_TOKENS = 1e12  # in a step: more is no number of tokens


class Elastic:
    """The main thread's side. `by_tokens`: what a delta counts, on all replicas alike."""

    def __init__(
        self,
        strategy: Strategy,
        membership: Membership,
        pieces: Sequence[FragmentState],
        observe: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        start_again: Callable[[], None] = lambda: None,
        thread: Executor | None = None,
        by_tokens: bool = False,
    ) -> None:
        self._schedule = check(strategy)
        self.by_tokens = by_tokens
        self.strategy, self.pieces, self._observe = strategy, pieces, observe
        self._waiting: dict[int, tuple[Ready, float]] = {}  # by fragment; and what was trained when it departed
        self._trained = 0.0  # by this replica: tokens, or steps
        self._travelled = [0.0] * len(pieces)  # of that, what the anchors have, by fragment
        self._owed: set[int] = set()  # fragments that were to depart when they could not
        self._seen: int | None = None  # the last step after which it was looked for what departs
        self._own_steps = 0  # inner steps of this replica
        self._at = Point()  # what the fragments hold
        anchors = [piece.anchor for piece in pieces]
        agreed = Agreed(anchors, [piece.state for piece in pieces], state_digest=digest(anchors).hex())
        codecs = [piece.codec for piece in pieces]
        self.rounds = Rounds(
            strategy,
            membership,
            agreed,
            codecs,
            in_turn(self._schedule, len(pieces)),
            observe=observe,
            most_weight=MOST_WEIGHT if by_tokens else 1.0,
            clock=clock,
            thread=thread,
        )
        self._start_again = start_again
        self._stop_requested = False

    def join(self, step: int) -> int:
        """Meet the others and take over what they hold; this replica's step then. Blocks.

        Raises `LinkError` where too few are there; then the membership is still open, for another try.
        """
        try:
            self.rounds.join(step)
        except BaseException as error:
            self.rounds.close(leave=not isinstance(error, LinkError))
            raise
        return self._pick_up(step)

    def after_step(self, step: int, tokens: float | None = None) -> int:
        """Depart what is due, pick up what has come; the step to go on from."""
        if self.by_tokens != (tokens is not None):
            raise ConfigurationError(
                "tokens of a step were given to a replica that began without, or the other way round: all replicas "
                "count alike or by tokens, from the first round on. Give Replica(tokens=...) at the beginning."
            )
        self._trained += tokens_of_step(tokens) if self.by_tokens else 1
        self._own_steps += 1
        self.rounds.trained(step)
        due = self._schedule.departs(step, len(self.pieces))
        late = [index for index in due if index in self._waiting]
        for index in late:
            self._observe("late", step, fragment=index)
        self._owed.update(late)
        made_up = [index for index in self._owed - self._waiting.keys() if index == self.rounds.report.next]
        leaving = dict.fromkeys([*self._missed(step), *due, *made_up])
        brought = [self._bring(index, step) for index in leaving if index not in self._waiting]
        if brought or late:
            self.rounds.depart(*brought, own_steps=self._own_steps)
        self._seen = step
        return self._pick_up(step)

    def _missed(self, step: int) -> list[int]:
        """Fragments that were to depart at steps which this replica stepped over, being behind; not what departs now."""
        seen = step - 1 if self._seen is None else self._seen
        over = range(max(seen, step - self._schedule.every) + 1, step)
        departs, count = self._schedule.departs, len(self.pieces)
        due = {index for s in over for index in departs(s, count)} - set(departs(step, count))
        return sorted(due - self._waiting.keys())

    def finish(self, step: int, keep_seconds: float = 0.0) -> None:
        """Take part until all have trained all their steps, and nobody has anything left to bring. See `Replica.finish`.

        Raises `LinkError` where the others are not heard for long; the anchors hold what was agreed until then.
        """
        late = step + self.strategy.schedule.delay
        while not self.rounds.over:
            self.rounds.wait(lambda: self.rounds.idle or self.rounds.over or self._stop_requested)
            self._pick_up(late)
            report = self.rounds.report
            if self.rounds.over:
                break
            if report.alone >= PATIENCE or self._stop_requested:
                why = "asked to stop." if self._stop_requested else report.reason
                raise LinkError(f"the last exchange was given up: {why} The anchors hold what was agreed until then.")
            if report.state in (State.TRAINING, State.IN_DOUBT):
                self.rounds.finish(keep_seconds)
            else:
                left = [i for i, travelled in enumerate(self._travelled) if travelled < self._trained]
                self.rounds.meet(*(self._bring(index, step) for index in left if index not in self._waiting))
        self._pick_up(late)

    @property
    def keeping(self) -> bool:
        """Whether this replica keeps the final state for those who are missing."""
        return self.rounds.report.state is State.KEEPING

    def request_stop(self) -> None:
        """At the end of a run, too, where it waits for others. From any thread."""
        self._stop_requested = True
        self.rounds.wake()

    def close(self) -> None:
        self.rounds.close()

    # ---- to be saved and to go on

    def facts(self) -> dict[str, Any]:
        """What to save beside the fragments' tensors, between inner steps: JSON. What is in the air is still in the parameters."""
        return {
            "turn": self._at.turn,
            "state_digest": self._at.state_digest,
            "run": self.rounds.report.run,
            "counted": {str(turn): who for turn, who in self._at.counted.items()},
            "by_tokens": self.by_tokens,
            "trained": self._trained,
            "travelled": self._travelled,
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Go on from `facts` and the fragments as they were saved with them. Nothing may have departed yet."""
        if facts["by_tokens"] != self.by_tokens:
            ways = {True: "the tokens behind it", False: "1"}
            raise CheckpointError(
                f"the checkpoint is of a run in which a delta counts {ways[facts['by_tokens']]}, here it counts "
                f"{ways[self.by_tokens]}; resume with the run's own setting."
            )
        agreed = Agreed([piece.anchor for piece in self.pieces], [piece.state for piece in self.pieces])
        agreed.load(facts)
        self._at = Point(agreed.turn, agreed.state_digest, dict(agreed.counted))
        self._trained, self._travelled = facts["trained"], list(facts["travelled"])
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
        ready = Ready(index, delta, weight, step, piece.feedback)
        self._waiting[index] = ready, self._trained
        self._owed.discard(index)
        self._observe("depart", step, fragment=index, round=piece.rounds, nbytes=0, seconds_spent=0.0)
        return ready

    def _pick_up(self, step: int) -> int:
        for outcome in self.rounds.outcomes(step):
            self._at = outcome.after
            if outcome.broken:
                self._observe(
                    "refused",
                    step,
                    fragment=outcome.fragment,
                    round=outcome.turn,
                    by=[],
                    reason="NaN or infinity in the delta",
                )
                self._start_again()
            if outcome.anchor is not None:
                self._take_over(outcome, outcome.anchor, step)
            if outcome.ready is not None and outcome.fragment in self._waiting:
                _, departed = self._waiting.pop(outcome.fragment)
                if outcome.counted is not None:
                    self._travelled[outcome.fragment] = departed
                elif outcome.after.turn == outcome.turn:  # its turn is still to come
                    self._owed.add(outcome.fragment)
        return max(step, self.rounds.report.step)

    @torch.no_grad()
    def _take_over(self, outcome: Outcome, anchor: Tensor, step: int) -> None:
        piece, counted, merge = self.pieces[outcome.fragment], outcome.counted, self.strategy.merge
        before, piece.anchor, piece.state = piece.anchor, anchor, outcome.state
        piece.rounds += 1
        if counted is not None:
            piece.feedback = outcome.feedback
        if counted is not None and isinstance(merge, Mix):
            flight, delay = step - counted.step, self.strategy.schedule.delay
            if flight == delay:
                for part, values in piece.slices(anchor):
                    merge.into(part, values.to(part.device))
            else:
                _land_late(piece, before - counted.delta, merge.alpha, delay / flight)
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


@torch.no_grad()
def _land_late(piece: FragmentState, departed: Tensor, alpha: float, due: float) -> None:
    """θ ← anchor + α·(departed − anchor) + κ·(θ − departed), κ = 1 − (1 − α)·due: as `Mix(alpha)` for the share `due` of the flight
    that was to be, and what was trained later is kept whole. `departed`: the parameters as they were then.
    """
    kept = 1 - (1 - alpha) * due
    rest = torch.lerp(piece.anchor, departed, alpha) - kept * departed
    for part, values in piece.slices(rest):
        part.copy_(kept * part.to(values) + values)


def in_turn(schedule: Schedule, fragments: int) -> list[int]:
    """All fragments in the order in which they first depart.

    >>> from thinwire import Staggered
    >>> in_turn(Staggered(every=10, offsets=(7, 3, 3)), 3)
    [1, 2, 0]
    """
    first: dict[int, None] = {}
    for step in range(1, 3 * schedule.every + 1):
        first |= dict.fromkeys(schedule.departs(step, fragments))
    return [*first, *(index for index in range(fragments) if index not in first)]


def tokens_of_step(tokens: object) -> float:
    """Raises `ConfigurationError` for what cannot be a number of tokens."""
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not 0 < tokens <= _MOST_TOKENS:
        raise ConfigurationError(
            f"tokens={tokens!r}: how many tokens an inner step of this replica has is needed, above 0 and at most {_MOST_TOKENS:.0e}."
        )
    return float(tokens)


def check(strategy: Strategy) -> Schedule:
    """Refuse what needs the same replicas in every round; the schedule is fine."""
    reason = ""
    exchange = strategy.exchange
    if not isinstance(exchange, Direct | TwoShot | AllReduce) or getattr(exchange, "feedback", None) is not None:
        reason = f"{exchange} remembers or names the replicas; Direct(), TwoShot() and AllReduce() do not"
    elif not isinstance(strategy.schedule, Schedule):
        reason = f"{strategy.schedule} counts from the beginning of a round, which a new replica has not seen"
    elif isinstance(strategy.signal, Gradients):
        reason = "Gradients() are exchanged at every step, and the replicas keep no anchors to go on from"
    elif strategy.privacy is not None:
        reason = f"{strategy.privacy} shares its noise among replicas that must all be there"
    elif not isinstance(strategy.policy, Constant):
        reason = f"{strategy.policy} counts rounds that all have seen"
    elif strategy.filters:
        reason = f"{', '.join(map(str, strategy.filters))} is fitted to a number of replicas, or keeps what all of them must agree on"
    elif not isinstance(strategy.merge, Mix):
        reason = f"{strategy.merge} needs rounds that take a whole period, no more and no less"
    elif strategy.feedback is not None and strategy.feedback.kappa:
        reason = f"{strategy.feedback} keeps the mean of all references, and so needs the same replicas in every round; kappa=0 does not"
    elif joins(strategy.codec):
        reason = f"{strategy.codec} divides by those who sent a value, where a delta may count more than another; the codec inside it does not"
    if reason:
        raise ConfigurationError(
            f"this strategy cannot run among replicas that come and go: {reason}. Choose another, or a fixed group."
        )
    assert isinstance(strategy.schedule, Schedule)
    return strategy.schedule
