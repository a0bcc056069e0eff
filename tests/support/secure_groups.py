"""Replicas over a hub as threads of one process, each with its own key and connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from group_laws import TIMEOUT

from thinwire.comm.secure import Hub, SecureGroup, Token, join


def run_secure(
    hub: Hub | Token,
    size: int,
    fn: Callable[[SecureGroup], Any],
    folder: Path,
    prefix: str = "replica",
    run: str = "",
    listens: Mapping[int, tuple[str, str]] = {},
) -> list[Any]:
    """Runs `fn(group)` on `size` replicas that join `hub`. Returns the results in rank order, or raises the first error.

    `listens` has the `listen` and `address` of the replicas that open a port, by index, which is the rank if `hub` is a token.
    """
    token = hub.invite(size) if isinstance(hub, Hub) else hub
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def replica(index: int) -> None:
        name = f"{prefix}-{threading.get_native_id()}-{index}" if isinstance(hub, Hub) else f"{prefix}-{index}"
        try:
            at = listens.get(index, ("", ""))
            with join(str(token), name, size, folder, run or str(token), TIMEOUT, None, 0, *at) as group:
                results[group.rank] = fn(group)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=replica, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
