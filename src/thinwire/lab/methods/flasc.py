"""FLASC: sparse packets to and from a hub. Kuo, Raje, Rajesh, Smith, *Federated LoRA with Sparse Communication*, arXiv 2406.05233
(also in the abstract of CELLM, arXiv 2407.20557).

    the hub holds p, the trained parameters (LoRA's factors) as one vector, and Adam's moments
    down    s = the `down` largest of |p|, the rest zero         to each replica that the round draws
    train   y ← s; train all of y, also where s is zero
    up      the `up` largest of |s − y|                          to the hub
    hub     p ← Adam(p, the mean of the received deltas)

The largest values are those of the whole vector, not of each tensor. Only what is sent is masked, never what is trained. There is
no error feedback: a replica keeps no state between rounds, and may never be drawn again. At densities of 1 it is FedAdam
(Reddi et al., arXiv 2003.00295).

*Differs*: the first round begins with all of p, which all replicas know. A replica that is not drawn receives a header at the end of
a round, so that all are at the same step. A delta that is not finite is left out of its round's mean. A round changes nothing if the
square of its mean, which Adam needs, is not finite. Values are sent in fp32 unless `codec` says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity, TopK
from thinwire.comm.group import Group, gather
from thinwire.comm.state_transfer import give, take
from thinwire.drivers.attached import TAG, Attached, Method, check_rounds, check_sampled, draw_names, silent
from thinwire.drivers.handshake import digest
from thinwire.drivers.step_hooks import outermost
from thinwire.errors import CheckpointError, ConfigurationError, ModelError
from thinwire.packet import HEADER_NBYTES, REFUSED, STOP, Header, empty_packet, identity, open_packet, payload, seal
from thinwire.pieces.piece import check_piece
from thinwire.rng import Key
from thinwire.types import Observer

UP, DOWN, FINAL = range(3)  # the kind of a message in its round


@dataclass(frozen=True, kw_only=True)
class Flasc(Method):
    """The method: densities, inner steps a round, sampled replicas, the hub's learning rate.

    *Wire*, in a round: 48 + nbytes(up) from each replica that is drawn, 48 + nbytes(down) to each that the next round draws, 48 to each
    other; the hub's own delta is not sent. At the end 48 + 4n to each. With fp32 values about density·(34 − log₂ density)
    bits a parameter, so above about 0.9 the dense form (density 1) is smaller. *Memory* beside the model: 8 bytes a trained
    parameter, on the hub 16.

    Args:
        up, down: share of the values that travel to the hub, and from it, (0, 1].
        every: inner steps of a round.
        sampled: number of replicas that a round draws; None: all.
        outer_lr: learning rate of the hub's AdamW.
        codec: encodes the values that are sent.
        seed: of the draws; an integer number.

    Raises:
        ConfigurationError: a number is out of range, or the codec does not fit.

    >>> hub, other = (Flasc(up=0.25, down=0.25).nbytes_per_period(1_000_000, size=3, rank=rank) for rank in (0, 1))
    >>> hub, other
    (2250096, 1125048)
    """

    up: float = 0.25
    down: float = 0.5
    every: int = 10
    sampled: int | None = None
    outer_lr: float = 1e-2
    codec: Codec = Identity()
    seed: int = 0

    def check_run(self, run: Any, job: Any) -> None:
        check_sampled(run, self.sampled, self.every)
        if self.down < 1 and run.model.lora is None:
            raise ConfigurationError(
                f"{run.method.label} without lora: values that the hub does not send count as zero, which works for adapters but not for whole "
                "weights; add --lora 8, or flasc(down=1)."
            )

    def __post_init__(self) -> None:
        if not (0 < self.up <= 1 and 0 < self.down <= 1):
            raise ConfigurationError(f"up={self.up}, down={self.down}: above 0 and at most 1 is needed; 1 sends all.")
        check_piece("codec", self.codec, Codec)
        check_rounds(self.every, self.sampled, self.outer_lr)
        self.at(self.up), self.at(self.down)  # refuses densities that cannot be sparse

    def at(self, density: float) -> Codec:
        """The codec of a vector at `density`; without indices at 1."""
        return self.codec if density == 1 else TopK(density, self.codec)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr, momentum=0.9)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        names: Sequence[str] | None = None, observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Federated:  # fmt: skip
        return Federated(self, model, optimizer, group, names, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int = 0) -> int:
        up, down = (self.at(density).nbytes(numel) for density in (self.up, self.down))
        now, then = (self.draw([str(other) for other in range(size)], round_) for round_ in (period, period + 1))
        if rank != 0:
            return HEADER_NBYTES + up if str(rank) in now else 0
        return sum(HEADER_NBYTES + (down if str(other) in then else 0) for other in range(1, size))

    def draw(self, names: Sequence[str], round_: int) -> tuple[str, ...]:
        """The replicas of `names` that train in a round, in their order; the same on all replicas."""
        return draw_names(names, self.sampled, self.seed, round_)


class Federated(Attached):
    """`Flasc` attached to a model; `Attached` shows the loop. The first of `names` at the start stays the hub; it trains when it is drawn.

    Any optimizer can be used; its state is cleared at the start of each round. Before the end only the hub knows p: the others hold
    the values that the hub sent last. A round that ends in a `LinkError` has changed nothing here; see `meet`.

    Args:
        method: the settings.
        model, optimizer: the trained parameters, such as adapters (`thinwire.app.trainer.adapters`).
        group, names: the replicas that exchange, and their names in rank order; None: their ranks.
        observer, clock: called with each event; seconds, monotonic.

    Raises:
        ConfigurationError: more replicas are sampled than there are.

    >>> from thinwire import ThreadGroup
    >>> model, method = nn.Linear(2, 1), Flasc(every=5)
    >>> method.attach(model, method.optimizer(model, lr=0.1), ThreadGroup.create(1)[0]).hub
    '0'
    """

    strategy: Flasc

    def __init__(
        self, method: Flasc, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        names: Sequence[str] | None, observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, names, observer, clock)
        if method.sampled is not None and method.sampled > group.size:
            raise ConfigurationError(f"sampled={method.sampled} of {group.size} replicas: at most all can be sampled.")
        self.hub, self.rounds, self._finished = self.names[0], 0, False
        shapes = self.fragments[0].shapes
        self._codecs = {UP: method.at(method.up).fitted(shapes), DOWN: method.at(method.down).fitted(shapes)}
        self._codecs[FINAL] = Identity()
        self.start = self._flat()  # s
        self.p = nn.Parameter(self.start.clone())  # on other replicas than the hub: the values that were received last
        self._adam = torch.optim.AdamW([self.p], lr=method.outer_lr, weight_decay=0.0)
        self._hooks = [optimizer.register_step_post_hook(outermost(lambda *_: self._after_step()))]
        self.meet(group, self.names)

    # ---- the loop

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return self.name not in self.strategy.draw(self.names, self.rounds)

    @property
    def share(self) -> float:  # type: ignore[override]
        return len(self.strategy.draw(self.names, self.rounds)) / len(self.names)

    @property
    def informed(self) -> bool:
        """Whether this replica knows p: the hub does; at the end all do."""
        return self._finished or self.name == self.hub

    @property
    def evaluated(self) -> str:
        return "anchors" if self.informed else "start"

    def skip(self) -> None:
        """Count a step in which this replica is idle."""
        self._after_step()

    def _after_step(self) -> None:
        self.step += 1
        if self.step % self.strategy.every == 0:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """End a round, and begin the next."""
        now, then = (
            [self.names.index(name) for name in self.strategy.draw(self.names, round_)]
            for round_ in (self.rounds, self.rounds + 1)
        )
        (self._gather if self.name == self.hub else self._report)(now, then)

    def _report(self, now: Sequence[int], then: Sequence[int]) -> None:
        """On other replicas than the hub: send the delta to the hub, and receive the start of the next round."""
        began, rank, hub = self._clock(), self.group.rank, self.names.index(self.hub)
        send = {hub: self._packet(UP, self.start - self._flat())} if rank in now else {}
        due = self._header(DOWN, hub, empty=rank not in then)
        packet = empty_packet(due.nbytes)
        arrived = self._carry(send, {hub: packet}, due, began)
        self.stopping |= bool(open_packet(packet, due) & STOP)
        self._arrived(due, began, arrived)
        if rank in then:
            self.start = self._held(self._decoded(DOWN, packet, hub))
            self.p.copy_(self.start)
        self._next(rank in then)

    def _gather(self, now: Sequence[int], then: Sequence[int]) -> None:
        """On the hub: receive all deltas, take Adam's step, and send to the replicas that the next round draws."""
        began, rank = self._clock(), self.group.rank
        packets = {peer: empty_packet(self._header(UP, peer).nbytes) for peer in now if peer != rank}
        self.group.post(TAG, {}, packets).wait()
        if rank in now:
            packets[rank] = self._packet(UP, self.start - self._flat())
        flags = {peer: open_packet(packet, self._header(UP, peer)) for peer, packet in packets.items()}
        self.stopping |= self._stop_requested or any(said & STOP for said in flags.values())
        self._descend({peer: packets[peer] for peer in sorted(packets) if not flags[peer] & REFUSED})
        if refused := [peer for peer in sorted(packets) if flags[peer] & REFUSED]:
            self._refuse(refused, "NaN or infinity in the trained weights")
        told, notice, due = self._packet(DOWN, self.p), self._packet(DOWN, None), self._header(DOWN, rank)
        self.start = self._held(self._decoded(DOWN, told, rank))
        self._next(rank in then)
        down = {peer: told if peer in then else notice for peer in range(self.group.size) if peer != rank}
        arrived = self._carry(down, {}, due, began)
        self._arrived(due, began, arrived)

    def _descend(self, packets: Mapping[int, Tensor]) -> None:
        """p ← Adam(p, mean), unless there is no mean, or its square is not finite."""
        total = torch.zeros_like(self.p)
        for peer, packet in packets.items():
            self._codecs[UP].decode_add(payload(packet), total, self._key(UP, peer))
        mean = total / max(1, len(packets))
        if not bool(torch.isfinite(mean.square()).all()):
            self._refuse([], "the mean delta is too large for Adam")
        elif packets:
            self.p.grad = mean
            self._adam.step()
            self.p.grad = None

    def _next(self, drawn: bool) -> None:
        self.rounds += 1
        self.optimizer.state.clear()
        if drawn:
            self._load(self.start)

    def _refuse(self, by: list[int], reason: str) -> None:
        self._observe("refused", self.step, fragment=0, round=self.rounds, by=by, reason=reason)

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange the steps since the last round, and leave p in every model: 48 + 4n bytes from the hub to each."""
        if self._finished:
            return
        self._finished = True
        if self.step % self.strategy.every:
            self._exchange()
        hub = self.names.index(self.hub)
        if self.name == self.hub:
            packet = self._packet(FINAL, self.p)
            others = [rank for rank in range(self.group.size) if rank != hub]
            self.group.post(TAG, dict.fromkeys(others, packet), {}, "final").wait()
        else:
            packet = empty_packet(self._header(FINAL, hub).nbytes)
            self.group.post(TAG, {}, {hub: packet}, "final").wait()
            open_packet(packet, self._header(FINAL, hub))
            self.p.copy_(self._decoded(FINAL, packet, hub))
        self._load(self.p)
        self.close()

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which the model holds p, or the values of it that this replica received last."""
        own = self._flat()
        self._load(self.p)
        try:
            yield
        finally:
            self._load(own)

    # ---- the group

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        """Continue with the replicas of `group`, which must contain the hub. Collective. The hub decides: a replica in another state
        takes over the hub's.

        Raises `ConfigurationError` without the hub, `DisagreementError`, `LinkError`.
        """
        self.group, self.names = group, self._checked(names, group)
        if self.hub not in self.names:
            raise ConfigurationError(
                f"names={self.names}: the hub {self.hub!r} is not among them, and no other replica holds p; resume from its checkpoint."
            )
        self.introduce({"names": list(self.names), "hub": self.hub})
        hub, told = self.names.index(self.hub), self._told()
        place, text = told[hub]
        drawn = self.strategy.draw(self.names, self.rounds)
        behind = [r for r, (at, its) in enumerate(told) if at != place or (its != text and self.names[r] in drawn)]
        if behind and group.rank == hub:
            nbytes = give(group, behind, {"start": self.start}, {"rounds": self.rounds, "step": self.step})
            self._observe("given", self.step, to=[self.names[rank] for rank in behind], nbytes=nbytes)
        elif group.rank in behind:
            tensors, facts = take(group, hub, 4 * self.start.numel() + (1 << 16))
            self._put(tensors["start"], facts)
            self.optimizer.state.clear()
            self._load(self.start)
            self._observe("caught_up", self.step, round=self.rounds, donor=self.hub)
        if not bool(torch.isfinite(self.start).all()):
            raise ModelError("the first weights hold NaN or infinity; initialise them, or load a sound checkpoint.")

    def _told(self) -> list[tuple[bytes, bytes]]:
        """Digests of all replicas: of rounds and steps, and of the weights at which the round began."""
        own = self.rounds.to_bytes(8, "little") + self.step.to_bytes(8, "little") + digest([self.start])
        return [(text[:16], text[16:]) for text in gather(self.group, own, len(own), "resume")]

    @torch.no_grad()
    def _put(self, start: Tensor, facts: Mapping[str, Any]) -> None:
        self.start, self.rounds, self.step = start.clone(), int(facts["rounds"]), int(facts["step"])
        self.p.copy_(start)

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {"start": self.start}
        if self.name == self.hub:
            tensors |= {"p": self.p.detach().clone()} | dict(self._adam.state.get(self.p, {}))
        return tensors, {"rounds": self.rounds, "step": self.step, "hub": self.hub}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`. Raises `CheckpointError`, and the errors of `meet`."""
        if tensors["start"].shape != self.start.shape or (facts["hub"] == self.name) != (self.hub == self.name):
            raise CheckpointError(
                f"the checkpoint is of {tensors['start'].numel():,} trained parameters with the hub {facts['hub']!r}, this run has "
                f"{self.start.numel():,} with {self.hub!r}; resume with the run's own settings."
            )
        self._put(tensors["start"], facts)
        if self.name == self.hub:
            with torch.no_grad():
                self.p.copy_(tensors["p"])
            moments = {name: value.clone() for name, value in tensors.items() if name not in ("start", "p")}
            self._adam.state.clear()
            if moments:
                self._adam.state[self.p] = moments
        self.meet(self.group, self.names)

    # ---- packets

    def _packet(self, part: int, values: Tensor | None) -> Tensor:
        """A packet of `values`, or an empty one if there are none; marked as refused if they are not finite."""
        rank = self.group.rank
        header = self._header(part, rank, empty=values is None)
        packet = empty_packet(header.nbytes)
        if values is not None and bool(torch.isfinite(values).all()):
            self._codecs[part].encode(values.detach(), payload(packet), self._key(part, rank))
        elif values is not None:
            payload(packet).zero_()
            header = replace(header, flags=REFUSED)
        stopping = self.stopping or self._stop_requested
        seal(packet, replace(header, flags=header.flags | STOP) if stopping else header)
        return packet

    def _decoded(self, part: int, packet: Tensor, sender: int) -> Tensor:
        out = torch.zeros(self.start.numel())
        self._codecs[part].decode_add(payload(packet), out, self._key(part, sender))
        return out

    def _header(self, part: int, sender: int, empty: bool = False) -> Header:
        codec, numel = self._codecs[part], 0 if empty else self.start.numel()
        return Header(identity(codec), sender, 0, self.rounds, part, numel, 0 if empty else codec.nbytes(numel))

    def _key(self, part: int, sender: int) -> Key:
        return Key(self.strategy.seed, round=self.rounds, sender=sender, part=part)

    # ---- weights

    def _held(self, start: Tensor) -> Tensor:
        """`start` as the parameters hold it in their own types. What that rounds off is no training, of which Adam would make whole steps."""
        return torch.cat([part.to(parameter.dtype).float().reshape(-1) for parameter, part in self._slices(start)])

    def _flat(self) -> Tensor:
        return super()._flat().cpu()
