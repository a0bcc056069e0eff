"""`thinwire doctor`: it reports each fault that a test makes, and no problem without a fault."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from namespaces import Namespaces, missing
from rich.console import Console

from thinwire import streaming_diloco
from thinwire.app.cli import checks as machine
from thinwire.app.cli import doctor
from thinwire.app.cli.capacity import Needs, check_capacity, choose_defaults
from thinwire.app.trainer.place import device_of
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import outline_model
from thinwire.codecs import E3M0
from thinwire.comm import Link
from thinwire.errors import ConfigurationError

REASON = missing()


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Enough text for a small run, and a cache below the test's folder."""
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    file = tmp_path / "text.txt"
    file.write_text("All that glisters is not gold. " * 4000)
    # tests/app/plan/test_links_and_machines.py measures it, in a process
    monkeypatch.setattr(doctor, "base_nbytes", lambda: 500_000_000)
    return file


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that is busy with other tests is not one without loopback."""
    monkeypatch.setattr(machine, "ROUND_TRIP_LIMIT", 600.0)


def findings_of(capsys, *arguments: str) -> tuple[int, dict[str, dict]]:
    """The exit code, and the findings by their subject."""
    code = doctor.main([*arguments, "--json"])
    said = capsys.readouterr()
    answer = json.loads(said.out)
    steps, timed = said.err.splitlines(), any(finding["what"] == "inner step" for finding in answer["findings"])
    assert steps[0].startswith("looking at processors") and ("timing an inner step" in steps) >= timed
    assert answer["problems"] == sum(f["level"] == "problem" for f in answer["findings"])
    return code, {finding["what"]: finding for finding in answer["findings"]}


def saved(tmp_path, text, **settings) -> str:
    file = tmp_path / "run.toml"
    Run.of(text=(str(text),), **{"steps": 10, "batch": 2, "sequence": 32, "carrier": "threads"} | settings).save(file)
    return str(file)


def test_the_doctor_finds_no_problem_on_this_machine(capsys, tmp_path):
    code, found = findings_of(capsys, "--runs", str(tmp_path / "not" / "yet"))
    assert code == 0
    assert torch.__version__ in found["thinwire"]["says"]
    assert "measured" in found["gloo round trip"]["says"]
    assert "127.0.0.1" in found["interfaces"]["says"]


def test_firewall_rules_accept_only_the_replicas(capsys):
    assert doctor.main(["--firewall", "10.0.0.1", "10.0.7.0/24", "fd00::2", "--master-port", "7000"]) == 0
    said = capsys.readouterr().out
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = f"{{ 7000, 29510-29511, {first}-{last} }}"
    assert "elements = { 10.0.0.1/32, 10.0.7.0/24 }" in said and "elements = { fd00::2/128 }" in said
    assert [line.split("dport ")[1] for line in said.splitlines() if "dport" in line] == [
        f"{ports} accept", f"{ports} accept", f"{ports} drop",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"'oslo'.*IP addresses"):
        doctor.main(["--firewall", "oslo"])


@pytest.mark.skipif(
    REASON is not None or shutil.which("nft") is None, reason=f"no nft, or no network namespaces: {REASON}"
)
def test_the_kernel_accepts_the_firewall_rules(capsys):
    doctor.main(["--firewall", "10.0.0.1", "fd00::2"])
    rules = capsys.readouterr().out
    with Namespaces(1) as space:
        command = ["ip", "netns", "exec", space.namespaces[0], "nft", "-f", "-"]
        for _ in range(2):  # the second time as after a change
            done = subprocess.run(command, input=rules, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr


def test_every_finding_that_is_not_ok_has_advice(capsys, tmp_path, text):
    file = saved(tmp_path, text, steps=10**6, replicas=1000, link="1kbit", delay=1)
    _, found = findings_of(capsys, file, "--step-seconds", "0.1", "--master-addr", "10.0..1")
    assert "does not resolve" in found["rank 0"]["says"]
    _, found = findings_of(capsys, file, "--step-seconds", "0.1", "--master-addr", "nowhere.invalid")
    poor = {what for what, finding in found.items() if finding["level"] != "ok"}
    assert {"replicas", "text", "link", "delay", "rank 0"} <= poor
    assert all(found[what]["do"] for what in poor)


def test_a_valid_run_has_no_problem(capsys, tmp_path, text):
    code, found = findings_of(capsys, saved(tmp_path, text, replicas=1, strategy="streaming_diloco"))
    assert code == 0
    assert "measured" in found["inner step"]["says"]
    assert "predicted" in found["memory of a replica"]["says"] and "predicted" in found["link"]["says"]


@pytest.mark.parametrize(
    ("break_it", "what", "says"),
    [
        (lambda file, text: file.write_text("stepps = 3"), "run file", "stepps"),
        (lambda file, text: text.unlink(), "text", "text.txt"),
        (lambda file, text: text.write_text("short"), "text", "more text"),
        (lambda file, text: file.write_text(file.read_text().replace("tiny", "huge")), "model", "huge"),
    ],
)
def test_each_broken_setting_or_file_is_a_problem(capsys, tmp_path, text, break_it, what, says):
    file = tmp_path / "run.toml"
    saved(tmp_path, text)
    break_it(file, text)
    code, found = findings_of(capsys, str(file), "--step-seconds", "1")
    assert code == 1
    assert found[what]["level"] == "problem" and says in found[what]["says"]


def test_a_port_in_use_and_a_file_in_place_of_the_runs_are_problems(capsys, tmp_path):
    (tmp_path / "runs").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = ["--master-addr", "127.0.0.1", "--master-port", str(taken.getsockname()[1])]
        code, found = findings_of(capsys, *at, "--runs", str(tmp_path / "runs"))
        assert code == 1 and "cannot be used" in found["rank 0"]["says"]
        assert found["disk"]["level"] == "problem" and found["disk"]["says"].endswith("runs is a file")


def test_a_model_that_does_not_fit_is_a_problem_and_is_not_measured(capsys, tmp_path, text, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: (1 << 20, 1 << 20))
    code, found = findings_of(capsys, saved(tmp_path, text))
    assert code == 1
    assert found["memory of a replica"]["level"] == "problem" and "inner step" not in found


def test_a_link_below_the_needed_rate_is_a_warning():
    strategy = streaming_diloco(every=30, delay=5)
    numels, seconds = [1_000_000, 500_000], 0.2
    floor = 8 * strategy.nbytes_per_period(numels, 3) / (30 * seconds)

    def level(rate: float) -> str:
        return next(iter(doctor.enough(strategy, numels, 3, Link(rate), seconds))).level

    assert level(1.001 * floor) == "ok" and level(0.999 * floor) == "warning"


def test_a_delay_too_short_for_the_largest_fragment_is_a_warning():
    strategy = streaming_diloco(every=30, delay=2)
    nbytes = strategy.exchange.nbytes_sent(E3M0(), 1_000_000, 2)

    def found(rate: float) -> doctor.Finding:
        return list(doctor.enough(strategy, [1_000_000], 2, Link(rate), 0.5))[1]

    assert found(8.001 * nbytes).level == "ok"
    assert found(7.9 * nbytes).level == "warning" and "--delay 3" in found(7.9 * nbytes).do


@pytest.mark.parametrize(("seconds", "level"), [(0.001, "warning"), (1.0, "ok")])
def test_steps_too_short_for_the_work_of_their_rounds_are_a_warning(seconds, level):
    """Its advice is enough."""
    run, shapes = Run.of(), [((64, 64), (64,))] * 4
    found = doctor.work_of_rounds(run, run.make_strategy(), shapes, seconds, 1)
    assert found.level == level and "(predicted)" in found.says
    if level == "warning":
        every = int(found.do.partition("--every ")[2].split(",")[0])
        rarer = run.changed(every=every)
        assert doctor.work_of_rounds(rarer, rarer.make_strategy(), shapes, seconds, 1).level == "ok"


def test_the_doctor_removes_its_network_namespace():
    assert machine.shaping().what == "shaped links"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout if _has_ip() else ""
    assert f"thinwire-doctor-{os.getpid()}" not in listed  # other processes may have namespaces of their own


def _has_ip() -> bool:
    return shutil.which("ip") is not None


@pytest.mark.parametrize(
    ("free", "settings", "where"),
    [
        (8e9, {}, "device"),
        (1e6, {}, None),  # no room
        (8e9, {"anchors": "host"}, "host"),
        (8e9, {"strategy": "streaming_diloco"}, None),  # its rounds would not stay there
        (8e9, {"strategy": "data_parallel"}, None),
        (8e9, {"strategy": "fedavg"}, None),
        (8e9, {"carrier": "elastic"}, None),
    ],
)
def test_anchors_go_to_a_gpu_that_has_room(monkeypatch, free, settings, where):
    """On a GPU that is only said to be there; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80e9))
    run = Run.of(model="nano", **settings)
    model = outline_model(run.model, 128, 0, 256)
    got, lines = choose_defaults(run, model)
    assert got.method.anchors == where and len(lines) == (where == "device")
    assert choose_defaults(run, model, got) == (got, [])  # a run that has begun keeps its choice


def test_a_replica_that_its_gpu_cannot_hold_is_refused_whatever_the_host_has(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "memory", lambda: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run = Run.of(model="mini")
    model = outline_model(run.model, 128, 0, 256)
    for free, level in ((50_000_000, "problem"), (80 * 10**9, "ok")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 10**9))  # noqa: B023  # called at once
        (found,) = doctor.room(Needs.of(run, model))
        assert found.level == level and ("on its GPU (predicted), and 50.0 MB are free" in found.says) == (
            level == "problem"
        )
        refused = (
            pytest.raises(ConfigurationError, match=r"a replica needs .* on its GPU")
            if level == "problem"
            else nullcontext()
        )
        with refused:
            check_capacity(run, model, 2, tmp_path, Console(quiet=True))


def test_replicas_share_the_gpus_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of(index).index for index in range(5)] == [0, 1, 0, 1, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of(3).type == "cpu"
