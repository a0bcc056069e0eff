"""A communication hook for torch.nn.parallel.DistributedDataParallel: its buckets travel as a strategy says.

Each bucket is exchanged as soon as DDP has filled it, on the exchange threads, while backward goes on.
"""

# Annotations are evaluated here: DDP looks at those of a hook.
import math
import warnings
from collections.abc import Mapping
from concurrent.futures import Future as Landing
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported without saying so
from torch.utils.hooks import RemovableHandle

from thinwire.codecs import in_full
from thinwire.comm.group import Group
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.own_files import digests
from thinwire.pieces.partition import Fragment, Whole, trainable
from thinwire.runtime.fragment_state import FragmentState, hold
from thinwire.runtime.gradient_driver import Stepped
from thinwire.runtime.handshake import compare_settings
from thinwire.runtime.pipeline import RoundPipeline
from thinwire.runtime.update import RoundUpdate
from thinwire.strategy import Gradients, Strategy


class GradientHook:
    """Run a strategy that exchanges `Gradients()` inside DDP.

    ```python
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = GradientHook(dgc(clip=0.0), model, TorchGroup(process_group, timeout=60.0))
    hook.register(ddp, hook.strategy.inner.make(model, lr=1e-3, weight_decay=0.1))
    ```

    A DDP bucket is what elsewhere is a fragment. The first step travels in fp32, since DDP cuts its buckets anew after it; what filters and
    feedback remember follows each parameter into its new bucket. A step in which any replica's gradient is not finite changes none of
    that, and leaves NaN in the gradients of that bucket, on all replicas alike, as plain DDP would: skip it. The `group` must be one of
    its own: DDP's messages and the packets must not mix. Buckets are exchanged in fp32 and written back in their own dtype.
    Weights are compared after every hundredth step, and are replica 0's where they have drifted apart (`Gradients`).

    `state()` and `load_state()` keep what each parameter's filters and feedback remember (what the owners of a `TwoShot(Feedback())` hold back
    is not kept, nor what `AllReduce` goes on from: lost at a resume). Raises `ConfigurationError`, `DisagreementError`; backward raises `LinkError`.
    """

    def __init__(self, strategy: Strategy, model: nn.Module, group: Group) -> None:
        if not isinstance(strategy.signal, Gradients) or strategy.partition != Whole():
            raise ConfigurationError(
                f"{strategy.signal} in fragments by {strategy.partition}: DDP exchanges Gradients(), in buckets that it cuts itself; choose a "
                "strategy of gradients, with the partition Whole(), or attach a Replica in place of DDP."
            )
        if any(one.needs_whole for one in strategy.filters):
            raise ConfigurationError(
                f"{strategy.filters} in DDP's buckets: Clip would see a bucket and needs the norm of the whole gradient; choose clip=0."
            )
        self.strategy, self.group = strategy, group
        self.steps = 0  # that were exchanged
        self._first = True  # of this hook: DDP cuts its buckets anew after it
        compare_settings(group, {"strategy": repr(strategy)} | digests(strategy))
        strategy.warm_up()
        self._named = {id(parameter): (name, parameter) for name, parameter in trainable(model)}
        self._stepped = Stepped(model, lambda: [p.detach() for _, p in self._named.values()], group, warnings.warn)
        self._pipeline = RoundPipeline(strategy, group, None)
        self._pieces: dict[tuple[str, ...], FragmentState] = {}
        self._remembered: dict[str, Tensor] = {}  # by parameter and what it is, for buckets still to come
        self._landed: list[RoundUpdate] = []  # of this step
        self._hooks: list[RemovableHandle] = []

    def register(self, ddp: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Have `ddp` exchange its buckets by this hook from now on. Raises `ConfigurationError` if `optimizer` does not go with it."""
        self.strategy.check_inner(optimizer, sharded=False)
        ddp.register_comm_hook(self, GradientHook.exchange)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._stepped.after(self.steps)))

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook: what comes back is done when the bucket holds the estimate of the mean."""
        buffer, last = bucket.buffer(), bucket.is_last()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.device.type == "cuda" else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        piece = self._piece(bucket)
        delta = buffer.detach().to("cpu", torch.float32, copy=True)
        codec = in_full(piece.codec) if self._first else None
        buffers = self._pipeline.context.buffers
        update = piece.begin_round(self.strategy, delta, self.steps, buffers, number=self.steps, codec=codec)
        self._pipeline.launch(update)
        if last:
            self.steps, self._first = self.steps + 1, False

        def land(landing: Landing[None]) -> None:
            try:
                landing.result()
                self._land(update, buffer, last)
            except BaseException as error:
                done.set_exception(error)  # type: ignore[arg-type]  # whatever it is, DDP waits for it
            else:
                done.set_result(buffer)

        update.arrival.add_done_callback(land)
        return done

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What to save between two steps: tensors by name, and facts for JSON."""
        tensors = dict(self._remembered)
        for piece in self._pieces.values():
            tensors |= _by_parameter(piece)
        return tensors, {"steps": self.steps}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`, before the first step. Raises `CheckpointError`."""
        known = {name.partition("/")[0] for name in tensors} <= {name for name, _ in self._named.values()}
        if self._pieces or not known:
            raise CheckpointError(
                "the state of another model, or after the first step, was given; load it into a new GradientHook of the run's own model."
            )
        self._remembered, self.steps = dict(tensors), int(facts["steps"])

    def close(self) -> None:
        """End the exchange threads. The group stays open; it is the caller's."""
        for hook in self._hooks:
            hook.remove()
        self._pipeline.close()

    @torch.no_grad()
    def _land(self, update: RoundUpdate, buffer: Tensor, last: bool) -> None:
        """On the thread on which rounds land, one after another in the order of departure."""
        if update.good and update.anchor is not None:
            buffer.copy_(update.anchor)
        else:
            buffer.fill_(math.nan)
        self._landed.append(update)
        if last:
            good = all(one.good for one in self._landed)
            for one in self._landed:
                if good:
                    one.commit()
                else:
                    one.discard()
            self._landed = []

    def _piece(self, bucket: GradBucket) -> FragmentState:
        """What is remembered for a bucket of these parameters; made where DDP has cut anew."""
        parameters = tuple(self._named[id(p)] for p in bucket.parameters())
        names = tuple(name for name, _ in parameters)
        if names not in self._pieces:
            for others in [key for key in self._pieces if set(key) & set(names)]:
                self._remembered |= _by_parameter(self._pieces.pop(others))
            fragment = Fragment(f"bucket {bucket.index()}", parameters)
            piece = hold(self.strategy, fragment, bucket.index(), self.group.rank, self.group.size)
            piece.anchor = torch.zeros(1).expand(fragment.numel)  # gradients need none
            for name, place in _memories(piece).items():
                if name in self._remembered:
                    place.copy_(self._remembered.pop(name).view_as(place))
            self._pieces[names] = piece
        self._pieces[names].index = bucket.index()  # which may change while its parameters stay
        return self._pieces[names]


def _memories(piece: FragmentState) -> dict[str, Tensor]:
    """What feedback and filters remember of each parameter, as views; what they remember of a whole bucket is every parameter's."""
    states = {"feedback": piece.feedback} | {f"filter.{i}": state for i, state in enumerate(piece.filtered)}
    found = {}
    for what, state in states.items():
        for name, kept in state.items():
            whole, begin = kept.dtype != torch.float32, 0
            for own, parameter in piece.fragment.parameters:
                end = begin + parameter.numel()
                found[f"{own}/{what}.{name}"] = kept if whole else kept[begin:end]
                begin = end
    return found


def _by_parameter(piece: FragmentState) -> dict[str, Tensor]:
    return {name: kept.clone() for name, kept in _memories(piece).items()}
