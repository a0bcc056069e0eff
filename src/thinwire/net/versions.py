"""The version of what a member and the hub send each other: the newest that both speak.

Both state their range at the first message, in the metadata of gRPC, before anything is read: so a message of any version is read as
what it is. There are three kinds, each with its own range: the frames of a group, and requests of followers and of publishers. Requests to
join have another way (joining.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from thinwire.errors import PacketError
from thinwire.net.calls import Broken, Refused, check_open
from thinwire.version import FOLLOWER_REQUESTS, HUB_FRAMES, PUBLISHER_REQUESTS, Protocols, newest_of_both

FRAMES, FOLLOWING, PUBLISHING = "frames", "requests of followers", "requests of publishers"
RANGES = {FRAMES: HUB_FRAMES, FOLLOWING: FOLLOWER_REQUESTS, PUBLISHING: PUBLISHER_REQUESTS}
_KEYS = {FRAMES: "thinwire-frames", FOLLOWING: "thinwire-follow", PUBLISHING: "thinwire-publish"}
_RUN = "thinwire-run"
_MEMBERS = {FRAMES: "replica", FOLLOWING: "follower", PUBLISHING: "publisher"}


def stated(kind: str = FRAMES) -> tuple[tuple[str, str], ...]:
    """The metadata with this side's range."""
    return ((_KEYS[kind], str(RANGES[kind])),)


def stating_run(digest: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a control stream: the range, and the digest of the run that a member of a fixed group asks for; "": none."""
    return (*stated(), (_RUN, digest)) if digest else stated()


def stated_run(metadata: Any) -> str:
    """The digest that `stating_run` has put into `metadata`; "" if there is none."""
    return next((value for key, value in metadata or () if key == _RUN), "")


def states_range(metadata: Any, kind: str) -> bool:
    """Whether the hub has stated its range in `metadata`, which it does where the ranges meet."""
    return any(key == _KEYS[kind] for key, _ in metadata or ())


async def agreed_with_member(context: Any, kind: str = FRAMES) -> int:
    """The version for a call of a member, to which the hub states its range. Raises `PacketError`."""
    version = _agreed(kind, context.invocation_metadata(), "the hub speaks", f"the {_MEMBERS[kind]}")
    await context.send_initial_metadata(stated(kind))
    return version


async def agreed_with_hub(stream: Any, seconds: float, kind: str = FRAMES) -> int:
    """The version for a stream to the hub, which must be reached within `seconds`. Raises `Refused`, `Broken`."""
    try:
        async with asyncio.timeout(seconds):
            told = await stream.initial_metadata()
            if not states_range(told, kind):
                await check_open(stream)  # raises the hub's refusal
        return agreed_from(told, kind)
    except TimeoutError:
        raise Broken(f"the hub was not reached within {seconds:g} s") from None


def agreed_from(told: Any, kind: str) -> int:
    """The version for a call that the hub has answered with the metadata `told`. Raises `Refused`."""
    try:
        return _agreed(kind, told, f"this {_MEMBERS[kind]} speaks", "the hub")
    except PacketError as error:
        raise Refused(str(error)) from None


def _agreed(kind: str, metadata: Any, here: str, there: str) -> int:
    texts = [value for key, value in metadata or () if key == _KEYS[kind]]
    range_there = Protocols.parse(texts[0]) if len(texts) == 1 and isinstance(texts[0], str) else None
    version = newest_of_both(RANGES[kind], range_there) if range_there else None
    if version is None:
        raise PacketError(
            f"{here} {kind} {RANGES[kind]}, {there} {range_there or 'states none'}. Install one release on both, or one that speaks a "
            "version of each, and start them again"
        )
    return version
