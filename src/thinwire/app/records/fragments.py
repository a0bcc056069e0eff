"""The fragments of a run, as its events name them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from thinwire.app.records.events import Event
from thinwire.app.records.sessions import whole

MOST_FRAGMENTS = 4096  # most fragments in figures


def fragments_of(start: Event) -> list[tuple[str, int]]:
    """(name, parameters) of the fragments that a `start` event lists, `MOST_FRAGMENTS` at most."""
    listed = start["fragments"][:MOST_FRAGMENTS] if isinstance(start["fragments"], list) else []
    pairs = [item if isinstance(item, dict) else {} for item in listed]
    return [(str(item.get("name", index)), whole(item.get("numel"))) for index, item in enumerate(pairs)]


def fragment_of(event: Event, names: Mapping[str, int]) -> int:
    """The number of the event's fragment; an elastic replica writes a name, which `names` maps to it. -1: there is none."""
    given = event["fragment"]
    return int(given) if isinstance(given, int | float) and math.isfinite(given) else names.get(str(given), -1)
