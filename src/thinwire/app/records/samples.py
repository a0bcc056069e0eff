"""The samples of a run: trained, in flight, lost, waiting, or dropped, from the summaries of its replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.app.records.sessions import number

_KINDS = ("trained", "in_flight", "lost")


def samples_of(ends: Sequence[Mapping[str, Any]], computed: int | None = None) -> dict[str, Any]:
    """The `samples_...` of a run whose replicas ended with these summaries, for `Summary`; empty for one that has no ledger.

    All know what is trained and lost; in flight are each replica's own; waiting are those of the present epoch that nobody has
    trained. With `computed`, the samples that all replicas together have trained, the rest of them was dropped.
    """
    told = [one for one in (end.get("samples") for end in ends) if isinstance(one, dict)]
    known = [one for one in told if all(math.isfinite(number(one.get(kind))) for kind in _KINDS)]
    if not known:
        return {}
    newest = max(known, key=lambda one: number(one["trained"]) + number(one["lost"]))
    trained, lost = int(number(newest["trained"])), int(number(newest["lost"]))
    in_flight = sum(int(number(one["in_flight"])) for one in known)
    taken, epoch = trained + lost + in_flight, number(newest.get("in_an_epoch"))
    counts = {"samples_trained": trained, "samples_in_flight": in_flight, "samples_lost": lost}
    if 1 <= epoch < math.inf:
        counts["samples_waiting"] = -taken % int(epoch)
    if computed is not None:
        counts["samples_dropped"] = max(0, computed - taken)
    return counts


def text_of_samples(ends: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on samples that were lost with a replica or went to others, by position; empty if there are none."""
    sentences = []
    for key, says in (("lost_with", "are lost with"), ("returned_by", "were returned, and others train them, from")):
        found: dict[tuple[str, int, int], None] = {}
        for end in ends:
            told = end.get("samples")
            for entry in told.get(key, ()) if isinstance(told, dict) and isinstance(told.get(key), list) else ():
                if isinstance(entry, list) and len(entry) == 3 and all(math.isfinite(number(n)) for n in entry[1:]):
                    found[str(entry[0])[:64], int(number(entry[1])), int(number(entry[2]))] = None
        by_name: dict[str, list[str]] = {}
        for name, begin, stop in sorted(found):
            by_name.setdefault(name, []).append(f"{begin} to {stop - 1}" if stop - begin > 1 else str(begin))
        sentences += [
            f"Samples {', '.join(ranges[:50])} of the order {says} {name}." for name, ranges in by_name.items()
        ]
    return " ".join(sentences)
