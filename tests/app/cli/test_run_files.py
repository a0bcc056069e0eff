"""Run files: their tables, the same groups in `--help`, and the learning rate."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.cli import main
from thinwire.app.cli.options import MOST_USED, read
from thinwire.app.cli.train import Options
from thinwire.app.trainer.run import PART_OF, PARTS, Run
from thinwire.app.trainer.setup import learning_rate
from thinwire.app.trainer.trainer import Trainer
from thinwire.errors import ConfigurationError
from thinwire.strategy import Strategy

SIMULATE = ("simulate", "run")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def simulated(capsys: Any, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON summary of `thinwire simulate run`, and its text output."""
    assert main([*SIMULATE, *arguments, "--step-seconds", "0.1", "--json"]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_run_makes_its_strategy_once_and_hands_it_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the command line to the first inner step of two replicas; the defaults, which options replace, are a run of their own."""
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    Path("text.txt").write_text("".join(f"line {i}: thin wires carry {i}\n" for i in range(1000)))
    made, known, check, step = [0], list[int](), Strategy.__post_init__, Trainer._inner_step
    monkeypatch.setattr(Strategy, "__post_init__", lambda self: (check(self), made.__setitem__(0, made[0] + 1)))
    monkeypatch.setattr(Trainer, "_inner_step", lambda self: (known.append(made[0]), step(self)))
    asked = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]
    assert main(["train", *asked, "--text", "text.txt", "--steps", "1", "--seed", "3", "--out", "run"]) == 0
    assert len(known) == 2 and max(known) <= 3

    run = Run.of(strategy="diloco", seed=3)
    assert run.changed(steps=9, lr=0.5, replicas=3).plan is run.plan
    for change in ({"every": 7}, {"clip": 0.5}, {"seed": 4}, {"optimizer": "SGD()"}):
        anew = Run.of(**({"strategy": "diloco", "seed": 3} | change))
        assert run.changed(**change).plan == anew.plan != run.plan


def test_a_run_file_has_a_table_for_each_part() -> None:
    run = Run.of(every=10, text=("a.txt",), model="nano", lr=1, replicas=4, seed=7, eval_every=5)
    run.save(Path("run.toml"))
    written = tomllib.loads(Path("run.toml").read_text())
    assert list(written) == ["seed", *PARTS]
    assert written["method"]["every"] == 10 and written["model"]["model"] == "nano"
    assert all(PART_OF[name] == part for part in PARTS for name in written[part])
    assert Run.load(Path("run.toml")) == run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[method]\nevry = 3", r"evry is no setting \(did you mean every\?\)"),
        ("[method]\nlr = 0.1", r"lr is in \[method\]; it belongs in \[optimizer\]"),
        ("[data]\nseed = 1", r"seed is in \[data\]; it belongs above all tables"),
        (
            "[metod]\nevery = 3",
            r"\[metod\] is no table of a run file \(did you mean method\?\); there are \[method\], \[data\]",
        ),
        ("every = 3\n[method]\nevery = 4", "every is given twice"),
        ("[method]\nevery = 'x'", "every='x': a whole number is needed"),
        ("[method.inner]\nevery = 3", "inner is no setting"),
        ("# no settings yet\n[method]\n", "wrong.toml holds no settings; a run file has one at least"),
    ],
)
def test_misplaced_and_unknown_settings_are_refused_by_name(text: str, says: str) -> None:
    Path("wrong.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        Run.load(Path("wrong.toml"))


def test_an_empty_run_file_is_refused(capsys: Any) -> None:
    Path("empty.toml").touch()
    for verb in (("train",), ("doctor",), SIMULATE, ("plan", "50mbit", "machine.toml", "--run")):
        assert main([*verb, "empty.toml"]) in (1, 2) and "empty.toml holds no settings" in "".join(capsys.readouterr())
    assert [path.name for path in Path().iterdir()] == ["empty.toml"]


@pytest.mark.parametrize(
    ("verb", "first"),
    [
        (("train",), [*MOST_USED, "out", "resume"]),
        (("compare",), [*MOST_USED, "strategies", "out"]),
        (SIMULATE, [*MOST_USED, "step_seconds", "out"]),
    ],
)
def test_help_shows_ten_options_first_and_the_others_in_the_tables_of_a_run_file(
    verb: tuple[str, ...], first: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*verb, "--help"])
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if title := re.match(r"[ ╭─]*(Most used|Other|\[[a-z]+\]) options", line):
            shown = groups.setdefault(title[1], [])
        elif groups and (flag := re.match(r"[ │]{1,4}--([a-z][a-z-]*)", line)):
            shown.append(flag[1].replace("-", "_"))
    assert ended.value.code == 0 and groups.pop("Most used") == first and len(first) == 10
    other = groups.pop("Other")
    assert list(groups) == [f"[{part}]" for part in PARTS] and "seed" in other and "json" in other
    for part in PARTS:
        assert groups[f"[{part}]"] == [n for n, of in PART_OF.items() if of == part and n not in first]


def test_an_option_that_may_be_left_out_shows_one_type_and_none_sets_it_back(capsys: Any) -> None:
    Path("run.toml").write_text("[method]\nevery = 30\n")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "None" not in capsys.readouterr().out
    assert main(["train", "--lr", "abc"]) == 2 and "--lr abc: a number is needed." in capsys.readouterr().err
    assert read(Options, "train", ["run.toml"], "").run_settings.method.every == 30
    assert read(Options, "train", ["run.toml", "--every", "None"], "").run_settings.method.every is None


def test_an_unknown_flag_is_answered_with_the_nearest_one(capsys: Any) -> None:
    assert main(["train", "--evry", "3"]) == 2
    assert "--evry is no option (did you mean --every?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "lr", "origin"),
    [
        ({"model": "nano"}, 0.02, "the default, 10.24 / 64^1.5, by the model's width"),
        ({"model": "tiny", "strategy": "data_parallel"}, 0.0109, "the default, 10.24 / 96^1.5, by the model's width"),
        ({"model": "mini", "optimizer": "AdamW"}, 0.0025, "the default, 10.24 / 256^1.5, by the model's width"),
        ({"model": "mini", "lr": 0.01}, 0.01, "given; the default is 0.0025"),
        ({"model": "nano", "optimizer": "Muon"}, 0.03, "the default, 1.92 / 64, by the model's width"),
        ({"model": "mini", "optimizer": "Muon(momentum=0.9)"}, 0.0075, "the default, 1.92 / 256, by the model's width"),
        ({"model": "nano", "strategy": "muloco"}, 0.03, "the default, 1.92 / 64, by the model's width"),
        ({"model": "nano", "optimizer": "SAM(Muon())"}, 0.006, "the default, which is AdamW's; give --lr for SAM"),
        ({"model": "nano", "optimizer": "Muon", "lora": 4}, 0.006, "the default"),
        ({"model": "nano", "lora": 4}, 0.006, "the default"),
        ({"model": "nano", "optimizer": "SGD(0.9, lr_factor=100)"}, 0.006, "the default; times lr_factor 100: 0.6"),
        ({"model": "nano", "strategy": "dgc"}, 0.006, "the default; times lr_factor 100: 0.6"),
        ({"model": "nano", "strategy": "fedavg"}, 0.006, "the default"),
        ({"model": "run/model.safetensors"}, 0.006, "the default"),
        ({"model": "hf:a/b"}, 0.006, "the default"),
    ],
    ids=str,
)
def test_the_learning_rate_follows_the_width_of_a_size(given: dict[str, Any], lr: float, origin: str) -> None:
    run = Run.of(**given)
    assert (run.lr, run.lr_origin) == (lr, origin)
    if not run.model.model.endswith(".safetensors"):  # the size of its model is in the file
        assert Run.of(**given, steps=100, warmup=10).shared()["lr"] == lr
    assert learning_rate(run.changed(steps=100, warmup=10), 10) == pytest.approx(lr)


def test_a_run_keeps_its_learning_rate_in_its_file() -> None:
    Run.of(model="nano").absolute().save(Path("run.toml"))
    assert "lr = 0.02\n" in (text := Path("run.toml").read_text())
    assert "# lr: 0.02 (the default, 10.24 / 64^1.5, by the model's width)\n" in text
    assert (run := Run.load(Path("run.toml"))).optimizer.lr == 0.02
    assert run.changed(model="mini").lr_origin == "given; the default is 0.0025"


def test_settings_are_set_and_returned_by_name() -> None:
    run = Run.of(every=50, lr=0.01, seed=3)
    assert (run.method.every, run.optimizer.lr, run.seed) == (50, 0.01, 3)
    assert Run.of(**run.settings()) == run and set(run.settings()) == set(PART_OF)
    with pytest.raises(ConfigurationError, match=r"evry is no setting \(did you mean every\?\)"):
        run.changed(evry=3)


def test_a_run_file_that_a_person_wrote_is_not_replaced(capsys: Any) -> None:
    Path("text.txt").write_text("a thin wire carries it\n" * 900)
    mine = "# the second try\n[data]\ntext = ['text.txt']\n[model]\nmodel = 'nano'\n"
    Path("run.toml").write_text(mine)
    train = ["train", "run.toml", "--carrier", "threads", "--sequence", "16", "--eval-batches", "1", "--steps", "2"]
    for arguments in (
        [*train, "--out", "."],
        [*SIMULATE, "run.toml", "--link", "1mbit", "--step-seconds", "0.1", "--out", "."],
    ):
        assert (
            main(arguments) == 2 and "run.toml is no file of a run that Thinwire has begun" in capsys.readouterr().err
        )
    assert Path("run.toml").read_text() == mine
    Path("begun").mkdir()
    # As a run leaves it that failed before its first step.
    Run.load(Path("run.toml")).absolute().save(Path("begun/run.toml"))
    assert main([*train, "--out", "begun"]) == 0 and Run.load(Path("begun/run.toml")).optimizer.steps == 2
