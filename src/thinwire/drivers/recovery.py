"""Recovery: a replica whose weights have become NaN or infinite goes back to the anchors."""

from __future__ import annotations

from thinwire.comm.group import Group
from thinwire.drivers.base import Training
from thinwire.drivers.module_state import clear
from thinwire.drivers.rounds import WEIGHTS, or_flags
from thinwire.exchange import Buffers


def start_again(training: Training, site: Group | None = None, buffers: Buffers | None = None) -> bool:
    """Go back to the anchors if this replica's weights are not finite, and clear such values in optimizer and buffers. Returns whether.

    `site` is the group of the ranks of a sharded replica: all go back, or none. Finite weights stay; then the refused delta is older
    than the last restart. What the fragments hold of their own returns to `buffers`; a delta in flight, with its round.
    """
    bad = not all(fragment.finite() for fragment in training.fragments)
    if or_flags(site, (int(bad),), WEIGHTS) == (0,):
        return False
    training.warn("this replica's weights were not finite; it restarts from the anchors")
    for fragment in training.fragments:
        flies = fragment.flight is not None and fragment.flight.delta is fragment.own
        if buffers:
            buffers.give(fragment.deviation, *fragment.deviation_state.values(), None if flies else fragment.own)
        fragment.deviation, fragment.own, fragment.deviation_state = None, None, {}
        fragment.counted = training.trained  # what was trained since is in no delta
    training.load_anchors()
    clear(training.model, training.optimizer)
    return True
