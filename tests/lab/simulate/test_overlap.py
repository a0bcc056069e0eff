"""The overlap of a reduce-scatter with its matrix product: the simulator against closed forms, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from thinwire.app.cli import main
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.overlap import (
    ORDERS,
    RingReduction,
    hidden_share,
    memory_traffic,
    overlapped_seconds,
    reduce_scatter,
    serial_seconds,
)


@pytest.mark.parametrize(("c", "overlapped", "serial"), [(0.5, 8, 11.5), (1, 8, 15), (2, 15, 22)])
def test_staggered_and_serial_times_match_values_by_hand(c, overlapped, serial):
    """Eight ranks, one second per chunk."""
    ring = RingReduction(8, 1.0, c)
    assert reduce_scatter(ring, "staggered") == pytest.approx(overlapped, rel=1e-12)
    assert reduce_scatter(ring, "serial") == pytest.approx(serial, rel=1e-12)
    assert (overlapped_seconds(ring), serial_seconds(ring)) == (overlapped, serial)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16, 40])
def test_simulator_and_closed_form_agree(ranks):
    for c, k in product((0.01, 0.1, 0.3, 0.7, 1, 1.3, 2, 3.1, 20), (0, 0.2, 0.5, 1, 3)):
        ring = RingReduction(ranks, 1.0, c, k)
        assert reduce_scatter(ring, "staggered") == pytest.approx(overlapped_seconds(ring), rel=1e-9)
        assert reduce_scatter(ring, "serial") == pytest.approx(serial_seconds(ring), rel=1e-9)


def test_the_time_without_contention_has_two_cases():
    """max(N·g, g + (N−1)·c) for c ≥ g, max(N·g, (N−1)·g + c) below."""
    for n, c in product((2, 5, 9), (0.2, 0.9, 1.0, 1.1, 4.0)):
        branches = max(n, 1 + (n - 1) * c) if c >= 1 else max(n, n - 1 + c)
        assert overlapped_seconds(RingReduction(n, 1.0, c)) == pytest.approx(branches)


def test_the_gain_is_largest_where_sending_takes_as_long_as_computing():
    for n in (2, 8, 32):
        gains = {
            c: serial_seconds(r) / reduce_scatter(r, "staggered")
            for c in (0.5, 0.9, 1.0, 1.1, 2.0)
            for r in [RingReduction(n, 1.0, c)]
        }
        assert max(gains, key=gains.__getitem__) == 1.0 and gains[1.0] == pytest.approx(float(Fraction(2 * n - 1, n)))


def test_the_same_order_on_all_ranks_is_as_slow_as_serial():
    """All ranks compute the chunks in the same order, so the ring waits for the last one."""
    for c in (0.5, 1.0, 2.0):
        ring = RingReduction(8, 1.0, c)
        assert reduce_scatter(ring, "same") == pytest.approx(serial_seconds(ring))


def test_contention_slows_the_overlapped_order_only():
    quiet, busy = RingReduction(8, 1.0, 0.5), RingReduction(8, 1.0, 0.5, contention=1.0)
    took = reduce_scatter(busy, "staggered")
    assert reduce_scatter(quiet, "staggered") < took == pytest.approx(8 + 7 * 0.25)
    assert reduce_scatter(busy, "serial") == reduce_scatter(quiet, "serial")
    assert hidden_share(busy, took) == pytest.approx(0.5) and hidden_share(quiet, 8.0) == 1


def test_times_scale_with_the_unit():
    ring = RingReduction(6, 1.0, 1.7, 0.3)
    slow = replace(ring, produce_seconds=1e-6, send_seconds=1.7e-6)
    for order in ORDERS:
        assert reduce_scatter(slow, order) == pytest.approx(1e-6 * reduce_scatter(ring, order), rel=1e-9)


def test_memory_traffic_matches_the_formula():
    """S + (N−1)·3S/N against S + (N−1)·2S/N: a fifth less for two ranks, and a quarter less in the limit of many."""
    assert memory_traffic(2) == (2.5, 2.0)
    plain, near = memory_traffic(10_000)
    assert near / plain == pytest.approx(3 / 4, abs=1e-4)


# ---- the command


def json_output(capsys, arguments: str = "") -> dict:
    assert main(["simulate", "overlap", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_prints_all_orders(capsys):
    said = json_output(capsys, "--produce-seconds 1 --send-seconds 0.5")
    assert said["provenance"] == "simulated"
    assert said["seconds"] == pytest.approx({"serial": 11.5, "same": 11.5, "staggered": 8})
    assert said["predicted"] == {"serial": 11.5, "staggered": 8} and said["hidden_share"]["staggered"] == 1
    assert said["speedup"] == pytest.approx(11.5 / 8)


def test_a_link_and_a_size_replace_the_seconds(capsys):
    assert json_output(capsys, "--nbytes 64MB --link 100gbit,5us")["send_seconds"] == pytest.approx(645e-6)


def test_the_command_prints_a_table_and_draws_a_figure(capsys, tmp_path):
    assert main(["simulate", "overlap", "--plot", str(tmp_path / "o.svg")]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said and "predicted" in said and "not of a model" in said
    assert (tmp_path / "o.svg").read_text().count("<polyline") == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--ranks 1", "ranks=1: between 2 and 256"),
        ("--ranks 1000", "ranks=1000: between 2 and 256"),
        ("--produce-seconds 0", "produce_seconds=0.0: a positive time"),
        ("--send-seconds nan", "send_seconds=nan"),
        ("--contention -1", "contention=-1.0: between 0 and 100"),
        ("--contention nan", "contention=nan"),
        ("--nbytes 64MB", "--link 100gbit,5us is missing"),
        ("--link 1gbit", "--nbytes 64MB is missing"),
        ("--link 1gbit --nbytes 1MB --send-seconds 1", "both give the time of a ring step"),
        ("--link 0gbit --nbytes 1MB", "a positive rate is needed"),
        ("--ranks 0 --link 1gbit --nbytes 1MB", "ranks=0"),
        ("--plot o", "o: a name that ends with"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(arguments, says, capsys):
    assert main(["simulate", "overlap", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigurationError, match="order='backwards' is not known"):
        reduce_scatter(RingReduction(2, 1.0, 1.0), "backwards")  # type: ignore[arg-type]
