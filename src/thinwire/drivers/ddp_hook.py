"""A communication hook for torch.nn.parallel.DistributedDataParallel: a strategy exchanges its buckets.

Each bucket is exchanged as soon as DDP has filled it, on the exchange threads, while backward continues.
"""

# Annotations are evaluated here: DDP looks at those of a hook.
import math
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future as Landing
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # exported without saying so
from torch.utils.hooks import RemovableHandle

from thinwire.codecs import in_full
from thinwire.comm.group import Group, GroupClaim
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import FragmentState, first_state
from thinwire.drivers.gradients import Stepped
from thinwire.drivers.handshake import compare_settings
from thinwire.drivers.rounds import RoundPipeline
from thinwire.drivers.step_hooks import outermost
from thinwire.errors import CheckpointError, ConfigurationError, ModelError
from thinwire.pieces.partition import Fragment, Whole, trainable
from thinwire.pieces.piece import digests
from thinwire.strategy import Strategy


class GradientHook:
    """Run a strategy that exchanges `Gradients()` inside DistributedDataParallel, over its buckets.

    - **A bucket** takes the place of a fragment. It is exchanged in fp32 and written back in its own dtype.
    - **The first step** travels in fp32, because DDP rebuilds its buckets after it. The state of filters and feedback follows each
      parameter into its new bucket.
    - **A gradient that is not finite** on any replica leaves NaN in that bucket on all replicas, as DDP does, and changes no state.
      Skip that step.
    - **Weights** are compared after every hundredth step. If they have drifted apart, all replicas take those of replica 0.

    `state()` and `load_state()` keep what filters and feedback remember of each parameter. They do not keep what the owners of a
    `TwoShot(Feedback())` hold back, nor the state of `AllReduce`: a resume loses these.

    Args:
        strategy: one of gradients, with the partition `Whole()` and without `Clip`.
        model: the module inside DDP.
        group: the replicas, one rank each. It needs its own process group: DDP's messages and the packets must not mix.

    Raises:
        ConfigurationError: the strategy exchanges deltas or fragments, or has a `Clip`; an argument has another type.
        DisagreementError: the replicas have different strategies.
        LinkError: raised by backward; a replica was lost, or a link was cut.

    >>> import torch.distributed as dist
    >>> import thinwire as tw
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun gives more ranks
    >>> model = torch.nn.Linear(4, 1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> group = tw.TorchGroup.from_world(replicas=1)
    >>> hook = tw.GradientHook(tw.data_parallel(), model, group)
    >>> hook.register(ddp, optimizer)
    >>> ddp(torch.ones(2, 4)).sum().backward()  # the mean of all replicas is in the gradients now
    >>> optimizer.step()
    >>> hook.steps
    1
    >>> hook.close()
    >>> group.close()
    >>> dist.destroy_process_group()
    """

    def __init__(self, strategy: Strategy, model: nn.Module, group: Group) -> None:
        _check_types("GradientHook", strategy=(strategy, Strategy), model=(model, nn.Module), group=(group, Group))
        if not strategy.exchanges_gradients or strategy.partition != Whole():
            raise ConfigurationError(
                f"{strategy.signal} in fragments by {strategy.partition}: DDP exchanges Gradients(), in its own buckets; choose a "
                "strategy of gradients, with the partition Whole(), or attach a Replica instead of DDP."
            )
        if any(one.needs_whole for one in strategy.filters):
            raise ConfigurationError(
                f"{strategy.filters} in DDP's buckets: Clip would see a bucket and needs the norm of the whole gradient; choose clip=0."
            )
        self.strategy, self.group = strategy, group
        self._claim: GroupClaim | None = None
        self.steps = 0  # exchanged steps
        self._first = True  # the first step of this hook, after which DDP rebuilds its buckets
        compare_settings(group, {"strategy": repr(strategy)} | digests(strategy))
        strategy.warm_up()
        self._named = {id(parameter): (name, parameter) for name, parameter in trainable(model)}
        self._stepped = Stepped(model, lambda: [p.detach() for _, p in self._named.values()], group, warnings.warn)
        self._pipeline = RoundPipeline(strategy, group, None, watched=False)
        self._states: dict[tuple[str, ...], FragmentState] = {}
        self._remembered: dict[str, Tensor] = {}  # state by parameter and kind, for buckets that are still to be made
        self._landed: list[Flight] = []  # in this step
        self._hooks: list[RemovableHandle] = []
        self._closed = False

    def register(self, ddp: nn.parallel.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Make `ddp` exchange its buckets by this hook.

        Raises `ConfigurationError` if the strategy needs another optimizer, the group has not DDP's ranks, or it has another hook or a Replica;
        `ModelError` if the hook has another model.
        """
        self._check_open()
        parallel = nn.parallel.DistributedDataParallel
        _check_types("GradientHook.register", ddp=(ddp, parallel), optimizer=(optimizer, torch.optim.Optimizer))
        self.strategy.check_inner(optimizer, sharded=False)
        if (ranks := ddp.process_group.size()) != self.group.size:
            raise ConfigurationError(
                f"the hook's group has {self.group.size} replicas and DDP {ranks} ranks: as many are needed, one rank each; make the group by "
                f"TorchGroup.from_world(replicas={ranks})."
            )
        foreign = [name for name, p in ddp.module.named_parameters() if p.requires_grad and id(p) not in self._named]
        if foreign:
            raise ModelError(
                f"DDP trains {foreign[0]!r} and the hook's model has no such tensor; the module inside DDP is needed: "
                "GradientHook(strategy, ddp.module, group)."
            )
        self._claim = GroupClaim(self.group)
        self._claim.take()
        ddp.register_comm_hook(self, GradientHook.exchange)
        self._hooks.append(optimizer.register_step_post_hook(outermost(lambda *_: self._stepped.after(self.steps))))

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook that DDP calls: the future is done when the bucket holds the estimate of the mean."""
        self._check_open()
        buffer, last = bucket.buffer(), bucket.is_last()
        if buffer.is_sparse:
            raise ModelError(
                f"the gradient of {self._named[id(bucket.parameters()[0])][0]} is sparse, and DDP's hooks take dense ones; leave sparse=False in its "
                "layer, or attach a Replica instead of DDP."
            )
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.device.type == "cuda" else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        # else DDP would say of the error that it is no tensor
        self._at_end_of_backward(lambda: _raise(flight.arrival.exception()))
        state = self._state_of(bucket)
        delta = buffer.detach().to("cpu", torch.float32, copy=True)
        codec = in_full(state.codec) if self._first else None
        buffers = self._pipeline.context.buffers
        flight = Flight(state.begin_round(self.strategy, delta, self.steps, number=self.steps, codec=codec), buffers)
        self._pipeline.launch(flight, 0.0, scheduled=True)
        if last:
            self.steps, self._first = self.steps + 1, False

        def land(landing: Landing[None]) -> None:
            try:
                landing.result()
                self._land(flight, buffer, last)
            except BaseException as error:  # any, because DDP waits for the future
                # Not the error itself: its frames hold this future.
                done.set_exception(RuntimeError(str(error)))  # type: ignore[arg-type]
            else:
                done.set_result(buffer)

        flight.arrival.add_done_callback(land)
        return done

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What to save between two steps: tensors by name, and facts for JSON."""
        tensors = dict(self._remembered)
        for state in self._states.values():
            tensors |= _by_parameter(state)
        return tensors, {"steps": self.steps}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`, before the first step. Raises `CheckpointError`."""
        known = {name.partition("/")[0] for name in tensors} <= {name for name, _ in self._named.values()}
        if self._states or not known or type(facts.get("steps")) is not int:
            raise CheckpointError(
                "the state belongs to another model, or this hook has taken a step already; load it into a new GradientHook of the run's own model."
            )
        self._remembered, self.steps = dict(tensors), facts["steps"]

    def close(self) -> None:
        """End the exchange threads. The group stays open; it is the caller's."""
        for hook in self._hooks:
            hook.remove()
        self._pipeline.close()
        self._closed = True
        if self._claim:
            self._claim.release(not any(state.flight for state in self._states.values()))

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(
                "this GradientHook is closed, and its DDP cannot exchange gradients without it; train with a new DDP, with a new hook or none."
            )

    def _at_end_of_backward(self, call: Callable[[], None]) -> None:
        """Have `call` called by backward before DDP looks at its buckets. Raises `ModelError` outside of backward."""
        try:
            torch.autograd.Variable._execution_engine.queue_callback(call)
        except RuntimeError:
            raise ModelError(
                "DDP calls its hook outside of backward, as ddp.join() does on a rank that has no more batches; as many steps on each rank are "
                "needed. Leave join() out, and give all ranks as many batches."
            ) from None

    @torch.no_grad()
    def _land(self, flight: Flight, buffer: Tensor, last: bool) -> None:
        """Land an flight. Called on one thread, in the order of departure."""
        if flight.good and flight.anchor is not None:
            buffer.copy_(flight.anchor)
        else:
            buffer.fill_(math.nan)
        self._landed.append(flight)
        if last:
            good = all(one.good for one in self._landed)
            for one in self._landed:
                if good:
                    one.commit()
                else:
                    one.discard()
            self._landed = []

    def _state_of(self, bucket: GradBucket) -> FragmentState:
        """The state of a bucket with these parameters; made when DDP has rebuilt its buckets."""
        parameters = tuple(self._named[id(p)] for p in bucket.parameters())
        names = tuple(name for name, _ in parameters)
        if names not in self._states:
            for others in [key for key in self._states if set(key) & set(names)]:
                self._remembered |= _by_parameter(self._states.pop(others))
            fragment = Fragment(f"bucket {bucket.index()}", parameters)
            state = first_state(self.strategy, fragment, bucket.index(), self.group.rank, self.group.size)
            state.anchor = torch.zeros(1).expand(fragment.numel)  # gradients need no anchor
            for name, place in _memories(state).items():
                if name in self._remembered:
                    place.copy_(self._remembered.pop(name).view_as(place))
            self._states[names] = state
        self._states[names].index = bucket.index()  # the index may change while the parameters stay
        return self._states[names]


def _check_types(of: str, **given: tuple[object, type]) -> None:
    """Raise `ConfigurationError` for the first argument that is not of its type."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise ConfigurationError(f"{of}: {name} is of type {type(value).__name__}; {kind.__name__} is needed.")


def _raise(error: BaseException | None) -> None:
    """Raise a copy of `error`: the frames of the error itself would hold DDP, which holds the hook that keeps the error."""
    if error:
        raise copy(error)


def _memories(of: FragmentState) -> dict[str, Tensor]:
    """The state of feedback and filters for each parameter, as views. State of a whole bucket belongs to each of its parameters."""
    states = {"feedback": of.feedback} | {f"filter.{i}": kept for i, kept in enumerate(of.filtered)}
    found = {}
    for what, state in states.items():
        for name, kept in state.items():
            whole, begin = kept.dtype != torch.float32, 0
            for own, parameter in of.fragment.parameters:
                end = begin + parameter.numel()
                found[f"{own}/{what}.{name}"] = kept if whole else kept[begin:end]
                begin = end
    return found


def _by_parameter(state: FragmentState) -> dict[str, Tensor]:
    return {name: kept.clone() for name, kept in _memories(state).items()}
