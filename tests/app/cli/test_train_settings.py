"""Settings of `thinwire train` and `compare`: checks before anything is built, and the settings that a run keeps."""

from __future__ import annotations

import io
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from run_folders import read_events

from thinwire.app.cli import checks as machine
from thinwire.app.cli import main
from thinwire.app.cli.summary import speed_advice, stall_advice
from thinwire.app.cli.training import finish
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.launch import Stop
from thinwire.app.trainer.run import Run

SMALL = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]
TEXT = "".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000))

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text("".join(f"{i}. quite another matter, of {i % 7} words\n" for i in range(3000)))
    return tmp_path


def train(out: str, *more: str, text: str = "text.txt") -> int:
    return main(["train", *SMALL, "--text", text, "--out", out, "--steps", "4", *more])


def tokenizer_in(folder: str) -> bytes:
    return Path(folder, "tokenizer.json").read_bytes()


def test_a_model_brings_its_tokenizer(here: Path, capsys: Capture) -> None:
    assert train("first", "--tokenizer", "bpe:300") == 0
    model = ("--model", "first/model.safetensors")
    assert train("second", *model, text="other.txt") == 0
    assert tokenizer_in("second") == tokenizer_in("first")
    capsys.readouterr()
    for given in ("bpe:300", "bytes"):
        assert train("refused", *model, "--tokenizer", given, text="other.txt") == 2
        said = capsys.readouterr().err
        assert "first/model.safetensors was trained with bpe-" in said and "first/tokenizer.json" in said
    shutil.move("second", "moved")  # the run folder is enough
    shutil.rmtree("first")
    assert train("third", "--model", "moved/model.safetensors", "--tokenizer", "bpe:moved/tokenizer.json") == 0
    Path("moved/tokenizer.json").unlink()
    assert train("refused", "--model", "moved/model.safetensors") == 2
    assert "moved/tokenizer.json" in capsys.readouterr().err
    assert not Path("refused").exists()


def test_a_resumed_run_keeps_its_tokenizer(here: Path) -> None:
    assert train("run", "--tokenizer", "bpe:300") == 0
    before = tokenizer_in("run")
    shutil.rmtree("cache")
    shutil.copy("other.txt", "text.txt")
    assert main(["train", "--resume", "--out", "run", "--steps", "6"]) == 0
    assert tokenizer_in("run") == before
    events = read_events(Path("run/events/replica-0.jsonl"))
    first, second = (event["run"]["corpus"]["tokenizer"] for event in events if event["event"] == "start")
    assert first == second


