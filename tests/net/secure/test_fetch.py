"""Followers at a hub receive complete published versions, and can do nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("grpc")

from thinwire.app.cli import main
from thinwire.app.records.published import PublishedFolder
from thinwire.app.trainer.publish import Publisher
from thinwire.errors import DataError, LinkError
from thinwire.net import Hub, PublishedAtHub, enrol, join
from thinwire.net import hub as hubs
from thinwire.net import keys as keys_of_hub
from thinwire.net.invitations import opened_state
from thinwire.pieces.partition import Fragment


def published(run: Path) -> torch.Tensor:
    """Publishes two versions of a model of more than one chunk, and returns the values of the newest."""
    model = nn.Linear(1200, 1200)
    fragment = Fragment("all", tuple(model.named_parameters()))

    def write(folder: Path) -> None:
        save_file(model.state_dict(), folder / "model.safetensors")

    publisher = Publisher(run / "published" / "replica-0", [fragment], write, pytest.fail)
    flat = torch.cat([value.detach().flatten() for _, value in fragment.parameters])
    publisher.offer(0, [flat])
    publisher.offer(7, [flat + 1e-3], over=True)
    publisher.close()
    return (flat + 1e-3).bfloat16()


@pytest.mark.parametrize("hours", [-2.0, 2.0])
def test_a_certificate_is_renewed_half_way_also_if_the_clocks_differ(
    hours: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time() + 3600.0 * hours
    monkeypatch.setattr(enrol, "time", SimpleNamespace(time=lambda: now))
    with Hub(tmp_path / "hub") as hub:
        admitted = asyncio.run(enrol.Enrolment(hub.invite(), "oslo", tmp_path / "keys").admitted())
    assert (admitted.due - now, admitted.end - now) == pytest.approx((1800.0, 3600.0), abs=0.01)


def test_a_hub_whose_clock_was_set_makes_its_certificate_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(hubs, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    with Hub(tmp_path / "hub") as hub:
        used = [hub._credentials()]
        for moved in (60.0, 30 * 86_400.0, -60 * 86_400.0):
            now += moved
            used.append(hub._credentials())
            assert used[-1] is hub._credentials()
    assert used[0] is used[1] and used[1] is not used[2] and used[2] is not used[3]


@pytest.mark.parametrize(("days", "why"), [(-30, "certificate has expired"), (30, "certificate is not yet valid")])
def test_a_clock_that_is_wrong_is_named(days: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Wrong:
            return super().now(tz) + timedelta(days=days)

    monkeypatch.setattr(keys_of_hub, "datetime", Wrong)
    with Hub(tmp_path / "hub", published=PublishedFolder(tmp_path)) as hub:
        with PublishedAtHub(str(hub.invite()), "follower-oslo", tmp_path / "keys") as origin:
            with pytest.raises(LinkError, match=f"{why}; compare the clocks of this machine and of the hub"):
                origin.newest()


def test_a_follower_can_only_receive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, keys = tmp_path / "run", tmp_path / "keys"
    due = published(run)
    with Hub(tmp_path / "hub", published=PublishedFolder(run)) as hub:
        token = str(hub.invite(name="follower-oslo"))
        asked = ["--name", "follower-oslo", "--keys", str(keys), "--out", str(tmp_path / "live"), "--json"]
        assert main(["follow", token, *asked]) == 0
        newest = json.loads(capsys.readouterr().out)["newest"]
        assert newest["over"] and newest["step"] == 7 and newest["nbytes"] < newest["full_nbytes"]
        here = load_file(tmp_path / "live/model.safetensors")
        flat = torch.cat([here["weight"].flatten(), here["bias"]])
        assert torch.equal(flat.view(torch.int16), due.view(torch.int16))
        with PublishedAtHub(token, "follower-oslo", keys) as origin:
            first = origin.newest()
            assert first and first == origin.newest() == PublishedFolder(run).newest()
            with pytest.raises(DataError, match="is gone"):
                list(origin.read("00" * 32, 0))
            with pytest.raises(LinkError, match="receives only"):
                join(token, "follower-oslo", 2, keys, "run", 60.0)
            with opened_state(tmp_path / "hub") as state:
                state.revoke("follower-oslo")
            with pytest.raises(LinkError, match="revoked"):
                origin.newest()
        assert main(["follow", token, *asked]) == 1 and "revoked" in capsys.readouterr().err
    with Hub(tmp_path / "other") as hub, PublishedAtHub(str(hub.invite()), "paris", tmp_path / "more") as origin:
        with pytest.raises(LinkError, match="does not serve followers"):
            origin.newest()
    assert main(["follow", token]) == 2 and "--name" in capsys.readouterr().err
