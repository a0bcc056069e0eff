"""Recovery: a replica whose weights have become NaN or infinite goes back to the anchors."""

from __future__ import annotations

from thinwire.comm.group import Group
from thinwire.runtime.driver import Training
from thinwire.runtime.module_state import clear
from thinwire.runtime.pipeline import WEIGHTS, or_flags


def start_again(training: Training, site: Group | None = None) -> None:
    """Go back to the anchors if this replica's weights are not finite, and clear such values in optimizer and buffers.

    `site` is the group of the ranks of a sharded replica: all go back, or none. Finite weights stay; then the refused delta is older
    than the last restart.
    """
    bad = not all(fragment.finite() for fragment in training.fragments)
    if or_flags(site, (int(bad),), WEIGHTS) == (0,):
        return
    training.warn("this replica's weights were not finite; it restarts from the anchors")
    for fragment in training.fragments:
        fragment.deviation = fragment.own = None
    training.load_anchors()
    clear(training.model, training.optimizer)
