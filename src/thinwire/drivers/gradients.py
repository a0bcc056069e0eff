"""The driver for gradients in a fixed group: replicas exchange them before every inner step, so their parameters stay equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group
from thinwire.drivers.base import Training
from thinwire.drivers.flight import Flight
from thinwire.drivers.flights import FixedGroupDriver, Flights
from thinwire.drivers.handshake import agree_on_resume, agree_on_weights, digest
from thinwire.drivers.module_state import gradient, put_gradient, reshard, separate_gradients
from thinwire.errors import ModelError, NonFiniteError
from thinwire.pieces.partition import Fragment

STEPS_BETWEEN_COMPARISONS = 100  # steps between two comparisons of the weights, which should be equal
_DRIFTED = (
    "the weights of the replicas have drifted apart: their processors or optimizers round differently, or their learning rates differ. All take "
    f"replica 0's now, and again if they differ (compared every {STEPS_BETWEEN_COMPARISONS} steps); "
    "thinwire.pieces.inner_optimizers.SGD(...).make(...) steps alike on all processors."
)


class GradientDriver(FixedGroupDriver):
    """Replaces every gradient by the mean of all replicas' (fp32, in rank order) before the optimizer steps. See `Driver`, `Flights`.

    If any replica's gradient is not finite, all gradients become None on all replicas and the step changes nothing.
    """

    uses_gradients: bool = True

    def __init__(self, training: Training, fragments: list[Fragment], group: Group, site: Group | None) -> None:
        self.training, self._group = training, group
        self._flights = Flights(training, fragments, group, site)
        self._stepped = Stepped(training.model, training.weights, group, training.warn, self._flights.together)
        self._exchanged = False  # whether the gradients of the next step are exchanged

    @torch.no_grad()
    def before_inner_step(self, closure: bool) -> None:
        """Raises `ModelError` if the optimizer was given a closure, `NonFiniteError` if own weights are not finite."""
        if closure:  # a closure would compute new gradients after the exchange
            raise ModelError(
                "step(closure) with Gradients(): gradients are exchanged before the step; call the closure first, then step() without it."
            )
        if self._exchanged:
            return
        self._exchanged = True
        training, buffers = self.training, self._flights.buffers
        separate_gradients(parameter for one in training.fragments for _, parameter in one.fragment.parameters)
        for fragment in training.fragments:
            delta = buffers.like(fragment.anchor)
            partial = any(parameter.grad is None for _, parameter in fragment.fragment.parameters)
            for (_, parameter), (_, into) in zip(fragment.fragment.parameters, fragment.slices(delta)):
                into.copy_(gradient(parameter))
            state = fragment.begin_round(training.strategy, delta, training.step, partial=partial)
            self._flights.depart(Flight(state, buffers), training.clock())
        flights = [fragment.flight for fragment in training.fragments if fragment.flight]
        for flight in flights:
            self._flights.land(flight)
        refused = not all(flight.good for flight in flights)
        for flight in flights:
            self._take(flight, refused)
            self._flights.landed(flight)
        if refused:
            self._stepped.check()

    def _take(self, flight: Flight, refused: bool) -> None:
        """Write the mean into the gradients, or None if a round of this step was `refused`."""
        mean = flight.fragment.anchor if flight.anchor is None else flight.anchor
        for (_, parameter), (_, values) in zip(flight.fragment.fragment.parameters, flight.fragment.slices(mean)):
            # Parameters without a gradient send zeros; if there are some, and the mean is exactly zero, all replicas skip them.
            if refused or (flight.partial and not bool(values.any())):
                parameter.grad = None
            else:
                put_gradient(parameter, values)
        if refused:
            flight.discard()
        else:
            flight.commit()

    def after_inner_step(self) -> None:
        self._exchanged = False
        self._stepped.after(self.training.step)

    def finish(self, keep_seconds: float) -> bool:
        """Exchanges nothing, because there are no flights; but the weights with which all end are compared."""
        self._flights.finish()
        self._flights.agree()
        if self._group.size > 1:
            self._stepped.compare()
        return True

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self.training.state()
        return tensors, facts | {"weights": self._stepped.facts()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._flights.load_state(tensors, facts)
        alike = self._stepped.resume(facts.get("weights", {}))
        self._flights.together(lambda group: agree_on_resume(group, self.training.step, alike), "load_state")

    def anchors(self) -> list[Tensor]:
        """The parameters, which are equal on all replicas."""
        return [one.snapshot(torch.empty_like(one.anchor)) for one in self.training.fragments]

    def load_anchors(self) -> None:
        """Does nothing, because the model holds the anchors."""


class Stepped:
    """Compares the weights of replicas that step with their own optimizers, from equal gradients. Processors may round differently. So
    the weights are compared regularly, and if they differ, all replicas take replica 0's; `say` is called the first time.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Callable[[], Sequence[Tensor]],
        group: Group,
        say: Callable[[str], None],
        together: Callable[[Callable[[Group], tuple[bytes, bool]], str], tuple[bytes, bool]] | None = None,
    ) -> None:
        self._model, self._weights, self._group, self._say = model, weights, group, say
        self._together = together or (lambda task, what: task(group))
        self._alike = digest(weights())  # digest of the weights at the last comparison
        self._drifted = False

    def after(self, step: int) -> None:
        """Called when all replicas have taken inner step `step`."""
        if step % STEPS_BETWEEN_COMPARISONS == 0:
            self.compare()

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the weights. Collective. 24 bytes to each other replica; if they differ, also the weights, from replica 0 to each."""
        weights = self._weights()
        self._alike, differ = self._together(
            lambda group: agree_on_weights(group, weights, "comparison"), "the comparison of weights"
        )
        if differ:
            reshard(self._model)
            if not self._drifted:
                self._say(_DRIFTED)
            self._drifted = True

    def check(self) -> None:
        """Raise `NonFiniteError` if this replica's weights are not finite, because there is no anchor to restart from."""
        if not all(bool(torch.isfinite(weight).all()) for weight in self._weights()):
            raise NonFiniteError(
                f"the weights of replica {self._group.rank} hold NaN or infinity, and data-parallel training keeps no "
                "anchors to restart from; resume from the last checkpoint."
            )

    def facts(self) -> dict[str, str]:
        """The state to save, for JSON."""
        return {"alike": self._alike.hex(), "own": digest(self._weights()).hex()}

    def resume(self, facts: Mapping[str, str]) -> bytes:
        """Resume from `facts`. Returns the digest that must be equal on all replicas: `alike`, or that of the weights if they are not the
        saved ones."""
        own = digest(self._weights())
        self._alike = bytes.fromhex(facts["alike"]) if facts.get("own") == own.hex() else own
        return self._alike
