"""The queue of outgoing messages: their order, how much is posted, and its end."""

from __future__ import annotations

import threading

import pytest
import torch

import thinwire as tw
from thinwire.exchange import SendContext, send_queue
from thinwire.exchange.chunks import Message


def test_the_round_that_lands_first_is_sent_first(monkeypatch):
    """Three rounds wait for a full window. The last of them lands first, so it is sent first."""
    monkeypatch.setattr(send_queue, "WINDOW_NBYTES", 100)
    left = []

    def replica(group):
        air = SendContext(group)
        gate = threading.Event()
        air.send_queue.put((0,), gate.wait)
        for name, lands in (("late", 9), ("later", 12), ("soon", 4), ("late too", 9)):
            air.send_queue.put((lands,), lambda name=name: left.append(name))
        gate.set()
        air.send_queue.put((99,), lambda: None).result()
        air.close()

    tw.run_threads(1, replica)
    assert left == ["soon", "late", "late too", "later"]


@pytest.mark.parametrize("window", [1, 16])
def test_messages_as_long_as_the_window_follow_without_a_gap(window, monkeypatch):
    """If they were posted one by one, a link would be idle for a delay between them. The next waits while a window is full."""
    monkeypatch.setattr(send_queue, "WINDOW_NBYTES", window)
    told = []

    class Told:
        rank, size = 0, 2

        def post(self, tag, send, recv, purpose="packet", sized=None):
            told.append(f"post {tag}")
            return type("Transfer", (), {"wait": lambda _: told.append(f"wait {tag}")})()

    box, packet = send_queue.SendQueue(Told()), torch.zeros(8, dtype=torch.uint8)
    sent = [send_queue.Outgoing(Message(0, 0, ()), packet, tag=tag, to=[1]) for tag in range(4)]
    for one in sent:
        box.send((), one, lambda one=one: one.written.set_result(None))
    box.put((), lambda: None).result()
    box.close()
    assert told == ["post 0", "post 1", "wait 0", "post 2", "wait 1", "post 3"]
    sent[0].wait_sent()  # a second wait, which does not reach the carrier
    assert told[-1] == "post 3"
    assert box.put((0,), lambda: told.append("after the end")).cancelled()


def test_the_end_of_a_queue_drops_waiting_jobs():
    """An error of a job is raised where its result is awaited, and the next job runs."""
    before = set(threading.enumerate())
    box, gate, begun, ran = send_queue.SendQueue(None), threading.Event(), threading.Event(), []

    def fails():
        raise OSError("of a job")

    def waits():
        begun.set()
        gate.wait()
        return 7

    with pytest.raises(OSError, match="of a job"):
        box.put((2,), fails).result()
    present = box.put((1,), waits)
    begun.wait()
    waiting = box.put((0,), lambda: ran.append("after the end"))
    assert len(set(threading.enumerate()) - before) == 1  # one job at a time
    box.close()
    assert waiting.cancelled() and not present.done()
    gate.set()
    box.close(wait=True)
    assert present.result() == 7 and not ran
