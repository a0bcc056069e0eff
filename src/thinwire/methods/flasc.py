"""FLASC: sparse both ways, around a hub. Kuo, Raje, Rajesh, Smith, *Federated LoRA with Sparse Communication*, arXiv 2406.05233 (the
abstract of CELLM, arXiv 2407.20557, tells the same).

    the hub holds p, all that is trained (LoRA's factors, one vector), and Adam's moments
    down    s = the `down` largest of |p|, the rest zero         to each replica of the round
    there   y ← s; train all of y, also where s is zero
    up      the `up` largest of |s − y|                          to the hub
    hub     p ← AdamW(p, the mean of what came)

The largest are those of the whole vector, not of each tensor. Masks are of what travels, never of what is trained. No error
feedback: a replica keeps nothing from round to round, and may be drawn once or never again. At densities of 1 it is FedAdam
(Reddi et al., arXiv 2003.00295).

*Differs*: a replica whose delta is not finite is left out of that round's mean. Values travel in fp32 unless `values` says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity, TopK
from thinwire.contact import agree, agree_on_start
from thinwire.errors import CheckpointError, ConfigurationError, NonFiniteError
from thinwire.group.base import Group
from thinwire.packet import HEADER_NBYTES, REFUSED, Header, empty_packet, identity, open_packet, payload, seal
from thinwire.partition import trainable
from thinwire.seeds import Key, derive
from thinwire.version import __version__

HUB = 0
DOWN, UP, FINAL = "down", "up", "final"  # the ledger's words
_PARTS = {DOWN: 0, UP: 1, FINAL: 2}


@dataclass(frozen=True, kw_only=True)
class Flasc:
    """The method: densities, how many replicas a round draws (None: all), and the hub's AdamW.

    *Wire*, in a round: 48 + nbytes(down) to each that is drawn and 48 + nbytes(up) from it; the hub's own part does not travel. With
    fp32 values density·(32 + ⌈log₂ n⌉) bits a parameter, so that above about 0.6 the dense form (density 1) is smaller.

    >>> Flasc(up=0.25, down=0.25).nbytes(1_000_000)
    (1625048, 1625048)
    """

    up: float = 0.25
    down: float = 0.25
    sampled: int | None = None
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    values: Codec = Identity()
    seed: int = 0

    def __post_init__(self) -> None:
        self.nbytes(1)  # densities that cannot be are refused
        if self.sampled is not None and self.sampled < 1:
            raise ConfigurationError(f"sampled={self.sampled}: at least one replica must train; None draws all.")
        if not self.lr > 0 or self.weight_decay < 0:
            raise ConfigurationError(
                f"lr={self.lr}, weight_decay={self.weight_decay}: lr > 0 and no negative decay are needed."
            )

    def codec(self, density: float) -> Codec:
        """How a vector travels at `density`; at 1 without indices. Raises `ConfigurationError`."""
        return self.values if density == 1 else TopK(density, self.values)

    def nbytes(self, numel: int) -> tuple[int, int]:
        """Of one message down and one up, headers included."""
        down, up = (HEADER_NBYTES + self.codec(density).nbytes(numel) for density in (self.down, self.up))
        return down, up

    def drawn(self, round_: int, size: int) -> list[int]:
        """The ranks that train in a round, the same everywhere."""
        return sorted(random.Random(derive(self.seed, "drawn", round_)).sample(range(size), self.sampled or size))


class Federation:
    """One replica of `method` at work; rank 0 is the hub, and trains like the others when it is drawn.

    ```python
    federation = Federation(Flasc(sampled=10), attach(model, rank=16, seed=0), group)
    for _ in range(rounds):
        federation.round(train)  # train() is called where this replica is drawn; the model is at s when it begins
    federation.finish()  # all hold p
    ```

    `train` may do what it likes with the model's trainable parameters; what it does to others stays where it is. An optimizer is to be
    made anew inside. Raises `DisagreementError` (other code, method or model), `LinkError`, `PacketError`.
    """

    def __init__(self, method: Flasc, model: nn.Module, group: Group) -> None:
        if method.sampled is not None and method.sampled > group.size:
            raise ConfigurationError(f"sampled={method.sampled} of {group.size} replicas: at most all can be drawn.")
        self.method, self.model, self.group, self.rounds = method, model, group, 0
        named = trainable(model)
        self.parameters = [parameter for _, parameter in named]
        facts = {f"model, {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in named}
        agree(group, {"code version": __version__, "method": repr(method)} | facts)
        p = torch.cat([parameter.detach().reshape(-1).float().cpu() for parameter in self.parameters])
        agree_on_start(group, [p])
        self.p = nn.Parameter(p)  # of use on the hub only
        self.optimizer = torch.optim.AdamW([self.p], lr=method.lr, betas=method.betas, weight_decay=method.weight_decay)
        self.heard: dict[int, Tensor] = {}  # on the hub: the deltas of the last round, by rank

    def round(self, train: Callable[[], object]) -> bool:
        """One round; whether this replica took part. Replicas that are not drawn return at once, but for the hub."""
        drawn, rank = self.method.drawn(self.rounds, self.group.size), self.group.rank
        if rank in (HUB, *drawn):
            start = self._download(drawn)
            if rank in drawn:
                self._load(start)
                train()
            self._upload(drawn, start)
        self.rounds += 1
        return rank in drawn

    def finish(self) -> None:
        """The hub tells all what p is, exactly."""
        others = [rank for rank in range(self.group.size) if rank != HUB]
        p = self._from_hub(Identity(), self.p.detach(), others, FINAL)
        with torch.no_grad():
            self.p.copy_(p)
        self._load(p)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Between rounds: what this replica needs to go on, tensors and facts for JSON. Only the hub's is more than a number."""
        moments = self.optimizer.state.get(self.p, {})
        return {"p": self.p.detach().clone()} | {name: v.clone() for name, v in moments.items()}, {
            "rounds": self.rounds
        }

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`. Raises `CheckpointError`."""
        if tensors["p"].shape != self.p.shape:
            raise CheckpointError(
                f"the checkpoint has {tensors['p'].numel():,} trained parameters, this model {self.p.numel():,}; take the run's own model."
            )
        with torch.no_grad():
            self.p.copy_(tensors["p"])
        moments = {name: value.clone() for name, value in tensors.items() if name != "p"}
        self.optimizer.state.clear()
        if moments:
            self.optimizer.state[self.p] = moments
        self.rounds = int(facts["rounds"])

    # ---- what travels

    def _download(self, drawn: Sequence[int]) -> Tensor:
        codec = self.method.codec(self.method.down)
        return self._from_hub(codec, self.p.detach(), [rank for rank in drawn if rank != HUB], DOWN)

    def _upload(self, drawn: Sequence[int], start: Tensor) -> None:
        method, rank = self.method, self.group.rank
        codec = method.codec(method.up)
        own = self._packet(codec, UP, start - self._flat()) if rank in drawn else None
        if rank != HUB:
            assert own is not None
            self.group.post(_PARTS[UP], {HUB: own}, {}, UP).wait()
            return
        packets = {peer: empty_packet(codec.nbytes(start.numel())) for peer in drawn if peer != HUB}
        self.group.post(_PARTS[UP], {}, packets, UP).wait()
        packets |= {HUB: own} if own is not None else {}
        self.heard = {}
        for peer in sorted(packets):
            flags, delta = self._opened(codec, UP, packets[peer], peer)
            if not flags & REFUSED:
                self.heard[peer] = delta
        if self.heard:
            self.p.grad = torch.stack(list(self.heard.values())).mean(0)
            self.optimizer.step()

    def _from_hub(self, codec: Codec, values: Tensor, to: Sequence[int], what: str) -> Tensor:
        """The hub's `values` as they are after the way, on the hub and on all whom it tells."""
        rank = self.group.rank
        if rank == HUB:
            packet = self._packet(codec, what, values)
            self.group.post(_PARTS[what], dict.fromkeys(to, packet), {}, what).wait()
        else:
            packet = empty_packet(codec.nbytes(values.numel()))
            self.group.post(_PARTS[what], {}, {HUB: packet}, what).wait()
        flags, told = self._opened(codec, what, packet, HUB)
        if flags & REFUSED:
            raise NonFiniteError("what the hub holds is not finite; go on from the last checkpoint, with a smaller lr.")
        return told

    def _packet(self, codec: Codec, what: str, values: Tensor) -> Tensor:
        header = self._header(codec, what, self.group.rank)
        packet = empty_packet(header.nbytes)
        try:
            codec.encode(values, payload(packet), self._key(self.group.rank))
        except NonFiniteError:
            payload(packet).zero_()
            header = replace(header, flags=REFUSED)
        seal(packet, header)
        return packet

    def _opened(self, codec: Codec, what: str, packet: Tensor, sender: int) -> tuple[int, Tensor]:
        flags = open_packet(packet, self._header(codec, what, sender))
        out = torch.zeros(self.p.numel())
        if not flags & REFUSED:
            codec.decode_add(payload(packet), out, self._key(sender))
        return flags, out

    def _header(self, codec: Codec, what: str, sender: int) -> Header:
        numel = self.p.numel()
        return Header(identity(codec), sender, 0, self.rounds, _PARTS[what], numel, codec.nbytes(numel))

    def _key(self, sender: int) -> Key:
        return Key(self.method.seed, round=self.rounds, sender=sender)

    # ---- weights

    def _flat(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1).float().cpu() for parameter in self.parameters])

    @torch.no_grad()
    def _load(self, flat: Tensor) -> None:
        for parameter, part in zip(self.parameters, torch.split(flat, [p.numel() for p in self.parameters])):
            parameter.copy_(part.view(parameter.shape))
