"""Graphs whose hubs fail, against §g: the components that remain, and what the survivors still learn."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.app.cli import main
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.disrupted import Disaster, betweenness, structure, survivors
from thinwire.lab.topology import BarabasiAlbert, Listed, RandomPairs, Ring


@pytest.mark.parametrize(
    ("attach", "who", "share", "giant", "isolated"),
    [
        (1, "degree", 0.1, 0.11, 0.45),
        (1, "random", 0.1, 0.83, 0.09),
        (2, "degree", 0.1, 0.79, 0.10),
        (2, "degree", 0.2, 0.30, 0.27),
        (2, "betweenness", 0.2, 0.30, 0.27),
        (2, "degree", 0.3, 0.14, 0.46),
        (2, "random", 0.3, 0.94, 0.05),
        (3, "degree", 0.2, 0.78, 0.11),
        (3, "degree", 0.3, 0.39, 0.25),
        (3, "degree", 0.5, 0.13, 0.65),
        (5, "degree", 0.5, 0.34, 0.23),
    ],
)
def test_the_largest_component_matches_the_published_table(attach, who, share, giant, isolated):
    """§g, 50 replicas, 30 graphs: the share of survivors in the largest component, and of those without a neighbour."""
    found = structure(BarabasiAlbert(attach), 50, who, share, 30)
    assert found.giant == pytest.approx(giant, abs=0.06) and found.isolated == pytest.approx(isolated, abs=0.05)


def test_betweenness_matches_values_by_hand():
    line = Listed(tuple((i, i + 1) for i in range(4))).edges(5)
    assert betweenness(line).tolist() == [0, 3, 4, 3, 0]
    assert betweenness(Ring().edges(4)).tolist() == [0.5] * 4
    assert survivors(line, "betweenness", 0.2, 0).tolist() == [True, True, False, True, True]
    assert [int(survivors(line, "random", 0.4, seed).sum()) for seed in range(5)] == [3] * 5


def test_early_losses_and_lost_hubs_cost_the_most_accuracy():
    """As in the paper: the loss of hubs without data costs much, too; survivors keep what they learned; a late loss costs little."""

    def mean(**settings):
        return Disaster(BarabasiAlbert(2), rounds=40, **settings).learned(0)

    early, late = mean(share=0.3, at_round=4), mean(share=0.3, at_round=36)
    assert early.mean < late.mean - 0.1 and late.mean > late.undisturbed - 0.08
    without = mean(share=0.3, at_round=4, data="others")
    assert without.mean < without.undisturbed - 0.2
    by_chance = mean(share=0.3, at_round=4, who="random")
    assert by_chance.mean > early.mean + 0.1
    hubs_only = mean(share=0.3, at_round=4, data="hit")
    assert hubs_only.mean > hubs_only.before - 0.02 and np.isnan(hubs_only.alone)
    assert early.isolated > early.alone - 0.02 and early.low <= early.mean


def test_the_command_draws_a_curve_for_each_column(tmp_path, capsys):
    """A column without values has none: on a ring that loses one of eight replicas no survivor is isolated."""
    picture = tmp_path / "disrupted.svg"
    few = ["--topology", "ring", "--replicas", "8", "--shares", "0.25", "0.125", "--graphs", "1", "--runs", "1"]
    assert main(["simulate", "disrupted", *few, "--rounds", "4", "--at-round", "2", "--plot", str(picture)]) == 0
    assert str(picture) in capsys.readouterr().out.replace("\n", "")
    drawn = picture.read_text()
    assert "survivors" in drawn and "share in the largest part" in drawn and "hit by degree" in drawn


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: structure(BarabasiAlbert(2), 50, "degree", 0.001, 1), "that is 0"),
        (lambda: structure(BarabasiAlbert(2), 50, "degree", 1.0, 1), "that is 50"),
        (lambda: structure(BarabasiAlbert(2), 50, "degree", float("nan"), 1), "that is 0"),
        (lambda: structure(BarabasiAlbert(2), 50, "degree", float("inf"), 1), "that is 50"),
        (lambda: structure(BarabasiAlbert(2), 10**20, "degree", 0.1, 1), "1 to 4096 are needed"),
        (lambda: structure(BarabasiAlbert(2), -1, "degree", 0.1, 1), "1 to 4096 are needed"),
        (lambda: structure(RandomPairs(), 50, "degree", 0.1, 1), "the same in every round"),
        (lambda: Disaster(Ring(), at_round=60), "0 <= at_round < rounds"),
        (lambda: Disaster(Ring(), rounds=10**20), "at most 10,000"),
        (lambda: BarabasiAlbert(0), "at least 1 neighbour"),
        (lambda: BarabasiAlbert(5).edges(5), "more than 5 are needed"),
    ],
    ids=range(11),
)
def test_invalid_settings_are_refused(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_more_graphs_than_can_be_drawn_are_refused(capsys):
    assert main(["simulate", "disrupted", "--graphs", "1" + 20 * "0"]) == 2
    assert "at most 1,000 graphs and runs" in capsys.readouterr().err
