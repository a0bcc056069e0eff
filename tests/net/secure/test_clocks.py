"""Clocks that were set, or that stood still: the hub and a member do not agree on when a certificate ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.app.records.published import PublishedFolder
from thinwire.errors import LinkError
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, PublishedAtHub, admit, enrol
from thinwire.net.calls import Outdated
from thinwire.net.enrol import Enrolment
from thinwire.net.group import connected_group
from thinwire.net.link import HubLink
from thinwire.net.loop import LoopThread
from thinwire.net.requests import HubChannel


@pytest.mark.parametrize("renews", ["requests", "group"])
def test_a_certificate_that_has_ended_by_the_clock_of_the_hub_is_renewed(
    renews: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member's clock was set back, so it would renew the certificate later."""
    monkeypatch.setattr(enrol, "RETRY_SECONDS", 0.0)
    thread = LoopThread.shared()
    registry = (lambda: MemberRegistry(600.0)) if renews == "requests" else None
    with Hub(tmp_path / "hub", lifetime=timedelta(seconds=-1), registry=registry) as hub:
        member = Enrolment(hub.invite(), "oslo", tmp_path / "keys")
        ended = asyncio.run(member.admitted())
        member._admitted = replace(ended, end=inf, due=inf)
        hub._admission.lifetime = timedelta(hours=1)
        if renews == "requests":
            with pytest.raises(LinkError, match="the hub does not answer"):
                HubChannel(member, "o" * 16, "", thread, 600.0)
            HubChannel(member, "o" * 16, "", thread, 600.0).close()
        else:
            connected_group(HubLink(member, bytes(32), 1), 600.0, 600.0).close()
        assert member._admitted.due < inf
    thread.release()


def test_a_follower_whose_certificate_has_ended_by_the_clock_of_the_hub_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection still stands. It was told that the hub serves no followers, and ended for that."""
    with Hub(tmp_path / "hub", published=PublishedFolder(tmp_path / "run")) as hub:
        with PublishedAtHub(str(hub.invite()), "follower-oslo", tmp_path / "keys") as published:
            assert published.newest() is None
            before = published._enrolment._admitted
            ahead = SimpleNamespace(time=lambda: time.time() + 7200.0, monotonic=time.monotonic)
            monkeypatch.setattr("thinwire.net.hub.time", ahead)
            with pytest.raises(Outdated, match="the certificate of this follower has expired"):
                published.newest()
            monkeypatch.undo()
            assert published.newest() is None and published._enrolment._admitted is not before


def test_a_member_whose_clock_is_behind_takes_a_renewed_certificate_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 10 minutes. It was away until it could, so the others of a fixed group took it for dead."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Ahead:
            return super().now(tz) + timedelta(minutes=10)

    with Hub(tmp_path / "hub", published=PublishedFolder(tmp_path / "run")) as hub:
        with PublishedAtHub(str(hub.invite()), "follower-oslo", tmp_path / "keys") as published:
            assert published.newest() is None
            monkeypatch.setattr("thinwire.net.keys.datetime", Ahead)
            used, hub._made, published._used = hub._credentials(), 0.0, None
            assert published.newest() is None and hub._credentials() is not used
    with Hub(tmp_path / "new") as hub:
        admit(str(hub.invite()), "oslo", tmp_path / "keys")
