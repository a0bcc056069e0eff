"""A replica whose group may change: what its main thread does between inner steps.

Departures hand a delta to `Rounds`; outcomes are picked up when they are there, and never waited for. What has been trained
since a delta departed is always kept:

    on time, own delta counted    parameters ← as the strategy merges
    late, own delta counted       parameters ← parameters + (anchor′ − anchor) + delta     (its part is in anchor′ now)
    not counted, or caught up     parameters ← parameters + (anchor′ − anchor)             (the delta stays what it was)
    new, or back from long ago    parameters ← anchor′

"Late" is later than `delay` inner steps after departure. A fragment whose round is not over when it should depart again stays
at home this time; its progress travels in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor

from thinwire.contact import digest
from thinwire.errors import ConfigurationError, LinkError
from thinwire.exchange import AllReduce, Direct, TwoShot
from thinwire.group.roster import Roster
from thinwire.held import Held
from thinwire.merge import Mix
from thinwire.policy import Constant
from thinwire.rounds import NOTHING, Agreed, Outcome, Ready, Rounds
from thinwire.strategy import Gradients, Strategy

PATIENCE = 5  # musters in a row that nobody else comes to, at the end of a run
_POLL = 0.02  # seconds between looks for an outcome, at the end of a run


class Elastic:
    """The main thread's side. `fresh`: this replica holds random weights; whoever has trained is right."""

    def __init__(
        self,
        strategy: Strategy,
        roster: Roster,
        pieces: Sequence[Held],
        observe: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        start_again: Callable[[], None] = lambda: None,
        thread: Executor | None = None,
    ) -> None:
        check(strategy)
        self.strategy, self.pieces, self._observe = strategy, pieces, observe
        self._waiting: dict[int, tuple[Ready, int]] = {}  # by fragment; and the own steps when it departed
        self._counted = [0] * len(pieces)  # own steps that have travelled
        self._own_steps = 0
        self._at = (0, "")  # turn and chain of what the fragments hold
        agreed = Agreed([piece.anchor for piece in pieces], [piece.state for piece in pieces])
        agreed.chain = digest(agreed.anchors).hex()
        codecs = [piece.codec for piece in pieces]
        self.rounds = Rounds(
            strategy, roster, agreed, codecs, fresh=True, observe=self._hear, clock=clock, thread=thread
        )
        self._start_again = start_again

    def join(self, step: int) -> int:
        """Meet the others and take over what they hold; this replica's step then. Blocks."""
        self.rounds.step = step
        self.rounds.join()
        return self._pick_up(step)

    def after_step(self, step: int) -> int:
        """Depart what is due, pick up what has come; the step to go on from."""
        self._own_steps += 1
        self.rounds.jury.own_steps = self._own_steps
        self.rounds.step = max(step, self.rounds.step)
        for index in self.strategy.schedule.departs(step, len(self.pieces)):
            if index in self._waiting:
                self._observe("late", step, fragment=index)
            else:
                self._depart(index, step)
        return self._pick_up(step)

    def finish(self, step: int) -> None:
        """Take part until all have trained all their steps, and each fragment has travelled once more.

        Raises `LinkError` where the others are not heard for long; the anchors hold what was agreed until then.
        """
        self.rounds.finishing = True
        while not self.rounds.over:
            if self.rounds.idle:
                brought = [self.rounds.wanted] if self.rounds.wanted >= 0 else self.rounds.unsettled
                if brought and not self._waiting:
                    self._depart(brought[0], step)
                else:  # nothing left; or in doubt about the last round, which the next claims end
                    self.rounds.depart(NOTHING)
            self._pick_up(step + self.strategy.schedule.delay)
            if self.rounds.alone >= PATIENCE:
                raise LinkError(
                    f"the last exchange was given up: {self.rounds.why_alone} The anchors hold what was agreed until then."
                )
            time.sleep(_POLL)
        self._pick_up(step + self.strategy.schedule.delay)

    def close(self) -> None:
        self.rounds.close()

    # ---- to be saved and to go on

    def facts(self) -> dict[str, Any]:
        """What to save beside the fragments' tensors, between inner steps: JSON. What is in the air is still in the parameters."""
        turn, chain = self._at
        counted = {str(t): who for t, who in dict(self.rounds.agreed.counted).items() if t < turn}
        return {
            "turn": turn,
            "chain": chain,
            "counted": counted,
            "own_steps": self._own_steps,
            "carried": self._counted,
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Go on from `facts` and the fragments as they were saved with them. Nothing may have departed yet."""
        agreed = self.rounds.agreed
        agreed.anchors, agreed.states = [piece.anchor for piece in self.pieces], [piece.state for piece in self.pieces]
        agreed.load(facts)
        self._at = agreed.turn, agreed.chain
        self.rounds.saved_at, self.rounds.fresh = agreed.turn, False
        self._own_steps, self._counted = facts["own_steps"], list(facts["carried"])

    # ---- both ways

    @torch.no_grad()
    def _depart(self, index: int, step: int) -> None:
        piece = self.pieces[index]
        weight = 1.0 if self._own_steps > self._counted[index] else 0.0
        delta = piece.delta(torch.empty_like(piece.anchor))
        ready = Ready(index, delta, weight, step, piece.feedback)
        self._waiting[index] = ready, self._own_steps
        self.rounds.depart(ready)
        self._observe("depart", step, fragment=index, round=piece.rounds, nbytes=0, seconds_spent=0.0)

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
                    self._counted[outcome.fragment] = departed
        return max(step, self.rounds.step)

    @torch.no_grad()
    def _take_over(self, outcome: Outcome, anchor: Tensor, step: int) -> None:
        piece, counted, merge = self.pieces[outcome.fragment], outcome.counted, self.strategy.merge
        before, piece.anchor, piece.state = piece.anchor, anchor, outcome.state
        piece.rounds += 1
        if counted is not None:
            piece.feedback = outcome.feedback
        if counted is not None and step == counted.step + self.strategy.schedule.delay and isinstance(merge, Mix):
            for part, values in piece.slices(anchor):
                merge.into(part, values.to(part.device))
            return
        if outcome.anew:
            piece.load_into_parameters(anchor)
            self._counted[outcome.fragment] = self._own_steps
            return
        moved = anchor - before
        if counted is not None:
            moved += counted.delta
        for part, values in piece.slices(moved):
            part.copy_(part.to(values) + values)

    def _hear(self, event: str, **fields: Any) -> None:
        self._observe(event, self.rounds.step, **fields)


def check(strategy: Strategy) -> None:
    """Refuse what needs the same replicas in every round."""
    reason = ""
    exchange = strategy.exchange
    if not isinstance(exchange, Direct | TwoShot | AllReduce) or getattr(exchange, "feedback", None) is not None:
        reason = f"{exchange} remembers or names the replicas; Direct(), TwoShot() and AllReduce() do not"
    elif isinstance(strategy.signal, Gradients):
        reason = "Gradients() are exchanged at every step, and the replicas keep no anchors to go on from"
    elif not isinstance(strategy.policy, Constant):
        reason = f"{strategy.policy} counts rounds that all have seen"
    elif not isinstance(strategy.merge, Mix):
        reason = f"{strategy.merge} counts own deltas before the others have them"
    elif strategy.feedback is not None and strategy.feedback.kappa:
        reason = f"{strategy.feedback} keeps the mean of all references, and so needs the same replicas in every round; kappa=0 does not"
    if reason:
        raise ConfigurationError(
            f"this strategy cannot run among replicas that come and go: {reason}. Choose another, or a fixed group."
        )
