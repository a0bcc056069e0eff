"""`thinwire probe` on an emulated link, under torchrun, and in network namespaces."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from thinwire.app.cli import main
from thinwire.app.cli.checks import memory_of_each
from thinwire.app.plan.links import Links
from thinwire.app.plan.machine import Machine
from thinwire.app.trainer.run import Run
from thinwire.comm import Link, ThreadGroup

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
QUICK = ["--model", "nano", "--sequence", "16", "--seconds", "0.05", "--trips", "3"]


def test_probe_on_an_emulated_link_writes_files_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["probe", "--link", "20mbit,2ms", "--replicas", "3", "--out", str(tmp_path / "new"), "--json", *QUICK]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    links = Links.load(Path(said["links"]["file"]))
    assert len(links) == 3 and links.word == "emulated" == said["links"]["word"]
    assert all(link.bits_per_second > 0 for link in links.alone.values())
    samples = json.loads(Path(said["links"]["samples"]).read_text())
    assert len(samples["apart"]) == 18 and len(samples["round_trips"]) == 3 and len(samples["rounds"]) == 9
    assert Machine.load(tmp_path / "new/machine.toml").model == "nano" and said["machines"] == [
        str(tmp_path / "new/machine.toml")
    ]


def test_the_memory_of_a_machine_with_gpus_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two GPUs that are only said to be there; nothing runs on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    seen: list[int] = []

    def measured(run: Run, name: str, memory_nbytes: int, *rest: object) -> Machine:
        seen.append(memory_nbytes)
        return Machine(name, memory_nbytes, 1e11, device="cuda")

    monkeypatch.setattr("thinwire.app.cli.probe.probe_machine", measured)
    assert main(["probe", "--what", "machine", "--out", str(tmp_path)]) == 0 and seen == [60]
    assert [memory_of_each(sharing) for sharing in (1, 2, 3, 4, 5)] == [60, 60, 30, 30, 20]


def test_each_rank_measures_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process of a machine with two GPUs, which are only said to be there."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((60 + len(chosen)) * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("thinwire.app.trainer.launch.joined", lambda *given: nullcontext(ThreadGroup.create(1)[0]))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "thinwire.app.cli.probe.probe_machine",
        lambda run, name, memory, *rest: Machine(name, memory, 1e11, device="cuda"),
    )
    assert main(["probe", "--what", "machine", "--name", "box", "--out", str(tmp_path)]) == 0
    assert chosen == [torch.device("cuda", 1)] and Machine.load(tmp_path / "machine.toml").memory_nbytes == 61 * 10**9


def test_a_run_that_no_plan_can_have_is_measured_without_codecs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replicas of codistill hold different models."""
    Run.of(strategy="codistill", models=("nano", "tiny")).save(tmp_path / "run.toml")
    arguments = [str(tmp_path / "run.toml"), "--sequence", "16", "--seconds", "0.05", "--out", str(tmp_path)]
    assert main(["probe", *arguments]) == 0
    machine = Machine.load(tmp_path / "machine.toml")
    assert machine.steps and not machine.codecs and "Codecs" not in capsys.readouterr().err
    given = ["20mbit,2ms", str(tmp_path / "machine.toml"), "--run", str(tmp_path / "run.toml"), "--tokens", "4k"]
    assert main(["plan", *given]) == 2
    assert "no planned method can have the settings of this run" in capsys.readouterr().err


@pytest.mark.slow
def test_rank_0_writes_the_files_of_all_under_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "thinwire",
        "probe",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--name", "box", "--json", *QUICK],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert Links.load(tmp_path / "links.toml").names == ("box-0", "box-1") and said["links"]["word"] == "measured"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "box-0.toml",
        "box-1.toml",
        "links.samples.json",
        "links.toml",
    ]


def benchmark(name: str) -> ModuleType:
    """The module benchmarks/NAME.py."""
    return importlib.import_module(name)


def busy() -> str | None:
    """The reason why this machine is too busy for a measurement, or None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"a load of {load:.1f} on {cores} cores would be measured, too." if load > 3 * cores else None


def probed(space: Any, out: Path) -> Links:
    """The links found by two processes of `thinwire probe`, one in each namespace."""
    world = ["WORLD_SIZE=2", f"MASTER_ADDR={space.addresses[0]}", "MASTER_PORT=29571", "OMP_NUM_THREADS=1"]
    probe = [sys.executable, "-m", "thinwire", "probe", "--what", "links", "--name", "end", "--out", str(out)]
    processes = [space.start(rank, ["env", f"RANK={rank}", *world, *probe]) for rank in range(2)]
    assert [process.wait(timeout=900) for process in processes] == [0, 0]
    return Links.load(out / "links.toml")


@pytest.mark.slow
def test_probe_finds_the_rate_set_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tc tbf` counts Ethernet frames, in which 1,448 of 1,514 bytes are payload. Rates within 5 %, the delay within 1 ms."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = benchmark("namespaces")
    if why := made.missing() or busy():
        pytest.skip(why)
    bridge = made.Bridge()
    with made.Namespaces(2, bridge) as space:
        bridge.shape(20e6)
        links = probed(space, tmp_path)
    for pair, found in links.alone.items():
        assert found.bits_per_second == pytest.approx(20e6 * 1448 / 1514, rel=0.05)
        assert found.delay_seconds == pytest.approx(0.0, abs=1e-3)
        assert links.together[pair] == pytest.approx(20e6 * 1448 / 1514, rel=0.15)


@pytest.mark.slow
def test_probe_finds_the_rate_and_the_delay_of_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,448 of 1,500 bytes of an IP packet are payload. The rate within 5 %, the delay within 1 ms."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made, router = benchmark("namespaces"), benchmark("router")
    if why := made.missing() or busy() or ("" if Path("/dev/net/tun").exists() else "no /dev/net/tun here."):
        pytest.skip(why)
    with made.Namespaces(2, router.Router(Link(20e6, 0.025))) as space:
        links = probed(space, tmp_path)
    for found in links.alone.values():
        assert found.bits_per_second == pytest.approx(20e6 * 1448 / 1500, rel=0.05)
        assert found.delay_seconds == pytest.approx(0.025, abs=1e-3)
