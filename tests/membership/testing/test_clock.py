"""Virtual time moves to the next event only while no thread is busy."""

from __future__ import annotations

import threading

import pytest

from thinwire.membership.testing.clock import VirtualTime


def test_actions_and_waits_end_at_their_virtual_times():
    time, seen = VirtualTime(), []
    with time:
        time.enter("a")
        for what, seconds in (("late", 3.0), ("first", 1.0), ("second", 1.0)):
            time.after(seconds, lambda what=what: seen.append((what, time.now)))
        assert not time.wait_for("a", lambda: False, 2.0) and time.now == 2.0
        assert seen == [("first", 1.0), ("second", 1.0)]
        time.after(0.5)
        assert time.wait_for("a", lambda: time.now > 2.0) and time.now == 2.5
        assert time.wait_for("a", lambda: len(seen) == 3, 9.0) and time.now == 3.0
        assert time.wait_for("a", lambda: True, 0.0) and not time.wait_for("a", lambda: False, 0.0) and time.now == 3.0
        with pytest.raises(RuntimeError, match="a wait for each other, for ever"):
            time.wait_for("a", lambda: False)
        assert not time._waits


def test_virtual_time_stops_while_a_thread_is_busy():
    """a and c wait while b is busy. Then c sees the state at its own time, although others wait for a later one."""
    time, seen, flag = VirtualTime(), [], []

    def waits(name, times):
        with time:
            for seconds in times:
                time.wait_for(name, lambda: name == "c" and bool(flag), seconds)
                seen.append((name, time.now))
            time.leave(name)

    with time:
        for name in "abc":
            time.enter(name)
        time.after(1.0, lambda: flag.append(True))
    threads = {name: threading.Thread(target=waits, args=(name, times)) for name, times in
               (("a", [5.0]), ("b", [2.0, 4.0]), ("c", [None]))}  # fmt: skip
    threads["a"].start()
    threads["c"].start()
    for _ in range(60_000):
        with time:
            if len(time._waits) == 2:
                break
        threading.Event().wait(0.01)
    assert len(time._waits) == 2 and time.now == 0.0 and not seen
    threads["b"].start()
    for thread in threads.values():
        thread.join(600.0)
    assert seen == [("c", 1.0), ("b", 2.0), ("a", 5.0), ("b", 6.0)]
