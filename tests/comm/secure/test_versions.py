"""A member and a hub of unlike releases: they agree on the newest version of frames that both speak, or name both ranges."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from thinwire.comm.secure import versions
from thinwire.comm.secure.calls import Broken, Outdated, Refused
from thinwire.errors import PacketError
from thinwire.version import Protocols

THIS, NEXT, LATER = Protocols(4, 4, "0.1.0"), Protocols(4, 6, "0.2.0"), Protocols(5, 7, "0.3.0")


class Stream:
    """Both ends of a stream that begins: what a side hears, and what it says."""

    def __init__(self, *heard: tuple[str, str], code: grpc.StatusCode | None = None, silent: bool = False) -> None:
        self.heard, self.ended, self.silent, self.said = heard, code, silent, tuple[tuple[str, str], ...]()

    def invocation_metadata(self) -> Any:
        return self.heard

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.said = metadata

    async def initial_metadata(self) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        return self.heard

    async def read(self) -> Any:
        return grpc.aio.EOF if self.ended else b"a frame"

    async def code(self) -> Any:
        return self.ended

    async def details(self) -> str:
        return "lima is revoked"


def member_and_hub(member: Protocols, hub: Protocols, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """What each of them finds from what the other states."""
    monkeypatch.setattr(versions, "HUB_FRAMES", member)
    asked = Stream(("user-agent", "grpc"), *versions.stated())
    monkeypatch.setattr(versions, "HUB_FRAMES", hub)
    at_hub = asyncio.run(versions.agreed_with_member(asked))
    monkeypatch.setattr(versions, "HUB_FRAMES", member)
    return asyncio.run(versions.agreed_with_hub(Stream(*asked.said), 600.0)), at_hub


@pytest.mark.parametrize(
    ("member", "hub", "version"), [(THIS, THIS, 4), (THIS, NEXT, 4), (NEXT, THIS, 4), (NEXT, LATER, 6)]
)
def test_member_and_hub_use_the_newest_version_that_both_speak(
    member: Protocols, hub: Protocols, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert member_and_hub(member, hub, monkeypatch) == (version, version)


@pytest.mark.parametrize(("member", "hub"), [(THIS, LATER), (LATER, THIS)])
def test_ranges_that_do_not_meet_are_named_on_both_sides(
    member: Protocols, hub: Protocols, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "HUB_FRAMES", member)
    told = versions.stated()
    with pytest.raises(PacketError) as at_hub:
        member_and_hub(member, hub, monkeypatch)
    assert str(at_hub.value).startswith(
        f"the hub speaks frames {hub}, the replica {member}. Install one release on both"
    )
    monkeypatch.setattr(versions, "HUB_FRAMES", hub)
    with pytest.raises(Refused, match="one that speaks a version of each, and start them again") as at_member:
        asyncio.run(versions.agreed_with_hub(Stream(*told), 600.0))
    assert str(at_member.value).startswith(f"this replica speaks frames {hub}, the hub {member}. Install")


@pytest.mark.parametrize("stated", [(), ("4",), ("4 to 4 (Thinwire 0.1.0)",) * 2, ("5 to 4 (Thinwire 0.1.0)",)])
def test_a_range_that_is_absent_twice_there_or_odd_is_refused(
    stated: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "HUB_FRAMES", THIS)
    said = Stream(*[("thinwire-frames", one) for one in stated])
    with pytest.raises(
        PacketError, match=r"the hub speaks frames 4 to 4 \(Thinwire 0.1.0\), the replica (states none|5 to 4)"
    ):
        asyncio.run(versions.agreed_with_member(said))
    assert not said.said


def test_a_hub_that_refuses_is_told_apart_from_one_that_is_away() -> None:
    """One that ends the stream before it states its range says why; one that says nothing is dialled again."""
    for code, kind in ((grpc.StatusCode.PERMISSION_DENIED, Refused), (grpc.StatusCode.UNAUTHENTICATED, Outdated)):
        with pytest.raises(kind, match="lima is revoked"):
            asyncio.run(versions.agreed_with_hub(Stream(code=code), 600.0))
    with pytest.raises(Refused, match="the hub states none"):
        asyncio.run(versions.agreed_with_hub(Stream(("user-agent", "grpc")), 600.0))
    with pytest.raises(Broken, match=r"the hub was not reached within 0\.001 s"):
        asyncio.run(versions.agreed_with_hub(Stream(silent=True), 0.001))
