"""The real commands `thinwire hub`, whose stdout nobody reads, and `thinwire join`, whose token is no argument."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from group_laws import free_port
from hub_process import HubProcess

from thinwire.app.cli import join, main
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.secure import run_of_hub
from thinwire.errors import ConfigurationError, LinkError
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, Token, admit
from thinwire.net import join as meet


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_hub_whose_stdout_was_closed_before_the_token_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """A line on stderr says how to get a token, and a machine joins with it."""
    for attempt in range(9):  # the next port may be taken
        folder = tmp_path / f"hub-{attempt}"
        reader, writer = os.pipe()
        os.close(reader)
        at = ("--listen", f"127.0.0.1:{free_port()}", "--out", str(folder), *more)
        command = [sys.executable, "-m", "thinwire", "hub", *at]
        process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert process.stderr
        told = next((line for line in process.stderr if "nobody reads its stdout" in line), "")
        if told:
            break
        process.stderr.close()
        process.wait()
    try:
        assert f"thinwire hub invite --out {folder}" in told
        assert main(["hub", "invite", "--out", str(folder)]) == 0
        (token,) = filter(Token.is_one, capsys.readouterr().out.split())
        assert admit(token, "oslo", tmp_path / "keys").credentials.certificate
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 0 and "Error" not in rest, rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_hub_whose_port_was_taken_prints_its_token_at_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at, run = f"127.0.0.1:{taken.getsockname()[1]}", tmp_path / "run"
        assert main(["hub", "--out", str(tmp_path / "hub"), "--listen", at, "--published", str(run)]) == 1
    assert "run has no versions yet; followers wait until" in " ".join(capsys.readouterr().out.split())
    hub = HubProcess(tmp_path / "hub", "--address", "hub.example")
    try:
        assert hub.process.stdout and ", which replicas dial at hub.example (--address); machines that join" in hub.said
        told = next(line for line in hub.process.stdout if "join token" in line or "admitted members" in line)
    finally:
        hub.close()
    assert "join token" in told


def test_a_hub_takes_the_run_file_of_its_own_folder_and_says_in_one_line_that_its_port_is_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hub/run.toml"
    file.parent.mkdir(mode=0o700)
    Run.of(model="nano").save(file)
    before = file.read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["hub", "--out", str(file.parent), "--run-file", str(file), "--listen", at]) == 1
    said = capfd.readouterr().err  # gRPC's too, which does not write by Python
    assert f"the hub cannot listen at {at} (Address already in use)" in said and said.count("\n") == 1
    assert file.read_text() == before


def test_a_hub_replaces_its_own_copy_of_a_run_file_and_says_so_but_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a person wrote or changed there was lost without a word, and its own one when the disk was full."""

    def full(path: Path, data: bytes) -> None:
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    kept, file = tmp_path / "hub/run.toml", tmp_path / "other.toml"
    Run.of(model="nano").save(file)
    first = file.read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ["hub", "--out", str(kept.parent), "--run-file", str(file), "--listen", at]
        for steps in (None, None, 7):
            if steps:
                Run.of(model="nano", steps=steps).save(file)
            assert main(command) == 1 and kept.read_text() == file.read_text()
            assert ("replaces the run file" in capsys.readouterr().out) is bool(steps)
        for written in (first, f"# ours\n{file.read_text()}"):
            kept.write_text(written)
            assert main(command) == 2 and kept.read_text() == written
            told = " ".join(capsys.readouterr().err.split())
            assert f"{kept} is no copy that this hub has made, and {file} would replace it; leave --run-file" in told
        kept.unlink()
        assert main(command) == 1 and kept.read_text() == file.read_text()
        before = kept.read_text()
        Run.of(model="nano", steps=9).save(file)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            assert main(command) == 1 and kept.read_text() == before
        assert main(command) == 1 and kept.read_text() == file.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "--uses", "9"], "--uses with list: only run and invite can use it"),
        (["revoke", "oslo", "--now"], "--now with revoke: only rotate can use it"),
        (["invite", "--elastic"], "--elastic with invite: only run can use it"),
        *(
            (["--address", wrong], f"--address {wrong!r}: a host name or an IP address is needed, without a port")
            for wrong in ("", "hub.example:29530", "two words", "https://hub.example", "hüb.example", "x" * 254)
        ),
    ],
)
def test_an_option_of_another_verb_or_a_host_that_nobody_can_dial_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    """It would be ignored otherwise, or be in tokens with which nobody can join."""
    assert main(["hub", *arguments, "--out", str(tmp_path / "hub")]) == 2
    assert says in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "hub").exists()


