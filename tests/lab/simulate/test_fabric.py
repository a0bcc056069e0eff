"""Paths through a fabric: split flows load links like sprayed ones, fair completion times, ECMP, and the command."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import product
from random import Random

import numpy as np
import pytest

from thinwire.app.cli import main
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate import fabric
from thinwire.lab.simulate.fabric import (
    POLICIES,
    Fabric,
    Part,
    expected_most,
    loads,
    most_loaded,
    place,
    route,
    seconds,
)


def loads_of_spines(placed: fabric.Placement, spines: int) -> list[Fraction]:
    return [sum((share for at, share in placed if at == spine), Fraction(0)) for spine in range(spines)]


@pytest.mark.parametrize("policy", ["split", "wrap", "spray"])
def test_every_spine_carries_exactly_the_same_load(policy):
    """n / s flows on each spine, in exact fractions, for all n ≤ 64 and s ≤ 16. No part is empty."""
    for flows, spines in product(range(1, 65), range(1, 17)):
        placed = place(policy, flows, spines, Random(flows))
        assert loads_of_spines(placed, spines) == [Fraction(flows, spines)] * spines
        assert all(share > 0 for _, share in placed)


def test_splitting_needs_the_predicted_number_of_cuts():
    """r·(s/g − 1) with r = n mod s and g = gcd(r, s): at most 225 on 16 spines. Wrapping needs at most s − 1."""
    cuts = {n: len(place("split", n, 16, Random(0))) - n for n in range(1, 65)}
    assert all(cuts[n] == 0 for n in (16, 32, 64)) and max(cuts.values()) == cuts[15] == 225
    assert cuts[8] == 8 and cuts[20] == 12
    for flows, spines in product(range(1, 65), range(1, 17)):
        assert len(place("wrap", flows, spines, Random(0))) - flows <= spines - 1


def test_parts_of_a_flow_are_equal_and_whole_flows_are_placed_first():
    placed = place("split", 7, 4, Random(0))
    assert sorted(share for _, share in placed) == [Fraction(1, 4)] * 12 + [Fraction(1)] * 4
    assert {share for _, share in placed[:4]} == {Fraction(1)} and {at for at, _ in placed[:4]} == {0, 1, 2, 3}


@pytest.mark.parametrize("pattern", ["all-to-all", "ring"])
@pytest.mark.parametrize("failed", [0, 1, 3])
def test_all_uplinks_and_downlinks_of_a_fabric_have_the_same_load(pattern, failed):
    """Each (host, leaf) is balanced separately, so uplinks and downlinks are balanced."""
    given = Fabric(leaves=5, spines=6, hosts=2, failed=failed)
    for flows in (1, 4, 7):
        best = fabric.even_load(given, pattern, flows)
        for policy in ("split", "wrap", "spray"):
            parts = route(given, policy, pattern, flows, seed=flows)
            up, down = loads(given, parts)
            assert set(up.values()) == set(down.values()) == {best}
            assert sum(part.share for part in parts) == fabric.flow_count(given, pattern, flows)
        for policy in fabric.BY_CHANCE:
            assert most_loaded(given, route(given, policy, pattern, flows)) >= best


def test_balancing_a_host_over_all_leaves_together_is_not_enough():
    """Then uplinks are balanced, but downlinks collide. So the rule balances each leaf separately."""
    given = Fabric(leaves=5, spines=4)
    parts = [Part(i, (i + away) % 5, (away - 1) % 4, Fraction(1)) for i in range(5) for away in range(1, 5)]
    assert most_loaded(given, parts) == 1  # a rotation that happens to avoid collisions
    parts = [Part(i, sink, n, Fraction(1)) for i in range(5) for n, sink in enumerate(j for j in range(5) if j != i)]
    up, down = loads(given, parts)
    assert set(up.values()) == {1} and max(down.values()) == 4


@pytest.mark.parametrize("pattern", ["all-to-all", "ring"])
@pytest.mark.parametrize(("flows", "failed"), [(1, 0), (3, 0), (8, 0), (5, 1), (8, 1)])
def test_splitting_takes_as_long_as_spraying(pattern, flows, failed):
    given = Fabric(leaves=4, spines=8, hosts=2, failed=failed, bits_per_second=8e9)
    took = {policy: seconds(given, route(given, policy, pattern, flows), 1e6) for policy in POLICIES}
    ideal = float(fabric.even_load(given, pattern, flows)) * 1e6 * 8 / 8e9
    for policy in ("split", "wrap", "spray"):
        assert took[policy] == pytest.approx(ideal, rel=1e-9)
    assert took["ecmp"] >= ideal * (1 - 1e-12) and took["round-robin"] >= ideal * (1 - 1e-12)


def test_working_spines_take_the_share_of_a_failed_one():
    """n·F / (s − 1) for each host and leaf."""
    one = Fabric(leaves=2, spines=4, failed=1, bits_per_second=8.0)
    assert most_loaded(one, route(one, "split", "ring", 7)) == Fraction(7, 3)
    assert seconds(one, route(one, "split", "ring", 7), 1.0) == pytest.approx(7 / 3, rel=1e-9)


def test_fair_shares_match_values_by_hand():
    """Two parts share an uplink, and one of them shares a downlink with a third part. Each has half a link until one ends."""
    given = Fabric(leaves=3, spines=1, bits_per_second=8.0)
    parts = [Part(0, 1, 0, Fraction(1)), Part(0, 2, 0, Fraction(1, 2)), Part(1, 2, 0, Fraction(2))]
    # All parts run at ½ until 1 s. Then the second is done, the first has ½ left (until 1½ s), the third 1½ (until 2½ s).
    assert seconds(given, parts, 1.0) == pytest.approx(2.5)


def test_no_fabric_is_faster_than_its_busiest_link():
    given = Fabric(leaves=4, spines=4, hosts=3, bits_per_second=8.0)
    for seed in range(20):
        parts = route(given, "ecmp", "all-to-all", 2, seed)
        assert seconds(given, parts, 1.0) >= float(most_loaded(given, parts)) * (1 - 1e-9)


# ---- random paths


@pytest.mark.parametrize(("flows", "spines"), [(1, 4), (4, 3), (5, 4), (8, 3), (6, 1)])
def test_the_expected_busiest_link_is_the_mean_over_all_draws(flows, spines):
    every = [max(draw.count(spine) for spine in range(spines)) for draw in product(range(spines), repeat=flows)]
    assert expected_most(flows, spines) == pytest.approx(np.mean(every) * spines / flows, rel=1e-12)


@pytest.mark.parametrize(("flows", "spines", "drawn"), [(8, 8, 2.61), (32, 8, 1.76), (64, 16, 1.98)])
def test_the_load_of_ecmp_matches_published_draws(flows, spines, drawn):
    """The exact values are 2.597, 1.762 and 1.970. Our own draws agree, too."""
    exact = expected_most(flows, spines)
    assert exact == pytest.approx(drawn, abs=0.015)
    random = Random(3)
    found = [max(loads_of_spines(place("ecmp", flows, spines, random), spines)) for _ in range(1500)]
    assert float(sum(found) / len(found)) * spines / flows == pytest.approx(exact, rel=0.02)


def test_the_load_of_many_flows_approaches_balance():
    ratios = [expected_most(n, 8) for n in (1, 8, 64, 1000, 30_000)]
    assert ratios[0] == 8 and ratios == sorted(ratios, reverse=True) and ratios[-1] < 1.03


def test_the_same_seed_gives_the_same_paths():
    given = Fabric(4, 4, 2)
    assert route(given, "ecmp", "all-to-all", 3, 5) == route(given, "ecmp", "all-to-all", 3, 5)
    assert route(given, "ecmp", "all-to-all", 3, 5) != route(given, "ecmp", "all-to-all", 3, 6)


# ---- the command


def json_output(capsys, arguments: str = "") -> dict:
    assert main(["simulate", "fabric", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_prints_all_policies(capsys):
    said = json_output(capsys, "--leaves 4 --spines 4 --hosts 2 --flows 3 --failed 1")
    rows = {row["policy"]: row for row in said["policies"]}
    assert said["provenance"] == "simulated" and list(rows) == list(POLICIES)
    assert rows["split"]["seconds"] == pytest.approx(rows["spray"]["seconds"], rel=1e-9)
    assert rows["split"]["most_loaded"] == 1 < rows["ecmp"]["most_loaded"] <= rows["ecmp"]["worst_most_loaded"]
    assert rows["split"]["cuts"] == 0 and rows["spray"]["cuts"] is None
    assert json_output(capsys, "--leaves 4 --spines 4 --hosts 2 --flows 3 --failed 1") == said
    assert [row["policy"] for row in json_output(capsys, "--policy wrap")["policies"]] == ["wrap"]


def test_the_table_labels_simulated_and_predicted_figures(capsys, tmp_path):
    assert main(["simulate", "fabric", "--leaves", "3", "--plot", str(tmp_path / "f.svg")]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said and "predicted" in said and all(policy in said for policy in POLICIES)
    assert (tmp_path / "f.svg").read_text().count("<polyline") == len(POLICIES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--leaves 1", "leaves=1: between 2 and 4096"),
        ("--spines 0", "spines=0: between 1"),
        ("--hosts 0", "hosts=0: between 1"),
        ("--flows 0", "flows=0: at least 1"),
        ("--failed 8", "failed=8 of 8 spines: one that works is needed, so at most 7"),
        ("--failed -1", "failed=-1: between 0"),
        ("--rate 0gbit", "0.0 bit/s was given"),
        ("--rate fast", "the link 'fast' was given"),
        ("--nbytes 1parsec", "'1parsec' was given; a size is needed"),
        ("--nbytes 0", "'0' was given; a size of at least 1"),
        ("--draws 0", "draws=0: between 1 and 100"),
        ("--leaves 100 --hosts 100", "at most 30,000 parts of flows"),
        ("--plot f.pdf", "f.pdf: a name that ends with"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(arguments, says, capsys):
    assert main(["simulate", "fabric", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_flows_without_size_or_number_are_refused():
    given = Fabric(2, 2)
    with pytest.raises(ConfigurationError, match="flow_nbytes=nan"):
        seconds(given, route(given, "spray", "ring", 1), float("nan"))
    with pytest.raises(ConfigurationError, match="0 flows"):
        expected_most(0, 4)
