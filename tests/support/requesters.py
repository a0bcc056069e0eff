"""Replicas that send requests to a registry by hand, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from thinwire.membership.registry import MemberRegistry


class Requester:
    """A replica that sends requests. A wait ends at once, or if `patient` when its event has come; `waits` lists the allowed seconds."""

    def __init__(self, name: str, incarnation: str = "", patient: bool = True) -> None:
        self.name, self.incarnation, self.address, self.patient = (
            name,
            incarnation or f"{name}-1",
            f"at {name}",
            patient,
        )
        self.waits = list[float]()

    async def came(self, future: asyncio.Future[Any], seconds: float) -> bool:
        self.waits.append(seconds)
        if self.patient:
            await asyncio.wait([future])
        return future.done()


class Gone(Requester):
    """A requester whose connection ends once `ends` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ends = asyncio.Event()

    async def came(self, future: asyncio.Future[Any], seconds: float) -> bool:
        await self.ends.wait()
        raise ConnectionError


async def turns() -> None:
    """Lets all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def calls(registry: MemberRegistry, *requesters: Requester) -> list[asyncio.Future[dict[str, Any]]]:
    said = {"do": "call", "presence": "status", "seconds": 99}
    return [asyncio.ensure_future(registry.answer(one, said)) for one in requesters]


def names(told: dict[str, Any]) -> list[str]:
    return [name for name, *_ in told["present"]]


def ask(registry: MemberRegistry, requester: Requester, do: str, **fields: Any) -> dict[str, Any]:
    return asyncio.run(registry.answer(requester, {"do": do, "members": [], **fields}))
