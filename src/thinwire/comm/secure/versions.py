"""The version of the frames of a connection: the newest that both the member and the hub speak.

Both state their range when a stream begins, in the metadata of gRPC, before any frame: so a frame of any version is read as what it is.
"""

from __future__ import annotations

import asyncio
from typing import Any

from thinwire.comm.secure.calls import Broken, Refused, read
from thinwire.errors import PacketError
from thinwire.version import HUB_FRAMES, Protocols, newest_of_both

_KEY = "thinwire-frames"


def stated() -> tuple[tuple[str, str], ...]:
    """The metadata with this side's range."""
    return ((_KEY, str(HUB_FRAMES)),)


async def agreed_with_member(context: Any) -> int:
    """The version for a stream of a member, to which the hub states its range. Raises `PacketError`."""
    version = _agreed(context.invocation_metadata(), "the hub speaks", "the replica")
    await context.send_initial_metadata(stated())
    return version


async def agreed_with_hub(stream: Any, seconds: float) -> int:
    """The version for a stream to the hub, which must be reached within `seconds`. Raises `Refused`, `Broken`."""
    try:
        async with asyncio.timeout(seconds):
            told = await stream.initial_metadata()
            if all(key != _KEY for key, _ in told or ()):
                await read(stream)  # raises the hub's refusal
        return _agreed(told, "this replica speaks", "the hub")
    except TimeoutError:
        raise Broken(f"the hub was not reached within {seconds:g} s") from None
    except PacketError as error:
        raise Refused(str(error)) from None


def _agreed(metadata: Any, here: str, there: str) -> int:
    texts = [value for key, value in metadata or () if key == _KEY]
    range_there = Protocols.parse(texts[0]) if len(texts) == 1 and isinstance(texts[0], str) else None
    version = newest_of_both(HUB_FRAMES, range_there) if range_there else None
    if version is None:
        raise PacketError(
            f"{here} frames {HUB_FRAMES}, {there} {range_there or 'states none'}. Install one release on both, or one that speaks a "
            "version of each, and start them again"
        )
    return version
