"""Verbs of the command: messages and exit codes for wrong arguments and system errors, refused settings, and compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trained_runs import trained_run

import thinwire
from thinwire.app.cli import main, report
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["tarin"],
            "'tarin' is no verb (did you mean train?); there are train, resume, new, compare, report, top, checkpoints, sample and 12 more.",
        ),
        (["report"], "no run folder was given"),
        (["hub", "list", "--out", "my hub"], "thinwire hub --out 'my hub' makes one"),
        (["report", "nothing"], "nothing does not exist. Give the folder that `thinwire train` wrote."),
        (["report", "."], ". is no run folder: it has no events/*.jsonl."),
        (["train", "--resume"], "add --out FOLDER"),
        (["resume", "nothing"], "nothing holds no run to resume"),
        (["train", "nothing.toml"], "nothing.toml cannot be read as a run file"),
        (["compare", "--seeds", "0"], "at least 1 of each is needed"),
        (["evaluate", "run", "--sequence", "0"], "at least 1 of each is needed"),
        (
            ["compare", "--strategies", "dilco"],
            "strategy='dilco' is no recipe (did you mean diloco?); one of data_parallel, local_sgd, diloco",
        ),
        (["probe", "--what", "links"], "a link needs two replicas"),
        (["probe", "--link", "50mbit", "--replicas", "1" + 11 * "0"], "at most 128 threads are measured"),
        (["train", "--log", ""], "log='': some of wandb,mlflow,tensorboard,prometheus,jsonl are needed"),
        (["train", "--lighthouse", "127.0.0.1:1", "--name", ""], "the name '' was given to a replica"),
        (["train", "--lighthouse", "", "--name", "a"], "the address '' was given"),
        (["probe", "--link", "50"], "the link '50' was given"),
        (["probe", "nothing.toml"], "nothing.toml cannot be read as a run file"),
        (["doctor", "--step-seconds", "-1"], "more than 0 is needed"),
        (["doctor", "--master-addr", "127.0.0.1", "--master-port", "99999"], "--master-port 99999: a port, 1 to 65535"),
        (["doctor", "--firewall", "10.0.0.1", "--master-port", "0"], "--master-port 0: a port, 1 to 65535"),
        (["hub", "--listen", "10.0..1:29530"], "--listen '10.0..1:29530': HOST:PORT is needed"),
        (["hub", "--listen", "10.0.0.1:²"], "--listen '10.0.0.1:²': HOST:PORT is needed"),
        (["hub", "invite", "--uses", "1" + 20 * "0"], "1 to 1,000,000 uses and a positive time are needed"),
        (["lighthouse", "--host", ""], "--host '': an address of this machine is needed"),
        (["hub", "--address", "a..b"], "--address 'a..b': a host name or an IP address is needed"),
        (["doctor", "--link", ""], "the link '' was given"),
        (["follow", "nothing", "--every", "-1"], "--every -1.0: seconds between two looks are needed"),
        (
            ["docs", "../README"],
            "'../README' is no page; there are data, design, diagnosis, displays, elastic, experiments, experts, family and ",
        ),
        (["train", "--model", "hf:/none/such"], "'hf:/none/such': there is no such folder"),
        (["train", "--model", "hf:/none/such", "--tokenizer", "bytes"], "'/none/such': there is no such folder"),
        (["train", "--model", "nano", "--batch", "99999999999"], "choose a smaller model or --batch, fewer replicas"),
        (
            ["train", "--model", "nano", "--own-text"],
            "own_text=True with carrier='processes': an elastic run is needed",
        ),
        (["hub", "--out", "text.txt"], "text.txt: File exists, and a folder is needed. Check the path"),
        (
            ["simulate", "run", "--step-seconds", "1", "--link", "1mbit", "--failures", "1min"],
            "failures='1min': times with units between slashes are needed, such as 10min/7d or 10min/7d/30s.",
        ),
        (["train", "--text", "/dev/null"], "/dev/null is a pipe or a device; a file or folder is needed."),
        (["train", "--model", "hf:", "--tokenizer", "bytes"], "model '': "),
        (
            ["train", "--model", "tiny", "--fragments", "0"],
            "between 1 and 4 is needed (what is outside the layers is a fragment of its own); choose more",
        ),
        (
            ["train", "--strategy", "diloco("],
            "cannot read 'diloco(' ('(' was never closed); write a name with arguments",
        ),
    ],
)
def test_wrong_arguments_are_an_error_of_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("All that glisters is not gold. " * 4000)
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    if {"--resume", "--model"} & {*arguments}:
        arguments = [*arguments, "--text", str(text)]
    assert main(arguments) in (1, 2)
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_damaged_run_file_is_named_by_a_follower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("x")
    assert main(["follow", str(tmp_path)]) == 2
    assert "run.toml cannot be read as a run file" in capsys.readouterr().err


def test_an_emulated_link_is_not_probed_between_real_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["probe", "--link", "5mbit"]) == 2
    assert "--link under torchrun: the real links" in capsys.readouterr().err


def test_a_system_error_has_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arguments: object) -> int:
        raise OSError(28, "No space left on device", "run/summary.json")

    monkeypatch.setattr(report, "main", full)
    assert main(["report"]) == 1
    assert capsys.readouterr().err == (
        "thinwire report: run/summary.json: No space left on device. Check the path, its permissions and the free space.\n"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": "zero"}, "seed='zero': a whole number is needed"),
        ({"seed": 0.5}, "seed=0.5: a whole number is needed"),
        ({"steps": 10**20}, r"steps=1(0){20}: a whole number is needed, below 2\*\*63"),
        ({"seed": 10**20}, r"seed=1(0){20}: a whole number is needed, below 2\*\*63"),
        ({"timeout": 1e10}, "timeout=10000000000.0: at most 1,000,000,000 is possible"),
        ({"text": ("",)}, "text=.*: an empty name was given"),
        ({"replicas": 10**11}, "replicas=100000000000: at most 1,000,000"),
        ({"lora": 2**63 - 1}, "lora=9223372036854775807: at most 1,000,000"),
        ({"codec": "E3M0(block=1e20)"}, r"E3M0\(block=1e\+20\): a whole number is needed, below 2\*\*63"),
        ({"codec": "TopK(0.1, Sign(block=64.0))"}, r"Sign\(block=64.0\): a whole number is needed"),
        ({"codec": f"E3M0({2**63})"}, r"E3M0\(block=9223372036854775808\): a whole number is needed"),
        ({"exchange": "Fastest('1mbit', (Direct(), Star(2.0)))"}, r"Star\(center=2.0"),
        ({"codec": "Hadamard(E3M0(), 1e20)"}, r"Hadamard\(block=1e\+20\): a whole number is needed"),
        ({"partition": "Strided(4.0)"}, r"Strided\(count=4.0\): a whole number is needed"),
        ({"strategy": "diloco(every=1e20)"}, r"^every=1e\+20: a whole number of inner steps is needed"),
        ({"strategy": "noloco", "topology": "Mesh(rows=2.0)"}, r"Mesh\(rows=2.0\): a whole number is needed"),
        ({"steps": True}, "steps=True: a whole number is needed"),
        ({"every": "6"}, r"every='6': a whole number is needed"),
        ({"carrier": "pigeons"}, "carrier='pigeons': 'processes' or 'threads' or"),
        ({"text": ("a", 1)}, "text="),
        ({"eval_every": 0}, "eval_every=0: at least 1"),
        ({"warmup": -5}, "warmup=-5: 0 or more"),
        ({"lr": float("inf")}, "lr=inf: a finite number above 0"),
        ({"lr": float("nan")}, "lr=nan: a finite number above 0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan: 0 or more"),
        ({"strategy": "streaming"}, r"strategy='streaming' is no recipe \(did you mean streaming_sign\?\); one of"),
        ({"strategy": "zzz"}, r"strategy='zzz' is no recipe; one of"),
        (
            {"codec": "E5M9"},
            r"not known \(did you mean E5M2\?\); choose from Cast, [A-Za-z0-9, ]+ and \d+ more \(`thinwire docs pieces`\)\.$",
        ),
        ({"optimizer": "adamw"}, r"not known \(did you mean AdamW\?\); choose from AdamW, Muon, SAM, SGD\.$"),
        (
            {"strategy": "dilco(every=5)"},
            r"did you mean diloco\?\); choose from data_parallel, [a-z_0-9, ]+ and \d+ more \(`thinwire docs strategies`\)\.$",
        ),
        ({"partition": "Whole", "fragments": 3}, "partition='Whole' with fragments=3: .* give one of them"),
        ({"strategy": "dgc", "optimizer": "AdamW"}, "that method needs its own inner optimizer, SGD"),
        ({"optimizer": "Average()"}, r"optimizer='Average\(\)': AdamW, SGD\(...\), Muon or SAM\(...\) is needed"),
        ({"optimizer": "Adam"}, "'Adam' is not known"),
        ({"strategy": "dgc", "outer_lr": 0.1}, "Choose --strategy diloco or streaming_diloco or finetune for it."),
        ({"codec": "E3M0(block=1+x)"}, r"'1 \+ x' in .* is no plain value"),
        (
            {"codec": "Cast(bf16)"},
            r"'bf16' in 'Cast\(bf16\)' is not known; write a number, a text in quotes, or a piece\.$",
        ),
        ({"codec": "TopK(values=Cats())"}, r"'Cats' in .* is not known \(did you mean Cast\?\); write"),
        ({"optimizer": "SGD(lr=1)"}, r"SGD in 'SGD\(lr=1\)': got an unexpected .*; it takes momentum, lr_factor\.$"),
    ],
)
def test_invalid_settings_of_a_run_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Run.of(**change)  # type: ignore[arg-type]


def test_a_whole_number_is_accepted_as_a_learning_rate() -> None:
    assert Run.of(lr=1, clip=2).optimizer.lr == 1


def test_the_clip_of_a_run_applies_to_gradients_only() -> None:
    """It goes into the filters of a recipe that has them. The bound of the outer momentum is a different setting."""
    assert Run.of(strategy="dgc", clip=0.5).make_strategy() == thinwire.lab.recipes.dgc(clip=0.5)
    assert (
        Run.of(strategy="co2", clip=0.5).make_strategy()
        == Run.of(strategy="co2", clip=0.0).make_strategy()
        == thinwire.lab.recipes.co2()
    )


def test_compare_gives_each_strategy_the_settings_it_takes() -> None:
    run = Run.of(strategy="streaming_diloco", every=20, delay=3, merge=0.25, steps=7)
    assert run.with_strategy("data-parallel") == Run.of(strategy="data-parallel", steps=7)
    assert run.with_strategy("diloco") == Run.of(strategy="diloco", every=20, steps=7)
    assert run.with_strategy("streaming_diloco") == run
    assert run.with_strategy("diloco(every=5)") == Run.of(strategy="diloco(every=5)", steps=7)


def test_compare_refuses_a_folder_that_cannot_be_made_once_and_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    (tmp_path / "file").write_text("All that glisters is not gold. " * 4000)
    text, out = ["--text", str(tmp_path / "file")], tmp_path / "file"
    assert main(["compare", "--strategies", "diloco", "--model", "nano", *text, "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert (
        said.err
        == f"thinwire compare: {out}: File exists, and a folder is needed. Check the path, its permissions and the free space.\n"
    )
    assert "failed" not in said.out


def test_checkpoints_that_cannot_be_deleted_are_not_told_as_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another folder has the name that a checkpoint gets while it is deleted. In a folder without write permission it is the same."""
    text = "".join(f"line {i}: {i * i % 97} thin wires carry {i}\n" for i in range(3000))
    run = trained_run(tmp_path, tmp_path / "cache", text, "--steps", "2", "--checkpoint-every", "1")
    (run / "checkpoints/replica-1/.step-00000001.dropped/x").mkdir(parents=True)
    assert main(["checkpoints", str(run), "--prune", "1"]) == 1
    said = capsys.readouterr()
    left = run / "checkpoints/replica-1/step-00000001"
    assert f"1 of 2 checkpoints cannot be deleted, such as {left}" in said.err and left.exists()
    assert "deleted" not in said.out and not (run / "checkpoints/replica-0/step-00000001").exists()


