"""A graph within a budget of neighbours: against all graphs of five replicas, against known graphs, and its chart."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from thinwire.app.plan.links import Links
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.lab.plan.graph import graph_chart, halving_seconds, round_seconds, within_budget
from thinwire.lab.topology import Complete, Listed, OnePeerExponential, RandomPairs, Ring, check_size, spectrum
from thinwire.lab.topology.base import reachable


def random_links(size, seed):
    """Random links from 3 to 300 Mbit/s."""
    rng = np.random.default_rng(seed)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    return Links(tuple(map(str, range(size))), {pair: Link(float(10 ** rng.uniform(6.5, 8.5)), 0.02) for pair in pairs})


def test_the_graph_of_five_replicas_is_the_best_of_all():
    links, pairs, best = random_links(5, 1), list(combinations(range(5), 2)), {2: np.inf, 3: np.inf}
    for chosen in product((False, True), repeat=len(pairs)):
        graph = Listed(tuple(pair for pair, there in zip(pairs, chosen) if there))
        edges = graph.edges(5)
        if edges.sum(1).max() > 3 or not reachable(edges).all():
            continue
        seconds = halving_seconds(links, graph, 1e5)
        best = {
            degree: min(least, seconds) if edges.sum(1).max() <= degree else least for degree, least in best.items()
        }
    for degree, least in best.items():
        found = within_budget(links, degree, 1e5)
        assert found.edges(5).sum(1).max() <= degree
        assert halving_seconds(links, found, 1e5) == pytest.approx(least)


def test_the_graph_of_twelve_replicas_is_twice_as_fast_as_a_ring():
    """It leaves out the slow links, and no replica has more neighbours than its budget."""
    links = random_links(12, 3)
    found = within_budget(links, 3, 1e6)
    edges = found.edges(12)
    check_size(found, 12)
    assert edges.sum(1).max() <= 3
    assert halving_seconds(links, found, 1e6) < 0.5 * min(
        halving_seconds(links, one, 1e6) for one in (Ring(), Complete())
    )
    assert links.rates[edges].min() > 4 * links.rates.min()


def test_a_round_takes_as_long_as_its_slowest_replica():
    """By hand: 1 MB at 8 Mbit/s takes a second, two neighbours share the uplink, and one slow link takes longer than both."""
    alone = {(a, b): Link(8e6, 0.1) for a in range(3) for b in range(3) if a != b}
    ring = Ring().edges(3)
    assert round_seconds(Links(("a", "b", "c"), alone), ring, 1e6) == pytest.approx(2.1)
    slow = Links(("a", "b", "c"), alone | {(0, 1): Link(2e6, 0.3)})
    assert round_seconds(slow, ring, 1e6) == pytest.approx(4.3)
    assert round_seconds(slow, ring & False, 1e6) == 0

    late = Links(("a", "b", "c"), alone | {(1, 0): Link(8e6, 0.4)})
    heard = np.array([[0, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=bool)
    assert round_seconds(late, heard, 1e6) == pytest.approx(2.4)


def test_a_topology_that_changes_counts_by_its_mean_round():
    """A round of random pairs takes one second. One of the three exponential rounds runs over slow links and takes four."""
    links, pairs = Links.uniform(Link(8e6), 8), RandomPairs()
    assert halving_seconds(links, pairs, 1e6) == pytest.approx(max(1.0, spectrum(pairs, 8).halving))
    slow = Links(
        links.names, {(a, b): Link(2e6 if abs(a - b) == 4 else 8e6) for a in range(8) for b in range(8) if a != b}
    )
    assert halving_seconds(slow, OnePeerExponential(), 1e6) == pytest.approx(2.0)


def test_the_chart_draws_each_edge_once_with_the_width_of_its_value():
    """Four replicas lie clockwise on a circle from the top. An edge of one direction has that direction's value."""
    edges = np.array([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=bool)
    values = np.array([[0, 1.0, 2.0, 9.0], [1.0, 0, 0, 4.0], [9.0, 0, 0, 3.0], [0, 0, 0, 0]])
    (view,) = graph_chart(edges, values, "meetings", ("oslo", "lima", "rome", "bern")).views
    *lines, places = view.data
    top, right, bottom, left = (0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)
    found = [(tuple(zip(line["x"], line["y"])), line["name"], line["line"]["width"]) for line in lines]
    gap = (None, None)
    assert found == [
        ((top, right, gap, top, bottom, gap), "meetings up to 2", 1),
        ((bottom, left, gap), "meetings up to 3", 3),
        ((right, left, gap), "meetings up to 4", 5),
    ]
    assert list(zip(places["x"], places["y"])) == [top, right, bottom, left]
    assert places["text"] == ["oslo", "lima", "rome", "bern"] and not places["showlegend"] and view.layout["showlegend"]
    assert len({line["line"]["color"] for line in lines} | {places["marker"]["color"]}) == 4


@pytest.mark.parametrize(
    ("size", "degree", "said"),
    [
        (8, 1, "2 to 7 neighbours are needed. With one neighbour each only two replicas"),
        (8, 0, "2 to 7 neighbours are needed"),
        (8, 8, "2 to 7 neighbours are needed"),
    ],
)
def test_invalid_degrees_are_refused(size, degree, said):
    with pytest.raises(ConfigurationError, match=said):
        within_budget(Links.uniform(Link(8e6), size), degree, 1e6)
