"""Stragglers in virtual time: rounds by hand, the gain of gradient codes, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thinwire.app.cli import main
from thinwire.lab.methods.gradient_codes import Repetition, gradient_code
from thinwire.lab.methods.sequential_codes import Coded, Multiplexed, SelectiveRepeat
from thinwire.lab.simulate.stragglers import (
    FAMILIES,
    Delays,
    gilbert_elliott,
    search,
    shifted_exponential,
    simulate,
    without_the_slowest,
)


def rounds(*rows, batch_seconds=0.0):
    return Delays(np.array(rows, dtype=float), batch_seconds)


def test_ends_of_rounds_match_values_by_hand():
    delays = rounds([1, 1, 9, 1.5], [1, 1, 1, 1], [1, 8, 9, 1], batch_seconds=4.0)
    assert simulate(Coded(gradient_code(4, 0)), delays).ends == (9, 10, 19)
    # Each computes another quarter of a batch (1 s); one of {0, 1} and one of {2, 3} are needed.
    coded = simulate(Coded(Repetition(4, 1)), delays)
    assert coded.ends == (2.5, 4.5, 6.5) and coded.jobs == 3 and coded.lost == 0
    dropped = without_the_slowest(delays, 1)
    assert dropped.ends == (1.5, 2.5, 10.5) and dropped.lost == 0.25


def test_sequential_codes_wait_for_patterns_that_are_not_allowed():
    scheme = Multiplexed(4, 1, 2, 1)  # one late replica in any two rounds
    late_once, late_twice = [1, 1, 1, 9], [1, 1, 1, 8]
    run = simulate(scheme, rounds(late_once, late_twice, [1, 1, 1, 1], late_once), patience=1.0)
    assert run.ends == (2, 10, 11, 13) and run.late == 2
    two = simulate(scheme, rounds([1, 1, 5, 9], [1, 1, 1, 1]), patience=1.0)
    assert two.ends[0] == 5  # not 9: one more arrival is enough


def test_a_burst_is_repeated_without_waiting():
    delays = rounds([1, 1, 9, 9, 1, 1], *[[1.0] * 6] * 4)
    scheme = SelectiveRepeat(6, 1, 2, 2)
    run = simulate(scheme, delays)
    assert run.late >= 1 and run.ends[-1] < simulate(Coded(gradient_code(6, 0)), delays).ends[-1]


def test_drawn_delays_have_the_moments_of_their_distribution():
    bursts = gilbert_elliott(4000, 8, 1.0, 5.0, every=20, length=3, seed=0) > 1
    begins = int((bursts[1:] & ~bursts[:-1]).sum())
    assert bursts.mean() == pytest.approx(3 / 23, rel=0.1) and bursts[1:].sum() / begins == pytest.approx(3, rel=0.1)
    drawn = shifted_exponential(4000, 8, 1.0, 0.5, seed=0)
    assert drawn.min() >= 1 and drawn.mean() == pytest.approx(1.5, rel=0.02)


def test_codes_help_only_where_pauses_are_long_and_work_is_cheap():
    """Where repeated work is expensive, the search finds that no redundancy is best."""
    seconds = gilbert_elliott(120, 8, 1.0, 5.0, every=20, length=2, seed=1)
    for batch_seconds, helps in ((0.4, True), (400.0, False)):
        probe, rest = Delays(seconds, batch_seconds).part(0, 40), Delays(seconds, batch_seconds).part(40)
        plain = simulate(Coded(gradient_code(8, 0)), rest).seconds_per_job
        best = min(simulate(search(family, probe), rest).seconds_per_job for family in FAMILIES)
        assert (best < 0.7 * plain) == helps


def test_the_command_compares_all_codes(capsys, tmp_path):
    plot = tmp_path / "s.svg"
    arguments = f"--replicas 8 --steps 60 --probe 20 --compute-share 0.2 --stragglers 1 --plot {plot} --json"
    assert main(["simulate", "stragglers", *arguments.split()]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["method"]: row for row in told["methods"]}
    assert told["provenance"] == "simulated" and set(rows) == {"data-parallel", "ignore the slowest", *FAMILIES}
    assert rows["gradient coding"]["parameters"] == {"s": 1} and rows["gradient coding"]["load"] == 2
    assert rows["ignore the slowest"]["lost"] == 1 / 8 and all(
        row["lost"] == 0 for name, row in rows.items() if name != "ignore the slowest"
    )
    assert plot.read_text().count("<polyline") == 5


def test_the_command_takes_the_delays_of_a_recorded_run(capsys, tmp_path):
    made = "--strategy data_parallel --model nano --link 1gbit --step-seconds 0.5 --replicas 4 --jitter 0.5 --steps 60"
    assert main(["simulate", "run", *made.split(), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["simulate", "stragglers", "--recorded", str(tmp_path / "run"), "--probe", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["replicas"] == 4 and "recorded" in told["delays"] and told["methods"][0]["seconds_per_step"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--replicas 1", "1 replicas"),
        ("--stragglers 16", "stragglers=16"),
        ("--probe 5", "probe=5"),
        ("--probe 20 --steps 5", "at least 10 steps to probe"),
        ("--pause=-1s", "a time"),
        ("--burst-steps 0", "at least 1 round each"),
        ("--compute-share 2", "compute_share=2.0"),
        ("--patience -1", "patience=-1.0"),
        ("--replicas 100000 --steps 1000", "4,000,000 delays"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(arguments, says, capsys):
    assert main(["simulate", "stragglers", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
