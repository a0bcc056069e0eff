"""Run folders that somebody else made, or moves, or fills: no code of theirs runs, nothing outside is written, and it is said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import read_events
from safetensors import safe_open
from safetensors.torch import load_file
from trained_runs import SMALL, trained_run

from thinwire.app.cli import main
from thinwire.app.records import events as events_module
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer import watch
from thinwire.files import save_file

pytestmark = pytest.mark.usefixtures("one_cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4. Tests must not change it."""
    options = ["--steps", "4", "--every", "2", "--delay", "0", "--checkpoint-every", "2"]
    return trained_run(tmp_path_factory.mktemp("trained"), cache, "All that glisters is not gold. " * 4000, *options)


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


# ---- code


def with_a_piece(folder: Path, table: str, line: str) -> Path:
    """Lets run.toml name a file in the folder; returns the mark that the file leaves when it is run."""
    mark = folder.parent / "RAN"
    (folder / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from thinwire.codecs.cast import Identity as Mine\nfrom thinwire.pieces.inner_optimizers import AdamW as Inner\n"
    )
    name = line.split(" = ")[0]
    left_out = (
        ("job", "model", "text") if name == "job" else (name, "every", "delay") if name == "strategy" else (name,)
    )
    text = (folder / "run.toml").read_text()
    lines = [one for one in re.sub(r"\[\n[^\]]*\]", "[]", text).splitlines() if one.split(" = ")[0] not in left_out]
    lines.insert(lines.index(f"[{table}]") + 1, line)
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    return mark


READING = (
    *(["checkpoints"], ["checkpoints", "--verify"], ["sample", "--tokens", "2"], ["evaluate"]),
    *(["export", "--out", "out"], ["report", "--out", "page.html"], ["top", "--once"]),
)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("method", 'codec = "{at}/evil.py:Mine"'),
        ("method", 'strategy = "Strategy(schedule=Every(2), codec={at}/evil.py:Mine())"'),
        ("optimizer", 'optimizer = "{at}/evil.py:Inner"'),
        ("model", 'job = "{at}/evil.py"'),
    ],
)
def test_only_training_with_trust_runs_the_code_that_a_folder_names(
    folder: Path, table: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    mark = with_a_piece(folder, table, line.format(at=folder))
    for verb, *more in READING:
        code = main([verb, "run", *more])
        assert not mark.exists(), verb
        assert code == 0 or table == "model", (verb, capsys.readouterr().err)  # a job's model is only in its file
    capsys.readouterr()
    for command in (["resume", "run", "--steps", "6"], ["branch", "run", "--domain", "law", "--trained"]):
        assert main(command) in (1, 2)
        assert not mark.exists()
        assert "--trust" in capsys.readouterr().err or (table == "model" and command[0] == "branch")
    main(["resume", "run", "--steps", "6", "--trust"])
    assert mark.exists()


def test_code_with_which_one_has_trained_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another process, without its name on the command line; a changed copy of the file elsewhere is not."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("thin wires " * 4000)
    Path("own.py").write_text("from thinwire.codecs.cast import Identity as Mine\n")
    given = [*SMALL, "--text", "text.txt", "--carrier", "threads", "--steps", "2", "--out", "run"]
    assert main(["train", *given, "--checkpoint-every", "2", "--codec", "own.py:Mine"]) == 0
    resume = [sys.executable, "-m", "thinwire", "resume", "run", "--steps", "3"]
    assert subprocess.run(resume, check=False, capture_output=True).returncode == 0
    monkeypatch.setenv("HOME", str(tmp_path / "another"))
    refused = subprocess.run([*resume[:-1], "4"], check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "own.py is code that a run file names" in refused.stderr


# ---- links, devices, numbers


@pytest.mark.parametrize("what", ["checkpoints", "checkpoints/replica-0", "events/replica-0.jsonl", "run.toml"])
def test_what_leads_out_of_the_folder_is_neither_written_nor_deleted(
    folder: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = folder.parent / "precious"
    shutil.move(folder / what, precious)
    (folder / what).symlink_to(precious)
    files = [path for path in (precious, *precious.rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for command in (["resume", str(folder), "--steps", "8"], ["checkpoints", str(folder), "--prune", "1"]):
        assert main(command) in (1, 2)
        assert "leads out of the folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files if path.exists()} == before


def test_a_second_name_of_a_log_is_not_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, precious = folder / "events/replica-1.jsonl", folder.parent / "precious"
    precious.hardlink_to(log)
    before = precious.read_bytes()
    assert main(["resume", str(folder), "--steps", "8"]) in (1, 2)
    assert "second name" in capsys.readouterr().err
    assert precious.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "model.safetensors", "run.toml", "summary.json", "events/replica-9.jsonl"]
)
def test_a_fifo_hangs_no_command(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for verb, *more in [*READING, ["resume", "--steps", "8"]]:
        command = [
            verb,
            str(folder),
            *(str(folder.parent / one) if one in ("out", "page.html") else one for one in more),
        ]
        assert main(command) in (0, 1, 2), verb  # it returns


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("context", value) for value in (10**12, "1e12", 1.5, -1, True, None, [1])),
        *(("vocabulary", value) for value in (10**12, 0, 255, True, "256")),
        *(("model", value) for value in (["nano"], "huge", None)),
        ("positions", {}),
        ("tokenizer", 7),
    ],
)
def test_metadata_out_of_range_is_refused_by_its_name(
    folder: Path, name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["thinwire"])
    save_file(load_file(path), path, {"thinwire": json.dumps(said | {name: value})})
    assert main(["sample", str(folder), "--tokens", "2"]) in (1, 2)
    told = capsys.readouterr().err
    assert name in told or (name == "vocabulary" and "embedding" in told)


@pytest.mark.parametrize("value", ["yesterday", 10**400, 1e300, -(10**30), [], {}, True])
@pytest.mark.parametrize("name", ["wall_time", "seconds", "begin", "tokens", "own_seconds", "fragments", "replicas"])
def test_no_value_in_an_event_breaks_a_reader(folder: Path, name: str, value: object) -> None:
    log = folder / "events/replica-0.jsonl"
    events = [{**event, name: value} if name in event else event for event in read_events(log)]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["top", str(folder), "--once"]) in (0, 1)
    assert main(["report", str(folder), "--out", str(folder.parent / "page.html")]) in (0, 1)


