"""What the main thread learns when its replica has taken over the agreed state of others: one outcome for each fragment, or two."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.drivers.elastic.global_state import GlobalState, Record
from thinwire.drivers.elastic.messages import Outcome, Ready
from thinwire.drivers.elastic.past_deltas import UNKNOWN, Doubt, PastDeltas


def caught_up(
    agreed: GlobalState, known: Record, name: str, past: PastDeltas, last: Doubt | None, waiting: dict[int, Ready],
    anew: bool,
) -> Iterator[Outcome]:  # fmt: skip
    """The outcomes of `name`, which had the record `known` before it took over `agreed`. `last` is its commit that was not confirmed yet.
    Deltas that must not be sent any more leave `waiting`, and what cannot count again leaves `past`. `anew`: it held random weights.
    """
    confirmed = last is not None and agreed.counts(last.round, name, last.ready.fragment, last.mark)
    undone = None if confirmed else last  # the lighthouse died before the others learned of this commit
    for index, (anchor, state) in enumerate(zip(agreed.anchors, agreed.states)):
        back = undone.ready if undone and undone.ready.fragment == index else None
        held = None if anew else past.counted_in(agreed, known, name, index)
        new = anew or held == UNKNOWN
        if new or held:
            past.forget(index)
        stale = waiting.pop(index, None) if held or (new and agreed.ledger is None) else None
        spent = held == UNKNOWN
        yield Outcome(index, agreed.round, anchor, state, ready=stale, returned=back, anew=new, spent=spent)
        if isinstance(held, Doubt):  # later deltas hold it, too, and were not counted
            yield Outcome(index, held.round, anchor, state, held.ready, True, held.feedback)
        if undone and back and not new:
            past.doubted(undone, whole=not held)  # others that have this commit may come back
