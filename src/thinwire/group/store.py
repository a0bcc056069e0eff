"""A board in torch's TCPStore.

How a TCPStore (torch 2.13) behaves, measured, and what follows:

* Of two `compare_set(key, "", value)` the first stays, and both are told it: that is what a board needs.
* A connection that broke never comes back, and an operation on a frozen store waits for ever, whatever its time-out.
  So each runs in a thread that is left behind at the deadline, and a connection that failed once is not used again:
  what was decided with one store cannot be asked of the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without saying so

from thinwire.errors import LinkError

T = TypeVar("T")
ANSWER = 5.0  # seconds for one operation


class StoreBoard:
    """A board in a TCPStore, over one connection: after its first failure, none of its answers can be had any more."""

    def __init__(self, store: TCPStore, litter: list[str]) -> None:
        self._store, self._litter, self._lost = store, litter, ""

    def put(self, key: str) -> None:
        self._do(lambda: self._store.set(key, "1"))

    def all(self, keys: Sequence[str]) -> bool:
        return bool(self._do(lambda: self._store.check(list(keys))))

    def settle(self, key: str, value: bytes) -> bytes:
        return bytes(self._do(lambda: self._store.compare_set(key, "", value.decode())))

    def wait(self, key: str, seconds: float) -> bytes | None:
        def wait() -> bytes | None:
            try:
                self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
            except dist.DistStoreError:  # it has not come
                return None
            return bytes(self._store.get(key))

        return self._do(wait, seconds)

    def forget(self, keys: Sequence[str]) -> None:
        self._litter.extend(keys)

    def get(self, key: str) -> bytes:
        return bytes(self._do(lambda: self._store.get(key)))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._do(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def connection(self) -> TCPStore:
        return self._store

    def _do(self, operation: Callable[[], T], seconds: float = 0.0) -> T:
        if self._lost:
            raise LinkError(self._lost)
        try:
            return within(seconds + ANSWER, "the store beside the lighthouse", operation)
        except LinkError as error:
            self._lost = str(error)
            raise


def within(seconds: float, what: str, operation: Callable[[], T]) -> T:
    """What `operation` returns; raises `LinkError` if torch fails, or has not come back after `seconds`."""
    outcome: list[T] = []
    failure: list[RuntimeError] = []

    def run() -> None:
        try:
            outcome.append(operation())
        except RuntimeError as error:  # torch's DistError and its kin
            failure.append(error)

    thread = threading.Thread(target=run, name="thinwire-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome:
        return outcome[0]
    if failure:
        error = failure.pop()  # else the list, the error and the frame of `run` would hold each other
        raise LinkError(f"{what}: {short(error)}") from error
    raise LinkError(f"{what}: no answer within {seconds:g} s")


def open_store(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER))


def short(error: BaseException) -> str:
    """What happened, in a line: gRPC's and torch's errors go on for many."""
    text = str(error).strip().split("\n")[0]
    return text.split('message: "')[-1].split('", details')[0] if "status:" in text else text
