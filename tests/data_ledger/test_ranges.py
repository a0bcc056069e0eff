"""Ranges of whole numbers, beside sets of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from thinwire.data_ledger.ranges import Range, cut, join_adjacent, total, union, without

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda one: (one[0], sum(one))), max_size=6)


def numbers(ranges: object) -> list[int]:
    return [number for begin, end in ranges for number in range(begin, end)]  # type: ignore[attr-defined]


@given(RANGES)
def test_a_union_holds_each_number_once_in_ranges_that_do_not_touch(ranges: list[Range]) -> None:
    found = union(ranges)
    assert numbers(found) == sorted(set(numbers(ranges))) and total(found) == len(set(numbers(ranges)))
    assert all(begin < end for begin, end in found) and all(a[1] < b[0] for a, b in pairwise(found))


@given(RANGES, st.integers(0, 35), st.integers(0, 10))
def test_a_range_without_holes_holds_the_other_numbers(ranges: list[Range], begin: int, length: int) -> None:
    whole = begin, begin + length
    holes = union((max(a, whole[0]), min(b, whole[1])) for a, b in ranges)
    found = [*without(whole, holes)]
    assert numbers(found) == [number for number in range(*whole) if number not in numbers(holes)]
    assert all(a < b for a, b in found)


@given(RANGES, st.integers(1, 5))
def test_parts_of_ranges_hold_their_numbers_in_order_and_differ_by_one_at_most(ranges: list[Range], parts: int) -> None:
    found = cut(union(ranges), parts)
    assert numbers(one for part in found for one in part) == numbers(union(ranges)) and len(found) == parts
    assert max(map(total, found)) - min(map(total, found)) <= 1


@given(RANGES)
def test_joined_ranges_are_read_in_the_given_order(ranges: list[Range]) -> None:
    found = [*join_adjacent(ranges)]
    assert numbers(found) == numbers(ranges) and all(a[1] != b[0] for a, b in pairwise(found))