def test_an_invitation_shows_the_command_that_its_holder_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Hub(tmp_path / "hub").close()
    for name, command in (
        ("oslo", "thinwire join TOKEN [run.toml] --name NAME"),
        ("follower-oslo", "thinwire follow TOKEN --name follower-oslo --out FOLDER"),
    ):
        assert main(["hub", "invite", "--name", name, "--out", str(tmp_path / "hub")]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f" by: {command}")


def test_a_revoked_machine_does_not_come_back_by_its_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It knows a token that admits several. Others that this one has admitted stay, and other tokens stay valid."""
    keys = tmp_path / "keys"
    with Hub(tmp_path / "hub") as hub:
        token, another = str(hub.invite(3)), str(hub.invite())
        admit(token, "oslo", keys), admit(token, "lima", keys)
        assert main(["hub", "revoke", "oslo", "--out", str(tmp_path / "hub")]) == 0
        assert "its token, which could have admitted 1 more, has ended" in capsys.readouterr().out
        with pytest.raises(LinkError, match="the hub has no such invitation"):
            admit(token, "rome", keys)
        admit(token, "lima", keys), admit(another, "rome", tmp_path / "more")


def test_each_verb_ends_with_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Hub(tmp_path / "hub") as hub:
        admit(str(hub.invite()), "oslo", tmp_path / "keys")
    told = []
    for verb in (["revoke", "oslo"], ["rotate"], ["rotate"], ["invite"], ["list"]):
        assert main(["hub", *verb, "--out", str(tmp_path / "hub"), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    begun, ended = {"ended": False, "behind": []}, {"ended": True, "behind": []}
    assert told[:3] == [{"revoked": "oslo"}, begun, ended] and Token.is_one(told[3]["token"])
    assert [one["name"] for one in told[4]["members"]] == ["oslo"] and len(told[4]["open"]) == 1


@pytest.mark.parametrize(
    ("text", "more", "says"),
    [
        ('[data]\ntext = ["/data/law.txt"]', [], "names files or models in text, and a hub may name none"),
        ('[model]\nmodel = "hf:some/model"', [], "names files or models in model, and a hub may name none"),
        ("[data", [], "cannot be read"),
        ("[optimizer]\nbatch = 2", [], "is refused (batch is in [optimizer]; it belongs in [data]); have it corrected"),
        ('[method]\nstrategy = "plexus"', ["--elastic"], "is refused (strategy=plexus with carrier='secure-elastic'"),
    ],
    ids=["names a text", "names a model", "no TOML", "wrong table", "not elastic"],
)
def test_a_run_file_that_members_would_refuse_is_refused_by_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: list[str], says: str
) -> None:
    """Before a token is made, which a member would use in vain, and in a member's words."""
    (tmp_path / "run.toml").write_text(text)
    assert main(["hub", "--run-file", str(tmp_path / "run.toml"), "--out", str(tmp_path / "hub"), *more]) == 2
    told = capsys.readouterr().err
    assert f"the hub's run file {says}" in told and not (tmp_path / "hub").exists()
    with pytest.raises(ConfigurationError) as refused:
        run_of_hub(tmp_path / "run.toml", bool(more))
    assert str(refused.value) in told


