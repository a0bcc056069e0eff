"""A hub replaces its authority while members train: they take the new one during the run, and an absent member is told what to do."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from group_laws import Exchange
from raw_publisher import Version
from secure_groups import run_secure

from thinwire.app.cli import main
from thinwire.app.records.uploaded import UploadedVersions
from thinwire.errors import ConfigurationError, LinkError
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, PublishedAtHub, admit, upload
from thinwire.net.enrol import Enrolment
from thinwire.net.invitations import rotate
from thinwire.net.loop import LoopThread
from thinwire.net.requests import HubChannel
from thinwire.net.upload import HubUploader


def test_training_continues_while_the_authority_is_replaced(hub, audit, tmp_path, capsys):
    """Neither phase ends a connection for good. Afterwards the old authority and its tokens are refused."""
    keys, folder, token = tmp_path / "keys", tmp_path / "hub", hub.invite(4)
    admit(str(token), "away", keys)
    begun, ended, over = threading.Event(), threading.Event(), threading.Event()

    def replica(group) -> None:
        what = 0

        def rounds_until(event: threading.Event) -> None:
            nonlocal what
            more = torch.ones(1, dtype=torch.uint8)
            while int(more):
                Exchange(group, 1, what, 100_000).check()
                what += 1
                if group.rank == 0:
                    more[0] = not event.is_set()
                    group.post(9, {1: more}, {}).wait()
                else:
                    group.post(9, {}, {0: more}).wait()

        rounds_until(begun)
        rounds_until(ended)
        Exchange(group, 2, what, 100_000).check()

    def until(true: Callable[[], bool]) -> None:
        while not true():
            assert not over.wait(0.05), audit.said

    def operate() -> None:
        audit.wait("formed")
        ended_already, behind = rotate(folder)
        assert not ended_already and sorted(behind) == ["away", "replica-0", "replica-1"]
        audit.wait("rotated")
        begun.set()
        until(lambda: rotate(folder)[1] == ["away"])  # the others get theirs when they reconnect
        assert main(["hub", "rotate", "--out", str(folder)]) == 0
        assert main(["hub", "rotate", "--now", "--out", str(folder)]) == 0
        audit.wait("rotated", nth=2)  # the hub sees that the old one has ended, and lets all reconnect
        seen = [number for number, line in enumerate(audit.said) if "rotated" in line][1]
        until(lambda: sum(line.startswith("connected ") for line in list(audit.said)[seen:]) >= 2)
        ended.set()

    def operated() -> None:
        try:
            operate()
            done.append(True)
        finally:
            begun.set(), ended.set()  # after any failure the rounds end

    done: list[bool] = []
    operator = threading.Thread(target=operated)
    operator.start()
    try:
        run_secure(token, 2, replica, keys)
    finally:
        over.set()
        operator.join()
    assert done
    said = " ".join(capsys.readouterr().out.split())
    assert "without a certificate of it yet: away." in said and "needed by away:" in said
    assert not list(folder.glob("authority-next.*"))
    assert main(["hub", "list", "--out", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["open"] == []  # one use was left
    admit(str(token), "replica-0", keys)  # any token brings the new authority
    with pytest.raises(LinkError, match="rotated while this machine was away"):
        admit(str(token), "away", keys)
    with pytest.raises(LinkError, match="another fingerprint"):
        admit(str(token), "late", keys)
    with pytest.raises(ConfigurationError, match=r"remove .*away/authority\.\* alone"):
        admit(str(hub.invite()), "away", keys)
    forget(keys / "away")
    admit(str(hub.invite()), "away", keys)  # with the key to which its name is bound


@pytest.mark.parametrize("kind", ["follows", "publishes", "waits for a group"])
def test_members_without_a_group_take_the_new_authority_too(kind, tmp_path, audit, monkeypatch):
    """The hub refuses their next request for it, once. So a second `rotate` finds nobody who lacks a certificate."""
    monkeypatch.setattr(upload, "PAUSE_SECONDS", 0.0)
    Version.made(tmp_path / "run", 1, 9)
    store = UploadedVersions(tmp_path / "hub", ["oslo"], 1 << 30)
    with Hub(tmp_path / "hub", publishers=store, registry=lambda: MemberRegistry(600.0), say=audit) as hub:
        token, keys = hub.invite(), tmp_path / "keys"
        member, thread = Enrolment(token, "oslo", keys), LoopThread.shared()
        origin, uploader = PublishedAtHub(str(token), "follower-oslo", keys), HubUploader(member, lambda: None)

        def ask() -> None:
            if kind == "follows":
                origin.newest()
            elif kind == "publishes":
                if not uploader.send(tmp_path / "run", lambda: False):
                    raise LinkError(uploader.state)
            else:
                HubChannel(member, "o" * 16, "", thread, 600.0).close()

        ask()
        assert rotate(tmp_path / "hub")[0] is False
        audit.wait("rotated")
        with pytest.raises(LinkError, match="new authority"):
            ask()
        ask()
        assert rotate(tmp_path / "hub") == (True, [])
        for one in (origin, uploader):
            one.close()
        thread.release()


def forget(own: Path) -> None:
    for file in own.glob("authority.*"):
        file.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone writes into the folder of another user")
def test_a_hub_of_another_user_reads_the_authority_that_root_has_made(tmp_path, capsys):
    """It could not, and then formed no group any more."""
    Hub(tmp_path / "hub").close()
    for path in (tmp_path / "hub", *(tmp_path / "hub").iterdir()):
        os.chown(path, 12345, 12345)
    assert main(["hub", "rotate", "--out", str(tmp_path / "hub")]) == 0
    made = list((tmp_path / "hub").glob("authority-next.*"))
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in made} == {(12345, 0o600)} and len(made) == 2
