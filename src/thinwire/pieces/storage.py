"""Where a replica keeps its anchors and outer state, and in which type."""

from __future__ import annotations

from typing import Literal, get_args

from thinwire.errors import ConfigurationError
from thinwire.pieces.merge import Merge
from thinwire.pieces.schedule import Adaptive, Schedule

Anchors = Literal["host", "device", "disk"]
"""In host memory; on the model's device; or in a file, of which only those fragments are in memory that depart next or are in flight."""

StateDtype = Literal["fp32", "bf16"]
"""The type of outer state and feedback between two rounds of their fragment."""


def check_anchors(anchors: str, schedule: Schedule | Adaptive, merge: Merge, deltas: bool) -> None:
    """Raise `ConfigurationError` unless `anchors` is a known place and fits the other pieces. `deltas`: whether replicas agree on deltas."""
    if anchors not in get_args(Anchors):
        raise ConfigurationError(f"anchors={anchors!r}: 'host', 'device' or 'disk' is needed.")
    reason = ""
    if not deltas:
        reason = "gradients need no anchors, and gossip has none"
    elif isinstance(schedule, Adaptive):
        reason = f"{schedule} exchanges all fragments at once, so all would be in memory"
    elif merge.whole_period:
        reason = f"with {merge} every fragment is always in flight"
    if anchors == "disk" and reason:
        raise ConfigurationError(f"anchors='disk': {reason}; choose anchors='host', or deltas of fragments in turn.")


def check_state_dtype(dtype: str, deltas: bool) -> None:
    """Raise `ConfigurationError` unless `dtype` is known and fits. `deltas`: whether replicas agree on deltas."""
    if dtype not in get_args(StateDtype):
        raise ConfigurationError(f"state_dtype={dtype!r}: 'fp32' or 'bf16' is needed.")
    if dtype != "fp32" and not deltas:
        raise ConfigurationError(
            f"state_dtype={dtype!r}: state that every inner step changes would be rounded as often, and gossip has no outer state; choose 'fp32', "
            "or deltas."
        )
