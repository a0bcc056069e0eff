"""Attacks that test robust rules: replicas lie about their deltas. `thinwire compare --attack ALIE --liars 2`.

The last `liars` ranks lie about their deltas only. They train, take the agreed anchors, forward others' packets, and own their
shards honestly. Some attacks need the honest replicas' deltas of the same round; μ and σ below are over these, by coordinate. Then the
honest replicas send them to the liars in fp32, with the ledger's purpose "spying": liars know everything, as the papers assume.

An attack is a frozen value, but not a piece of a strategy, so `thinwire train` cannot use one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.catalogue.parsing import parse
from thinwire.codecs import Codec, Identity
from thinwire.comm.emulated import Link
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Arrival, Exchange, Settle
from thinwire.exchange.chunks import Signal, cut
from thinwire.exchange.round import Round
from thinwire.exchange.stage import MOST_STAGES, Stage
from thinwire.packet import payload
from thinwire.pieces.feedback import Feedback
from thinwire.records.choices import listed
from thinwire.rng import Key, normals
from thinwire.types import State


@dataclass(frozen=True)
class Scene:
    """What a liar knows: its own signal; if it spies, those of all honest replicas [honest, numel]; its signal in the fragment's
    first round; the round's key; and the numbers of replicas and of liars.
    """

    own: Tensor
    honest: Tensor
    first: Tensor
    key: Key
    size: int
    liars: int


class Attack:
    """Computes the values that a liar sends instead of its signal."""

    spies: ClassVar[bool] = False
    flips_labels: ClassVar[bool] = False
    remembers: ClassVar[bool] = False  # needs its signal of the first round
    sybils: ClassVar[bool] = False  # all liars send what the first of them sends

    def says(self, scene: Scene) -> Tensor:
        """The values to send, flat, in fp32."""
        return scene.own


@dataclass(frozen=True)
class SignFlip(Attack):
    """Send −(own delta), which is training backwards. (byzfl's is −μ: `IPM(1.0)`.)"""

    def says(self, scene: Scene) -> Tensor:
        return -scene.own


@dataclass(frozen=True)
class IPM(Attack):
    """−ε·μ: inner product manipulation (Xie et al., arXiv 1903.03936). A small ε, 0.1, hides; a large one, 2, reverses the mean.

    Args:
        eps: ε, more than 0.
    """

    eps: float = 2.0

    spies: ClassVar[bool] = True

    def says(self, scene: Scene) -> Tensor:
        return scene.honest.mean(0).mul_(-self.eps)


@dataclass(frozen=True)
class ALIE(Attack):
    """μ − z·σ: a little is enough (Baruch et al., arXiv 1902.06156), σ over n − 1.

    Without `z` it is the largest that hides among enough honest deltas: Φ⁻¹((M − f − s)/(M − f)), s = ⌊M/2 + 1⌋ − f. byzfl's form is z = −1.5.

    Args:
        z: in standard deviations; None: computed from M and f.
    """

    z: float | None = None

    spies: ClassVar[bool] = True

    def says(self, scene: Scene) -> Tensor:
        z = hidden(scene.size, scene.liars) if self.z is None else self.z
        spread = scene.honest.std(0) if len(scene.honest) > 1 else torch.zeros_like(scene.own)
        return scene.honest.mean(0) - z * spread


def hidden(size: int, liars: int) -> float:
    """ALIE's z.

    >>> [round(hidden(*of), 3) for of in ((15, 3), (25, 5), (50, 12), (11, 5), (10, 2))]
    [0.21, 0.253, 0.336, 0.967, 0.0]
    """
    honest = size - liars
    share = (honest - (size // 2 + 1 - liars)) / honest
    return NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0


@dataclass(frozen=True)
class Gaussian(Attack):
    """Noise N(0, σ²), drawn anew for each round and each liar.

    Args:
        sigma: σ, in the unit of a delta.
    """

    sigma: float = 1.0

    def says(self, scene: Scene) -> Tensor:
        return normals(scene.key.own("attack"), 0, scene.own.numel()) * self.sigma


@dataclass(frozen=True)
class Mimic(Attack):
    """The delta of honest replica `rank`, so that this replica's rare data count for more (Karimireddy et al., arXiv 2006.09365). *Differs*:
    the user names the replica to copy, as in byzfl; the paper finds it by the principal direction of the deltas.

    Args:
        rank: of an honest replica.
    """

    rank: int = 0

    spies: ClassVar[bool] = True

    def says(self, scene: Scene) -> Tensor:
        return scene.honest[self.rank % len(scene.honest)].clone()


@dataclass(frozen=True)
class NotFinite(Attack):
    """NaN, or infinity, in every coordinate.

    Args:
        value: such as 'nan' or 'inf'.
    """

    value: str = "nan"

    def says(self, scene: Scene) -> Tensor:
        return torch.full_like(scene.own, float(self.value))


@dataclass(frozen=True)
class Dissensus(Attack):
    """x − ε·Σ_honest (x_j − x) / f, where x is the first honest replica's: away from the honest replicas' agreement (He et al., arXiv 2202.01545;
    theirs is for each edge of a graph, and this graph is complete).

    Args:
        eps: ε, more than 0.
    """

    eps: float = 1.5

    spies: ClassVar[bool] = True

    def says(self, scene: Scene) -> Tensor:
        return scene.honest[0] - self.eps * (scene.honest - scene.honest[0]).sum(0) / scene.liars


@dataclass(frozen=True)
class Replay(Attack):
    """Send the values of the first round in every round."""

    remembers: ClassVar[bool] = True

    def says(self, scene: Scene) -> Tensor:
        return scene.first


@dataclass(frozen=True)
class LabelFlip(Attack):
    """A liar trains honestly on wrong targets: with a vocabulary of V tokens, target t becomes V − 1 − t."""

    flips_labels: ClassVar[bool] = True


@dataclass(frozen=True)
class Switch(Attack):
    """Be honest for `every` rounds of a fragment, then lie for as many.

    Args:
        then: the attack.
        every: rounds, 1 or more.
    """

    then: Attack = SignFlip()
    every: int = 2

    @property
    def spies(self) -> bool:  # type: ignore[override]  # as the attack inside
        return self.then.spies

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.then.remembers

    def says(self, scene: Scene) -> Tensor:
        return self.then.says(scene) if scene.key.round // self.every % 2 else scene.own


@dataclass(frozen=True)
class Sybils(Attack):
    """One liar under several names: all send what the first of them sends, which does `then` (Douceur, 2002).

    Args:
        then: the attack.
    """

    then: Attack = LabelFlip()

    sybils: ClassVar[bool] = True

    @property
    def spies(self) -> bool:  # type: ignore[override]  # as the attack inside
        return self.then.spies

    @property
    def flips_labels(self) -> bool:  # type: ignore[override]
        return self.then.flips_labels

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.then.remembers

    def says(self, scene: Scene) -> Tensor:
        return self.then.says(scene)


ATTACKS: dict[str, type[Attack]] = {
    kind.__name__: kind
    for kind in (SignFlip, IPM, ALIE, Gaussian, Mimic, NotFinite, Dissensus, Replay, LabelFlip, Switch, Sybils)
}


def attack_of(text: str) -> Attack:
    """Parse an attack, in letters of any case: alie, 'IPM(0.1)', 'Switch(ALIE(), 3)'. Raises `ConfigurationError`."""
    by_lower: dict[str, Any] = {name.lower(): kind for name, kind in ATTACKS.items()}
    plain = by_lower.get(text.strip().replace("_", "").replace("-", "").lower())
    made = plain() if plain else parse(text, ATTACKS)
    if not isinstance(made, Attack):
        raise ConfigurationError(f"attack={text!r}: one of {listed(ATTACKS, 'thinwire docs robust')} is needed.")
    return made


@dataclass(frozen=True)
class Attacked(Exchange):
    """An exchange like `exchange`, in which the last `liars` ranks send what `attack` computes.

    Args:
        exchange: how packets travel.
        attack: computes what liars send.
        liars: how many lie, 1 or more; one replica at least is honest.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.
    """

    exchange: Exchange
    attack: Attack
    liars: int = 1

    needs_fixed_group: ClassVar[str] = "has liars at given ranks"

    def __post_init__(self) -> None:
        if type(self.liars) is not int or self.liars < 1:
            raise ConfigurationError(f"liars={self.liars!r}: a whole number is needed, 1 or more.")

    @property
    def gathers(self) -> bool:
        return self.exchange.gathers

    @property
    def multiplies(self) -> bool:
        return self.exchange.multiplies

    @property
    def needs_hub(self) -> bool:
        return self.exchange.needs_hub

    @property
    def feedback(self) -> Feedback | None:
        return self.exchange.feedback

    @property
    def sends_own(self) -> bool:
        return self.exchange.sends_own

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        return self.exchange.owns(codec, numel, rank, size)

    def nbytes_products(self, size: int) -> int:
        return self.exchange.nbytes_products(size)

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        self.exchange.check(codec, feedback)

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        if self.liars >= size:
            raise ConfigurationError(
                f"liars={self.liars} of {size} replicas: at least one must be honest; choose {size - 1} or fewer."
            )
        first = {"first": torch.zeros(numel)} if lies(rank, size, self.liars) else {}
        return {**first, **self.exchange.init(codec, numel, rank, size)}

    def why(self, fragments: Sequence[tuple[Codec, int]], size: int) -> list[str]:
        return self.exchange.why(fragments, size)

    def depart(self, round_: Round, state: State) -> tuple[Any, Tensor | None]:
        inner = {name: kept for name, kept in state.items() if name != "first"}
        honest = spied(round_, self.liars, round_.signal) if self.attack.spies else torch.empty(0)
        if not lies(round_.rank, round_.size, self.liars):
            return self.exchange.depart(round_, inner), None
        own = round_.signal(0, round_.numel).cpu().clone()
        first = own if round_.key.round == 0 else state["first"]
        said = self.attack.says(Scene(own, honest, first, round_.key, round_.size, self.liars))
        if self.attack.sybils:
            said = alike(round_, said, self.liars)
        round_.signal = lambda begin, end: said[begin:end]
        return self.exchange.depart(round_, inner), first

    def arrive(self, departure: tuple[Any, Tensor | None], settle: Settle) -> Arrival:
        arrival, first = self.exchange.arrive(departure[0], settle), departure[1]
        return arrival if first is None else replace(arrival, state={"first": first, **arrival.state})

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return self.exchange.nbytes_sent(codec, numel, size, rank)

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return self.exchange.seconds(codec, numel, size, link)


def lies(rank: int, size: int, liars: int) -> bool:
    """Whether replica `rank` of `size` is one of the `liars`."""
    return rank >= size - liars


def spied(round_: Round, liars: int, signal: Signal) -> Tensor:
    """Send this replica's `signal` to the liars. On a liar, returns the signals of all honest replicas [honest, numel]."""
    honest = range(round_.size - liars)
    return _told(round_, MOST_STAGES - 3, honest, range(len(honest), round_.size), signal)


def alike(round_: Round, said: Tensor, liars: int) -> Tensor:
    """The values `said` of the first liar, which sends them to the other liars."""
    first = round_.size - liars
    told = _told(round_, MOST_STAGES - 5, [first], range(first + 1, round_.size), lambda begin, end: said[begin:end])
    return told[0] if len(told) else said


def _told(round_: Round, number: int, who: Sequence[int], to: Sequence[int], signal: Signal) -> Tensor:
    """Send `signal` in stage `number` if this replica is one of `who`. If it is one of `to`, returns their signals [who, numel]."""
    stage, messages = Stage(round_, Identity(), number, purpose="spying"), cut(Identity(), 0, round_.numel)
    if round_.rank in who:
        for index, message in enumerate(messages):
            stage.send(index, message, to, signal, replace(round_.key, sender=round_.rank))
    if round_.rank not in to:
        return torch.empty(0)
    stage.expect(dict.fromkeys(who, messages))
    found = torch.zeros(len(who), round_.numel)
    for index, message in enumerate(messages):
        stage.receive(index)
        for row, rank in zip(found, who):
            row[message.begin : message.end] = payload(stage.packet(index, rank)).view(torch.float32)
    return found
