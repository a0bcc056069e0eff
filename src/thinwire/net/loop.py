"""The thread of a process for all of its gRPC calls, which exists while it has users."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a separate thread. `shared` returns the process's loop; `release` ends it after its last user."""

    _lock = threading.Lock()
    _one: LoopThread | None = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._users = 0
        self._thread = threading.Thread(target=self._run, name="thinwire-secure", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> LoopThread:
        """The loop of this process, with one more user."""
        with cls._lock:
            if cls._one is None:
                cls._one = cls()
            cls._one._users += 1
            return cls._one

    def release(self) -> None:
        """Count one user less. After the last user the thread has ended on return."""
        with LoopThread._lock:
            self._users -= 1
            if self._users:
                return
            LoopThread._one = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run `work` in the loop, and wait for it from another thread. After `seconds`, cancel it and raise `TimeoutError`."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
