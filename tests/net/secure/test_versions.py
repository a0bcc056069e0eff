"""A member and a hub of unlike releases: they agree on the newest version of what they send that both speak, or name both ranges."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from thinwire.app.cli import main
from thinwire.errors import PacketError
from thinwire.net import Hub, PublishedAtHub, enrol, fetch, joining, versions
from thinwire.net.calls import Broken, Outdated, Refused
from thinwire.net.versions import FRAMES
from thinwire.version import FOLLOWER_REQUESTS, JOIN_REQUESTS, Protocols

THIS = Protocols(1, 1, "0.1.0")


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


@pytest.mark.parametrize("stated", [(), ("1",), ("1 to 1 (Thinwire 0.1.0)",) * 2, ("2 to 1 (Thinwire 0.1.0)",)])
def test_a_range_that_is_absent_twice_there_or_odd_is_refused(
    stated: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(versions.RANGES, FRAMES, THIS)
    said = Stream(*[("thinwire-frames", one) for one in stated])
    with pytest.raises(
        PacketError, match=r"the hub speaks frames 1 to 1 \(Thinwire 0.1.0\), the replica (states none|2 to 1)"
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


class OneList:
    """The published versions of a run that is over: a list, and no objects."""

    def newest(self) -> bytes:
        return b"a list"

    def read(self, digest: str, offset: int) -> Iterator[bytes]:
        return iter(())


def stating(key: str, *said: Protocols | str) -> Any:
    """A side of another release, or of one from before there were ranges."""
    return lambda kind: tuple((key, str(one)) for one in said)


def beside(here: Protocols) -> tuple[Protocols, Protocols]:
    """The ranges of the next release, which speaks what this one does, and of a later one, which does not."""
    return Protocols(here.oldest, here.newest + 1, "0.2.0"), Protocols(here.newest + 1, here.newest + 3, "0.3.0")


def test_a_request_to_join_is_refused_by_its_range_before_its_invitation_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, lines, (after, far) = JOIN_REQUESTS, list[str](), beside(JOIN_REQUESTS)
    with Hub(tmp_path / "hub", published=OneList(), say=lines.append) as hub:
        token = str(hub.invite(1))
        for said in ((far,), ()):
            monkeypatch.setattr(enrol, "SPOKEN", b"".join(str(each).encode() for each in said))
            assert main(["follow", token, "--name", "oslo", "--keys", str(tmp_path), "--once"]) == 1
            told = " ".join(capsys.readouterr().err.split())
            named = f"the hub speaks requests to join {here}, the machine {far if said else 'states none'}. Install one"
            assert named in told and named in lines[-1] and "new token" not in told
        monkeypatch.setattr(enrol, "SPOKEN", str(after).encode())
        for there in ((far,), ()):  # a hub that served it although the ranges do not meet
            with monkeypatch.context() as its:
                its.setattr(joining.JoinPort, "spoken", b"".join(str(each).encode() for each in there))
                with pytest.raises(Refused) as refused, PublishedAtHub(token, "oslo", tmp_path) as origin:
                    origin.newest()
            named = (
                f"this machine speaks requests to join {here}, the hub {far if there else 'states none'}. Install one"
            )
            assert str(refused.value).startswith(named)
        with PublishedAtHub(token, "oslo", tmp_path) as origin:
            assert origin.newest() == b"a list"


def test_a_followers_request_is_served_or_refused_by_its_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, (after, far) = FOLLOWER_REQUESTS, beside(FOLLOWER_REQUESTS)
    with (
        Hub(tmp_path / "hub", published=OneList()) as hub,
        PublishedAtHub(str(hub.invite()), "oslo", tmp_path) as origin,
    ):
        for said in ((far,), ()):
            monkeypatch.setattr(fetch, "stated", stating("thinwire-follow", *said))
            with pytest.raises(Refused) as refused:
                origin.newest()
            named = (
                f"the hub speaks requests of followers {here}, the follower {far if said else 'states none'}. Install"
            )
            assert named in str(refused.value)
        monkeypatch.setattr(fetch, "stated", stating("thinwire-follow", after))
        assert origin.newest() == b"a list"
        for there in ((far,), ()):
            with monkeypatch.context() as its, pytest.raises(Refused) as refused:
                its.setattr(versions, "stated", stating("thinwire-follow", *there))
                origin.newest()
            named = (
                f"this follower speaks requests of followers {here}, the hub {far if there else 'states none'}. Install"
            )
            assert str(refused.value).startswith(named)
        assert origin.newest() == b"a list"
