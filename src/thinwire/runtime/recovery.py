"""The way back to the anchors, where a replica's own weights have become NaN or infinite."""

from __future__ import annotations

from thinwire.comm.group import Group
from thinwire.runtime.driver import Training
from thinwire.runtime.module_state import clear
from thinwire.runtime.pipeline import WEIGHTS, or_flags


def start_again(training: Training, site: Group | None = None) -> None:
    """Go back to the anchors if own weights are not finite, and clear what is not finite in optimizer and buffers.

    `site` joins the ranks of a sharded replica: all go back, or none. Weights that are finite stay: the delta that was refused is from
    before the last new start.
    """
    bad = not all(fragment.finite() for fragment in training.fragments)
    if or_flags(site, (int(bad),), WEIGHTS) == (0,):
        return
    training.warn("this replica's weights were not finite; it starts again from the anchors")
    for fragment in training.fragments:
        fragment.deviation = fragment.own = None
    training.load_anchors()
    clear(training.model, training.optimizer)
