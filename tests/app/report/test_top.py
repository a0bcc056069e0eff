"""`thinwire top`, and the live line of `thinwire train`, on runs of methods with servers."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from trained_runs import trained_run

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.report.charts import loss_chart
from thinwire.app.report.progress import Progress

pytestmark = pytest.mark.usefixtures("late_imports")
TEXT = "".join(f"line {i}: thin wires carry {i}\n" for i in range(1000))


@pytest.mark.parametrize("strategy", ["decoupled_diloco(every=4, slow=(1, 3))", "plexus(every=4)"])
def test_bytes_of_servers_and_a_finished_run_are_shown(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server's answers do not depart. Of replicas with different speeds, the slow one ends after fewer steps."""
    run = trained_run(tmp_path, tmp_path / "cache", TEXT, "--strategy", strategy, "--steps", "12")
    summary = RunRecord.load(run).summary
    capsys.readouterr()
    assert main(["top", str(run)]) == 0 and " at step 12 · " in capsys.readouterr().out
    assert main(["top", str(run), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == summary.steps >= facts["steps"] == 12
    out = io.StringIO()
    with Progress(run, steps=12, replicas=2, console=Console(file=out)):
        pass
    line = out.getvalue().splitlines()[-1]
    assert line.startswith("step 12/12 · ")  # also if all together took more steps
    assert " at step 12 · " in line  # the last evaluation, after other inner steps of its replica
    assert f" · sent {text_of_nbytes(summary.wire_bytes_sent)} per replica · " in line
    record = RunRecord.load(run)
    assert record.evaluations.nbytes[-1] == sum(int(each["nbytes"]) for _, _, each, _ in record.replicas[0].ledger)
    curve = loss_chart([record]).views[2].data[1]  # the evaluations, over bytes
    assert curve["x"][-1] == pytest.approx(record.evaluations.nbytes[-1], rel=1e-5) and not loss_chart([record]).remarks
    assert sum(one["nbytes"] for one in facts["replicas"]) == pytest.approx(2 * summary.wire_bytes_sent, abs=2)
    for log in run.glob("events/*.jsonl"):  # as before the end
        log.write_text("".join(line for line in log.open() if json.loads(line)["event"] != "end"))
    assert main(["top", str(run), "--json"]) == 0
    assert all(one["nbytes"] > 0 for one in json.loads(capsys.readouterr().out)["replicas"])


def test_the_step_is_that_of_the_run_after_the_loss_of_a_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a replica that was killed after its second inner step; the others continued."""
    run = trained_run(
        tmp_path, tmp_path / "cache", TEXT, "--strategy", "async_local_sgd(every=4, slow=(1, 3))", "--steps", "12"
    )
    steps = RunRecord.load(run).summary.steps
    log = run / "events" / "replica-1.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    second = [index for index, line in enumerate(lines) if json.loads(line)["event"] == "step"][1]
    log.write_text("".join(lines[: second + 1]))
    capsys.readouterr()
    assert main(["top", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == steps
    out = io.StringIO()
    with Progress(run, steps=12, replicas=2, console=Console(file=out)):
        pass
    assert out.getvalue().splitlines()[-1].startswith(f"step {steps}/12 · ")


def test_a_damaged_log_is_named(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a whole one, and alone."""
    run = make_run(tmp_path / "run", steps=8)
    first, second = sorted(run.glob("events/*.jsonl"))
    for path in (second, first):
        path.write_bytes(b"\x00\x01\n[1]\n")
        assert main(["top", str(run)]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert f"{path.name} is damaged: 2 lines passed over" in told
    assert "nothing is written yet" not in told
