"""The choice between star and mesh: the closed forms in exact arithmetic, for members as unequal as a frame can say."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import PacketError
from thinwire.net.star_or_mesh import Measured, explained_choice, parse_measured, worst

POSSIBLE = st.integers(1, 1 << 53)
PAIRS = st.builds(Measured, POSSIBLE, POSSIBLE, POSSIBLE, POSSIBLE)
NBYTES, RECEIVERS = st.integers(1, 1 << 40), st.integers(1, 63)


def exactly(found: Measured, nbytes: int, receivers: int) -> tuple[Fraction, Fraction]:
    """Returns the seconds of a mesh and of a star."""
    mesh = Fraction(found.straight_trip, 2_000_000) + Fraction(8 * nbytes * receivers, found.straight_rate)
    return mesh, Fraction(found.hub_trip, 2_000_000) + Fraction(8 * nbytes, found.hub_rate)


@given(PAIRS, NBYTES, RECEIVERS)
def test_the_faster_shape_is_chosen(found, nbytes, receivers):
    """A difference in the last digits of a float may go either way. The text says what is chosen."""
    mesh, star = exactly(found, nbytes, receivers)
    if abs(mesh - star) > star / 10**12:
        assert found.straight(nbytes, receivers) is (mesh < star)
    chosen = "mesh for" if found.straight(nbytes, receivers) else "star over the hub for"
    assert explained_choice(found, 1, nbytes, receivers).startswith(chosen)


def test_the_text_has_all_figures_and_equal_times_go_by_the_hub():
    found = Measured(100_000, 20_000_000, 10_000, 40_000_000)
    assert found.star_seconds(1_000_000) == pytest.approx(0.45, rel=1e-12)
    assert found.mesh_seconds(1_000_000, 2) == pytest.approx(0.405, rel=1e-12)
    assert explained_choice(found, 3, 1_000_000, 2) == (
        "mesh for 1000000 bytes to 2: 0.405 s straight, 0.45 s by the hub, 0.41 s around a ring (predicted); "
        "round trips 10 ms straight, 100 ms by the hub, 40 and 20 Mbit/s (measured, the worst of 3)"
    )
    assert not Measured(2, 1, 2, 1).straight(5, 1)


@given(PAIRS, NBYTES, st.integers(1, 62))
def test_more_receivers_never_favour_straight_streams_and_rings_never_win(found, nbytes, receivers):
    assert found.straight(nbytes, receivers) or not found.straight(nbytes, receivers + 1)
    assert found.ring_seconds(nbytes, receivers) >= found.mesh_seconds(nbytes, receivers)
    if receivers == 1:
        assert found.ring_seconds(nbytes, 1) == found.mesh_seconds(nbytes, 1)


@given(st.lists(PAIRS, min_size=1, max_size=8), PAIRS, NBYTES, RECEIVERS, st.randoms())
def test_one_member_however_slow_decides_for_all_alike(pairs, slow, nbytes, receivers, draw):
    """The prediction is that of no pair that is faster; the order of reports does not matter, nor does a report that came twice."""
    all_of_them = [*pairs, slow]
    found = worst(all_of_them)
    draw.shuffle(all_of_them)
    assert worst([*all_of_them, slow]) == found == parse_measured(found)
    for pair in all_of_them:
        assert found.mesh_seconds(nbytes, receivers) >= pair.mesh_seconds(nbytes, receivers)
        assert found.star_seconds(nbytes) >= pair.star_seconds(nbytes)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("wrong", [0, (1 << 53) + 1, (1 << 64) - 1])
def test_numbers_that_are_not_possible_are_refused(place, wrong):
    fields = [1, 1 << 53, 1, 1 << 53]
    assert parse_measured(fields) == Measured(*fields)
    fields[place] = wrong
    with pytest.raises(PacketError, match="numbers from 1 to"):
        parse_measured(fields)
