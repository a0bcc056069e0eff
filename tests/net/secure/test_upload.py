"""A publisher elsewhere sends versions to a hub, and a follower of the hub gets every bit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path

import pytest
import torch
from raw_publisher import flat, publisher
from safetensors.torch import load_file
from secure_groups import run_secure
from torch import nn

pytest.importorskip("grpc")

from thinwire.app.cli import main
from thinwire.app.records.published import PublishedFolder
from thinwire.app.records.uploaded import UploadedVersions
from thinwire.app.trainer.meeting import AtHub, meeting_of
from thinwire.net import Hub, SecureGroup, Token, admit, upload
from thinwire.net.enrol import Enrolment
from thinwire.net.fetch import LIST, serve
from thinwire.net.frames import CHUNK_NBYTES
from thinwire.net.upload import HubUploader


def followed(token: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, int], torch.Tensor]:
    """What the command follows from the hub: the version, and its values."""
    capsys.readouterr()
    asked = [
        "--name",
        "follower-lima",
        "--keys",
        str(folder / "keys"),
        "--out",
        str(folder / "live"),
        "--once",
        "--json",
    ]
    assert main(["follow", token, *asked]) == 0
    here = load_file(folder / "live/model.safetensors")
    assert (folder / "live/empty.txt").read_bytes() == b""
    return json.loads(capsys.readouterr().out)["newest"], torch.cat([here["weight"].flatten(), here["bias"]])


def test_a_follower_gets_each_version_of_a_publisher_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(1200, 1200)
    store = UploadedVersions(tmp_path / "hub", ["oslo"], 1 << 30)
    with Hub(tmp_path / "hub", publishers=store) as hub:
        token = str(hub.invite(2))
        enrolment = Enrolment(Token.read(token), "oslo", tmp_path / "keys")
        made = publisher(tmp_path / "run", model, lambda: HubUploader(enrolment, lambda: None))
        made.offer(3, [flat(model)])
        made.offer(7, [flat(model) + 1e-3])
        made.close()
        newest, values = followed(token, tmp_path, capsys)
        assert newest["step"] == 7 and torch.equal(values, (flat(model) + 1e-3).bfloat16())


def test_a_version_waits_for_the_messages_of_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is begun while a message is on its way. The message has arrived before the first chunk of the version leaves."""
    monkeypatch.setattr(upload, "PAUSE_SECONDS", 0.0)
    left = list[bool]()
    for step, name in enumerate(("before", "beside")):
        made = publisher(tmp_path / name, nn.Linear(9, 9))
        made.offer(step, [torch.full((90,), float(step))])
        made.close()
    message = torch.zeros(32 * CHUNK_NBYTES, dtype=torch.uint8)

    def replica(group: SecureGroup) -> None:
        if group.rank == 1:
            group.post(1, {}, {0: message.clone()}).wait()
            return
        uploader = group.uploader()
        assert uploader.send(tmp_path / "before", lambda: False)  # so that it is connected
        before, sending = group.uploaded, group.post(1, {1: message}, {})
        while group.uploaded < before + CHUNK_NBYTES:
            threading.Event().wait(0.001)
        assert uploader.send(tmp_path / "beside", lambda: False)
        left.append(not sending._over.is_set())
        sending.wait()
        uploader.close()

    store = UploadedVersions(tmp_path / "hub", ["replica-0"], 1 << 30)
    with Hub(tmp_path / "hub", publishers=store) as hub:
        run_secure(hub.invite(2), 2, replica, tmp_path / "keys", bits_per_second=1e7)
    assert left == [False]


def test_a_refused_publisher_is_told_once_and_publishes_into_its_folder(tmp_path: Path) -> None:
    model, failed = nn.Linear(9, 9), list[str]()
    with Hub(tmp_path / "hub") as hub:
        enrolment = Enrolment(hub.invite(), "oslo", tmp_path / "keys")
        made = publisher(tmp_path / "run", model, lambda: HubUploader(enrolment, lambda: None), failed.append)
        for step in range(3):
            made.offer(step, [flat(model) + step])
        made.close()
    (told,) = failed
    assert (
        "oslo is no publisher of this hub" in told and json.loads((tmp_path / "run/list.json").read_text())["step"] == 2
    )


def test_a_publisher_without_a_hub_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has gone for good before the last version: the publisher says so."""
    monkeypatch.setattr("thinwire.app.trainer.publish.LAST_SECONDS", 0.0)
    model, failed = nn.Linear(9, 9), list[str]()
    with Hub(tmp_path / "hub", publishers=UploadedVersions(tmp_path / "hub", ["oslo"], 1 << 30)) as hub:
        token = hub.invite()
        admit(str(token), "oslo", tmp_path / "keys")
    enrolment = Enrolment(token, "oslo", tmp_path / "keys")
    made = publisher(tmp_path / "run", model, lambda: HubUploader(enrolment, lambda: None), failed.append)
    made.offer(0, [flat(model)], over=True)
    made.close()
    assert len(failed) == 1 and "has not got to the hub in" in failed[0] and "does not answer" in failed[0]


def test_a_publisher_that_is_told_to_stop_does_not_wait_for_the_hub(tmp_path: Path) -> None:
    model = nn.Linear(9, 9)
    with Hub(tmp_path / "hub") as hub:
        token = hub.invite()
        admit(str(token), "oslo", tmp_path / "keys")
    enrolment = Enrolment(token, "oslo", tmp_path / "keys")
    made = publisher(tmp_path / "run", model, lambda: HubUploader(enrolment, lambda: None))
    made.offer(0, [flat(model)])
    made.abandon()
    made.close()
    assert (tmp_path / "run/list.json").exists()


def test_every_answer_to_a_follower_has_a_message(tmp_path: Path) -> None:
    """So its metadata, with the hub's range, is never lost: gRPC may lose it where a call ends without one."""

    async def answered(question: bytes) -> list[bytes]:
        return [chunk async for chunk in serve(question, PublishedFolder(tmp_path))]

    assert asyncio.run(answered(LIST + hashlib.sha256(b"").digest())) == [b""]


def test_the_words_of_a_hub_name_it_in_a_replicas_process(tmp_path: Path) -> None:
    for here in (False, True):
        place = AtHub(tmp_path / "token", tmp_path / "keys", "red", here)
        assert meeting_of(place.words()) == place
