"""What a refusal offers: the nearest name, and a short list of all."""

from __future__ import annotations

import pytest

from thinwire.choices import MOST_LISTED, SHOWN, listed, nearest


@pytest.mark.parametrize("count", [0, 1, MOST_LISTED, MOST_LISTED + 1, 100])
def test_only_a_long_list_is_cut_and_names_the_command_that_lists_all(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    said = listed(names, "thinwire docs")
    if count <= MOST_LISTED:
        assert said == ", ".join(names)
    else:
        assert said == f"{', '.join(names[:SHOWN])} and {count - SHOWN} more (`thinwire docs`)"
    assert listed(names) == said.removesuffix(" (`thinwire docs`)")


def test_the_nearest_name_ignores_case_and_nothing_is_named_if_none_is_near() -> None:
    assert nearest("ALLREDUCE", ["AllReduce", "Direct"]) == " (did you mean AllReduce?)"
    assert nearest("zzz", ["AllReduce", "Direct"]) == ""