@pytest.mark.parametrize("content", ["", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"])
def test_a_damaged_authority_is_named_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    """Of a hub that starts, and of one that invites or whose authority is replaced."""
    Hub(tmp_path).close()
    for name, due in (("authority.pem", "begin a new hub in another --out"), ("authority.key", "holds no private key")):
        (tmp_path / name).write_text(content)
        for verb in ("run", "invite", "rotate"):
            assert main(["hub", verb, "--out", str(tmp_path)]) == 2
            told = " ".join(capsys.readouterr().err.split())
            assert f"{tmp_path / name} is empty or damaged: " in told and due in told


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("authority.pem", "the hub has admitted oslo thinwire join: the hub keeps no run file"),  # it is shown again
        ("key.pem", "oslo/key.pem is empty or damaged: it holds no private key"),
        ("authority.sha256", "keys/oslo holds the key of oslo at another hub"),
    ],
)
def test_a_join_with_a_damaged_file_of_its_keys_names_it_or_makes_it_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, says: str, content: bytes
) -> None:
    with Hub(tmp_path / "hub") as hub:
        token = str(hub.invite())
        admit(token, "oslo", tmp_path / "keys")
        (tmp_path / "keys/oslo" / file).write_bytes(content)
        assert main(["join", token, "--name", "oslo", "--keys", str(tmp_path / "keys")]) == 2
    told = capfd.readouterr()
    assert says in " ".join((told.out + told.err).split())


def test_join_takes_its_token_from_a_file_or_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub admits both, and sends them home, because it has no run file. A file that others may read is refused."""
    file, keys = tmp_path / "token", ["--keys", str(tmp_path / "keys")]
    with Hub(tmp_path / "hub") as hub:
        file.write_text(f"{hub.invite(2)}\n")
        file.chmod(0o600)
        monkeypatch.setattr(sys, "stdin", io.StringIO(file.read_text()))
        for given, name in ((f"@{file}", "oslo"), ("-", "lima")):
            assert main(["join", given, "--name", name, *keys]) == 2
            assert "the hub keeps no run file" in capsys.readouterr().err
    audit = (tmp_path / "hub/audit.txt").read_text()
    assert "admitted oslo" in audit and "admitted lima" in audit
    file.chmod(0o640)
    for given, says in (
        (f"@{file}", "chmod 600"),
        (f"@{tmp_path}", "no join token can be read from"),
        ("-", "of 0 characters"),
    ):
        assert main(["join", given, "--name", "rome", *keys]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_one_signal_ends_a_replica_that_waits_for_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """There is nothing to stop in order yet, so it does not take a second one."""
    (tmp_path / "run.toml").write_text("[optimizer]\nsteps = 2\n")
    given = [str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), "--keys", str(tmp_path / "keys")]

    def say(line: str) -> None:
        if line.startswith("waits oslo"):
            os.kill(os.getpid(), number)

    with Hub(tmp_path / "hub", say=say) as hub:
        assert main(["join", str(hub.invite()), "--name", "oslo", *given, "--timeout", "600"]) == 128 + number
    assert "thinwire join: interrupted" in capsys.readouterr().err


def save_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Run:
    """Saves a run of two steps on a small text as `run.toml` of `folder`, where its tokens are kept too."""
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: folder / "cache")
    (text := folder / "text.txt").write_text("a thin wire carries it\n" * 300)
    run = Run.of(text=(str(text),), steps=2, batch=1, sequence=16, eval_batches=1, **settings)
    run.save(folder / "run.toml")
    return run


def as_oslo(folder: Path) -> list[str]:
    return ["--name", "oslo", "--out", str(folder / "run"), "--keys", str(folder / "keys")]


@pytest.mark.slow
def test_the_timeout_of_a_join_is_that_of_its_first_round_in_an_elastic_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the run's own, and said that --timeout sets it."""
    save_run(tmp_path, monkeypatch, carrier="secure-elastic", timeout=2)
    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(5.0)) as hub:
        told = main(["join", str(hub.invite()), str(tmp_path / "run.toml"), *as_oslo(tmp_path), "--timeout", "1"])
    assert told == 1 and "Gave up after 1 s; --timeout sets this time." in " ".join(capsys.readouterr().err.split())


