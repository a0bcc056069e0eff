"""Codistillation: a replica learns from the predictions of others, around its inner steps.

After inner step k·H a replica predicts the part of the probe set that the H steps after the landing use, and sends its predictions
to all others. Training continues. τ steps later the round lands: the replica decodes all packets, its own too, and compares them with
the text of the probe set, which gives each replica's weight. In each of the next H steps the gradient of the divergence from the
others' predictions is added to the gradient of the replica's own loss.

No model weights are exchanged. Replicas agree only on the step; each keeps its own model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group, Transfer
from thinwire.drivers.attached import TAG, Attached, Method, Traits, nbytes_to_all, silent
from thinwire.drivers.handshake import agree_on_resume, compare_settings, digest
from thinwire.drivers.module_state import evaluating
from thinwire.drivers.step_hooks import outermost
from thinwire.errors import CheckpointError, ConfigurationError, PacketError
from thinwire.lab.methods.predictions import (
    PredictionCoder,
    Predictions,
    cross_entropy,
    divergence,
    most_probable,
    weights_by_quality,
)
from thinwire.packet import (
    REFUSED,
    STOP,
    Header,
    empty_packet,
    flags_of,
    identity,
    open_packet,
    payload,
    said_nbytes,
    seal,
)
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.pieces.piece import digests
from thinwire.types import Observer

BYTES = 256  # size of the default tokenizer's vocabulary


class ProbeSet(Protocol):
    """The probe set, in endless parts that are numbered from 0: the same on all replicas."""

    @property
    def vocabulary(self) -> int:
        """V, the size of the vocabulary."""

    def targets(self, number: int) -> Tensor:
        """The tokens [P] that follow in the text of part `number`."""

    def logits(self, number: int) -> Tensor:
        """The predictions of this replica's model for these tokens, [P, V]; with gradients, if these are on."""


@dataclass(frozen=True, kw_only=True)
class Codistill(Method):
    """Each replica has its own model, and learns from the predictions of the others on a shared probe set. See `codistill`.

    Args:
        every, delay, warmup: inner steps between two rounds, of a flight, and before a replica learns from others.
        probe, top: number of positions of a part of the probe set, and number of tokens that are sent for each.
        weight, temperature, sharpness, seed: numbers: λ, T and s of `codistill`; nothing is drawn from the seed.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Codistill(every=10, probe=128).nbytes_per_period(1_000_000, size=2)
    20209
    """

    every: int = 10
    delay: int = 2
    probe: int = 256
    top: int = 8
    weight: float = 0.5
    warmup: int = 100
    temperature: float = 1.0
    sharpness: float = 5.0
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(one_model_each=True)

    def check_run(self, run: Any, job: Any) -> None:
        if run.model.job:
            raise ConfigurationError(
                f"{run.method.label} with job={run.model.job!r}: replicas tell each other which token follows, so a language model is needed; leave "
                "job out."
            )
        if self.probe % run.data.sequence:
            raise ConfigurationError(
                f"{run.method.label} with sequence={run.data.sequence}: the probe set is cut into such windows, and its {self.probe} positions "
                f"of a step need to be a multiple; write codistill(probe={run.data.sequence * max(1, self.probe // run.data.sequence)})."
            )
        if self.top >= job.corpus.vocabulary:
            raise ConfigurationError(
                f"top={self.top} of {job.corpus.vocabulary} tokens: fewer are needed; 8 is the default."
            )

    def __post_init__(self) -> None:
        whole = (self.every, self.delay, self.probe, self.top, self.warmup)
        if any(type(number) is not int for number in whole) or min(self.every, self.probe, self.top) < 1:
            raise ConfigurationError(f"{self}: whole numbers are needed, and every, probe and top must be above 0.")
        if not 0 <= self.delay < self.every or self.warmup < 0:
            raise ConfigurationError(f"{self}: 0 <= delay < every is needed, and a warmup of 0 or more.")
        positive = (self.temperature, 1.0 + self.weight, 1.0 + self.sharpness)
        if not all(0 < number < math.inf for number in positive) or min(self.weight, self.sharpness) < 0:
            raise ConfigurationError(
                f"{self}: a temperature above 0 is needed, and weight and sharpness of 0 or more, all finite."
            )

    def weight_at(self, step: int) -> float:
        """The weight of the others' predictions in inner step `step`, counted from 1.

        >>> [Codistill(weight=0.5, warmup=100).weight_at(step) for step in (100, 150, 200, 300)]
        [0.0, 0.25, 0.5, 0.5]
        """
        return self.weight * min(1.0, max(0.0, (step - self.warmup) / self.warmup)) if self.warmup else self.weight

    def told(self, round_: int) -> bool:
        """Whether the predictions of a round are used; if not, its packets carry none."""
        return self.weight_at((round_ + 1) * self.every + self.delay) > 0

    def nbytes(self, round_: int, vocabulary: int) -> int:
        """The most bytes of a packet's payload."""
        return PredictionCoder(self.probe * self.every, vocabulary, self.top).nbytes if self.told(round_) else 0

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        probe: ProbeSet | None = None, observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Talking:  # fmt: skip
        """Attach this method to a model, with a `probe` that makes the model's predictions. Collective. Raises `ModelError`,
        `ConfigurationError`, `DisagreementError`, `LinkError`.
        """
        if probe is None:
            raise ConfigurationError(f"{self} without a probe: a probe set to predict is needed; give probe=.")
        return Talking(self, model, optimizer, group, probe, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int | None = None) -> int:
        """Most bytes that a replica sends in the round at the end of `period` (None: after the warm-up), with a vocabulary of bytes.
        The size of the model does not matter.
        """
        return nbytes_to_all(self.nbytes(1 + (2 * self.warmup if period is None else period), BYTES), size)


