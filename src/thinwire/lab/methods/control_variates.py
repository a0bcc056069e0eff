"""SCALLION and SCAFCOM: Huang, Li, Li, *Stochastic Controlled Averaging for Federated Learning with Communication
Compression*, ICLR 2024; SCAFFOLD (Karimireddy et al., arXiv 1910.06378) and FedAvg (arXiv 1602.05629) as their limits.

    all N replicas begin a round with the same x and c; the S sampled ones train: K steps of  y ← y − η·(g + c − cᵢ)
    aᵢ = (x − y) / Ση                      the mean gradient of the K steps, + c − cᵢ

    FedAvg     sᵢ = aᵢ                     and c = cᵢ = 0 always
    SCALLION   sᵢ = α·(aᵢ − c)             any unbiased codec; SCAFFOLD: α = 1, exact values
    SCAFCOM    vᵢ ← (1 − β)·vᵢ + β·(aᵢ + cᵢ − c),  sᵢ = vᵢ − cᵢ     any contractive codec

    dᵢ = decode(encode(sᵢ))                the only data sent, from each sampled replica to all others
    x ← x − η_g·Ση·(mean of the S dᵢ + c)
    cᵢ ← cᵢ + dᵢ  (the sampled)            c ← c + (1/N)·Σ dᵢ  (all replicas), so c is the mean of all N cᵢ

*Differs*: there is no server: each replica computes x and c from the packets, in rank order, with the same bits. Ση is the sum of
the learning rates that were used, so schedules and skipped steps are right. All replicas leave a replica out of a round if its aᵢ is
not finite. A replica that was away takes over x and c and keeps its cᵢ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, Identity, encode_from
from thinwire.comm.group import Group, gather
from thinwire.comm.state_transfer import give, take
from thinwire.drivers.attached import (
    Attached,
    Method,
    check_rounds,
    check_sampled,
    donor_and_behind,
    draw_names,
    nbytes_to_all,
    silent,
)
from thinwire.drivers.handshake import agree_on_start, digest
from thinwire.drivers.module_state import gradient, separate_gradients
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError, ModelError
from thinwire.lab.methods.control_rules import Rule
from thinwire.packet import REFUSED, Header, identity
from thinwire.rng import Key
from thinwire.types import Observer


@dataclass(frozen=True, kw_only=True)
class ControlVariates(Method):
    """Local SGD whose drift is controlled, S of N replicas at a time. The inner optimizer is plain SGD.

    *Wire*: (N−1)·(48 + nbytes(codec)) bytes from each of the S replicas in K steps, nothing from the others. *Memory*: 12 bytes a
    parameter (x, c, cᵢ), 16 with SCAFCOM.

    Args:
        rule: what a sampled replica sends.
        codec: what it is encoded with.
        every: inner steps K of a round.
        sampled: number S of replicas in a round; None: all.
        outer_lr: learning rate η_g of the outer step.
        seed: of the draws; an integer number.

    Raises:
        ConfigurationError: a number is out of range, or the codec does not fit the rule.

    >>> from thinwire.codecs import RandomK
    >>> from thinwire.lab.methods import Gain
    >>> ControlVariates(rule=Gain(0.1), codec=RandomK(0.1), sampled=4).every
    10
    """

    rule: Rule
    codec: Codec = Identity()
    every: int = 10
    sampled: int | None = None
    outer_lr: float = 1.0
    seed: int = 0

    def check_run(self, run: Any, job: Any) -> None:
        check_sampled(run, self.sampled, self.every)

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule) or not isinstance(self.codec, Codec) or isinstance(self.codec, type):
            raise ConfigurationError(
                f"rule={self.rule!r}, codec={self.codec!r}: Gain(), Averaged() or Plain(), and a Codec, are needed."
            )
        check_rounds(self.every, self.sampled, self.outer_lr)
        self.rule.check(self.codec)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=lr)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        names: Sequence[str] | None = None, observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Controlled:  # fmt: skip
        return Controlled(self, model, optimizer, group, names, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 0, period: int = 0) -> int:
        speaks = str(rank) in self.draw([str(other) for other in range(size)], period)
        return nbytes_to_all(self.codec.nbytes(numel), size) if speaks else 0

    def draw(self, names: Sequence[str], round_: int) -> tuple[str, ...]:
        """The replicas of `names` that are sampled, in their order; the same on all."""
        return draw_names(names, self.sampled, self.seed, round_)


class _Said(NamedTuple):
    """The dᵢ and vᵢ that this replica sent in a round. It takes them over when it learns that it was counted."""

    round: int
    d: Tensor
    v: Tensor


class Controlled(Attached):
    """`ControlVariates` attached to a model; `Attached` shows the loop.

    The `names` at the start stay the N replicas of the run. A round that ends in a `LinkError` has changed nothing here; see `meet`.

    Args:
        method: the settings.
        model, optimizer: plain SGD over the trained parameters.
        group, names: the replicas that exchange, and their names in rank order; None: their ranks.
        observer, clock: called with each event; seconds, monotonic.

    Raises:
        ConfigurationError, ModelError: more replicas are sampled than there are; the optimizer is not plain SGD.

    >>> from thinwire import ThreadGroup
    >>> from thinwire.lab.methods import scaffold
    >>> model, method = nn.Linear(2, 1), scaffold(every=5)
    >>> method.attach(model, method.optimizer(model, lr=0.1), ThreadGroup.create(1)[0]).sampled
    ('0',)
    """

    strategy: ControlVariates

    def __init__(
        self, method: ControlVariates, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        names: Sequence[str] | None, observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, names, observer, clock)
        _check_sgd(optimizer)
        self.all_names = self.names
        if method.sampled is not None and method.sampled > len(self.all_names):
            raise ConfigurationError(
                f"sampled={method.sampled} of {len(self.all_names)} replicas: at most all can be sampled."
            )
        self.rounds = 0
        self._codec = method.codec.fitted(self.fragments[0].shapes)
        self.x = self._flat()
        self.c, self.own, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x), torch.empty(0)
        self._nominal = self._moved = 0.0  # sums of learning rates: of all steps, and of those that changed y
        self._counted: dict[str, int] = {}  # by name: the last round in which the replica was counted
        self._said: _Said | None = None
        self._corrected = self._moves = self._finished = False
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.exchange_gradients()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self.meet(group, self.names)

    # ---- the loop

    @property
    def sampled(self) -> tuple[str, ...]:
        """The replicas that train in this round."""
        return self.strategy.draw(self.names, self.rounds)

    @property
    def idle(self) -> bool:  # type: ignore[override]
        return self.name not in self.sampled

    @property
    def share(self) -> float:  # type: ignore[override]
        return len(self.sampled) / len(self.names)

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """g ← g + c − cᵢ, once a step. A hook runs it before the optimizer's step; call it earlier to clip the result."""
        if self._corrected:
            return
        self._corrected = True
        self._moves = any(parameter.grad is not None for parameter in self.parameters)
        if self._moves and self.strategy.rule.controls:
            separate_gradients(self.parameters)
            for parameter, slice_ in self._slices(self.c - self.own):
                gradient(parameter).add_(slice_)

    def skip(self) -> None:
        """Count a step in which this replica is idle."""
        self._moves = False
        self._after_step()

    def _after_step(self) -> None:
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.step += 1
        self._nominal += lr
        self._moved += lr if self._moves and any(p.grad is not None for p in self.parameters) else 0.0
        self._corrected = self._moves = False
        if self.step % self.strategy.every == 0:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """The end of a round."""
        method, numel, key = self.strategy, self.x.numel(), Key(self.strategy.seed, round=self.rounds)
        nominal = float(torch.tensor(self._nominal, dtype=torch.float32))
        sampled = self.sampled
        header = Header(identity((method, nominal)), 0, 0, self.rounds, 0, numel, self._codec.nbytes(numel))
        body, own = None, torch.zeros(numel)
        if self.name in sampled:
            body = torch.zeros(header.nbytes, dtype=torch.uint8)
            v, sound = self._encode(body, replace(key, sender=self.group.rank))
            header = header if sound else replace(header, flags=REFUSED)
            self._codec.decode_add(body, own, replace(key, sender=self.group.rank)) if sound else None
            self._said = _Said(self.rounds, own.to(self.x.device), v) if sound else None
        heard = self.tell(body, header, [self.names.index(name) for name in sampled])
        good = [rank for rank, (flags, _) in heard.items() if not flags & REFUSED]
        total = torch.zeros(numel)
        for rank in good:
            self._codec.decode_add(heard[rank][1], total, replace(key, sender=rank))
        if len(good) < len(heard):
            self._refuse([rank for rank in heard if rank not in good], "NaN or infinity in the trained weights")
        self._land(total.to(self.x.device), [self.names[rank] for rank in good], nominal)

    def _encode(self, body: Tensor, key: Key) -> tuple[Tensor, bool]:
        """Write sᵢ into `body`; returns the next vᵢ, and whether all values are finite."""
        a = (self.x - self._flat()).div_(self._moved) if self._moved > 0 else torch.full_like(self.x, math.nan)
        signal, v = self.strategy.rule.signal(a, self.c, self.own, self.v)
        if not bool(torch.isfinite(signal).all()):
            return v, False
        encode_from(signal, self._codec, body, key)
        return v, True

    def _land(self, total: Tensor, good: list[str], nominal: float) -> None:
        """Compute the round's new x and c, unless no replica counted or they would not be finite."""
        if good:
            step = self.strategy.outer_lr * nominal
            x = self.x - (total / len(good) + self.c).mul_(step)
            c = self.c + total / len(self.all_names) if self.strategy.rule.controls else self.c
            if bool(torch.isfinite(x).all()) and bool(torch.isfinite(c).all()):
                self.x, self.c = x, c
                self._counted |= dict.fromkeys(good, self.rounds)
                self._settle()
            else:
                self._refuse([], "the weights would not be finite")
        self._said = None
        self.rounds += 1
        self._begin()

    def _settle(self) -> None:
        """Take over the dᵢ and vᵢ of the last round in which this replica sent, because the others counted them."""
        if self._said and self._counted.get(self.name) == self._said.round:
            self.v = self._said.v
            if self.strategy.rule.controls:
                self.own = self.own + self._said.d
        self._said = None

    def _begin(self) -> None:
        """Begin a new round from x."""
        self._load(self.x)
        self._nominal = self._moved = 0.0

    def _refuse(self, by: list[int], reason: str) -> None:
        self._observe("refused", self.step, fragment=0, round=self.rounds, by=by, reason=reason)

    def finish(self) -> None:
        """Exchange the steps since the last round, and leave x in the model."""
        if not self._finished:
            self._finished = True
            if self.step % self.strategy.every:
                self._exchange()
            self._load(self.x)
            self.close()

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which the model holds x."""
        with self._keeping_own():
            self._load(self.x)
            yield

    @contextmanager
    def _keeping_own(self) -> Iterator[None]:
        """A context after which the model holds this replica's own weights again, bit for bit."""
        own = [parameter.detach().clone() for parameter in self.parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, kept in zip(self.parameters, own):
                    parameter.copy_(kept)

    # ---- the group

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        """Continue with the replicas of `group`, some or all of those at the start. Collective.

        A replica that is behind takes over x and c. Raises `DisagreementError` if a replica's cᵢ is not the one that the others count
        with (its checkpoint is older than its last packet), or if replicas continued separately.
        """
        self.group, self.names = group, self._checked(names, group)
        if strangers := [name for name in self.names if name not in self.all_names]:
            raise ConfigurationError(
                f"{', '.join(strangers)} are not among the {len(self.all_names)} replicas of the start: {', '.join(self.all_names)}."
            )
        self.introduce({"names": list(self.names), "all names": list(self.all_names)})
        told = self._told()
        if all(rounds == step == 0 for rounds, step, _ in told):
            agree_on_start(group, [self.x], self._observe)
            if not bool(torch.isfinite(self.x).all()):
                raise ModelError("the first weights hold NaN or infinity; initialise them, or load a sound checkpoint.")
            self._begin()
        donor, behind = donor_and_behind([(rounds, step) for rounds, step, _ in told])
        if behind and group.rank == donor:
            facts = {"rounds": self.rounds, "step": self.step, "nominal": self._nominal, "counted": self._counted}
            nbytes = give(group, behind, {"x": self.x, "c": self.c}, facts)
            self._observe("given", self.step, to=[self.names[rank] for rank in behind], nbytes=nbytes)
        problem = ""
        if group.rank in behind:
            problem = self._take_over(*take(group, donor, 16 * self.x.numel() + (1 << 20)), self.names[donor])
        unlike = len({(rounds, text) for rounds, _, text in self._told()}) > 1  # also tells the others of a problem
        if unlike or problem:
            raise DisagreementError(
                problem or "replicas continued separately and differ; resume all from one step, or start again."
            )

    def _told(self) -> list[tuple[int, int, bytes]]:
        """Rounds, steps, and digest of x and c of all replicas."""
        own = self.rounds.to_bytes(8, "little") + self.step.to_bytes(8, "little") + digest([self.x, self.c])
        told = gather(self.group, own, len(own), "resume")
        return [(int.from_bytes(t[:8], "little"), int.from_bytes(t[8:16], "little"), t[16:]) for t in told]

    def _take_over(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], donor: str) -> str:
        """Take over the state of `donor`; returns the reason if this is not possible."""
        if {name: t.shape for name, t in tensors.items()} != {"x": self.x.shape, "c": self.x.shape}:
            return f"replica {donor!r} handed over weights of another model; run the same one on every replica."
        known, last = facts["counted"].get(self.name), self._counted.get(self.name)
        if known != last and not (self._said and known == self._said.round):
            return (
                f"replica {self.name!r} was last counted in round {known}, but its own record says {last}: its control variate "
                "differs from the one that the others count with. Resume all from one step."
            )
        new_round = facts["rounds"] > self.rounds
        self.x, self.c = tensors["x"].to(self.x.device), tensors["c"].to(self.x.device)
        self.rounds, self.step, self._counted = facts["rounds"], facts["step"], dict(facts["counted"])
        self._settle()
        if new_round:
            self._begin()
        self._nominal = float(facts["nominal"])
        self._observe("caught_up", self.step, round=self.rounds, donor=donor)
        return ""

    # ---- save and resume

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        facts = {
            "step": self.step, "rounds": self.rounds, "nominal": self._nominal, "moved": self._moved,
            "counted": dict(self._counted), "all names": list(self.all_names),
        }  # fmt: skip
        return {"x": self.x, "c": self.c, "own": self.own, "v": self.v}, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`. Raises `CheckpointError`, and the errors of `meet`."""
        if tensors["x"].shape != self.x.shape or tuple(facts["all names"]) != self.all_names:
            raise CheckpointError(
                f"the checkpoint is of {len(facts['all names'])} replicas and {tensors['x'].numel():,} parameters, this run has "
                f"{len(self.all_names)} and {self.x.numel():,}; resume with the run's own settings."
            )
        self.x, self.c, self.own, self.v = (tensors[name].to(self.x.device) for name in ("x", "c", "own", "v"))
        self.step, self.rounds, self._counted = facts["step"], facts["rounds"], dict(facts["counted"])
        self._nominal, self._moved = facts["nominal"], facts["moved"]
        with self._keeping_own():  # the caller's weights, in the middle of a round
            self.meet(self.group, self.names)


def _check_sgd(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ModelError` unless the optimizer subtracts lr·gradient, because only then aᵢ is the mean gradient."""
    groups = optimizer.param_groups
    extras = {k: g[k] for g in groups for k in ("momentum", "weight_decay", "maximize") if g.get(k)}
    if type(optimizer) is not torch.optim.SGD or extras or len({group["lr"] for group in groups}) > 1:
        raise ModelError(
            f"control variates with {type(optimizer).__name__} {extras or ''}: torch.optim.SGD with one learning rate and "
            "nothing else is needed, since (x − y)/Ση must be the mean gradient."
        )
