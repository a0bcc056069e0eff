"""A publisher elsewhere sends versions to a hub, and a follower of the hub gets every bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from raw_publisher import flat, publisher
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("grpc")

from thinwire.cli import main
from thinwire.comm.secure import Hub, Token
from thinwire.comm.secure.enrol import Enrolment
from thinwire.comm.secure.upload import HubUploader
from thinwire.records.uploaded import UploadedVersions


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
