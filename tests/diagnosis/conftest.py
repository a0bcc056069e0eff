"""Tests of the diagnosis: what the outbox does is done at once, so that a replica is one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from thinwire.exchange import outbox


class Inline(Executor):
    """Runs at once what is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "ThreadPoolExecutor", lambda *_: Inline())
    monkeypatch.setattr(outbox.threading, "Lock", threading.RLock)
