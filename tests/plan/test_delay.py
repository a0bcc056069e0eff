"""The default delay of the default method on a known link, in `train`, `compare` and `doctor`, and in the run file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import doctor, main
from thinwire.lm.run import Run
from thinwire.plan.compute import skeleton
from thinwire.plan.delay import follows_link, with_delay

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("link", "step_seconds", "delay"),
    [
        ("100mbit,1ms", 0.07, 1),
        ("20mbit,80ms", 0.07, 1),  # a short wait costs less than another step of delay
        ("20mbit,100ms", 0.07, 2),
        ("20mbit,150ms", 0.05, 3),
        ("20mbit,150ms", 0.2, 1),
        ("20mbit,2s", 0.4, 3),  # the longest that lands before the next departure
        ("10kbit,1ms", 0.07, 1),  # no delay helps a wire that is always busy
    ],
)
def test_the_delay_balances_waiting_and_loss(link: str, step_seconds: float, delay: int) -> None:
    run = Run.of(model="nano", link=link)
    given, said = with_delay(run, skeleton(run), step_seconds)
    assert given == run.changed(delay=delay) and said.startswith(f"{delay} step")
    assert ("--delay 1 would train" in said) == (delay > 1)


def test_a_longer_delay_says_what_it_costs_and_what_to_type() -> None:
    """A round takes 153 ms there, three steps of 50 ms."""
    run = Run.of(model="nano", link="20mbit,150ms")
    said = with_delay(run, skeleton(run), 0.05)[1]
    kept, waits = (int(share) for share in re.findall(r"at most (\d+)% of the time", said))
    assert waits < kept and "end about 4.1% lower after as many steps" in said


@pytest.mark.parametrize(
    "given",
    [
        {"link": "none"},
        {"delay": 2},
        {"strategy": "streaming_diloco"},
        {"strategy": "streaming_sign()"},
        {"replicas": 1},
    ],
    ids=str,
)
def test_only_an_unset_delay_on_a_known_link_follows_the_link(given: dict[str, Any]) -> None:
    assert follows_link(Run.of(link="20mbit,150ms")) and not follows_link(Run.of(**{"link": "20mbit,150ms"} | given))


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The time of an inner step that the measurement returns."""
    (tmp_path / "text.txt").write_text("a line of text that is read again and again\n" * 400)
    monkeypatch.chdir(tmp_path)
    taken = [0.05]
    monkeypatch.setattr(doctor, "measured_step", lambda run, vocabulary: taken[0])
    return taken


def test_a_resumed_run_keeps_its_delay(step: list[float], capsys: Capture) -> None:
    small = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]
    small += ["--link", "20mbit,150ms", "--text", "text.txt", "--steps", "4"]
    assert main(["train", *small, "--out", "run"]) == 0
    assert "delay: 3 steps: a round takes" in capsys.readouterr().out
    assert Run.load(Path("run/run.toml")).method.delay == 3
    compare = ["compare", *small, "--strategies", "streaming_sign", "data_parallel", "--out", "both", "--json"]
    for step[0] in (0.05, 0.2):  # the second comparison measures nothing
        assert main(compare) == 0
        rows = json.loads(capsys.readouterr().out)["strategies"]
        assert [row["steps"] for row in rows] == [4, 4]
    assert Run.load(Path("both/streaming_sign-seed-0/run.toml")).method.delay == 3
    assert main(["train", "--resume", "--out", "run", "--steps", "6"]) == 0
    assert Run.load(Path("run/run.toml")).method.delay == 3
    assert "delay:" not in capsys.readouterr().out


def test_doctor_names_the_delay_that_a_run_will_take(step: list[float], capsys: Capture) -> None:
    Run.of(model="nano", text=("text.txt",), link="20mbit,150ms").save(Path("run.toml"))
    main(["doctor", "run.toml", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    (said,) = (finding for finding in found if finding["what"] == "delay")
    assert said["level"] == "ok" and said["says"].startswith("thinwire train takes 3 steps")


def test_a_step_of_a_job_is_timed_with_its_own_optimizers(tmp_path: Path, capsys: Capture) -> None:
    """AdamW refuses the sparse gradients of this job, which has an optimizer for them."""
    job = Path(__file__).parents[2] / "examples" / "workloads" / "experts.py"
    short = ["--steps", "2", "--eval-every", "2", "--carrier", "threads", "--link", "20mbit,150ms"]
    assert main(["train", "--job", str(job), *short, "--out", str(tmp_path / "run")]) == 0
    assert "delay: " in capsys.readouterr().out
