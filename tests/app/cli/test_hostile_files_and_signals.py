"""Hostile files and signals at the command line: bounded reading, escaped text, and exit codes of stopped commands."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folders import read_events
from trained_runs import SMALL, trained_run

from thinwire.app.cli import main
from thinwire.app.records import events as events_module
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer import texts
from thinwire.app.trainer.run import Run
from thinwire.checkpoint import read
from thinwire.lab.cli import simulate

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1;1Hfake: all is well\n\x9b31m\u202e[/red]"

pytestmark = pytest.mark.usefixtures("one_cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4. Tests must not change it."""
    options = ["--steps", "4", "--every", "2", "--delay", "0", "--checkpoint-every", "2"]
    return trained_run(tmp_path_factory.mktemp("trained"), cache, "All that glisters is not gold. " * 4000, *options)


def resumed(run: Path) -> dict[str, Any]:
    (event,) = [event for event in read_events(run / "events/replica-0.jsonl") if event["event"] == "resume"]
    return event


# Checkpoints


def _with(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        said = json.loads((path / "manifest.json").read_text())
        said = {k: v for k, v in (said | {"step": int(path.name[5:])} | changes).items() if v is not None}
        (path / "manifest.json").write_text(json.dumps(said))

    return change


def _manifest(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "manifest.json").write_text(text)

    return change


def _fifo(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def _endless(path: Path) -> None:
    _with()(path)
    (path / "outer.safetensors").unlink()
    (path / "outer.safetensors").symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    """A file that declares 4 TB and holds none of them, with the right checksum."""
    from thinwire.checkpoint import _fingerprint

    head = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (path / "outer.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    files = json.loads((path / "manifest.json").read_text())["files"]
    _with(files=files | {"outer.safetensors": _fingerprint(path / "outer.safetensors")})(path)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "step a word": (_with(step="abc"), "no sound step"),
    "step missing": (_with(step=None), "KeyError: 'step'"),
    "step of another": (_with(step=10**300), "another step"),
    "step infinite": (_with(step=float("inf")), "no sound step"),
    "step of 5000 digits": (_manifest('{"format": 1, "step": ' + "9" * 5000 + "}"), "digits"),
    "format missing": (_with(format=None), "KeyError: 'format'"),
    "format a tree": (_with(format=[[]]), "has format [[]]"),
    "frozen missing": (_with(frozen=None), "KeyError: 'frozen'"),
    "facts a list": (_with(facts=[]), "no sound facts"),
    "a list": (_manifest("[]"), "TypeError"),
    "deep": (_manifest("[" * 100_000 + "]" * 100_000), "nested too deeply"),
    "escapes": (_with(format=ESCAPES), "has format"),
    "a FIFO": (_fifo, "no regular file"),
    "a device": (_endless, "outer.safetensors is no regular file"),
    "4 TB": (_huge, "SafetensorError"),
}


def test_hostile_checkpoints_are_skipped_and_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are all newer than the last good one."""
    good = run / "checkpoints/replica-0/step-00000004"
    for step, (change, _) in enumerate(HOSTILE.values(), start=5):
        change(Path(shutil.copytree(good, good.with_name(f"step-{step:08d}"))))
    assert main(["train", "--resume", "--out", str(run), "--steps", "5"]) == 0
    assert resumed(run)["from_step"] == 4
    for skipped, (name, (_, says)) in zip(resumed(run)["skipped"], HOSTILE.items(), strict=True):
        assert says in skipped["reason"], name
    read(run / "checkpoints/replica-0/step-00000005")  # hostile ones of later steps do not displace the new one
    said = capsys.readouterr().out
    assert "no regular file" in said and all(line.isprintable() for line in said.split("\n"))


def test_a_resume_without_whole_checkpoints_needs_from_start(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints/replica-1/step-00000004")
    (run / "checkpoints/replica-1/step-00000002/inner.safetensors").unlink()
    resume = ["train", "--resume", "--out", str(run), "--steps", "5"]
    assert main(resume) == 1
    said = capsys.readouterr().err
    assert "replica 0: has whole checkpoints of step 2, 4; replica 1: has no whole checkpoint" in said
    assert "--from-start" in said
    assert [event["event"] for event in read_events(run / "events/replica-0.jsonl")][
        -1
    ] == "warning"  # no step was taken
    assert main([*resume, "--from-start"]) == 0
    assert (run / "checkpoints-1/replica-0/step-00000004").is_dir()  # nothing was deleted
    assert RunRecord.load(run).replicas[0].step.tolist() == [1, 2, 3, 4, 5]
    assert main(["train", "--from-start", "--out", str(run)]) == 2


def test_an_elastic_resume_without_checkpoints_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchft", reason="the extra thinwire[elastic] is not installed")
    Run.load(run / "run.toml").changed(carrier="elastic").save(run / "run.toml")
    shutil.rmtree(run / "checkpoints")
    assert main(["train", "--resume", "--out", str(run), "--steps", "5"]) == 1
    assert "none of replica-0, replica-1 has a complete checkpoint" in capsys.readouterr().err


def test_a_full_disk_is_reported_and_a_later_resume_needs_from_start(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the checkpoints nor the model fit on the disk."""
    settings, out = (
        [str(trained / "run.toml"), "--steps", "2", "--checkpoint-every", "1"],
        ["--out", str(tmp_path / "full")],
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        assert main(["train", *settings, *out]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"free ([\d,]+ bytes|some space)", capsys.readouterr().err.lower())
    assert main(["train", "--resume", *out]) == 1
    assert "replica 1: has no whole checkpoint" in capsys.readouterr().err
    assert main(["train", "--resume", "--from-start", *out]) == 0


def test_all_files_of_a_run_have_the_same_modes(trained: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in trained.rglob("*") if path.is_file()}
    assert {"model.safetensors", "run.toml", "inner.safetensors"} < modes.keys() and len(set(modes.values())) == 1, (
        modes
    )


# Event logs and names


def test_control_characters_in_run_folders_are_escaped(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "LONGEST_LINE", 1 << 16)
    folder = tmp_path / "run \x1b[31m [red]"
    run.rename(folder)
    log = folder / "events/replica-0.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    start = json.loads(lines[0])
    start |= {"strategy": ESCAPES, "fragments": [{"name": ESCAPES, "numel": 1}] * 3}
    warning = {"event": "warning", "seconds": 1.0, "step": 1, "message": ESCAPES}
    more = [
        json.dumps(warning),
        json.dumps(warning | {"message": "A" * (1 << 20)}),  # skipped and counted
        json.dumps(warning | {"step": 10**30}),  # not a valid step
        json.dumps(warning | {"message": "kept " + "B" * 60_000}),  # cut
        "[" * 50_000,
        json.dumps(
            {
                "event": "eval",
                "seconds": 10**400,
                "step": 4,
                "loss": 1.0,
                "tokens": 1,
                "seconds_spent": 0,
                "of": ESCAPES,
            }
        ),
    ]
    log.write_bytes(json.dumps(start).encode() + b"\n" + b"".join(lines[1:]) + "\n".join(more).encode() + b"\n")
    (folder / "summary.json").write_text("[" * 100_000)
    for arguments in (["report", str(folder)], ["report", str(folder), "--diagnose"]):
        assert main(arguments) == 0
        said = capsys.readouterr()
        assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
    page = (folder / "report.html").read_text()
    assert r"\x1b]0;owned\x07" in page and "4 damaged lines were passed over" in page
    assert "B" * 3000 in page and "B" * 5000 not in page and "A" * 100 not in page
    assert "\x1b" not in page


def test_a_terminal_escapes_all_control_characters_but_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from thinwire.app.report.terminal import Terminal

    table = Table("a")
    table.add_row(Text(ESCAPES))
    table.add_row(ESCAPES)
    Terminal(force_terminal=True, width=200, color_system="standard").print(table, ESCAPES, Text(ESCAPES, style="red"))
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(line.isprintable() for line in said.split("\n")) and said.count(r"\x1b[2J") == 4


# Run files and text


def test_run_files_that_exhaust_the_parser_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    for text, says in {
        "text = " + "[" * 20_000 + "]" * 20_000: "nested too deeply",
        '[method]\nstrategy = "' + "(" * 50_000 + '"': "at most 10,000 are read",
        '[method]\ncodec = "' + "-" * 9_000 + '1"': "cannot read",
        '[method]\ncodec = "' + "Each(" * 1500 + ")" * 1500 + '"': "cannot read",
        "[optimizer]\nsteps = " + "9" * 4000: "a whole number is needed",
        '[method]\nstrategy = "\\u001b[2J\\u001b]0;x\\u0007"': r"\x1b[2J",
    }.items():
        file.write_text(text)
        assert main(["train", str(file)]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1 and said[:-1].isprintable() and len(said) < 6000
    file.unlink()
    os.mkfifo(file)
    assert main(["train", str(file)]) == 2 and "no regular file" in capsys.readouterr().err


def _parquet(path: Path, texts: list[str], times: int, **options: Any) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra thinwire[parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * times, arrow.int32()), arrow.array(texts))
    parquet.write_table(
        arrow.table({"text": column if times > 1 else arrow.array(texts)}),
        path,
        compression="zstd",
        store_schema=False,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "write", "says"),
    [
        ("deep.jsonl", lambda path: path.write_text("[" * 60_000 + "\n"), "deep.jsonl:1 is not JSON (it is nested too deeply)"),
        ("digits.jsonl", lambda path: path.write_text("9" * 5000 + "\n"), "digits.jsonl:1 is not JSON"),
        ("line.jsonl", lambda path: path.write_text('{"text": "' + "A" * (1 << 20) + '"}'), "line.jsonl:1 has 65,536 characters or more"),
        ("again.parquet", lambda path: _parquet(path, ["A" * 50_000], 1000), "expands more than 100 times"),
        ("page.parquet", lambda path: _parquet(path, ["A" * (8 << 20)], 1, use_dictionary=False), "expands more than 100 times"),
        ("bomb.txt.gz", lambda path: path.write_bytes(gzip.compress(b"A" * (8 << 20))), "bomb.txt.gz expands more than 100 times"),
        ("row.parquet", lambda path: _parquet(path, ["A" * (1 << 17)], 1), "has a row of 131,072 characters"),
    ],
)  # fmt: skip
def test_data_that_expands_beyond_the_limits_is_refused_in_one_line(
    name: str,
    write: Callable[[Path], None],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "LARGEST_DOCUMENT", 1 << 16)
    monkeypatch.setattr(texts, "EXPANDED", 1 << 20)
    write(tmp_path / name)
    assert main(["train", *SMALL, "--text", str(tmp_path / name)]) == 1
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


# Signals


@pytest.fixture
def handlers(terminal: None) -> Iterator[None]:
    """Check that the command restores the signal handlers."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_exit_code_of_a_stopped_verb_names_the_signal(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    def busy(arguments: object) -> int:
        os.kill(os.getpid(), number)
        threading.Event().wait()
        return 0

    monkeypatch.setattr(simulate, "main", busy)
    assert main(["simulate"]) == code


def _once(there: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls `act` once `there()` is true."""

    def body() -> None:
        while not there():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_a_stopped_comparison_begins_no_other_run_and_marks_the_stopped_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    run = Run.load(trained / "run.toml")
    options = [*SMALL, "--text", *run.data.text, "--steps", "100000", "--checkpoint-every", "0", "--out", "both"]
    log = tmp_path / "both/diloco-every-2-seed-0/events/replica-0.jsonl"
    stop = _once(
        lambda: log.exists() and b'"event":"step"' in log.read_bytes(), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    code = main(["compare", *options, "--json", "--strategies", "diloco(every=2)", "local_sgd"])
    stop.join()
    said = capsys.readouterr()
    assert code == 143
    told = json.loads(said.out)
    assert told["not_begun"] == ["local_sgd"] and [row["strategy"] for row in told["strategies"]] == ["diloco(every=2)"]
    assert "(stopped at step" in re.sub(r"\s+", " ", said.err) and "not begun: local_sgd" in said.err
    assert (tmp_path / "both/report.html").exists() and not list((tmp_path / "both").glob("local*"))


def test_a_signal_after_the_last_step_leaves_summary_and_report(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    from thinwire.app.cli import training

    write = training.write_report

    def interrupted(*arguments: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*arguments)

    monkeypatch.setattr(training, "write_report", interrupted)
    assert main(["train", str(trained / "run.toml"), "--steps", "2", "--out", "run"]) == 0  # nothing was cut short
    assert (tmp_path / "run/summary.json").exists() and (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(
    ("width", "columns"), [(60, "tokens/s compute stalled"), (40, "replica  step   loss tokens/s compute")]
)
def test_the_display_fits_narrow_terminals(trained: Path, width: int, columns: str) -> None:
    import io

    from thinwire.app.report.progress import Progress

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=40, color_system=None)
    with Progress(trained, steps=4, replicas=2, console=console) as progress:
        progress.update()
    shown = out.getvalue()
    assert "elapsed" in shown and columns in shown and "…" not in shown
