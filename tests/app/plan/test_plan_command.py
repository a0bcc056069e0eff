"""The command that `thinwire plan` prints, and settings of a run file that a plan leaves out or names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.app.cli import main
from thinwire.app.plan.machine import Machine
from thinwire.app.trainer.run import Run

CPU = Machine("cpu", memory_nbytes=80 * 10**9, flops_per_second=1.5e14)


@pytest.mark.parametrize(
    ("link", "replicas", "ranks", "command"),
    [
        ("50mbit,30ms", 2, 1, "thinwire train plan.toml"),
        (
            "50mbit,30ms",
            2,
            2,
            "torchrun --standalone --nproc_per_node 4 -m thinwire train plan.toml --out runs/planned",
        ),
        ("none", 1, 2, "torchrun --standalone --nproc_per_node 2 -m thinwire train plan.toml --out runs/planned"),
        ("none", 1, 1, "thinwire train plan.toml"),
    ],
)
def test_the_printed_command_for_one_machine_starts_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, link: str, replicas: int,
    ranks: int, command: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    CPU.save(Path("machine.toml"))
    Run.of(model="nano", link=link).save(Path("run.toml"))
    asked = ["plan", "1gbit,1ms", "machine.toml", "--run", "run.toml", "--replicas", str(replicas)]
    method = "diloco" if replicas == 1 else "data_parallel"  # which one replica alone cannot have
    assert main([*asked, "--ranks", str(ranks), "--methods", method, "--tokens", "1m"]) == 0
    assert f"to train: {command}\n" in capsys.readouterr().out


def test_each_rank_of_a_replica_reads_equally_many_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`thinwire train` refuses another batch."""
    monkeypatch.chdir(tmp_path)
    CPU.save(Path("machine.toml"))
    asked = [
        "plan",
        "1gbit,1ms",
        "machine.toml",
        "--model",
        "nano",
        "--tokens",
        "1m",
        "--batch-tokens",
        str(2 * 19 * 128),
    ]
    for ranks, batch in ((1, 19), (8, 16)):
        assert main([*asked, "--ranks", str(ranks), "--methods", "streaming_sign"]) == 0
        data = Run.load(Path("plan.toml")).data
        assert data.batch * data.accumulate == batch and data.batch % ranks == 0


@pytest.mark.parametrize(
    ("carrier", "command"),
    [
        (
            "elastic",
            "thinwire lighthouse --host HOST --secret run.secret, and on each machine: thinwire train plan.toml "
            "--lighthouse HOST:29510 --secret run.secret --name NAME --out runs/planned",
        ),
        (
            "secure-elastic",
            "thinwire hub --elastic --listen 0.0.0.0:29530 --address HOST --uses 3, and on each machine: "
            "thinwire join TOKEN plan.toml --name NAME",
        ),
    ],
)
def test_the_printed_command_is_one_that_the_carrier_of_the_run_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, carrier: str, command: str
) -> None:
    """torchrun starts no elastic run, and none over a hub."""
    monkeypatch.chdir(tmp_path)
    CPU.save(Path("machine.toml"))
    Run.of(model="nano", carrier=carrier).save(Path("run.toml"))
    asked = ["plan", "100gbit,1us", "machine.toml", "--run", "run.toml", "--replicas", "3", "--tokens", "1m"]
    assert main([*asked, "--methods", "streaming_sign"]) == 0
    assert f"to train: {command}\n" in capsys.readouterr().out
    assert main([*asked, "--ranks", "2"]) == 2
    assert f"--ranks 2 with carrier='{carrier}'" in capsys.readouterr().err


def test_a_run_file_with_slow_machines_and_a_link_of_its_own_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """machine.toml says how fast machines are; a link that the figures do not count is a warning."""
    monkeypatch.chdir(tmp_path)
    CPU.save(Path("machine.toml"))
    Run.of(model="nano", slow=(1, 2), link="5mbit,30ms", uplink="1gbit").save(Path("run.toml"))
    asked = ["plan", "1gbit,1ms", "machine.toml", "--run", "run.toml", "--replicas", "3", "--tokens", "1m", "--json"]
    assert main([*asked, "--methods", "streaming_sign"]) == 0
    told = json.loads(capsys.readouterr().out)["warnings"]
    assert Run.load(Path("plan.toml")).placement.slow == ()
    assert [one for one in told if "stays" in one] == [
        "link-stays: the run file keeps link = 5mbit,30ms, and these figures do not count it"
    ]


def test_a_name_with_a_line_break_stays_in_the_comment_of_the_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CPU.save(Path("machine.toml"))
    Path("links.toml").write_text(
        'names = ["a\\nseed = 7", "b"]\n[[link]]\nbetween = ["a\\nseed = 7", "b"]\nalone = "1gbit"\n'
    )
    assert main(["plan", "links.toml", "machine.toml", "--model", "nano", "--tokens", "1m"]) == 0
    capsys.readouterr()
    assert Run.load(Path("plan.toml")).seed == 0 and "a\\nseed = 7" in Path("plan.toml").read_text()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--memory", ""], "'' was given; a size is needed"),
        (["--deadline", ""], "'' was given; a time is needed"),
        (["--tokens", ""], "'' was given; a count is needed"),
        (["--batch-tokens", ""], "'' was given; a count is needed"),
        (["--degrees", "", "--ranks", "4"], "degrees '': three whole numbers"),
        (["--tokenizer", "bpe:1" + 20 * "0"], "at most 16,777,216"),
        (["--replicas", "1" + 11 * "0"], "1 to 1024 are needed"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_empty_values_and_too_many_replicas_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    CPU.save(Path("machine.toml"))
    assert main(["plan", "1gbit,1ms", "machine.toml", "--model", "nano", "--tokens", "1m", *given]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--ranks", "8", "--degrees", "2,3,6"], "nested groups are needed"),
        (["--ranks", "8", "--degrees", "2,8,16"], "a multiple of s_o"),
        (["--ranks", "8", "--levels", "3"], "each level one of the level"),
        (["--out", "file/plan.toml"], "file: Not a directory"),
        (["--out", "folder"], "folder: the name of a file is needed"),
        (["--frontier", "file/f.svg"], "file: Not a directory"),
        (["--rates", "new/r.svg", "--frontier", "new/r.svg"], "one file holds one picture"),
    ],
    ids=lambda given: " ".join(given[-2:]) if isinstance(given, list) else "",
)
def test_what_the_command_could_not_show_or_write_is_refused_before_it_computes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    assert main(["plan", "1gbit,1ms", "machine.toml", *given]) in (1, 2)  # there is no machine.toml yet
    assert says in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