def test_probe_looks_at_out_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.files.os.access", lambda place, mode: False)
    monkeypatch.setattr("thinwire.app.cli.probe.probe_machine", lambda *_: pytest.fail("it measures"))
    assert main(["probe", "--what", "machine", "--out", str(tmp_path)]) == 1
    assert f"thinwire probe: {tmp_path}: Permission denied" in capsys.readouterr().err


def test_resuming_a_finished_run_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("All that glisters is not gold. " * 4000)
    small = ["--text", str(text), "--model", "nano", "--batch", "1", "--sequence", "16", "--carrier", "threads"]
    assert main(["train", *small, "--steps", "4", "--eval-batches", "1", "--out", str(folder), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    events = (folder / "events/replica-0.jsonl").read_bytes()
    assert main(["train", "--resume", "--out", str(folder), "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == first and "finished already" in again.err
    assert (folder / "events/replica-0.jsonl").read_bytes() == events
    assert isinstance(first["wire_bytes_sent"], int) and first["steps"] == 4
    assert main(["train", "--resume", "--out", str(folder), "--steps", "2"]) == 0
    assert "finished already, with 4 steps" in capsys.readouterr().out
    assert main(["resume", str(folder), "--replicas", "3"]) == 0
    assert "finished already, with 4 steps, and --replicas 3 has no effect" in capsys.readouterr().out
    assert Run.load(folder / "run.toml").placement.replicas == 2


def test_report_looks_at_out_before_it_reads_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run/events").mkdir(parents=True)
    (tmp_path / "run/events/replica-0.jsonl").write_text("no event\n")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path)]) == 1
    assert f"{tmp_path}: the name of a file is needed" in capsys.readouterr().err
