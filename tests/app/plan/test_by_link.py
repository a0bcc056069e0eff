"""The rounds of the default method on a known link, in `train`, `compare` and `doctor`, and in the run file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from thinwire import streaming_sign
from thinwire.app.cli import capacity, doctor, main
from thinwire.app.plan.by_link import by_link, follows_link
from thinwire.app.plan.compute import skeleton
from thinwire.app.plan.expected import FORMS, cost_of_delay
from thinwire.app.plan.links import Links
from thinwire.app.plan.machine import Machine
from thinwire.app.plan.search import settings
from thinwire.app.plan.setting import Task
from thinwire.app.trainer.run import Run
from thinwire.comm import Link

Capture = pytest.CaptureFixture[str]
DEFAULT, ALL_SIGNS = FORMS[:2]


def test_the_first_form_is_the_recipe() -> None:
    assert (DEFAULT.every, DEFAULT.codec, DEFAULT.above) == (streaming_sign().schedule.every, None, 0.0)


@pytest.mark.parametrize("steps", [1000, 3000])
def test_a_plan_proposes_no_form_for_a_run_that_is_too_short_for_it(steps: int) -> None:
    """As `by_link`. The sparse recipe was measured after 2,000 steps."""
    run, cpu = Run.of(model="nano"), Machine("cpu", memory_nbytes=16 * 10**9, flops_per_second=1e11)
    tokens = 2.0 * steps * run.data.tokens
    methods = ("streaming_sign", "streaming_sparse")
    found = settings(Task(run, Links.uniform(Link(1e5, 0.1), 2), (cpu,), tokens, methods=methods))
    several = [one for one in found if one.replicas == 2]
    signs = {one.run.method.every for one in several if one.method == "streaming_sign"}
    assert signs == {form.every for form in FORMS if form.steps <= steps}
    said = {str(warning) for one in several for warning in one.loss.warnings if warning.name == "short-run"}
    assert said == (
        {"short-run: 1,000 steps; measured after 2,000, a shorter run ends higher"} if steps < 2000 else set()
    )


def test_the_costs_of_delay_are_those_measured_and_rise() -> None:
    for form in FORMS:
        assert [cost_of_delay(form.every, delay) for delay, _ in form.of_delay] == [
            1 + cost for _, cost in form.of_delay
        ]
    for every in (4, 5, 7, 14, 24, 100):
        costs = [cost_of_delay(every, delay) for delay in range(1, every)]
        assert costs[0] == 1 and costs == sorted(costs) and len(set(costs)) == len(costs)


@pytest.mark.parametrize(
    ("link", "step_seconds", "form", "delay"),
    [
        ("100mbit,1ms", 0.07, DEFAULT, 1),
        ("20mbit,70ms", 0.07, DEFAULT, 1),  # a short wait costs less than another step of delay
        ("20mbit,100ms", 0.07, DEFAULT, 2),
        ("20mbit,150ms", 0.05, DEFAULT, 3),  # three steps: the longest delay of H = 4
        ("20mbit,150ms", 0.2, DEFAULT, 1),
        ("20mbit,190ms", 0.05, ALL_SIGNS, 4),
        ("20mbit,240ms", 0.05, ALL_SIGNS, 5),
        ("20mbit,2s", 0.4, ALL_SIGNS, 5),
        ("10kbit,1ms", 0.07, DEFAULT, 1),  # no delay helps a wire that is always busy
    ],
)
def test_the_rounds_balance_waiting_and_loss(link: str, step_seconds: float, form: Any, delay: int) -> None:
    run = Run.of(model="nano", link=link)
    given, said = by_link(run, skeleton(run), step_seconds)
    assert given == run.changed(every=form.every, codec=form.codec, delay=delay)
    assert said.startswith(f"--every {form.every} ") and f" --delay {delay}: a round takes" in said
    assert ("--delay 1 would train" in said) == (delay > 1)
    assert form.codec is None or f' --codec "{form.codec}" ' in said


def test_rarer_rounds_say_what_they_cost_and_what_to_type() -> None:
    """A round takes 193 ms there, four steps of 50 ms."""
    run = Run.of(model="nano", link="20mbit,190ms")
    said = by_link(run, skeleton(run), 0.05)[1]
    kept, waits = (int(share) for share in re.findall(r"at most (\d+)% of the time", said))
    lower = 1 - 1 / (1 + ALL_SIGNS.above) / cost_of_delay(ALL_SIGNS.every, 4)
    assert waits < kept and f"end about {lower:.1%} lower after as many steps" in said


@pytest.mark.parametrize("given", [{"every": 5}, {"codec": "Sign(block=64)"}, {"every": 7, "codec": "E3M0()"}], ids=str)
def test_given_rounds_stay_and_only_the_delay_follows_the_link(given: dict[str, Any]) -> None:
    run = Run.of(model="nano", link="20mbit,190ms", **given)
    assert follows_link(run)
    chosen, said = by_link(run, skeleton(run), 0.05)
    every = given.get("every", DEFAULT.every)
    assert chosen == run.changed(every=every, delay=chosen.method.delay) and 1 < chosen.method.delay < every
    assert f"(H and codec stay, because --{' and --'.join(given)} is given)" in said


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
    for module in (capacity, doctor):
        monkeypatch.setattr(module, "measure_step", lambda run, vocabulary: taken[0])
    return taken


def _rounds(folder: str) -> tuple[int | None, str | None, int | None]:
    method = Run.load(Path(folder, "run.toml")).method
    return method.every, method.codec, method.delay


def test_a_resumed_run_keeps_its_rounds(step: list[float], capsys: Capture) -> None:
    small = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]
    small += ["--link", "20mbit,190ms", "--text", "text.txt", "--steps", "4"]
    chosen = ALL_SIGNS.every, ALL_SIGNS.codec, 4
    assert main(["train", *small, "--out", "run"]) == 0
    assert "rounds: --every 7 --codec" in capsys.readouterr().out
    assert _rounds("run") == chosen
    compare = ["compare", *small, "--strategies", "streaming_sign", "data_parallel", "--out", "both", "--json"]
    for step[0] in (0.05, 0.2):  # the second comparison measures nothing
        assert main(compare) == 0
        rows = json.loads(capsys.readouterr().out)["strategies"]
        assert [row["steps"] for row in rows] == [4, 4]
    assert _rounds("both/streaming_sign-seed-0") == chosen
    assert main(["train", "--resume", "--out", "run", "--steps", "6"]) == 0
    assert _rounds("run") == chosen
    assert "rounds:" not in capsys.readouterr().out


def test_doctor_names_the_rounds_that_a_run_will_take(step: list[float], capsys: Capture) -> None:
    Run.of(model="nano", text=("text.txt",), link="20mbit,190ms").save(Path("run.toml"))
    main(["doctor", "run.toml", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    (said,) = (finding for finding in found if finding["what"] == "rounds")
    assert said["level"] == "ok" and said["says"].startswith("thinwire train takes --every 7 --codec")
    assert "delay" not in [finding["what"] for finding in found]


def test_a_step_of_a_job_is_timed_with_its_own_optimizers(tmp_path: Path, capsys: Capture) -> None:
    """AdamW refuses the sparse gradients of this job, which has an optimizer for them."""
    job = Path(__file__).parents[3] / "examples" / "workloads" / "experts.py"
    short = ["--steps", "2", "--eval-every", "2", "--carrier", "threads", "--link", "20mbit,150ms"]
    assert main(["train", "--job", str(job), *short, "--out", str(tmp_path / "run")]) == 0
    assert "rounds: --every " in capsys.readouterr().out
