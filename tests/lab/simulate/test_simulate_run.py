"""`thinwire simulate run`: its output, its run folder, its refusals, and its distance to emulated runs."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.run import Run
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.lab.cli.simulate.run import Options, make_scenario, skeleton
from thinwire.lab.simulate.replicas import simulate
from thinwire.lab.simulate.scenario import Failures, Scenario, Stragglers

ROOT = Path(__file__).parents[3]
ASKED = "--model nano --steps 60 --every 12 --delay 3 --link 2mbit,30ms --step-seconds 0.2"


def json_output(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert main(["simulate", "run", *arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_summary_has_the_keys_of_a_real_run(capsys):
    summary = json_output(capsys, ASKED)
    keys = "strategy replicas steps tokens parameters eval_loss wire_bytes_sent bits_per_parameter_per_step compute_utilization wall_seconds"
    assert set(keys.split()) | {"stall_seconds", "provenance"} <= set(summary)
    assert summary["provenance"] == "simulated" and summary["eval_loss"] is None
    assert summary["tokens"] == 60 * 2 * 8 * 128 and summary["wall_seconds"] > 60 * 0.2
    assert summary["compute_utilization"] == pytest.approx(12 / summary["wall_seconds"], rel=1e-6)
    strategy = tw.streaming_sign(every=12, delay=3)
    fragments = strategy.partition.fragments(skeleton(Run.of(model="nano")))
    shapes = [fragment.shapes for fragment in fragments]
    assert summary["parameters"] == sum(fragment.numel for fragment in fragments)
    assert summary["wire_bytes_sent"] == pytest.approx(5 * strategy.nbytes_per_period(shapes, 2), rel=0.1)
    assert summary["floor_bits_per_second"] == 8 * strategy.nbytes_per_period(shapes, 2) / (12 * 0.2)


def test_the_table_labels_simulated_and_predicted_figures(capsys):
    assert main(["simulate", "run", *ASKED.split(), "--replicas", "20", "--failures", "5s/1min"]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said and "predicted" in said and "failures" in said
    assert "the 4 that wait most and the 4 that wait least" in said


@pytest.mark.parametrize(("strategy", "said"), [("gasloc", True), ("local_sgd", False)])
def test_gossip_s_figures_are_told_to_be_a_bound(strategy, said, capsys):
    assert (
        main(["simulate", "run", *f"--strategy {strategy} --link 100mbit --step-seconds 0.1 --steps 60".split()]) == 0
    )
    assert ("stalls are an upper bound. The mean of all at the end" in capsys.readouterr().out) == said


def test_options_replace_the_settings_of_a_run_file(capsys, tmp_path):
    Run.of(model="nano", steps=30, link="1mbit", strategy="diloco", every=10).save(tmp_path / "run.toml")
    summary = json_output(capsys, f"{tmp_path}/run.toml --step-seconds 0.1 --steps 20")
    assert summary["strategy"] == "diloco(every=10)" and summary["steps"] == 20


def test_a_simulated_run_folder_can_be_reported(capsys, tmp_path):
    out = tmp_path / "virtual"
    summary = json_output(capsys, f"{ASKED} --replicas 3 --slower 1 2 --failures 4s/10s/1s --seed 3 --out {out}")
    record = RunRecord.load(out)
    assert record.summary.provenance == "simulated" and record.status == "finished"
    assert record.summary.compute_utilization == pytest.approx(summary["compute_utilization"], abs=1e-6)
    assert record.summary.wire_bytes_sent == pytest.approx(summary["wire_bytes_sent"], abs=1)
    assert record.bits_per_second == 2e6 and len(record.replicas) == 3
    assert {note.text for note in record.notes} == {"this replica dies", "this replica is back, with the anchors"}
    assert Run.load(out / "run.toml").method.every == 12 and json.loads((out / "summary.json").read_text()) == summary
    assert record.replicas[0].start.machine["failures"] == "4s/10s/1s"
    page = (out / "report.html").read_text()
    assert 'id="section-timeline"' in page and 'id="section-loss"' not in page and page.count(">simulated<") >= 6
    assert main(["report", str(out), "--diagnose"]) == 0
    assert "The run was simulated, so no message was sent." in capsys.readouterr().out
    assert main(["simulate", "run", *ASKED.split(), "--out", str(out)]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_the_screen_of_a_simulated_run_shows_no_loss(capsys, tmp_path):
    json_output(capsys, f"{ASKED} --out {tmp_path / 'virtual'}")
    assert main(["top", str(tmp_path / "virtual"), "--once", "--json"]) == 0
    told = capsys.readouterr()
    assert "nan" not in told.err and json.loads(told.out.splitlines()[-1])["replicas"][0]["loss"] is None


def test_more_steps_than_can_be_simulated_are_refused_before_a_folder_is_made(capsys, tmp_path):
    asked = [*ASKED.split(), "--steps", "1" + 12 * "0", "--out", str(tmp_path / "virtual")]
    assert main(["simulate", "run", *asked]) == 2
    assert "at most 10,000,000" in capsys.readouterr().err and not (tmp_path / "virtual").exists()


def test_a_variation_whose_square_is_zero_is_none(capsys):
    none, least = (json_output(capsys, f"{ASKED} --jitter {jitter}") for jitter in ("0", "1e-300"))
    assert none["wall_seconds"] == least["wall_seconds"]


@pytest.mark.parametrize(("collate", "unit", "each"), [("def collate(samples): ...", "samples", 4), ("", "batches", 1)])
def test_a_job_is_counted_in_its_own_unit(capsys, tmp_path, collate, unit, each):
    job, out = tmp_path / "job.py", tmp_path / "virtual"
    job.write_text(
        "import torch\n\ndef model():\n    return torch.nn.Linear(3, 2)\n\ndef batches(share): ...\n\n"
        f"def loss(model, batch): ...\n\n{collate}\n"
    )
    asked = ["simulate", "run", "--job", str(job), "--steps", "12", "--batch", "4", "--every", "6", "--link", "1mbit"]
    assert main([*asked, "--step-seconds", "0.1", "--delay", "1", "--out", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["tokens"] == 12 * 2 * each and f" {unit}/s, " in told.err
    assert RunRecord.load(out).start.unit == unit


def test_the_event_log_agrees_with_the_summary(tmp_path):
    """In a run without failures, the summary computed from the events equals the simulated one."""
    out = tmp_path / "virtual"
    assert main(["simulate", "run", *ASKED.split(), "--jitter", "0.2", "--slower", "1", "1.5", "--out", str(out)]) == 0
    for log in out.glob("events/*.jsonl"):  # remove the recorded summary
        log.write_text("".join(line for line in log.read_text().splitlines(True) if '"event":"end"' not in line))
    said, found = json.loads((out / "summary.json").read_text()), RunRecord.load(out)
    for name in ("compute_utilization", "wall_seconds", "stall_seconds", "wire_bytes_sent"):
        assert getattr(found.summary, name) == pytest.approx(said[name], rel=1e-4), name
    for replica in found.replicas:
        assert (np.diff(replica.begin) > 0).all() and len(replica.step) == 60
        flights = replica.flights
        assert len(flights) and (flights.begin <= flights.link_begin).all() and (flights.link_end <= flights.end).all()
        assert (flights.link_begin <= flights.link_end).all()


def options(**changes: Any) -> Options:
    run = changes.pop("run", Run.of(replicas=6, link="50mbit,30ms", model="nano"))
    return Options(**({"run_settings": run, "step_seconds": 1.0} | changes))


def test_the_scenario_follows_the_options():
    scenario = make_scenario(
        options(
            slower=(1.0, 2.0),
            links=("1mbit", "2mbit"),
            sharing=2,
            loss=0.1,
            failures="10min/7d/30s",
            stragglers="10s/1h",
        )
    )
    assert scenario.step_seconds == (1.0, 2.0) * 3 and scenario.shares == (0, 0, 1, 1, 2, 2)
    assert [wire.link for wire in scenario.wires] == [Link(1e6), Link(2e6), Link(1e6)]
    assert scenario.failures == Failures(7 * 86400.0, 600.0, 30.0) and scenario.stragglers == Stragglers(3600.0, 10.0)
    drawn = make_scenario(options(run=Run.of(replicas=4000, link="50mbit"), step_variation=0.2, link_variation=0.5))
    rates = [wire.link.bits_per_second for wire in drawn.wires]
    assert np.mean(drawn.step_seconds) == pytest.approx(1, rel=0.02) and np.std(drawn.step_seconds) == pytest.approx(
        0.2, rel=0.05
    )
    assert np.mean(rates) == pytest.approx(50e6, rel=0.03) and np.std(rates) == pytest.approx(25e6, rel=0.1)
    down = make_scenario(options(outages="20s/2h")).wires
    first, second = ([*islice(wire.outages, 500)] for wire in down[:2])
    assert first == [*islice(down[0].outages, 500)] != second
    assert np.mean([end - begin for begin, end in first]) == pytest.approx(20, rel=0.2)


def test_the_scenario_follows_the_run_s_own_slow_machines_and_uplink(capsys):
    plain = json_output(capsys, f"{ASKED} --replicas 3")
    slow = json_output(capsys, f"{ASKED} --replicas 3 --slow 1 1 4 --slower 1 2 1")
    assert slow["wall_seconds"] > 3 * plain["wall_seconds"]
    thin = json_output(capsys, f"{ASKED} --replicas 3 --uplink 100kbit")
    assert thin["stall_seconds"] > 10 * plain["stall_seconds"]
    run = Run.of(replicas=2, slow=(1, 3), uplink="40mbit", link="50mbit,30ms")
    scenario = make_scenario(options(run=run, slower=(2.0, 1.0)))
    assert scenario.step_seconds == (2.0, 3.0) and [wire.link for wire in scenario.wires] == [Link(4e7, 0.03)] * 2
    alone = make_scenario(options(run=run.changed(link="none")))
    assert [wire.link for wire in alone.wires] == [Link(4e7)] * 2
    faster = make_scenario(options(run=run, links=("1mbit", "1gbit,1ms")))
    assert [wire.link for wire in faster.wires] == [Link(1e6), Link(4e7, 0.001)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": Run.of(replicas=6, uplink="50mbit"), "sharing": 2}, "uplink='50mbit' with sharing=2"),
        ({"step_seconds": None}, "the time of an inner step is needed"),
        ({"step_seconds": 0.0}, "a positive time for every replica"),
        ({"run": Run.of(model="nano")}, "a link is needed: --link"),
        ({"links": ("50mb",)}, "the link '50mb' was given"),
        ({"links": ("0mbit",)}, "a rate of 0.0 bit/s"),
        ({"slower": (1.0, 0.0)}, "positive factors"),
        ({"slower": ()}, "positive factors"),
        ({"step_variation": -1.0}, "step_variation=-1.0: zero or more"),
        ({"link_variation": float("nan")}, "link_variation=nan"),
        ({"sharing": 7}, "between 1 and 6 replicas share"),
        ({"loss": 1.5}, "loss=1.5"),
        ({"stragglers": "10s"}, "stragglers='10s': times with units between slashes"),
        ({"stragglers": "10/1h"}, "'10' was given; a time is needed"),
        ({"outages": "0s/1h"}, "seconds=0.0: a positive time"),
        ({"failures": "1s/2s/3s/4s"}, "between slashes"),
        ({"failures": "1fortnight/2s"}, "'1fortnight' was given"),
    ],
)
def test_invalid_options_are_refused(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        make_scenario(options(**changes))


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--step-seconds 1",
        f"{ASKED} --links 5",
        "nothing.toml",
        "--step-seconds 1 --link 1mbit --model huge",
        "--step-seconds 1 --link 1mbit --tokenizer words",
    ],
)
def test_wrong_arguments_are_an_error_of_one_line(arguments, capsys):
    assert main(["simulate", "run", *arguments.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def emulated() -> list[dict[str, Any]]:
    rows = json.loads((ROOT / "benchmarks/results/utilization.json").read_text())["rows"]
    return [row for row in rows if str(row.get("how")).startswith("Strategy(")]


@pytest.mark.parametrize("row", emulated(), ids=lambda row: f"{row['method']}, {row['megabits_per_second']:.3g} Mbit/s")
def test_simulated_utilization_is_close_to_the_emulated_one(row):
    """The benchmark ran processes over a shaped link; its JSON holds strategy, step time and rate.

    1448 of 1514 bytes on the wire are payload. Nothing is fitted. The simulator does not know the CPU time of encoding; the row has its share
    of the core that trains.
    """
    strategy = tw.catalogue.parsing.parse(row["how"])
    numels = [fragment.numel for fragment in strategy.partition.fragments(skeleton(Run.of(model="mini")))]
    link = Link(row["megabits_per_second"] * 1e6 * 1448 / 1514)
    outcome = simulate(strategy, numels, Scenario.alike(2, row["inner_step_seconds"], link), 3000)
    hidden = row["utilization"] > 0.95  # the overlap hides sending and encoding
    apart = max(0.02, row["beside_cpu"]) if hidden else 0.1
    assert outcome.compute_utilization == pytest.approx(row["utilization"], rel=apart)
