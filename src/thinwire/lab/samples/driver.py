"""Drives a replica that trains when it is in the sample of a round (Plexus), before and after its inner steps.

    the model of a round arrives:   a, v ← the message;   θ ← a
    after H inner steps:            Δ = a − θ,   (a, v) ← outer step on Δ,   which go to the aggregators

The outer step is linear, so the mean of the participants' (a, v) is the outer step on the mean of their Δ. Momentum travels with the model,
and an aggregator only takes a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Identity
from thinwire.comm.group import Group, GroupClaim
from thinwire.drivers.attached import Attached
from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.handshake import agree_on_start, check_start
from thinwire.drivers.module_state import clear
from thinwire.drivers.step_hooks import outermost
from thinwire.errors import CheckpointError, ConfigurationError, LinkError, PeerError
from thinwire.lab.robust.coordinates import mean_of
from thinwire.lab.samples.composition import SampleComposition
from thinwire.lab.samples.host import PeerHost
from thinwire.lab.samples.messages import PeerMessage, SampleMessages
from thinwire.lab.samples.peer import SampledPeer
from thinwire.lab.samples.peer_view import PeerView
from thinwire.lab.samples.rules import Train
from thinwire.types import Observer


class PlexusReplica(Attached):
    """The loop of `Plexus` on one replica.

    ```python
    trained = plexus(every=30, sample=3).attach(model, optimizer, group)
    while trained.progress < steps and not trained.stopping:
        if trained.idle:                                       # not in the sample of a round
            trained.skip()                                     # waits until it is, or the run ends
            continue
        model(next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.finish()                                           # all hold the same weights
    ```

    `step` counts the inner steps of the run, also those of rounds in which this replica did not train.
    """

    own_steps = True
    strategy: SampleComposition  # the `Plexus` that attached it

    def __init__(
        self, method: SampleComposition, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, None, observer, clock)
        self._claim = GroupClaim(group)
        self.introduce({})
        self._one = FragmentState(self.fragments[0], 0, torch.empty(self.fragments[0].numel), {}, {}, Identity())
        self._one.snapshot(self._one.anchor)
        agree_on_start(group, [self._one.anchor], observer)
        check_start(self.fragments, [self._one.anchor])
        self._one.state = method.outer.init(self._one.anchor)
        self._one.load_into_parameters(self._one.anchor)
        self._round, self._since, self._training, self._finished = 0, 0, False, False
        wire = SampleMessages(group.size, self._model().numel())
        view = PeerView.of(range(group.size))
        peer = SampledPeer(group.rank, method.rules, view, mean_of, method.seed)
        self._host = PeerHost(group, wire, peer, clock, self._warn)
        self._hook = optimizer.register_step_post_hook(outermost(lambda *_: self._after_step()))
        peer.start(1, 0, self._model())
        self._claim.take()
        self._host.start()
        if group.rank in view.order(1, 1)[: method.sample]:
            self._next()

    @property
    def evaluated(self) -> str:
        return "anchors" if self._finished else "start"

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return not self._training

    @property
    def share(self) -> float:  # type: ignore[override]
        return min(1.0, self.strategy.sample / self.group.size)

    def _warn(self, message: str) -> None:
        self._observe("warning", self.step, message=message)

    def skip(self) -> None:
        """Wait until this replica is in a sample, or the run ends. Raises `LinkError`."""
        began = self._clock()
        self._next()
        self.stall_seconds += self._clock() - began
        self.seconds += self._clock() - began

    # ---- around an inner step

    @torch.no_grad()
    def _after_step(self) -> None:
        began = self._clock()
        self.step += 1
        if self.step - self._since == self.strategy.every:
            self._depart(self._stop_requested)
        while not self._host.work.empty():  # a newer round: training from an older one no longer counts
            self._next()
        self.seconds += self._clock() - began

    def _depart(self, stop: bool) -> None:
        """Take the outer step, and send the result to the aggregators."""
        one, taken = self._one, self.step - self._since
        if not one.finite():
            self._warn("this round gave NaN or infinity in the weights; its training counts as zero")
            clear(self.model, self.optimizer)
            one.load_into_parameters(one.anchor)
        model = self._model()
        if taken:
            outer = self.strategy.outer if taken == self.strategy.every else self.strategy.outer.last
            anchor, state = outer.step(one.anchor, one.delta(torch.empty_like(one.anchor)), one.state)
            model = torch.cat([anchor, *state.values()])
        self._training = False
        self._host.trained(self._round, self.step, model, stop)

    def _model(self) -> Tensor:
        return torch.cat([self._one.anchor, *self._one.state.values()])

    @torch.no_grad()
    def _next(self) -> None:
        """Wait for work, and begin it. Raises `LinkError` if none can come."""
        work = self._host.work.get()
        if isinstance(work, PeerError):
            self._host.work.put(work)
            raise LinkError(str(work)) from work
        self._adopt(work.message)
        self._training = isinstance(work, Train)
        self.stopping |= not self._training

    def _adopt(self, message: PeerMessage) -> None:
        one, numel = self._one, self._one.anchor.numel()
        one.anchor = message.model[:numel].clone()
        one.state = {name: message.model[numel:].clone() for name in one.state}
        one.load_into_parameters(one.anchor)
        self._round, self.step, self._since = message.round, message.step, message.step

    # ---- the end

    @torch.no_grad()
    def finish(self) -> None:
        """Send the trained model of the run's last round, and take the final model."""
        while not self.stopping:
            if self._training:
                self._depart(True)
            self._next()
        self._finished = True
        self.close()

    def close(self) -> None:
        self._hook.remove()
        if self.stopping:
            self._host.wait()
        self._host.close()
        self._claim.release(self.stopping)  # otherwise messages of this run may still come

    # ---- the agreed model

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which the model holds the weights with which this replica's last round began."""
        own = self._one.snapshot(torch.empty_like(self._one.anchor))
        self._one.load_into_parameters(self._one.anchor)
        try:
            yield
        finally:
            self._one.load_into_parameters(own)

    # ---- save and resume

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        raise ConfigurationError("replicas that train in samples keep their group; start a new run.")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The model of this replica's last round and its momentum."""
        return {"model": self._model()}, {"step": self.step, "round": self._round}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Always raises `CheckpointError`: no replica knows which of them has the newest model."""
        raise CheckpointError(
            "a run of plexus cannot be resumed, because no replica knows who had its newest model; begin a new run from an exported model."
        )
