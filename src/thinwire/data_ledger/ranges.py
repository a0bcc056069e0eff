"""Sums, unions and parts of ranges of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from thinwire.data_ledger.order import part_of

Range = tuple[int, int]  # begin, end


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The numbers in `ranges` as ascending ranges that do not touch.

    >>> union([(5, 7), (0, 2), (2, 3), (4, 4)])
    ((0, 3), (5, 7))
    """
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return tuple(found)


def total(ranges: Iterable[Range]) -> int:
    """The number of elements in `ranges`."""
    return sum(end - begin for begin, end in ranges)


def without(whole: Range, holes: Iterable[Range]) -> Iterator[Range]:
    """The range without `holes`, which are in it, ascending, and do not touch."""
    at = whole[0]
    for begin, end in holes:
        if at < begin:
            yield at, begin
        at = end
    if at < whole[1]:
        yield at, whole[1]


def join_adjacent(ranges: Iterable[Range]) -> Iterator[Range]:
    """Join adjacent ranges, in the given order."""
    last: Range | None = None
    for begin, end in ranges:
        if last and last[1] == begin:
            last = last[0], end
            continue
        if last:
            yield last
        last = begin, end
    if last:
        yield last


def cut(ranges: Sequence[Range], parts: int) -> list[tuple[Range, ...]]:
    """Cut `ranges` into `parts` of equal length, up to one element."""
    whole, found = total(ranges), []
    for index in range(parts):
        low, high = part_of(whole, parts, index)
        at, mine = 0, list[Range]()
        for begin, end in ranges:
            a, b = max(low - at, 0), min(high - at, end - begin)
            if a < b:
                mine.append((begin + a, begin + b))
            at += end - begin
        found.append(tuple(mine))
    return found
