"""`thinwire probe` as a user types it: on an emulated link, under torchrun, and in network namespaces."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from thinwire.cli import main
from thinwire.group import Link
from thinwire.plan.links import Links
from thinwire.plan.machine import Machine

QUICK = ["--model", "nano", "--sequence", "16", "--seconds", "0.05", "--trips", "3"]


def test_on_an_emulated_link_it_writes_files_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["probe", "--link", "20mbit,2ms", "--replicas", "3", "--out", str(tmp_path / "new"), "--json", *QUICK]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    links = Links.load(Path(said["links"]["file"]))
    assert len(links) == 3 and links.word == "emulated" == said["links"]["word"]
    assert all(10e6 < link.bits_per_second < 30e6 for link in links.alone.values())
    samples = json.loads(Path(said["links"]["samples"]).read_text())
    assert len(samples["apart"]) == 18 and len(samples["round_trips"]) == 3 and len(samples["rounds"]) == 9
    assert Machine.load(tmp_path / "new/machine.toml").model == "nano" and said["machines"] == [
        str(tmp_path / "new/machine.toml")
    ]


def test_under_torchrun_rank_0_writes_for_all(tmp_path: Path) -> None:
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
        capture_output=True, text=True, timeout=240, check=False,
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


def namespaces() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks/namespaces.py"
    spec = importlib.util.spec_from_file_location("namespaces", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def busy() -> str | None:
    """Whether others leave too little of this machine for a measurement."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"a load of {load:.1f} on {cores} cores measures the others." if load > 3 * cores else None


@pytest.mark.slow
def test_in_namespaces_it_finds_what_the_kernel_was_told(tmp_path: Path) -> None:
    """`tc tbf` counts Ethernet frames: 1,448 bytes of 1,514 are ours, so 20 Mbit/s carry 19.1. Within 5 %; the delay within 1 ms."""
    made = namespaces()
    if why := made.missing() or busy():
        pytest.skip(why)
    probe = [
        sys.executable,
        "-m",
        "thinwire",
        "probe",
        "--what",
        "links",
        "--name",
        "end",
        "--out",
        str(tmp_path),
        "--seconds",
        "1.5",
    ]
    with made.Namespaces() as link:
        link.shape(20e6)
        world = ["WORLD_SIZE=2", f"MASTER_ADDR={link.addresses[0]}", "MASTER_PORT=29571", "OMP_NUM_THREADS=1"]
        processes = [link.start(rank, ["env", f"RANK={rank}", *world, *probe]) for rank in range(2)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    links = Links.load(tmp_path / "links.toml")
    for pair, found in links.alone.items():
        assert found.bits_per_second == pytest.approx(20e6 * 1448 / 1514, rel=0.05)
        assert found.delay_seconds == pytest.approx(0.0, abs=1e-3)
        assert links.together[pair] == pytest.approx(20e6 * 1448 / 1514, rel=0.1)
    assert isinstance(links.alone[0, 1], Link)


@pytest.mark.slow
def test_through_a_router_it_finds_rates_and_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sites with their own uplinks: rates within 5 % (1,448 of 1,500 bytes of IP are ours), delays within 1 ms."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    made = importlib.import_module("router")
    if why := made.missing() or busy():
        pytest.skip(why)
    probe = [sys.executable, "-m", "thinwire", "probe", "--what", "links", "--name", "site", "--out", str(tmp_path)]
    given = [Link(20e6, 0.010), Link(5e6, 0.025)]
    with made.Router(given) as router:
        world = ["WORLD_SIZE=2", f"MASTER_ADDR={router.addresses[0]}", "MASTER_PORT=29573", "OMP_NUM_THREADS=1"]
        processes = [router.start(rank, ["env", f"RANK={rank}", *world, *probe]) for rank in range(2)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for (sender, _), found in Links.load(tmp_path / "links.toml").alone.items():
        assert found.bits_per_second == pytest.approx(given[sender].bits_per_second * 1448 / 1500, rel=0.05)
        assert found.delay_seconds == pytest.approx(0.0175, abs=1e-3)