@dataclass
class _Flight:
    """A round in flight."""

    round: int
    step: int
    own: Tensor  # the packet that a checkpoint saves
    sent: Tensor  # the same packet, with the flags of this replica
    packets: dict[int, Tensor]
    transfer: Transfer
    begin: float


@dataclass(frozen=True)
class _Heard:
    """A landed round: the payloads that count, by replica; the decoded predictions of the others, and their weights."""

    round: int
    payloads: dict[int, Tensor]
    others: list[tuple[float, Predictions]]


class Talking(Attached):
    """`Codistill` attached to a model, in the usual loop: `optimizer.step()` adds the divergence, then rounds depart and land. Then `finish()`.

    All replicas take the same number of inner steps. `weights` are the weights of all replicas since the last round, in rank order,
    with this one; 0 for a replica that was refused.

    Args:
        method, model, optimizer, group, probe, observer, clock: as in `Codistill.attach`; the clock returns seconds.

    Raises:
        ConfigurationError: the probe set does not fit the method.

    >>> from thinwire.comm import run_threads
    >>> class Probe:
    ...     vocabulary, targets = 256, staticmethod(lambda number: torch.zeros(8, dtype=torch.int64))
    >>> method, model = Codistill(probe=8), nn.Linear(1, 1)
    >>> run_threads(1, lambda group: method.attach(model, method.optimizer(model, 0.1), group, probe=Probe()).weights)
    [[0.0]]
    """

    strategy: Codistill

    def __init__(
        self, method: Codistill, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, probe: ProbeSet,
        observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, None, observer, clock)
        self.probe = probe
        self.weights = [0.0] * group.size
        vocabulary, targets = probe.vocabulary, probe.targets(0)
        if len(targets) != method.probe or not method.top < vocabulary:
            raise ConfigurationError(
                f"{method} with {len(targets)} positions in a part of the probe set, and {vocabulary} tokens: as many as probe={method.probe} "
                "are needed, and more tokens than top."
            )
        self._coder = PredictionCoder(method.probe * method.every, vocabulary, method.top)
        self._flying: _Flight | None = None
        self._heard: _Heard | None = None
        self._learned = self._finished = False
        compare_settings(
            group,
            {"strategy": repr(method), "vocabulary": vocabulary}
            | {"text of the probe set": digest([targets]).hex()}
            | digests(method),
        )
        self._hooks = [
            optimizer.register_step_pre_hook(outermost(lambda *_: self.exchange_gradients())),
            optimizer.register_step_post_hook(outermost(lambda *_: self._after_step())),
        ]

    @property
    def evaluated(self) -> str:
        """`each`: every replica has its own model."""
        return "each"

    # ---- around an inner step

    def exchange_gradients(self) -> None:
        """Add the gradient of the divergence from the others' predictions, once a step. A hook runs it before the optimizer's step;
        call it earlier to clip the sum.
        """
        if self._learned:
            return
        self._learned = True
        method, heard, weight = self.strategy, self._heard, self.strategy.weight_at(self.step + 1)
        if heard is None or not heard.others or not weight:
            return
        slot = self.step - method.delay - heard.round * method.every
        begin = slot * method.probe
        with torch.enable_grad():
            logits = self.probe.logits(heard.round * method.every + slot)
            losses = [
                of * divergence(logits, told.part(begin, begin + method.probe), method.temperature)
                for of, told in heard.others
            ]
            torch.autograd.backward(weight * method.temperature**2 * torch.stack(losses).sum())

    @torch.no_grad()
    def _after_step(self) -> None:
        self.step += 1
        self._learned = False
        if self.group.size == 1:
            self.stopping |= self._stop_requested
            return
        round_, since = divmod(self.step, self.strategy.every)
        if round_ and not since:
            self._depart(self._packet(round_), round_, self.step)
        if self._flying and self.step >= self._flying.step + self.strategy.delay:
            self._heard = self._land(self._flying)
            self._flying = None

    # ---- rounds

    def _due(self, rank: int, round_: int, step: int) -> Header:
        """The header of the packet of `rank`; its payload may be shorter."""
        coder, most = self._coder, self.strategy.nbytes(round_, self._coder.vocabulary)
        return Header(identity(self.strategy), rank, 0, round_, 0, coder.positions * coder.top, most, step=step)

    def _packet(self, round_: int) -> Tensor:
        """This replica's packet of a round, without the flag that asks all to stop."""
        method, body, flags = self.strategy, torch.empty(0, dtype=torch.uint8), 0
        if method.told(round_):
            told = self._predicted(round_)
            if bool(torch.isfinite(told.logs[:, :-1]).all()):
                body = self._coder.encode(told)
            else:
                flags = REFUSED
        own = empty_packet(len(body))
        payload(own).copy_(body)
        seal(own, replace(self._due(self.group.rank, round_, self.step), nbytes=len(body), flags=flags))
        return own

    def _predicted(self, round_: int) -> Predictions:
        method = self.strategy
        with evaluating(self.model):  # dropout would change the predictions
            parts = [
                most_probable(self.probe.logits(round_ * method.every + slot), method.top, method.temperature)
                for slot in range(method.every)
            ]
        return Predictions(torch.cat([part.tokens for part in parts]), torch.cat([part.logs for part in parts]))

    def _depart(self, own: Tensor, round_: int, step: int) -> None:
        group, began = self.group, self._clock()
        due, sent = self._due(group.rank, round_, step), own
        if self._stop_requested:
            sent = own.clone()
            seal(sent, replace(due, nbytes=len(payload(own)), flags=flags_of(own) | STOP))
        packets = {peer: empty_packet(due.nbytes) for peer in range(group.size) if peer != group.rank}
        transfer = group.post(TAG, dict.fromkeys(packets, sent), packets, sized=said_nbytes)
        self._flying = _Flight(round_, step, own, sent, packets, transfer, began)
        fields = {"fragment": 0, "round": round_, "nbytes": nbytes_to_all(due.nbytes, group.size)}
        self._observe("depart", self.step, **fields, seconds_spent=self._clock() - began)

    def _land(self, flight: _Flight) -> _Heard:
        """Wait for a round, and compute the weights of its predictions. Raises `LinkError`, `PacketError`, `DisagreementError`."""
        began = self._clock()
        flight.transfer.wait()
        arrived = self._clock()
        fields = {"fragment": 0, "round": flight.round}
        self._observe(
            "flight", self.step, **fields, nbytes=len(flight.sent) * len(flight.packets), begin=flight.begin, end=arrived,
            queued_seconds=flight.transfer.queued_seconds, transfer_seconds=flight.transfer.transfer_seconds,
        )  # fmt: skip
        waited = arrived - began
        self.stall_seconds += waited
        self.seconds += waited
        said = {self.group.rank: flight.sent}
        said |= {peer: packet[: said_nbytes(packet)] for peer, packet in flight.packets.items()}
        payloads = {}
        for rank, packet in sorted(said.items()):
            flags = open_packet(packet, self._due(rank, flight.round, flight.step), least=0)
            self.stopping |= bool(flags & STOP)
            if not flags & REFUSED:
                payloads[rank] = payload(packet)
        heard = self._weighed(flight.round, payloads)
        if refused := sorted(said.keys() - heard.payloads.keys()):
            reason = "predictions that are not finite, or no predictions"
            self._observe("refused", self.step, **fields, by=refused, reason=reason)
        spent = self._clock() - arrived
        self._observe("land", self.step, **fields, begin=began, stall_seconds=waited, seconds_spent=spent)
        return heard

    def _weighed(self, round_: int, payloads: Mapping[int, Tensor]) -> _Heard:
        """The predictions that count, with weights by how well each replica has predicted the text of the probe set."""
        method, device = self.strategy, self.parameters[0].device
        if not method.told(round_):
            return _Heard(round_, dict(payloads), [])
        told: dict[int, Predictions] = {}
        for rank, body in payloads.items():
            try:
                told[rank] = self._coder.decode(body)
            except PacketError as error:
                self._observe("warning", self.step, message=f"replica {rank} is not counted in round {round_}: {error}")
        targets = torch.cat([self.probe.targets(round_ * method.every + slot) for slot in range(method.every)]).cpu()
        losses = [cross_entropy(one, targets, self._coder.vocabulary) for one in told.values()]
        weights = dict(zip(told, weights_by_quality(losses, method.sharpness)))
        self.weights = [weights.get(rank, 0.0) for rank in range(self.group.size)]
        others = [
            (weights[rank], Predictions(one.tokens.to(device), one.logs.to(device)))
            for rank, one in told.items()
            if rank != self.group.rank
        ]
        return _Heard(round_, {rank: payloads[rank] for rank in told}, others)

    # ---- the end, and the group

    def finish(self) -> None:
        """Receive the rounds in flight, so that no replica sends to one that has left."""
        if not self._finished:
            self._finished = True
            if self._flying:
                self._land(self._flying)
            self.close()

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        raise ConfigurationError("the group of a codistillation is fixed; resume all from checkpoints with another.")

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state with the rounds in flight and the predictions that were received last."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"step": self.step, "replicas": self.group.size, "flying": None, "heard": None}
        if self._flying:
            tensors["flying"] = self._flying.own
            facts["flying"] = [self._flying.round, self._flying.step]
        if self._heard:
            tensors |= {f"heard.{rank}": body.clone() for rank, body in self._heard.payloads.items()}
            facts["heard"] = [self._heard.round, list(self._heard.payloads)]
        return tensors, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Collective: all load the same step, and rounds that were in flight depart again; one in flight before is dropped. Raises
        `CheckpointError`, `DisagreementError`, `LinkError`.
        """
        if facts["replicas"] != self.group.size:
            raise CheckpointError(
                f"the checkpoint is of {facts['replicas']} replicas, this run has {self.group.size}; resume with as many as the saved run had."
            )
        self.step = facts["step"]
        agree_on_resume(self.group, self.step, bytes(16))
        if self._flying:
            self._flying.transfer.wait()
        self._flying = self._heard = None
        if facts["heard"]:
            round_, ranks = facts["heard"]
            self._heard = self._weighed(round_, {rank: tensors[f"heard.{rank}"] for rank in ranks})
        if facts["flying"]:
            round_, step = facts["flying"]
            self._depart(tensors["flying"], round_, step)