def test_a_join_without_a_checkpoint_to_resume_from_is_told_what_it_can_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`join` has no --from-start."""
    save_run(tmp_path, monkeypatch, replicas=1, carrier="secure", checkpoint_every=1)
    with Hub(tmp_path / "hub") as hub:
        join = ["join", str(hub.invite()), str(tmp_path / "run.toml"), *as_oslo(tmp_path)]
        assert main(join) == 0
        shutil.rmtree(tmp_path / "run/checkpoints")
        assert main([*join, "--resume"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "begin again at the first step in another --out" in said and "--from-start" not in said


def test_a_replica_that_resumes_without_a_run_file_keeps_the_settings_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's file may have other settings, such as fewer steps, or there may be none."""
    run, given = save_run(tmp_path, monkeypatch, replicas=1, carrier="secure"), as_oslo(tmp_path)
    with Hub(tmp_path / "hub") as hub:
        token = str(hub.invite())
        assert main(["join", token, str(tmp_path / "run.toml"), *given]) == 0
        assert main(["join", token, *given, "--resume"]) == 0
        run.changed(steps=1, text=()).save(tmp_path / "hub/run.toml")
        assert main(["join", token, *given, "--resume"]) == 0
    assert Run.load(tmp_path / "run/run.toml").optimizer.steps == 2


def test_the_advice_to_resume_names_the_run_file_and_the_group() -> None:
    """A hub without a run file refuses a replica that comes again without it."""
    given = join.Options("TOKEN", Path("run.toml"), "oslo", group="red")
    told = join.repeated(given)
    assert told == (" --name oslo --keys .thinwire --group red", "join TOKEN run.toml")
    spaced = join.Options("TOKEN", Path("my run.toml"), "oslo", keys=Path("my keys"))
    assert join.repeated(spaced) == (" --name oslo --keys 'my keys'", "join TOKEN 'my run.toml'")


def test_a_replica_that_resumes_in_the_folder_of_another_is_refused_and_changes_nothing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path, monkeypatch, carrier="secure").absolute()
    (tmp_path / "oslo/events").mkdir(parents=True)
    run.changed(lr=0.5).save(tmp_path / "oslo/run.toml")
    before = (tmp_path / "oslo/run.toml").read_text()
    (tmp_path / "oslo/events/replica-1.jsonl").touch()
    given = [str(tmp_path / "run.toml"), "--resume", "--out", str(tmp_path / "oslo"), "--keys", str(tmp_path / "keys")]
    waits = threading.Event()
    with Hub(tmp_path / "hub", say=lambda line: waits.set() if line.startswith("waits bergen") else None) as hub:
        token = str(hub.invite(uses=2))

        def meet_later() -> None:
            waits.wait()
            meet(token, "oslo", 2, tmp_path / "keys").close()

        with ThreadPoolExecutor() as threads:
            other = threads.submit(meet_later)
            assert main(["join", token, "--name", "bergen", *given]) == 2
            other.result()
    said = capsys.readouterr()
    assert f"dialling the hub at 127.0.0.1:{hub.port}\nthe hub has admitted bergen\n" in said.out
    assert "bergen waits for 1 of 2 members; here: bergen\n" in said.out
    told = " ".join(said.err.split())
    assert "oslo is the folder of replica-1, and bergen is replica-0 of bergen, oslo; give the --out" in told
    assert {path.name for path in (tmp_path / "oslo").rglob("*")} == {"run.toml", "events", "replica-1.jsonl"}
    assert (tmp_path / "oslo/run.toml").read_text() == before
