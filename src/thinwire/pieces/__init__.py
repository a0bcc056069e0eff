"""The pieces a strategy is composed of: frozen values that are their own configuration."""

from thinwire.lab import privacy
from thinwire.lab.gossip import rules as gossip
from thinwire.lab.gradients import lgreco
from thinwire.pieces import aggregate, feedback, inner_optimizers, merge, outer, partition, policy, schedule, transforms

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
