"""Attacks that test robust rules: replicas lie about their deltas. `thinwire compare --attack ALIE --liars 2`.

An attack is a frozen value, and computes what a liar sends. `lab/robust/attacked.py` adds liars to an exchange. Some attacks need the
honest replicas' deltas of the same round; μ and σ below are over these, by coordinate.

An attack is not a piece of a strategy, so `thinwire train` cannot use one.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.rng import Key, normals


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

    def among(self, exchange: Any, liars: int) -> Any:
        """The exchange in which the last `liars` ranks lie so. Raises `ConfigurationError`."""
        from thinwire.lab.robust.attacked import with_liars

        return with_liars(exchange, self, liars)


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
        then: the attack; one that is computed anew in each round.
        every: rounds, 1 or more.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.
    """

    then: Attack = SignFlip()
    every: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.then, Attack) or self.then.flips_labels or self.then.sybils:
            raise ConfigurationError(
                f"{self}: an attack on the deltas of one replica is needed, such as SignFlip(); labels are flipped and Sybils are alike in all "
                "rounds; Sybils(Switch(...)) is possible."
            )
        if type(self.every) is not int or self.every < 1:
            raise ConfigurationError(f"{self}: every is a number of rounds, 1 or more; 2 is usual.")

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
