"""1F1B pipelines: the simulator against an independent oracle and closed forms, and the command."""

from __future__ import annotations

import json
from random import Random

import pytest

from thinwire.app.cli import main
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.pipeline import (
    Pipeline,
    amp_seconds,
    one_forward_one_backward,
    pipeline_seconds,
    pipette_seconds,
)

PINS = [(4, 16, 0.5, 71, 60, 69), (8, 32, 1.0, 185, 131, 173), (2, 32, 0.5, 115, 100, 115)]


@pytest.mark.parametrize(("p", "n", "c", "simulated", "amp", "pipette"), PINS)
def test_simulated_and_predicted_times_match_recorded_values(p, n, c, simulated, amp, pipette):
    """Forward 1 s, backward 2 s. The exact form equals the simulation; Pipette has one term less, AMP counts hops once."""
    assert one_forward_one_backward(Pipeline.of(p, n, 1.0, 2.0, [c])) == simulated
    assert pipeline_seconds(p, n, 3.0, c) == simulated
    assert (amp_seconds(p, n, 3.0, c), pipette_seconds(p, n, 3.0, c)) == (amp, pipette)


@pytest.mark.parametrize("p", range(1, 9))
def test_the_exact_form_is_exact_where_stages_divide_the_micro_batches(p):
    for n in range(p, 41, p):
        for forward, backward, c in ((1, 2, 0.0), (1, 2, 0.3), (1, 2, 7.0), (1, 1, 0.5), (3, 1, 1.0), (0, 2, 1.0)):
            simulated = one_forward_one_backward(Pipeline.of(p, n, forward, backward, [c]))
            assert simulated == pytest.approx(pipeline_seconds(p, n, forward + backward, c), rel=1e-12)
            assert amp_seconds(p, n, forward + backward, c) <= simulated + 1e-9


def test_the_exact_form_is_an_upper_bound_elsewhere():
    """It is too high only where stages do not divide the micro-batches and hops take time."""
    high = 0
    for p in range(2, 8):
        for n in range(1, 30):
            simulated, predicted = (
                one_forward_one_backward(Pipeline.of(p, n, 1, 2, [0.4])),
                pipeline_seconds(p, n, 3, 0.4),
            )
            assert predicted >= simulated - 1e-9
            if predicted > simulated + 1e-9:
                high += 1
                assert n % p
            free = one_forward_one_backward(Pipeline.of(p, n, 1, 2, [0.0]))
            assert free == pytest.approx((n + p - 1) * 3)  # all forms agree where hops take no time
    assert high > 50


def oracle(pipeline: Pipeline) -> float:
    """The longest path by recursion: each pass waits for the pass before it on its stage and for its neighbour's."""
    p, n = pipeline.stages, pipeline.micro_batches
    before: dict[tuple[int, bool, int], tuple[int, bool, int] | None] = {}
    for i in range(p):
        ahead = min(n, p - 1 - i)
        turns = [(i, False, m) for m in range(ahead)]
        for m in range(n - ahead):
            turns += [(i, False, ahead + m), (i, True, m)]
        turns += [(i, True, m) for m in range(n - ahead, n)]
        before |= dict(zip(turns, [None, *turns]))
    ends: dict[tuple[int, bool, int] | None, float] = {None: 0.0}

    def end(turn):
        if turn not in ends:
            i, back, m = turn
            begin = end(before[turn])
            if back and i < p - 1:
                begin = max(begin, end((i + 1, True, m)) + pipeline.hop_seconds[i])
            elif not back and i:
                begin = max(begin, end((i - 1, False, m)) + pipeline.hop_seconds[i - 1])
            ends[turn] = begin + (pipeline.backward_seconds if back else pipeline.forward_seconds)[i]
        return ends[turn]

    return max(end(turn) for turn in before)


def test_uneven_stages_and_hops_match_the_longest_path():
    draw = Random(4)
    for _ in range(60):
        p, n = draw.randint(1, 5), draw.randint(1, 9)
        times = [tuple(draw.uniform(0, 3) for _ in range(count)) for count in (p, p, p - 1)]
        pipeline = Pipeline(n, *times)
        assert one_forward_one_backward(pipeline) == pytest.approx(oracle(pipeline), rel=1e-12)


def test_a_step_is_at_least_as_long_as_its_busiest_stage_and_its_chain():
    pipeline = Pipeline.of(5, 20, 1.0, 2.0, hops=[0.1, 4.0], slower=[1.0, 1.7])
    took = one_forward_one_backward(pipeline)
    assert took >= max(pipeline.work_seconds) and took >= 3 * (3 + 2 * 1.7) + 2 * sum(pipeline.hop_seconds)
    assert not pipeline.even and pipeline.hop_seconds == (0.1, 4.0, 0.1, 4.0)


def test_a_step_of_many_micro_batches_is_simulated():
    assert one_forward_one_backward(Pipeline.of(32, 4096, 1.0, 2.0, [0.1])) == pytest.approx(
        pipeline_seconds(32, 4096, 3.0, 0.1)
    )


# ---- the command


def json_output(capsys, arguments: str = "") -> dict:
    assert main(["simulate", "pipeline", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_prints_the_simulated_and_predicted_steps(capsys):
    said = json_output(capsys, "--stages 8 --micro-batches 32 --forward-seconds 1 --hop-seconds 1")
    assert said["provenance"] == "simulated" and said["step_seconds"] == 185
    assert said["predicted"] == {"exact": 185, "Pipette": 173, "AMP": 131}
    assert said["compute_utilization"] == pytest.approx(96 / 185)


def test_links_between_stages_give_the_hops(capsys):
    said = json_output(capsys, "--stages 3 --links 1gbit,20ms 100mbit --activation 1MB --slower 1 2 1")
    assert said["hop_seconds"] == pytest.approx([0.028, 0.08]) and said["predicted"] is None
    assert said["busiest_utilization"] > said["compute_utilization"]


def test_the_command_prints_a_table_and_draws_a_figure(capsys, tmp_path):
    assert main(["simulate", "pipeline", "--plot", str(tmp_path / "p.svg")]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said and "predicted" in said and "AMP" in said
    assert (tmp_path / "p.svg").read_text().count("<polyline") == 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--stages 0", "0 stages"),
        ("--micro-batches 0", "4 stages, 0 micro-batches: at least 1"),
        ("--stages 3000 --micro-batches 3000", "at most 2,000,000 forward passes"),
        ("--forward-seconds -1", "forward_seconds=-1.0: between 0 and 1e9"),
        ("--forward-seconds nan", "forward_seconds=nan"),
        ("--forward-seconds 0", "passes of 0 seconds"),
        ("--backward-seconds inf", "backward_seconds=inf"),
        ("--hop-seconds -0.1", "hop_seconds=-0.1"),
        ("--hop-seconds", "0 hops"),
        ("--links 1gbit --hop-seconds 1", "both give the time of a hop"),
        ("--links fast", "the link 'fast' was given"),
        ("--links 1gbit --activation big", "'big' was given; a size is needed"),
        ("--slower 0 0 0 0", "passes of 0 seconds"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line(arguments, says, capsys):
    assert main(["simulate", "pipeline", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_wrong_number_of_times_is_refused():
    with pytest.raises(ConfigurationError, match="2 forward times, 1 backward times, 1 hops"):
        Pipeline(1, (1.0, 1.0), (1.0,), (0.0,))
