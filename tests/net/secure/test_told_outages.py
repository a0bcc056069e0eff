"""Who waits for a hub, or a member, that is away hears so at once, and not when the group ends for it."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from group_laws import TIMEOUT
from hub_process import HubProcess
from raw_member import RawMember, admitted, welcomed

from thinwire.net import Hub, frames, join, link


def test_a_killed_hub_is_named_by_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "AWAY_SECONDS", 0.1)
    hub, heard = HubProcess(tmp_path / "hub"), queue.Queue[str]()
    token = str(hub.invite(2))
    with ThreadPoolExecutor() as pool:

        def joined(name: str, warn: queue.Queue[str]):  # type: ignore[no-untyped-def]
            return pool.submit(join, token, name, 2, tmp_path / "keys", "", TIMEOUT, warn=warn.put)

        oslo, lima = joined("oslo", heard), joined("lima", queue.Queue())
        with oslo.result() as one, lima.result() as other:
            hub.kill()
            assert "oslo is not connected to the hub at 127.0.0.1:" in heard.get()
            one._farewell = other._farewell = 0.0
    hub.close()


def test_a_killed_member_is_named_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a warning of Python, unless the caller takes it."""
    monkeypatch.setattr(link, "AWAY_SECONDS", 0.1)
    heard = queue.Queue[str]()
    with Hub(tmp_path / "hub") as hub, ThreadPoolExecutor() as pool:
        token, lima = str(hub.invite(1)), admitted(hub.invite(), "lima", tmp_path)
        oslo = pool.submit(join, token, "oslo", 2, tmp_path / "keys", "", TIMEOUT, warn=heard.put)
        with RawMember(hub.invite(), lima, frames.group_label(2, "")) as member:
            welcomed(member.hello(2))
            group = oslo.result()
        assert "lima is not connected to the hub; after a minute it counts as lost" in heard.get()
        group._farewell = 0.0
        group.close()
