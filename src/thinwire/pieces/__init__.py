"""The pieces a strategy is composed of: frozen values that are their own configuration."""

from thinwire.pieces import (
    aggregate,
    feedback,
    gossip,
    inner_optimizers,
    lgreco,
    merge,
    outer,
    partition,
    policy,
    privacy,
    schedule,
    transforms,
)

__all__ = [
    "aggregate",
    "feedback",
    "gossip",
    "inner_optimizers",
    "lgreco",
    "merge",
    "outer",
    "partition",
    "policy",
    "privacy",
    "schedule",
    "transforms",
]
