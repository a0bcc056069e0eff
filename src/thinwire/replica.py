"""One replica: the face over a driver."""

from __future__ import annotations

import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from thinwire.comm.group import ElasticGroup, Group, GroupClaim
from thinwire.drivers.base import Driver, Training, anchored
from thinwire.drivers.inner_steps import InnerSteps, as_one, optimizers_of
from thinwire.drivers.loop_warnings import LoopWarnings, silent
from thinwire.drivers.model_buffers import SharedBuffers
from thinwire.drivers.module_state import export_state
from thinwire.errors import ConfigurationError
from thinwire.pieces.partition import Fragment
from thinwire.strategy import Strategy
from thinwire.types import Observer

if TYPE_CHECKING:
    from thinwire.data_ledger import LeasedReader

_NUMBER = struct.Struct("<d")


def choose(training: Training, fragments: list[Fragment], group: Group | ElasticGroup, site: Group | None) -> Driver:
    """The driver that this group and this strategy need; then call its `join`. Raises as `Replica`."""
    if isinstance(group, ElasticGroup):
        made: Driver = group.driver(training, fragments, site)
        return made
    if training.reader is not None:
        raise ConfigurationError(
            "reader= with a fixed group: it follows what members agree on; give a Membership, or read a share by rank."
        )
    exchange = training.strategy.exchange
    if not exchange.traits.agrees:
        without: Driver = exchange.driver(training, fragments, group, site)
        return without
    if training.strategy.exchanges_gradients:
        from thinwire.drivers.gradients import GradientDriver

        return GradientDriver(training, fragments, group, site)
    from thinwire.drivers.deltas import DeltaDriver

    return DeltaDriver(training, fragments, group, site)


