"""Coroutines that run side by side, such as the two directions of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_one_ends(*works: Coroutine[Any, Any, object]) -> list[Exception]:
    """Run all until one ends, cancel the others and wait for them. Returns the errors, in the order of `works`."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [end for end in ends if isinstance(end, Exception)]
