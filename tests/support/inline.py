"""A fixture that makes the send queue run its calls at once, so that a replica is one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from thinwire.exchange import send_queue


class Inline(Executor):
    """Runs submitted calls at once, in the thread that submits them."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...

    def close(self, wait: bool = False, cancel: bool = False) -> None: ...


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "JobThread", Inline)
    monkeypatch.setattr(send_queue.threading, "Lock", threading.RLock)
