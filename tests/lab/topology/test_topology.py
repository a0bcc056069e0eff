"""Graphs, weights and spectra against closed forms; sizes and files that do not fit are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thinwire.errors import ConfigurationError
from thinwire.lab.topology import (
    BarabasiAlbert,
    Complete,
    Cut,
    ErdosRenyi,
    Exponential,
    Listed,
    Mesh,
    MoshpitGrid,
    OnePeerExponential,
    RandomGroups,
    RandomPairs,
    RandomRegular,
    Ring,
    Torus,
    check_doubly,
    check_size,
    metropolis,
    mixing,
    outgoing,
    read_edges,
    second,
    spectrum,
    spread,
)

EVERY = [
    *(Complete(), Ring(), Mesh(), Mesh(2), Torus(), Exponential(), OnePeerExponential(), RandomPairs()),
    *(MoshpitGrid(), MoshpitGrid(2), MoshpitGrid(3), RandomGroups(4), RandomGroups(2)),
    *(
        BarabasiAlbert(2),
        RandomRegular(3),
        ErdosRenyi(0.7),
        Listed(((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (0, 7))),
    ),
]


@pytest.mark.parametrize("topology", EVERY, ids=str)
def test_weights_are_doubly_stochastic_in_every_round(topology):
    """No replica sends to itself, all edges have weights, and a mean over all replicas is unchanged."""
    check_size(topology, 8)
    for number in range(20):
        edges, weights = topology.edges(8, number, 3, 7), mixing(topology, 8, number, 3, 7)
        assert not edges.diagonal().any() and (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(0), 1, atol=1e-12)
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-12)
        assert ((weights > 0) == (edges.T | np.eye(8, dtype=bool))).all()
    assert topology.fixed == all((topology.edges(8, 0, 3, 7) == topology.edges(8, n, 3, 7)).all() for n in range(20))


def test_degrees_are_those_of_the_graphs():
    degrees = {topology: topology.edges(16).sum(1) for topology in (Complete(), Ring(), Torus(), Exponential())}
    assert [set(map(int, of)) for of in degrees.values()] == [{15}, {2}, {4}, {4}]
    assert sorted(map(int, set(Mesh(4).edges(16).sum(1)))) == [2, 3, 4]
    assert set(RandomRegular(3).edges(20).sum(1)) == {3}
    assert {int(RandomPairs().edges(10, n).sum()) for n in range(50)} == {10}


def test_spectra_equal_their_closed_forms():
    """Sources: §b (Metropolis), §m.4 (2 / (1 + τ) exactly for even M), and 1/3 + 2/3 cos for a ring."""
    for size in (4, 6, 8, 12, 24, 64):
        tau = int(np.ceil(np.log2(size)))
        assert spectrum(Exponential(), size).gap == pytest.approx(2 / (1 + tau), abs=1e-9)
        assert spectrum(Ring(), size).second == pytest.approx((1 + 2 * np.cos(2 * np.pi / size)) / 3, abs=1e-9)
        assert spectrum(Complete(), size).second == 0.0
    ring, large, grid = spectrum(Ring(), 16), spectrum(Ring(), 100), spectrum(Mesh(10), 100)
    assert [round(one.second, 4) for one in (ring, large, grid)] == [0.9493, 0.9987, 0.9795]
    assert [round(one.second**4, 4) for one in (ring, large, grid)] == [0.8119, 0.9947, 0.9204]
    assert ring.halving == pytest.approx(np.log(2) / -np.log(0.949253), rel=1e-4)


def distance_left(weights):
    """‖W − J‖₂: the largest factor by which these weights multiply the distance from the mean."""
    return float(np.linalg.norm(weights - 1 / len(weights), 2))


def test_one_peer_exponential_is_exact_only_for_powers_of_two():
    def after(size, rounds):
        product = np.eye(size)
        for number in range(rounds):
            product = mixing(OnePeerExponential(), size, number) @ product
        return distance_left(product)

    assert after(8, 3) < 1e-15 and spectrum(OnePeerExponential(), 8).second == 0.0
    assert after(6, 3) > 0.1 and after(6, 30) == pytest.approx(after(6, 3) ** 10, rel=1e-6)


def test_a_full_moshpit_grid_is_exact_after_one_round_along_each_axis():
    """§m.6: 8³ is exact. A grid that is not full is not exact, but its error shrinks in every round."""

    def after(topology, size, rounds):
        product = np.eye(size)
        for number in range(rounds):
            product = mixing(topology, size, number) @ product
        return distance_left(product)

    for topology, size, axes in ((MoshpitGrid(8), 512, 3), (MoshpitGrid(2), 16, 4), (MoshpitGrid(), 12, 2)):
        assert topology.rounds(size) == axes
        assert after(topology, size, axes - 1) == pytest.approx(1) and after(topology, size, axes) < 1e-12
    assert 0 < spectrum(MoshpitGrid(), 15).second < 0.5
    assert after(MoshpitGrid(), 15, 20) < 1e-4


@pytest.mark.parametrize(
    ("topology", "size", "groups", "expected"),
    [
        (RandomPairs(), 8, 4, 0.4286),
        (RandomPairs(), 32, 16, 0.4839),
        (RandomGroups(4), 64, 16, 0.2381),
        (RandomGroups(8), 64, 8, 0.1111),
    ],
    ids=str,
)
def test_random_groups_shrink_the_variance_by_the_expected_factor(topology, size, groups, expected):
    """§m.6: with r groups in a round, the mean factor over rounds is (r − 1)/(M − 1)."""
    rng, ratios = np.random.default_rng(0), []
    for number in range(1000):
        x = rng.normal(size=size)
        x -= x.mean()
        mixed = mixing(topology, size, number) @ x
        ratios.append((mixed**2).sum() / (x**2).sum())
    assert (groups - 1) / (size - 1) == pytest.approx(expected, abs=5e-5)
    assert np.mean(ratios) == pytest.approx(expected, abs=0.012)
    assert spectrum(topology, size).second ** 2 == pytest.approx((groups - 1) / (size - 1))


def test_pairs_depend_on_seed_round_and_fragment():
    edges = RandomPairs().edges
    assert (edges(8, 5, 1, 2) == edges(8, 5, 1, 2)).all()
    assert all(
        (edges(32, 5, 1, 2) != other).any() for other in (edges(32, 6, 1, 2), edges(32, 5, 0, 2), edges(32, 5, 1, 3))
    )


def test_columns_of_push_sum_weights_add_up_to_one():
    edges = Listed(((0, 1), (1, 2), (2, 0), (0, 2)), one_way=True).edges(3)
    weights = outgoing(edges)
    np.testing.assert_allclose(weights.sum(0), 1)
    assert weights[2, 0] == pytest.approx(1 / 3) and weights[1, 2] == 0


def test_spread_counts_the_rounds_until_a_value_reaches_all():
    assert [spread(topology, 8) for topology in (Complete(), Ring(), Exponential())] == [1, 4, 3]
    assert spread(OnePeerExponential(), 8) == 3 and spread(Complete(), 1) == 0
    assert spread(Cut(Ring(), 1, 300), 4, number=1) == 300
    for graph in (Listed(((0, 1),)), Listed(((0, 1), (1, 2)), one_way=True), ErdosRenyi(0.1)):
        with pytest.raises(ConfigurationError, match="no path leads"):
            spread(graph, 3)


def test_metropolis_weights_of_a_complete_graph_are_equal_bit_for_bit():
    for size in range(2, 20):
        assert len(set(metropolis(Complete().edges(size)).ravel().tolist())) == 1


@pytest.mark.parametrize(
    ("topology", "size", "said"),
    [
        (Listed(((0, 1), (2, 3))), 4, "in 2 parts: no path leads from replica 0 to replica 2"),
        (Listed(((0, 1), (1, 2)), one_way=True), 3, "in 3 parts"),
        (Listed(((0, 5),)), 4, "an edge of replica 5 among 4 replicas"),
        (RandomPairs(), 5, "among 5 replicas: an even number is needed"),
        (RandomGroups(4), 10, "a multiple of 4 is needed, 2 would be left over; give 12 replicas"),
        (RandomRegular(3), 5, "not 3 x 5"),
        (RandomRegular(8), 8, "a degree from 2 to 7"),
        (Mesh(3), 8, "a number of rows by which 8 divides is needed"),
        (Torus(), 5, "a prime number, has one row alone"),
        (ErdosRenyi(0.01), 8, "parts"),
    ],
    ids=str,
)
def test_graphs_that_do_not_fit_the_size_are_refused(topology, size, said):
    with pytest.raises(ConfigurationError, match=said):
        check_size(topology, size)


def test_weights_that_would_move_the_mean_are_refused():
    one_way = Listed(((0, 1), (1, 2), (2, 0), (0, 2)), one_way=True)
    with pytest.raises(ConfigurationError, match=r"replica 2 receives add up to 1\.333, .* at others to 1;"):
        mixing(one_way, 3)
    bent = mixing(Ring(), 5).copy()
    bent[3] = np.eye(5)[3]  # this row does not mix, which biases the mean
    with pytest.raises(ConfigurationError, match=r"replica 3 receives add up to 1, .* at others to 1\.667"):
        check_doubly(bent, "a ring")


def test_edges_are_read_from_a_file(tmp_path):
    file = tmp_path / "ring.json"
    file.write_text(json.dumps([[0, 1], [1, 2], [2, 0]]))
    assert read_edges(file) == Listed(((0, 1), (1, 2), (2, 0))) and second(mixing(read_edges(file), 3)) == 0.0
    file.write_text(json.dumps({"edges": [[0, 1]], "one_way": True}))
    assert read_edges(file).one_way
    for text in ("no json", "[[0, 1], [2]]", '{"kanten": []}', '[["a", 1]]', "[[0, 0]]"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="edge"):
            read_edges(file)
    with pytest.raises(ConfigurationError, match="holds no edges"):
        read_edges(tmp_path / "none.json")
