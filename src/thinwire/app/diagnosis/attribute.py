"""Finds what bad ways have in common: a sender, a receiver, a replica, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thinwire.app.diagnosis.findings import Side
from thinwire.app.diagnosis.measure import Cell


@dataclass(frozen=True)
class Cause:
    """A cause; `cells` are the bad ways that it explains."""

    side: Side
    who: tuple[str, ...]
    cells: tuple[Cell, ...]
    both: bool = False


def attribute(bad: Collection[Cell], names: Sequence[str], perhaps: Collection[Cell] = ()) -> list[Cause]:
    """The causes of the `bad` ways between the replicas `names`; `perhaps` are further ways that may be bad.

    >>> [cause.side.value for cause in attribute([("a", "b"), ("a", "c"), ("a", "d")], "abcd")]
    ['sender side']
    >>> [(cause.side.value, cause.who) for cause in attribute([("a", "b")], "ab")]
    [('way', ('a', 'b'))]
    """
    if len(names) == 2:
        return _links(set(bad), Side.WAY)
    least = max(2, len(names) - 2)
    causes, explained = [], set()
    for name in names:
        out, into = ([cell for cell in sorted(bad) if cell[end] == name] for end in (0, 1))
        sends, receives = (
            len(of) >= 2 and sum(cell[end] == name for cell in {*bad, *perhaps}) >= least
            for end, of in ((0, out), (1, into))
        )
        if sends or receives:
            side = Side.REPLICA if sends and receives else Side.SENDER if sends else Side.RECEIVER
            cells = (out if sends else []) + (into if receives else [])
            causes.append(Cause(side, (name,), tuple(cells)))
            # Acknowledgements return over a side that is full, so the other direction is delayed too.
            explained |= {cell for cell in {*bad, *perhaps} if name in cell}
    young = set(perhaps) - set(bad) - explained  # they may still complete a row or a column
    left = {c for c in set(bad) - explained if not any(c[0] == p[0] or c[1] == p[1] for p in young)}
    return causes + _links(left, Side.LINK)


def _links(cells: set[Cell], side: Side) -> list[Cause]:
    causes = []
    for cell in sorted(cells):
        both = cell[::-1] in cells
        if not both or cell < cell[::-1]:
            causes.append(Cause(side, cell, (cell, cell[::-1]) if both else (cell,), both))
    return causes
