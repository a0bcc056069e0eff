"""`--log`: every tracker runs for real, offline; the page and the dashboard use the names of the metrics."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from thinwire.app.cli import main
from thinwire.app.records.events import EVENTS
from thinwire.app.report import trackers
from thinwire.app.report.metrics import METRICS, MetricValues
from thinwire.app.report.trackers import Follower, Sink, following, open_sinks, parse_sinks
from thinwire.errors import ConfigurationError

MakeRun = Callable[..., Path]
NAMES = {"thinwire_step"} | {f"thinwire_{m.name}" + ("_total" if m.kind == "counter" else "") for m in METRICS}


def needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


def test_the_page_and_the_dashboard_use_the_names_of_the_metrics() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter) \| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(m.name, m.kind, m.event, m.about) for m in METRICS]
    assert {metric.event for metric in METRICS} <= set(EVENTS)
    board = json.loads((ROOT / "examples/grafana.json").read_text())
    asked = {name for p in board["panels"] for t in p["targets"] for name in re.findall(r"thinwire_\w+", t["expr"])}
    assert len(asked) >= 12 and asked <= NAMES
    assert all(f"`{name}`" in page for name in trackers.SINKS)


def test_gauges_keep_the_last_value_and_counters_add() -> None:
    values = MetricValues()
    step = {
        "event": "step",
        "step": 1,
        "seconds": 0.1,
        "loss": 2.0,
        "lr": 0.1,
        "grad_norm": 1.0,
        "tokens": 8,
        "compute_seconds": 0.5,
    }
    values.take(step)
    assert values.take(step | {"loss": 1.0})["loss"] == 1.0 and values.now["tokens"] == 16 and values.now["steps"] == 2
    # a malformed event, whose members is no list
    assert values.take({"event": "round", "members": 3})["members"] != values.now["steps"]
    assert not values.take({"event": "start"})


def test_rounds_of_an_elastic_run_count_as_flights_and_landings() -> None:
    values, fields = MetricValues(), {"members": ["a", "b"], "seconds_spent": 0.5, "nbytes": 100}
    values.take({"event": "round", "fragment": -1, "committed": False} | fields | {"nbytes": 0})  # nothing to exchange
    assert values.now == {"members": 2.0}
    values.take({"event": "round", "fragment": 0, "committed": True} | fields)
    values.take({"event": "round", "fragment": 1, "committed": False} | fields | {"seconds_spent": 2.0})
    assert values.now == {"members": 2.0, "sent_bytes": 200.0, "flight_seconds": 2.0, "rounds_landed": 1.0}


@needs("tensorboard")
@needs("prometheus_client")
def test_a_killed_and_resumed_run_is_followed(make_run: MakeRun, tmp_path: Path) -> None:
    """It is followed by three trackers at once, which are read by TensorBoard, over HTTP, and line by line."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, said = make_run(tmp_path / "run", replicas=2, steps=210, killed_at=120), list[str]()
    with following("tensorboard,prometheus=0,jsonl", run, {}, said.append) as follower:
        assert follower is not None
        follower.update()
        address = re.search(r"http://127.0.0.1:\d+/metrics", " ".join(said))
        assert address
        with urllib.request.urlopen(address[0]) as answer:
            scraped = answer.read().decode()
    assert 'thinwire_step{replica="replica-1",run="run"} 210.0' in scraped
    assert 'thinwire_steps_total{replica="replica-0",run="run"} 230.0' in scraped  # 20 steps were repeated
    assert set(re.findall(r"^(thinwire_\w+)\{", scraped, re.MULTILINE)) <= NAMES
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 210 and {line["replica"] for line in lines} == {"replica-0", "replica-1"}
    board = EventAccumulator(str(run / "tensorboard/replica-0"))
    board.Reload()
    steps = [event.step for event in board.Scalars("loss")]
    assert steps == list(range(1, 211)) and board.Scalars("evaluation_loss")[-1].step == 200


class Failing(Sink):
    """A tracker that fails at step 3."""

    where = "nowhere"

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        if given:
            raise RuntimeError("no\nnetwork")

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            raise RuntimeError("gone")


def test_a_tracker_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails under the real command; a resume continues after the last line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(trackers.SINKS, "wandb", Failing)
    assert main(["new", "my_job.py"]) == 0
    train = ["train", "--job", "my_job.py", "--carrier", "threads", "--every", "4", "--delay", "1", "--out", "run"]
    train += ["--log", "wandb,jsonl"]
    assert main([*train, "--steps", "6", "--checkpoint-every", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("log: wandb failed and is left out: RuntimeError: gone") == 1
    assert main(["train", "--resume", "--out", "run", "--steps", "9", "--log", "jsonl"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["replica"] == "replica-0" and "loss" in line]
    assert [line["step"] for line in mine] == list(range(1, 10)) and mine[-1]["steps"] == 9
    assert main(["train", "--out", "other", "--log", "wandb=x"]) == 2
    assert "log=wandb: it does not begin (RuntimeError: no network)" in capsys.readouterr().err


def test_unknown_and_missing_trackers_are_refused(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_sinks(None) == {} and parse_sinks("wandb=team, jsonl") == {"wandb": "team", "jsonl": ""}
    with pytest.raises(ConfigurationError, match="graphite not known; some of wandb,mlflow"):
        parse_sinks("graphite")
    for name, package in (
        ("wandb", "wandb"),
        ("tensorboard", "torch.utils.tensorboard"),
        ("prometheus", "prometheus_client"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigurationError, match=rf"pip install 'thinwire\[{name}\]'"):
            open_sinks({name: ""}, tmp_path, {})
    assert main(["report", str(make_run(tmp_path / "run", steps=10)), "--log", "prometheus"]) == 2
    follower = Follower(tmp_path / "nothing", {}, print)
    follower.close()


def tell(run: Path, name: str, **variables: str) -> str:
    """Runs `thinwire report --log NAME` in a separate process, because these packages leave threads behind."""
    command = [sys.executable, "-m", "thinwire", "report", str(run), "--log", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables, cwd=run)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("wandb")
def test_wandb_receives_a_run_offline(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replicas=1, steps=20)
    out = tell(run, "wandb", WANDB_MODE="offline")
    (kept,) = run.glob("wandb/offline-run-*/*.wandb")
    assert f"wandb sync {kept.parent}" in out and (run / "wandb-run.txt").read_text().strip() in kept.name
    held = kept.read_bytes()
    assert b"replica-0/loss" in held and b"inner_step" in held


@needs("mlflow")
def test_mlflow_receives_a_run_in_a_folder(make_run: MakeRun, tmp_path: Path) -> None:
    run, store = make_run(tmp_path / "run", replicas=1, steps=20), tmp_path / "mlruns"
    tell(run, "mlflow", MLFLOW_TRACKING_URI=store.as_uri(), MLFLOW_ALLOW_FILE_STORE="true")
    (kept,) = store.glob(f"*/{(run / 'mlflow-run.txt').read_text().strip()}/metrics/replica-0/loss")
    assert [int(line.split()[2]) for line in kept.read_text().splitlines()] == list(range(1, 21))


@needs("tensorboard")
def test_a_report_replaces_what_was_sent_before(make_run: MakeRun, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "run", replicas=2, steps=20)
    sent = []
    for _ in range(2):
        assert main(["report", str(run), "--log", "jsonl,tensorboard"]) == 0
        sent.append((run / "metrics.jsonl").read_text())
    assert sent[0] == sent[1] and len(set(sent[0].splitlines())) == sent[0].count("\n") > 20
    board = EventAccumulator(str(run / "tensorboard/replica-1"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(1, 21))
