"""The fastest exchange of packets: closed forms against times measured over emulated links, by hand, and their crossing."""

from __future__ import annotations

import math
from itertools import product

import pytest

from thinwire.app.plan.exchanges import ring_seconds, star_seconds, ways
from thinwire.app.plan.links import Links
from thinwire.comm import Link
from thinwire.exchange import Direct, TwoShot
from thinwire.lab.star.exchange import Star

# A star and gloo's ring among four replicas with uplinks of 200 Mbit/s, emulated: one-way delay, bytes, seconds of each.
MEASURED = [
    (0.05, 1e5, 0.168, 0.615), (0.05, 1e6, 0.28, 0.75), (0.05, 1e7, 1.75, 1.35),
    (0.01, 1e5, 0.040, 0.128), (0.01, 1e6, 0.185, 0.165), (0.01, 1e7, 1.59, 0.73),
]  # fmt: skip


@pytest.mark.parametrize(("delay", "nbytes", "star", "ring"), MEASURED)
def test_closed_forms_are_close_to_measured_times(delay: float, nbytes: float, star: float, ring: float) -> None:
    """The router shaped uplinks only, and a step of gloo's ring takes a round trip. TCP's slow start explains the rest at 100 kB."""
    links = Links.uniform(Link(200e6, delay), 4)
    egress = Links(links.names, links.alone, up=links.up, down=(math.inf,) * 4)
    predicted = star_seconds(egress, nbytes, 0), ring_seconds(Links.uniform(Link(200e6, 2 * delay), 4), nbytes)
    assert predicted[0] == pytest.approx(2 * delay + 4 * 8 * nbytes / 200e6)
    assert 0.65 * star < predicted[0] < 1.1 * star and 0.85 * ring < predicted[1] < 1.15 * ring
    if max(star, ring) > 1.15 * min(star, ring):
        assert (predicted[0] < predicted[1]) == (star < ring)


@pytest.mark.parametrize(("size", "delay", "hop"), [*product((3, 4, 8), (0.001, 0.1), (1.0, 2.0))])
def test_a_star_and_a_ring_cross_at_the_size_of_the_paper(size: int, delay: float, hop: float) -> None:
    """The star is faster for (2·(M−1)·τ_hop − 2·τ) > S/B·(2·(M−1) − 2·(M−1)/M).

    A step of the ring takes one delay, or a round trip as in gloo.
    """
    around, rate = 2 * (size - 1), 50e6
    nbytes = (around * hop * delay - 2 * delay) / (around - around / size) * rate / 8
    star, ring = (Links.uniform(Link(rate, times * delay), size) for times in (1.0, hop))
    assert star_seconds(star, 0.99 * nbytes, 0) < ring_seconds(ring, 0.99 * nbytes)
    assert star_seconds(star, 1.01 * nbytes, 0) > ring_seconds(ring, 1.01 * nbytes)


def test_the_fastest_exchange_matches_values_by_hand() -> None:
    links = Links.uniform(Link(8e6, 0.1), 4)  # 1 MB a second
    assert {way.name: way.seconds for way in ways(links, 1e6)} == pytest.approx(
        {"in shards": 1.7, "each to all": 3.1, "around a ring": 2.1, "over replica-0": 6.2}
    )
    assert ways(links, 1e6)[0].exchange == TwoShot() and ways(links, 1e4)[0].exchange == Direct()
    places = range(4)
    thin = {(a, b): Link(8e8 if 2 in (a, b) else 8e6, 0.01) for a in places for b in places if a != b}
    site = Links(("a", "b", "c", "d"), thin, up=(8e7, 8e7, 8e8, 8e7), down=(8e7, 8e7, 8e8, 8e7))
    best = ways(site, 1e6)[0]  # only the links of one site are wide
    assert best.exchange == Star(2) and best.name == "over c" and best.seconds == pytest.approx(0.02 + 0.1 + 0.1)


def test_both_directions_of_a_link_to_a_center_count_once() -> None:
    """Behind a link that is slow in one direction."""
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    delay = {True: 0.3, False: 0.1}  # from the center, and to it
    links = Links(("a", "b", "c"), {(a, b): Link(8e9, delay[a == 0]) for a, b in pairs}, up=(8e9,) * 3, down=(8e9,) * 3)
    assert star_seconds(links, 1.0, 0) == pytest.approx(0.4)