def test_a_run_file_works_in_any_folder_and_lists_the_settings_of_its_recipe(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("run", "--codec", "E2M1", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    written = Path("run/run.toml").read_text()
    assert tomllib.loads(written)["data"]["text"] == [str(here / "text.txt")] and "# every: 4\n# delay: 1\n" in written
    assert "every" not in tomllib.loads(written)  # so --strategy can choose another one with its own defaults
    made_of = summary["made_of"]
    assert (made_of["every"], made_of["delay"], made_of["fragments"]) == (4, 1, 4)
    assert made_of["lr"] == "0.02 (the default, 10.24 / 64^1.5, by the model's width)"
    assert made_of["codec"].startswith("E2M1(") and made_of["composition"].startswith("Strategy(")
    page = Path("run/report.html").read_text()
    assert "made of.every" in page and "made of.fragments" in page
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["train", str(here / "run/run.toml"), "--strategy", "diloco"]) == 0


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_built(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: (64 << 30, 24 << 30))
    for verb in ("train", "compare"):
        assert main([verb, *SMALL, "--text", "text.txt", "--model", "4b", "--out", "run"]) == 2
        said = capsys.readouterr().err
        assert "model='4b'" in said and "2 of them here" in said and "25.8 GB of memory are free" in said
        assert "thinwire docs machines" in said
    assert not Path("run").exists()
    monkeypatch.setattr(machine, "memory", lambda: (4 << 30, 1 << 20))
    assert train("run", "--strategy", "fedavg") == 2
    assert "model='nano'" in capsys.readouterr().err


def test_methods_that_do_not_suit_adapters_print_a_warning(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: (4 << 30, 0))  # the warning comes before anything is built
    for strategy, lora, says in (
        ("power_sgd", (), False),
        ("power_sgd", ("--lora", "4"), True),
        ("dgc", ("--lora", "4"), True),
        ("data_parallel", ("--lora", "4"), False),
        ("data_parallel(codec=Cast())", ("--lora", "4"), False),
    ):
        assert train("run", "--strategy", strategy, *lora) == 2
        assert (f"warning: {strategy}: " in capsys.readouterr().out) == says, strategy


def test_compare_continues_after_a_method_fails(here: Path, capsys: Capture) -> None:
    out = here / "out"
    out.mkdir()
    (out / "diloco-seed-1").write_text("a file where the run's folder should be")
    strategies = ["--strategies", "diloco", "muloco", "local_sgd"]
    asked = [
        "compare",
        *SMALL,
        "--text",
        "text.txt",
        "--out",
        str(out),
        "--steps",
        "4",
        "--seeds",
        "2",
        "--lora",
        "2",
        "--json",
    ]
    assert main([*asked, *strategies]) == 1
    told = capsys.readouterr()
    rows = {row["strategy"]: row for row in json.loads(told.out)["strategies"]}
    assert "is a file, and the run needs a folder" in rows["diloco"]["failed"] and "failed" in told.err
    assert all(rows[name]["eval_loss"] > 0 for name in ("muloco", "local_sgd"))
    assert "over the seeds of each: 1 of diloco, 2 of muloco, 2 of local_sgd" in " ".join(told.err.split())
    assert (out / "report.html").exists()
    (out / "diloco-seed-1").unlink()
    assert main([*asked, *strategies]) == 0
    assert "loss: mean ± standard deviation over 2 seeds" in capsys.readouterr().err


def test_only_compare_accepts_attacks(capsys: Capture):
    assert main(["train", *SMALL, "--attack", "alie"]) == 2
    assert "only `thinwire compare` has them" in capsys.readouterr().err
    assert main(["compare", *SMALL, "--text", "text.txt", "--strategies", "diloco", "--liars", "1"]) == 2
    assert "liars=1 without an attack" in capsys.readouterr().err
    few = ["--replicas", "3", "--aggregate", "TrimmedMean(2)", "--attack", "SignFlip", "--liars", "1"]
    assert main(["compare", *SMALL, "--text", "text.txt", "--strategies", "diloco", *few]) == 2
    assert "2·2 + 1 = 5 are needed" in capsys.readouterr().err
    asked = [
        "--replicas",
        "3",
        "--steps",
        "4",
        "--aggregate",
        "Median",
        "--attack",
        "label-flip",
        "--liars",
        "1",
    ]
    assert (
        main(["compare", *SMALL, "--text", "text.txt", "--strategies", "diloco(every=2)", "--out", "tried", *asked])
        == 0
    )
    begun = tomllib.loads(next(Path("tried").glob("*/run.toml")).read_text())["method"]
    assert (begun["aggregate"], begun["attack"], begun["liars"]) == ("Median", "label-flip", 1)


def test_a_run_that_waited_names_the_command_that_finds_a_delay(make_run: Callable[..., Path], tmp_path: Path) -> None:
    thin, wide = make_run(tmp_path / "thin", rate=2e5), make_run(tmp_path / "wide", rate=1e9)
    told = stall_advice(RunRecord.load(thin), thin)
    assert re.fullmatch(
        r"replicas waited for rounds for \d\d% of the time \(emulated\); thinwire doctor \S+/thin/run.toml shows the --delay without waits",
        told,
    )
    assert stall_advice(RunRecord.load(wide), wide) == ""
    record = RunRecord.load(thin)
    unknown = replace(record, replicas=[replace(one, start=replace(one.start, link={})) for one in record.replicas])
    assert "thin/run.toml --link RATE,DELAY (of your link) shows" in stall_advice(unknown, thin)
    waited = told.partition(";")[0]
    for strategy, advice in {
        "a2cid2": "",  # which has no delay, as the next three
        "data-parallel": "",
        "plexus(sample=2)": "",
        " plexus (sample=2)": "",
        "streaming_diloco(every=5)": "the delay without waits",  # no option: it is in the parentheses
        "Strategy(schedule=Staggered(4))": "the delay without waits",
        "streaming-diloco": "the --delay without waits",
    }.items():
        alike = replace(record, settings=record.settings | {"strategy": strategy})
        said = f"; thinwire doctor {thin / 'run.toml'} shows {advice}" if advice else ""
        assert stall_advice(alike, thin) == waited + said, strategy


def test_a_stopped_run_names_the_command_that_resumes_it(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun no command of one machine can."""
    folder = make_run(tmp_path / "my run", steps=40)
    Run().save(folder / "run.toml")
    for log in folder.glob("events/*.jsonl"):
        stopped = {"event": "stop", "seconds": 99.0, "step": 40, "reason": "asked to stop"}
        log.write_text(log.read_text() + json.dumps(stopped) + "\n")
    told = []
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "2"}):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        out = io.StringIO()
        finish(folder, Console(file=out, width=200), False, Stop())
        told += [line.partition(": ")[2] for line in out.getvalue().splitlines() if line.startswith("to resume")]
    assert told == [
        f"thinwire resume '{folder}'",
        "the same torchrun command on each machine, with --resume",
    ]
    Run.of(strategy="plexus").save(folder / "run.toml")
    out = io.StringIO()
    finish(folder, Console(file=out, width=200), False, Stop())
    assert "a run with plexus cannot resume" in out.getvalue() and "to resume" not in out.getvalue()


def test_a_run_of_unequal_machines_names_the_batches_that_suit_them(
    make_run: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    record = RunRecord.load(make_run(tmp_path / "run"))
    seconds = (np.full(20, 0.4), np.array([0.1] * 15 + [9.0] * 5))  # one is often interrupted
    slower = replace(
        record,
        settings=record.settings
        | {"strategy": "streaming-sign", "replicas": 2, "batch": 8, "carrier": "processes", "job": None},
        replicas=[replace(one, compute_seconds=each) for one, each in zip(record.replicas, seconds, strict=True)],
    )
    told = speed_advice(slower)
    assert told == (
        "replica 0's steps took 4.0 times as long as the fastest ones; with --batch 2 8 all would take about equally long"
    )
    for served in ("async_local_sgd", "halos(every=10)"):
        assert speed_advice(replace(slower, settings=slower.settings | {"strategy": served})) == told
    for other in (
        {"batch": [8, 2]},
        {"batch": 1},
        {"batch": 3},
        {"carrier": "elastic"},
        {"job": "job.py"},
        {"strategy": "noloco"},
    ):
        assert speed_advice(replace(slower, settings=slower.settings | other)) == "", other
    for each in (np.full(20, 0.14), np.full(9, 0.4)):  # nearly as fast; too few steps
        first = replace(slower.replicas[0], compute_seconds=each)
        assert speed_advice(replace(slower, replicas=[first, *slower.replicas[1:]])) == ""
    first = replace(slower.replicas[0], compute_seconds=np.full(20, 1.04))
    assert speed_advice(replace(slower, replicas=[first, *slower.replicas[1:]])) == (
        "replica 0's steps took 10.4 times as long as the fastest ones; so slow a machine costs a run more than it brings: "
        "leave it out, or let it follow (thinwire follow)"
    )
    served = slower.settings | {"strategy": "halos", "batch": 10}  # what so slow a machine costs it is not measured
    assert speed_advice(replace(slower, settings=served, replicas=[first, *slower.replicas[1:]])).endswith(
        "10.4 times as long as the fastest ones; with --batch 1 10 all would take about equally long"
    )
    for silent in ("data_parallel", "decoupled_diloco(every=10)"):  # no run of it can be followed
        settings = slower.settings | {"strategy": silent}
        assert speed_advice(replace(slower, settings=settings, replicas=[first, *slower.replicas[1:]])).endswith(
            "leave it out"
        )
        assert main(["train", *SMALL, "--strategy", silent, "--publish"]) == 2
        assert "recipes with rounds of deltas, such as streaming_sign, publish" in capsys.readouterr().err


def test_runs_in_the_folder_of_the_text_are_not_read(here: Path, capsys: Capture) -> None:
    assert train("runs/first", text=".") == 0 and "not read as text" not in capsys.readouterr().err
    assert train("runs/second", "--checkpoint-every", "2", text=".") == 0
    assert f"; run folder: 1 ({here}/runs/first)\n" in capsys.readouterr().out
    assert train("runs/second", "--resume", "--steps", "6", text=".") == 0
    logs = [read_events(f"runs/{name}/events/replica-0.jsonl") for name in ("first", "second")]
    corpora = [event["run"]["corpus"] for log in logs for event in log if event["event"] == "start"]
    assert len(corpora) == 3 and all(one == corpora[0] for one in corpora) and corpora[0]["files"] == 2
    assert train("runs/third", text="runs/first") == 1
    assert "files found: 0; passed over: " in capsys.readouterr().err
