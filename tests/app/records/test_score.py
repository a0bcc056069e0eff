"""The score of a run: each part is as documented, and a part that was not measured is absent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord, best_loss
from thinwire.app.records.score import Score

RUN = ["train", "--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]


def test_the_score_is_the_product_of_its_measured_parts() -> None:
    score = Score({"deadline": 0.5, "quality": None, "bytes": 0.9})
    assert (
        score.value == pytest.approx(0.45) and score.text() == "0.450 = deadline 0.500 × bytes 0.900, without quality"
    )
    assert Score({"deadline": None}).value is None and Score({"deadline": None}).text() == "not measured"


def test_parts_are_computed_from_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i}\n" for i in range(3000)))
    for name, steps in (("short", 4), ("long", 12)):
        assert main([*RUN, "--text", "text.txt", "--steps", str(steps), "--out", name]) == 0
    told = json.loads(Path("long/summary.json").read_text())
    parts = told["score"]["parts"]
    assert parts["quality"] is None and parts["availability"] == 1.0 and 0 <= parts["deadline"] <= 1
    assert parts["bytes"] == pytest.approx(1 - told["bits_per_parameter_per_step"] / 32)
    records = [RunRecord.load(name) for name in ("short", "long")]
    best = best_loss(records)
    losses = [record.summary.eval_loss or math.nan for record in records]
    assert best == min(losses) and best_loss(records[:1]) is None
    quality = [record.score(best).parts["quality"] for record in records]
    assert quality == pytest.approx([math.exp(best - loss) for loss in losses]) and max(filter(None, quality)) == 1.0
    capsys.readouterr()
    assert main(["report", "short", "long", "--json", "--out", "page.html"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["score"]["parts"]["quality"] for run in runs] == pytest.approx(quality)
    assert "short: score " in Path("page.html").read_text()

    # repeated work lowers the score, and so does a round that came too late
    log = Path("long/events/replica-0.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    land = next(line for line in lines if line["event"] == "land")
    land["stall_seconds"] = 9.0
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, after = parts["deadline"], RunRecord.load("long").score().parts["deadline"]
    assert after is not None and after <= before and after < 1
