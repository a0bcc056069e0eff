"""Algorithms with a loop of their own, over any `Group`: what no composition of the other pieces is."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.codecs import Codec, Identity, RandomK, TopK
from thinwire.methods.base import Attached, Method
from thinwire.methods.control_rules import Averaged, Gain, Plain, Rule
from thinwire.methods.control_variates import Controlled, ControlVariates
from thinwire.methods.flasc import Federated, Flasc
from thinwire.methods.gradient_codes import Cyclic, Repetition
from thinwire.methods.minmax import (
    Extragradient,
    Free,
    Masha1,
    Masha2,
    Saddle,
    Saddling,
    Simplexes,
    nbytes_sent,
    saddle,
)
from thinwire.methods.sequential_codes import Multiplexed, SelectiveRepeat
from thinwire.methods.zeroth_order import JustOneByte, Log, ZerothOrder

_TENTH, _HUNDREDTH = RandomK(0.1), TopK(0.01)


def just_one_byte(*, samples: int = 4, radius: float = 1e-3) -> JustOneByte:
    """Just One Byte (Zelikman et al., 2023): fine-tune with forward passes only, a byte a value on the wire."""
    return JustOneByte(samples=samples, radius=radius)


def fedavg(
    *, every: int = 10, sampled: int | None = None, outer_lr: float = 1.0, codec: Codec = Identity()
) -> ControlVariates:
    """FedAvg (McMahan et al., arXiv 1602.05629): `sampled` replicas train alone, their mean is taken."""
    return ControlVariates(rule=Plain(), every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def scaffold(*, every: int = 10, sampled: int | None = None, outer_lr: float = 1.0) -> ControlVariates:
    """SCAFFOLD (Karimireddy et al., arXiv 1910.06378), in one vector a round: control variates take out the drift."""
    return ControlVariates(rule=Gain(1.0), every=every, sampled=sampled, outer_lr=outer_lr)


def scallion(
    *,
    every: int = 10,
    sampled: int | None = None,
    outer_lr: float = 1.0,
    alpha: float = 0.1,
    codec: Codec = _TENTH,
) -> ControlVariates:
    """SCALLION (Huang, Li, Li, ICLR 2024): SCAFFOLD through any unbiased codec."""
    return ControlVariates(rule=Gain(alpha), every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def scafcom(
    *,
    every: int = 10,
    sampled: int | None = None,
    outer_lr: float = 1.0,
    beta: float = 0.2,
    codec: Codec = _HUNDREDTH,
) -> ControlVariates:
    """SCAFCOM (Huang, Li, Li, ICLR 2024): SCAFFOLD with momentum through any contractive codec."""
    return ControlVariates(rule=Averaged(beta), every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


def flasc(
    *,
    every: int = 10,
    up: float = 0.25,
    down: float = 0.5,
    sampled: int | None = None,
    outer_lr: float = 1e-2,
    codec: Codec = Identity(),
) -> Flasc:
    """FLASC (Kuo et al., arXiv 2406.05233): adapters around a hub, sparse up and down; at densities of 1 FedAdam."""
    return Flasc(up=up, down=down, every=every, sampled=sampled, outer_lr=outer_lr, codec=codec)


METHODS: dict[str, Callable[..., Method]] = {
    f.__name__: f for f in (just_one_byte, fedavg, scaffold, scallion, scafcom, flasc)
}

__all__ = [
    "METHODS",
    "Attached",
    "Averaged",
    "ControlVariates",
    "Controlled",
    "Cyclic",
    "Extragradient",
    "Federated",
    "Flasc",
    "Free",
    "Gain",
    "JustOneByte",
    "Log",
    "Masha1",
    "Masha2",
    "Method",
    "Multiplexed",
    "Plain",
    "Repetition",
    "Rule",
    "Saddle",
    "Saddling",
    "SelectiveRepeat",
    "Simplexes",
    "ZerothOrder",
    "fedavg",
    "flasc",
    "just_one_byte",
    "nbytes_sent",
    "saddle",
    "scafcom",
    "scaffold",
    "scallion",
]
