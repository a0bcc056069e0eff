"""Clocks that were set, or that stood still: the hub and a member do not agree on when a certificate ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from math import inf
from pathlib import Path

import pytest

from thinwire.comm.secure import Hub, enrol
from thinwire.comm.secure.enrol import Enrolment
from thinwire.comm.secure.group import connected_group
from thinwire.comm.secure.link import HubLink
from thinwire.comm.secure.loop import LoopThread
from thinwire.comm.secure.requests import HubChannel
from thinwire.errors import LinkError
from thinwire.membership.registry import MemberRegistry


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
        hub._admission._lifetime = timedelta(hours=1)
        if renews == "requests":
            with pytest.raises(LinkError, match="the hub does not answer"):
                HubChannel(member, "o" * 16, "", thread, 600.0)
            HubChannel(member, "o" * 16, "", thread, 600.0).close()
        else:
            connected_group(HubLink(member, bytes(32), 1), 600.0, 600.0).close()
        assert member._admitted.due < inf
    thread.release()