class Replica:
    """Attach a strategy to a model, its optimizer and a group. The training loop does not change.

    A hook counts each call of `optimizer.step` as one inner step. Rounds depart and land inside that call.

    - **Entry**: the replicas compare code, strategy and model. If their weights differ, all start from those of replica 0.
    - **Clean exit**: rounds in flight land, one last round averages the training since then, and the model holds the anchors.
    - **The one rule**: every replica takes the same number of inner steps. Gradient accumulation, closures and schedulers work
      unchanged. To skip an update, call `step` with all gradients set to None.

    Parameters: frozen ones must be equal on all. Tied ones travel once. Any floating dtype is exchanged as fp32 and written back in its own
    dtype. The state of the inner optimizer stays local. Buffers are no part of a round: see `buffers`. FSDP1 is not supported; DDP is inside a site.
    Cost: 4 bytes per parameter for the anchor, 4 for Nesterov momentum, 4 for rounds in flight; a snapshot a departure, a merge a landing.

    Args:
        strategy: the method, as a composition of pieces.
        model: its parameters that require gradients are exchanged. `fully_shard` (FSDP2) comes before.
        optimizer: the inner optimizer, over these parameters; several in a list count one inner step when each has stepped once. A step that
             a GradScaler skips is none: train until `step` is the number you want (docs/torch-features.md).
        group: the replicas of a fixed group; with FSDP2 this rank and the same ranks of the other replicas. A `Membership` makes the
            run elastic (docs/elastic.md): `step` then jumps ahead if this replica was behind.
        site: the ranks of this replica, if it has several.
        tokens: tokens per inner step: a delta is then weighted by its tokens. None: all deltas count alike.
        reader: with a `Membership` only: where this replica reads its samples, each once an epoch in all (docs/data.md).
        buffers: with `mean` all start from replica 0's, and floating ones become the mean of all at the end and within `averaged_buffers`
            (4 bytes a value each time, if any differ). `local`, and with a `Membership`: each keeps its own; random ones need one seed.
        resume: is called with this replica to load a checkpoint into it; with a `Membership` before it meets the others (docs/elastic.md).
        validation: gives the model's losses on a few held-out batches, for a rule that weighs neighbours by them (`Bristle`). It is called on the
            main thread, in evaluation mode, without gradients.
        observer: is called as `observer(event, step, **fields)` at depart, flight, land, refused, wire (on another thread) and warning.
            Without it, warnings go to Python's `warnings`; that replicas began with different weights or buffers is not said then.
        clock: the time in seconds that events carry.

    Raises:
        ModelError: the model has nothing to train, or the optimizer holds other parameters.
        ConfigurationError: the strategy does not work with this group or this optimizer, or the group or optimizer has another Replica at work.
        DisagreementError: replicas differ in code, strategy, model, frozen parameters, or number of steps (which may close the group).
        LinkError: a replica was lost, or a link was cut.

    >>> import thinwire as tw
    >>> def train(group):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with tw.Replica(tw.diloco(every=5), model, optimizer, group) as replica:
    ...         for _ in range(10):
    ...             model(torch.ones(4, 2) * group.rank).square().mean().backward()
    ...             optimizer.step()  # counts an inner step; rounds depart and land here
    ...             optimizer.zero_grad()
    ...     return model.weight
    >>> torch.equal(*tw.run_threads(2, train))
    True
    """

    own_loop: ClassVar[Literal[False]] = False  # a method with its own loop says True

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        group: Group | ElasticGroup, *, site: Group | None = None, tokens: float | None = None,
        reader: LeasedReader | None = None, buffers: Literal["mean", "local"] = "mean",
        resume: Callable[[Replica], object] | None = None, validation: Callable[[], Sequence[float]] | None = None,
        observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.strategy, self.model, self.optimizer, self.group = strategy, model, as_one(optimizers_of(optimizer)), group
        self._site, self._finished, self._closed = site, False, False
        training, fragments = Training.of(strategy, model, self.optimizer, observer, clock, tokens, site)
        from thinwire.pieces import optimizer_attributes  # needed once there is an optimizer

        optimizer_attributes.begin(self.optimizer, model)
        self._buffers = SharedBuffers(buffers, model, group, training.frozen, training.warn)
        training.reader, training.validation, self._training = reader, validation, training
        self._claim = GroupClaim(group)
        with training.copies.following():
            training.copies.touched()
            self._driver = choose(training, fragments, group, site)
        for fragment in training.fragments:
            fragment.touched = training.copies.touched
        self._driver.join(lambda: _begin(self, observer, resume))
        training.frozen.begin()
        optimizers_of_replica = optimizers_of(optimizer)
        self._inner_steps = InnerSteps(optimizers_of_replica, training, self._driver)
        self._loop_warnings = LoopWarnings(self, model, observer, strategy.codec, self._buffers.local)
        last = optimizers_of_replica[-1]
        here = weakref.proxy(self)  # a hook of the optimizer must not keep this replica alive
        self._loop_warnings.check_after_first_step(last, lambda: _check_saves(here))
        self._claim.take(self._driver.gather)

    @property
    def step(self) -> int:
        """Inner steps taken."""
        return self._training.step

    @step.setter
    def step(self, step: int) -> None:
        self._training.step = step

    @property
    def tokens(self) -> float | None:
        """Tokens per inner step. Update it before a step with a different count."""
        return self._training.tokens

    @tokens.setter
    def tokens(self, tokens: float | None) -> None:
        self._training.tokens = tokens

    @property
    def stopping(self) -> bool:
        """Whether all replicas stop after this step, because one has requested it."""
        return self._training.stopping

    @property
    def agreed(self) -> bool:
        """Whether the outer weights are the same on all replicas: always, except in gossip before `finish`."""
        return self.strategy.exchange.traits.agrees or self._finished

    @property
    def seconds(self) -> float:
        """Seconds of the main thread in departures and landings, stalls included."""
        return self._inner_steps.seconds

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the main thread has waited for landings."""
        return self._training.stall_seconds

    @property
    def fragments(self) -> list[Fragment]:
        return [one.fragment for one in self._training.fragments]

    @property
    def in_flight(self) -> list[int]:
        """Indices of the fragments that are in flight."""
        return [one.index for one in self._training.fragments if one.flight]

    def request_stop(self) -> None:
        """Ask all replicas to stop at one step: `stopping` becomes true on all at the next landing. With a `Membership`: here, at once."""
        self._driver.request_stop()

    def exchange_gradients(self) -> None:
        """With `Gradients`: replace every gradient in place by the mean over all replicas (fp32, in rank order), or by None if any is not finite.
        A hook runs it before a step. Call it earlier to clip the mean; if no step follows, the next call raises `ModelError`.
        """
        self._inner_steps.exchange_early()

    def anchors(self) -> list[Tensor]:
        """The outer weights, one flat fp32 tensor per fragment. With `Gradients`: the parameters, which are equal on all replicas."""
        return list(self._driver.anchors())

    def anchored(self) -> AbstractContextManager[None]:
        """A context: inside it the model holds the outer weights; afterwards the replica's own weights again, bit for bit. Raises `ModelError` at
        its end if something else, such as a swap of averaged weights that crosses this one, has changed the model's weights meanwhile.
        """
        return anchored(self._driver)

    def averaged_buffers(self) -> AbstractContextManager[None]:
        """A context with the buffers that all will end with, and afterwards its own again. Collective in a fixed group with buffers="mean"."""
        return self._buffers.averaged(self._driver.gather)

    def mean(self, value: float) -> float:
        """The mean of `value`, such as a loss, over all replicas, with the same bits on each. Collective in a fixed group; else it is `value`."""
        return _mean(self._driver.gather(_NUMBER.pack(value), _NUMBER.size, "metric"))

    def export(self) -> dict[str, Any]:
        """The model's state dict with the outer weights (whole tensors, on the CPU), and extra state, if modules have any. With FSDP all ranks
        of a site must call it.
        """
        with self.anchored():
            return export_state(self.model)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a resume bit for bit needs besides the state dicts of model and inner optimizer: tensors (copy them to go back), facts for JSON. With
        what the optimizer holds in its attributes, such as an optimizer inside it. Raises `CheckpointError`, with the path of what cannot be saved.
        """
        from thinwire.drivers import stateful  # at the first save
        from thinwire.pieces import optimizer_attributes

        own = stateful.with_origin(self._driver.state(), self.strategy, self.group, self._site)
        return optimizer_attributes.with_attributes(own, self.optimizer, self.model)

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`, all at the same step; the caller has restored model and inner optimizer. With a `Membership`: in `resume`. In a
        fixed group all must call it. Raises `CheckpointError` (another model, strategy or replica), `DisagreementError` (different anchors).
        """
        from thinwire.drivers import stateful
        from thinwire.pieces import optimizer_attributes

        facts = stateful.check_origin(facts, self._training, self.group, self._site)
        self._driver.load_state(*optimizer_attributes.restore_from((tensors, facts), self.optimizer, self.model))
        self._training.frozen.begin()  # the model was loaded before

    def state_dict(self) -> dict[str, Any]:
        """`state()` for torch.distributed.checkpoint, whose `Stateful` a Replica is: under its own name, so that all may share a folder."""
        from thinwire.drivers import stateful

        return stateful.pack_state(stateful.owner(self.group, self._site), self.strategy, self.state())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """As `load_state`, from `state_dict()`; model and inner optimizer are loaded before it."""
        from thinwire.drivers import stateful

        self.load_state(*stateful.unpack_state(stateful.owner(self.group, self._site), self.strategy, saved))

    def finish(self, keep_seconds: float = 0.0) -> None:
        """Land the rounds in flight, exchange the training since then, leave the outer weights in the model, and close a `Membership`. If a member
        is missing, the first of the others keeps the final state for it, for `keep_seconds` or until `close`, on its own thread.
        """
        if self._finished:
            return
        if self._closed:
            raise ConfigurationError(
                "finish() after close(): a closed Replica exchanges nothing. Call finish() first, on all replicas, or neither: `with` does both."
            )
        self._loop_warnings.finishes(self.step)
        training = self._training
        with training.copies.following():
            over = self._inner_steps.finish(keep_seconds)
            self._driver.load_anchors()
        if training.copies.active and self.agreed:
            self._driver.load_anchors()  # schedule-free optimizers moved the weights back to another point
            training.copies.settle(training.anchor_of_each())
        self._buffers.average(self._driver.gather)
        self._finished = True
        if over:
            self.close()

    def close(self) -> None:
        """Detach from the optimizer and end the exchange threads. The group belongs to the caller and stays open."""
        self._closed = True
        self._claim.release(self._finished or not self.in_flight)
        self._loop_warnings.closes()
        self._inner_steps.close()
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._closed:  # the loop may end early with close(): then nothing is exchanged
                self.finish()
        finally:
            self.close()


def _check_saves(replica: Any) -> None:
    """Raise `CheckpointError` now if the first checkpoint would fail, and not hours later."""
    from thinwire import checkpoint

    checkpoint.check(replica, frozen=False)


def _mean(told: Sequence[bytes]) -> float:
    """The mean of packed numbers; equal ones do not change."""
    numbers: list[float] = [_NUMBER.unpack(one)[0] for one in told]
    return numbers[0] if len(set(numbers)) == 1 else sum(numbers) / len(numbers)


def _begin(replica: Replica, observer: Observer, resume: Callable[[Replica], object] | None) -> None:
    replica._buffers.begin(observer)
    if resume:
        resume(replica)