def test_a_report_reads_the_newest_files_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MOST_FILES", 2)
    os.utime(shutil.copy(folder / "events/replica-0.jsonl", folder / "events/replica-7.jsonl"), (0, 0))
    record = RunRecord.load(folder)
    assert [replica.called for replica in record.replicas] == ["replica-0", "replica-1"]
    assert any("3 event files are there; the newest 2" in remark for remark in record.remarks)


# ---- moved, deleted, full


@pytest.mark.parametrize("moved", [True, False])
def test_a_run_stops_when_its_folder_is_renamed_or_deleted(
    moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.2)
    Path("text.txt").write_text("thin wires " * 4000)
    given = [*SMALL, "--text", "text.txt", "--carrier", "threads", "--checkpoint-every", "2"]

    def move() -> None:
        tail = events_module.Tail("run/events/replica-0.jsonl")
        while not any(event["event"] == "checkpoint" for event in tail.read()):
            over.wait(0.05)
        if moved:
            Path("run").rename("other")
        while Path("run").exists():
            shutil.rmtree("run", ignore_errors=True)

    over = threading.Event()
    mover = threading.Thread(target=move)
    mover.start()
    assert main(["train", *given, "--steps", "100000", "--out", "run"]) == 1
    mover.join()
    assert not Path("run").exists()
    told = capsys.readouterr().err
    if moved:
        assert "renamed" in told
        step = max(event["step"] for event in read_events(Path("other/events/replica-0.jsonl")))
        assert main(["resume", "other", "--steps", str(step + 2)]) == 0
    else:
        assert "deleted" in told


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_told_on_the_console_and_so_is_its_end(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.0)
    told: list[str] = []
    looked = watch.FolderWatch(small_disk, told.append, threading.Event())
    looked.look()
    assert told == []
    with pytest.raises(OSError, match="space"), (small_disk / "fill").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
        raise OSError("no space")
    looked.look()
    looked.look()
    assert len(told) == 1
    assert "can no longer be written (No space left on device)" in told[0]
    (small_disk / "fill").unlink()
    looked.look()
    assert "can be written again" in told[-1]
    looked.close()
