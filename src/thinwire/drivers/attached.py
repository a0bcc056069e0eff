"""The common part of methods with their own loop: attaching to a model, and sending packets.

A `Method` is a frozen value like a `Strategy`; `attach` joins it with a model, an optimizer and a group. The result has the same
interface as a `Replica`, so the trainer, checkpoints and events work with both.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.comm.group import TAGS, Group, gather
from thinwire.drivers.gradient_reducers import check_reducers
from thinwire.drivers.handshake import compare_settings, digest
from thinwire.drivers.loop_warnings import silent as silent
from thinwire.drivers.model_buffers import FrozenWeights
from thinwire.drivers.module_state import export_state
from thinwire.errors import ConfigurationError, DisagreementError
from thinwire.packet import HEADER_NBYTES, STOP, Header, empty_packet, open_packet, payload, seal
from thinwire.pieces import optimizer_attributes
from thinwire.pieces.partition import Fragment, Whole, check_optimizer, check_sharding, local, trainable
from thinwire.pieces.piece import digests
from thinwire.rng import derive
from thinwire.types import Observer

TAG = TAGS >> 1  # the same for all messages: those of a pair of replicas are matched in the order of posting


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a caller asks of a method with its own loop, in place of which method it is.

    Args:
        own_steps: replicas may take unequal numbers of steps, so each resumes from the newest of its own checkpoints.
        one_model_each: every replica trains another model of its own, on the same probe set.
        weighs_samples: replicas may have micro-batches of unequal size.
        cannot_resume: why a run cannot resume, as the end of a sentence; empty: it can.
    """

    own_steps: bool = False
    one_model_each: bool = False
    weighs_samples: bool = False
    cannot_resume: str = ""


@runtime_checkable
class Method(Protocol):
    """A method with its own loop: a frozen dataclass. Its text identifies it on the wire."""

    own_loop: ClassVar[Literal[True]] = True  # a Strategy says False

    @property
    def traits(self) -> Traits:
        return Traits()

    def check_run(self, run: Any, job: Any) -> None:
        """Raise `ConfigurationError` unless this method can train the `run` of a `job`, as the command has them."""
        return

    @property
    def seed(self) -> int: ...

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The inner optimizer that the method's paper uses."""

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group,
        *,
        observer: Observer = silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> Attached:
        """Attach this method to a model. Collective. Raises `ModelError`, `DisagreementError`, `LinkError`."""

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int = 0) -> int:
        """Bytes that replica `rank` of `size` sends in a period of `every` steps, headers included. Predicted = counted."""

    @property
    def every(self) -> int:
        """Inner steps in a period."""


class Participant(ABC):
    """A replica that exchanges packets with others: it keeps their names and sends packets to them.

    `names` are the names of the replicas in rank order. A replica keeps its name in all groups that follow. A step that ends in a
    `LinkError` has changed nothing: the remaining replicas make a new group, call `meet` with it, and continue.
    """

    def __init__(
        self, group: Group, names: Sequence[str] | None, observer: Observer, clock: Callable[[], float]
    ) -> None:
        self.group, self.names = group, self._checked(names, group)
        self.step = 0
        self.stopping = self._stop_requested = False
        self.seconds = self.stall_seconds = 0.0
        self._observe, self._clock = observer, clock

    @property
    def name(self) -> str:
        return self.names[self.group.rank]

    @abstractmethod
    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        """Continue with the replicas of `group`. Collective: all of them call it."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state that is needed to resume bit for bit: tensors, and values for JSON."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`. Collective: all replicas load the same step."""

    def request_stop(self) -> None:
        """Ask all replicas to stop at the same step: `stopping` becomes true on all of them with the next exchange."""
        self._stop_requested = True

    def tell(self, body: Tensor | None, header: Header, senders: Iterable[int]) -> dict[int, tuple[int, Tensor]]:
        """Exchange packets; returns flags and payload of each of `senders`, by rank. `body` is this replica's payload if it is a sender.

        A sender sends its packet to all others, in one message each. Raises `LinkError`, `PacketError`; then no payload may be used.
        """
        group, began = self.group, self._clock()
        peers = [peer for peer in range(group.size) if peer != group.rank]
        packets = {peer: empty_packet(header.nbytes) for peer in senders if peer != group.rank}
        send: dict[int, Tensor] = {}
        if body is not None:
            own = empty_packet(header.nbytes)
            payload(own).copy_(body)
            flags = header.flags | (STOP if self._stop_requested else 0)
            seal(own, replace(header, sender=group.rank, flags=flags))
            send = dict.fromkeys(peers, own)
        arrived = self._carry(send, packets, header, began)
        heard = {
            peer: (open_packet(p, replace(header, sender=peer, flags=0)), payload(p)) for peer, p in packets.items()
        }
        if body is not None:
            heard[group.rank] = (flags, payload(own))
        self.stopping |= any(said & STOP for said, _ in heard.values())
        self._arrived(header, began, arrived)
        return dict(sorted(heard.items()))

    def _carry(self, send: Mapping[int, Tensor], packets: Mapping[int, Tensor], header: Header, began: float) -> float:
        """Send and receive the packets of a round that began at `began`; returns the time at which all had arrived. Raises `LinkError`."""
        nbytes = sum(message.numel() for message in send.values())
        fields = {"fragment": header.fragment, "round": header.round}
        self._observe("depart", self.step, **fields, nbytes=nbytes, seconds_spent=self._clock() - began)
        transfer = self.group.post(TAG, send, packets)
        transfer.wait()
        arrived = self._clock()
        self._observe(
            "flight", self.step, **fields, nbytes=nbytes, begin=began, end=arrived,
            queued_seconds=transfer.queued_seconds, transfer_seconds=transfer.transfer_seconds,
        )  # fmt: skip
        return arrived

    def _arrived(self, header: Header, began: float, arrived: float) -> None:
        """Report the packets that arrived at `arrived`, after all were checked."""
        waited = arrived - began
        self.stall_seconds += waited
        self.seconds += waited
        fields = {"fragment": header.fragment, "round": header.round}
        self._observe("land", self.step, **fields, begin=began, stall_seconds=waited, seconds_spent=0.0)

    @staticmethod
    def _checked(names: Sequence[str] | None, group: Group) -> tuple[str, ...]:
        made = tuple(map(str, range(group.size))) if names is None else tuple(names)
        if len(made) != group.size or len(set(made)) != group.size:
            raise ConfigurationError(f"names={made} for {group.size} replicas: one for each is needed, all different.")
        return made


