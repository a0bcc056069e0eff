"""A fixture that makes the send queue run its calls at once, so that a replica is one thread."""

from __future__ import annotations

import threading

import pytest
from diagnosis_play import Inline

from thinwire.exchange import send_queue


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "ThreadPoolExecutor", lambda *_: Inline())
    monkeypatch.setattr(send_queue.threading, "Lock", threading.RLock)
