"""One replica: the face over a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group
from thinwire.elastic.driver import join
from thinwire.membership.rendezvous import Membership
from thinwire.observer import Observer
from thinwire.pieces.partition import Fragment
from thinwire.runtime.delta_driver import DeltaDriver
from thinwire.runtime.driver import Driver, Training, anchored
from thinwire.runtime.gradient_driver import GradientDriver
from thinwire.runtime.inner_steps import InnerSteps, as_one, listed
from thinwire.runtime.loop_warnings import LoopWarnings, silent
from thinwire.runtime.module_state import exported
from thinwire.runtime.stateful import owner, packed, unpacked
from thinwire.strategy import Gradients, Strategy


def choose(training: Training, fragments: list[Fragment], group: Group | Membership, site: Group | None) -> Driver:
    """The driver that this group and this strategy need, having met the others. Raises as `Replica`."""
    if isinstance(group, Membership):
        return join(training, fragments, group, site)
    kind = GradientDriver if isinstance(training.strategy.signal, Gradients) else DeltaDriver
    return kind(training, fragments, group, site)


class Replica:
    """Attach a strategy to a model, its optimizer and a group; the training loop stays as it is.

    ```python
    with Replica(streaming_diloco(every=100, delay=5), model, optimizer, group):
        for batch in data:
            model(batch).loss.backward()
            optimizer.step()          # counts an inner step; departures and landings happen here
            optimizer.zero_grad()
    ```

    On entry the replicas compare code, strategy and model, and all start from replica 0's weights if theirs differ. On a clean exit
    rounds in the air land, one last round averages what was trained since, and the model holds the outer weights (the anchors).

    *Every replica must take the same number of inner steps*: one call of `optimizer.step` is one; of several optimizers in a list, one of each.
    What a GradScaler skips is none: such a loop goes on until `step` is what it shall be (docs/torch-features.md).

    With a `Membership` in place of a group replicas may come and go (docs/elastic.md): `step` jumps ahead where this replica was behind.
    `tokens` per inner step, updated before a step with a different count, makes a delta count by its tokens; without, all count alike.

    Parameters: frozen ones are left alone, tied ones travel once, any floating dtype is exchanged as fp32 and written back in its own.
    Buffers and inner optimizer state stay local. Parameters sharded by FSDP2 (`fully_shard`) are exchanged shard by shard: `group` joins a
    rank with its twins in the other replicas, `site` the ranks of this replica. FSDP1 and DDP are not supported.
    Cost: 4 bytes a parameter for the anchor, 4 for Nesterov momentum, 4 for rounds in the air; a snapshot at departure, a merge at landing.

    `observer(event, step, **fields)` hears depart, flight, land, refused, wire and warning events (wire on another thread); times are `clock()`'s.
    Without one, warnings go to Python's. Raises `ModelError` (a model that cannot be trained so), `DisagreementError`, `LinkError`.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        group: Group | Membership,
        *,
        site: Group | None = None,
        tokens: float | None = None,
        observer: Observer = silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        optimizers = listed(optimizer)
        self.strategy, self.model, self.optimizer, self.group = strategy, model, as_one(optimizers), group
        self._finished, self._site, sharded = False, site, site is not None
        self._training, fragments = Training.of(strategy, model, self.optimizer, observer, clock, tokens, sharded)
        self._driver = choose(self._training, fragments, group, site)
        self._inner_steps = InnerSteps(optimizers, self._training, self._driver)
        self._loop_warnings = LoopWarnings(self, model, observer)

    @property
    def step(self) -> int:
        """Inner steps taken."""
        return self._training.step

    @step.setter
    def step(self, step: int) -> None:
        self._training.step = step

    @property
    def tokens(self) -> float | None:
        """Of an inner step from now on."""
        return self._training.tokens

    @tokens.setter
    def tokens(self, tokens: float | None) -> None:
        self._training.tokens = tokens

    @property
    def stopping(self) -> bool:
        """Whether all replicas stop at this step, because one has asked."""
        return self._training.stopping

    @property
    def seconds(self) -> float:
        """Of the main thread in departures and landings, stalls included."""
        return self._inner_steps.seconds

    @property
    def stall_seconds(self) -> float:
        """How long the main thread has waited for landings."""
        return self._training.stall_seconds

    @property
    def fragments(self) -> list[Fragment]:
        return [one.fragment for one in self._training.fragments]

    @property
    def in_flight(self) -> list[int]:
        """Indices of the fragments that are in the air."""
        return [one.index for one in self._training.fragments if one.flight]

    def request_stop(self) -> None:
        """All replicas are to stop at one step: `stopping` becomes true on all at the next landing; with a `Membership` here, now."""
        self._driver.request_stop()

    def exchange_gradients(self) -> None:
        """With `Gradients`: replace every gradient by the mean of all replicas' (fp32, in rank order), in place.

        Runs by itself before the optimizer's step; call it earlier where the mean is needed earlier, as before clipping. If
        any replica's gradient is not finite, all gradients become None on all replicas and the step changes nothing.
        """
        self._inner_steps.exchange_gradients()

    def anchors(self) -> list[Tensor]:
        """The outer weights, flat and in fp32, a tensor a fragment (with `Gradients`: the parameters, which are equal everywhere)."""
        return list(self._driver.anchors())

    def anchored(self) -> AbstractContextManager[None]:
        """Within: the model holds the outer weights, for evaluation. After: the replica's own again, bit for bit."""
        return anchored(self._driver)

    def export(self) -> dict[str, Tensor]:
        """The model's state dict with the outer weights (whole tensors, on the CPU). With FSDP all ranks of a site must call it."""
        with self.anchored():
            return exported(self.model)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that is needed beside model and inner optimizer to go on bit for bit, rounds in the air too: tensors, and facts for JSON."""
        return self._driver.state()

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`, all at the same step; model and inner optimizer are the caller's. Collective in a fixed group.

        Raises `CheckpointError` (of another model or strategy), `DisagreementError` (replicas loaded different anchors).
        """
        self._driver.load_state(tensors, facts)

    def state_dict(self) -> dict[str, Any]:
        """`state()` for torch.distributed.checkpoint, whose `Stateful` a Replica is: under its own name, so that all may share a folder."""
        return packed(owner(self.group, self._site), self.strategy, self.state())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """As `load_state`, from `state_dict()`; model and inner optimizer are loaded before it."""
        self.load_state(*unpacked(owner(self.group, self._site), self.strategy, saved))

    def finish(self, keep_seconds: float = 0.0) -> None:
        """Land what is in the air, exchange what was trained since, and leave the outer weights in the model.

        With `keep_seconds` among replicas that come and go: if one is missing at the end, the first of the others keeps the final
        state for it so long, on a thread beside what comes next, until `close`; its membership is closed when it is over.
        """
        if self._finished:
            return
        self._finished = True
        self._loop_warnings.finishes(self.step)
        over = self._driver.finish(keep_seconds)
        self._driver.load_anchors()
        if over:
            self.close()

    def close(self) -> None:
        """Detach from the optimizer and end the exchange threads. The group stays open; it is the caller's."""
        self._loop_warnings.closes()
        self._inner_steps.close()
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()