class Attached(Participant):
    """A method attached to a model, with the interface of a `Replica` for the training loop. `Method.attach` makes one.

    Args:
        method: the settings.
        model, optimizer: the model to train, with the same weights on every replica, and its optimizer.
        group, names: the replicas that exchange, and their names in rank order; None: their ranks.
        observer, clock: called with each event; seconds, monotonic.

    Raises:
        ModelError, ConfigurationError: the method does not work with this model, this optimizer or this group.

    >>> from thinwire import run_threads
    >>> from thinwire.lab.methods import scaffold
    >>> def replica(group):
    ...     model, method = nn.Linear(2, 1), scaffold(every=5, sampled=1)
    ...     optimizer = method.optimizer(model, lr=0.1)
    ...     trained = method.attach(model, optimizer, group)
    ...     for batch in torch.ones(10, 4, 2):
    ...         if trained.idle:  # not sampled in this round
    ...             trained.skip()
    ...             continue
    ...         model(batch).sum().backward()
    ...         optimizer.step()  # exchanges after every fifth step
    ...         optimizer.zero_grad()
    ...     trained.finish()
    ...     return trained.progress
    >>> run_threads(2, replica)
    [10, 10]
    """

    own_loop: ClassVar[Literal[True]] = True  # a Replica says False
    samples: int = 0  # forward passes of an inner step without gradients; 0: it has gradients
    own_steps = False  # true: each replica takes as many steps as it can, and its checkpoints are of its own steps
    tokens = 1.0  # in an inner step, for methods that weigh replicas by them
    idle = False  # a replica that is idle takes no part in this step's work; its loop calls `skip` instead
    share = 1.0  # share of the replicas that are not idle

    def __init__(
        self, method: Method, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        names: Sequence[str] | None, observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        check_optimizer(model, optimizer)
        check_sharding(model, whole_replica=False)
        check_reducers(model, None)
        super().__init__(group, names, observer, clock)
        self.strategy, self.model, self.optimizer = method, model, optimizer
        optimizer_attributes.begin(optimizer, model)
        self.fragments: list[Fragment] = Whole().fragments(model)
        self.parameters = [parameter for _, parameter in trainable(model)]
        self._hooks: list[RemovableHandle] = []

    @property
    def evaluated(self) -> str:
        """The weights that are evaluated: `anchors`, `own` weights, the `mean` of all replicas', or `start`: those at the start of a round."""
        return "anchors"

    @property
    def progress(self) -> int:
        """Number of inner steps of the run; replicas of unequal speed take different shares of it."""
        return self.step

    def skip(self) -> None:
        """Count a step in which this replica is idle."""

    def iterate(self, losses: Callable[[int], Tensor]) -> float:
        """An inner step without gradients, if the method has `samples`, of which the loss of number j is `losses(j)`. Returns their mean."""
        raise AssertionError(f"{self.strategy} has gradients")

    def exchange_gradients(self) -> None:
        """Called between backward and the optimizer's step. Does nothing by default."""

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which the model holds the weights that all replicas agree on."""
        yield

    def averaged_buffers(self) -> AbstractContextManager[None]:
        """A context that does nothing, because buffers stay local."""
        return nullcontext()

    def anchors(self) -> list[Tensor]:
        """The agreed weights of the whole model, in one flat fp32 tensor."""
        with self.anchored():
            return [self._flat()]

    def export(self) -> dict[str, Any]:
        """The model's state dict with the agreed weights; whole tensors on the CPU."""
        with self.anchored():
            return export_state(self.model)

    def finish(self) -> None:
        """Exchange the remaining steps, and leave the agreed weights in the model."""
        self.close()

    def close(self) -> None:
        """Detach. The group stays open; it is the caller's."""
        for hook in self._hooks:
            hook.remove()

    def _flat(self) -> Tensor:
        """This replica's own weights, in one flat fp32 tensor."""
        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self.parameters])

    def _slices(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, with its part of `flat` in the same shape."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        yield from ((parameter, part.view(parameter.shape)) for parameter, part in zip(self.parameters, parts))

    @torch.no_grad()
    def _load(self, flat: Tensor) -> None:
        for parameter, slice_ in self._slices(flat):
            parameter.copy_(slice_)

    def introduce(self, facts: Mapping[str, Any]) -> None:
        """Compare code, method, model and `facts` with all others. Raises `DisagreementError`."""
        tensors = {n: f"{tuple(p.shape)} {p.dtype}" for n, p in trainable(self.model)}
        common = {"strategy": repr(self.strategy)} | {f"model, {name}": text for name, text in tensors.items()}
        compare_settings(self.group, common | digests(self.strategy) | FrozenWeights(self.model).facts() | dict(facts))

    def same_weights(self) -> None:
        """Compare weights by 16 bytes from each replica; if they differ, all replicas raise `DisagreementError`."""
        told = gather(self.group, digest([local(p.detach()) for p in self.parameters]), 16, "resume")
        for rank, text in enumerate(told):
            if text != told[0]:
                raise DisagreementError(
                    f"replica {rank} holds other weights than replica 0 at step {self.step}; start all with the same "
                    "weights, or resume all from one step."
                )


def check_rounds(every: int, sampled: int | None, outer_lr: float) -> None:
    """Raise `ConfigurationError` unless rounds can have these values."""
    whole = [number for number in (every, sampled) if number is not None]
    if any(type(number) is not int or number < 1 for number in whole) or not 0 < outer_lr < math.inf:
        raise ConfigurationError(
            f"every={every}, sampled={sampled}, outer_lr={outer_lr}: whole numbers above 0, and a learning rate above 0, are needed."
        )


def check_sampled(run: Any, sampled: int | None, every: int) -> None:
    """Raise `ConfigurationError` unless `sampled` replicas of `run` can train in each round of `every` steps."""
    placement, label = run.placement, run.method.label
    if sampled is None:
        return
    if sampled > placement.replicas:
        raise ConfigurationError(
            f"sampled={sampled} of {placement.replicas} replicas: at most all can be; give more --replicas."
        )
    needed = 1 + math.ceil(every / placement.checkpoint_every) if placement.checkpoint_every else 1
    if placement.keep < needed:
        raise ConfigurationError(
            f"keep={placement.keep} with checkpoint_every={placement.checkpoint_every} and {label}: a replica that is not sampled is "
            f"up to {every} steps ahead of the others, and would delete checkpoints that they still need; give --keep {needed}."
        )


def donor_and_behind(places: Sequence[Any]) -> tuple[int, list[int]]:
    """The first rank that is furthest, and the ranks that are not as far, by the `places` of all replicas in a run."""
    furthest = max(places)
    return places.index(furthest), [rank for rank, place in enumerate(places) if place < furthest]


def draw_names(names: Sequence[str], count: int | None, seed: int, round_: int) -> tuple[str, ...]:
    """The `count` (None: all) of `names` that are drawn for a round, in their order; the same on all replicas."""
    if count is None:
        return tuple(names)
    chosen = sorted(names, key=lambda name: derive(seed, f"sampled {name}", round_))[:count]
    return tuple(name for name in names if name in chosen)


def nbytes_to_all(nbytes: int, size: int) -> int:
    """Bytes that one of `size` replicas sends to all others with a payload of `nbytes`. Predicted = counted."""
    return (size - 1) * (HEADER_NBYTES + nbytes)
