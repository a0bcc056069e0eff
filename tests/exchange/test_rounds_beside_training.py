"""Rounds beside training: what is sent first, how much is posted, what overlaps, and that a steady round allocates nothing."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from strategies import METHODS, each

import thinwire as tw
from thinwire.exchange import Round, SendContext, send_queue
from thinwire.rng import Key
from thinwire.testing.exchanges import deltas, rounds
from thinwire.testing.toy import batch, inner_step, journey, own, toy, validation


class Slow:
    """A group that records each post, and completes messages only later."""

    def __init__(self, group, seconds):
        self.group, self.rank, self.size, self.seconds, self.posts = group, group.rank, group.size, seconds, []
        self.close = group.close

    def post(self, tag, send, recv, purpose="packet", sized=None):
        if send and purpose == "packet":
            self.posts.append((time.monotonic(), next(iter(send.values()))))
        transfer = self.group.post(tag, send, recv, purpose, sized)
        return _Slow(transfer, time.monotonic() + self.seconds if send and purpose == "packet" else 0.0)


class _Slow:
    queued_seconds = transfer_seconds = 0.0

    def __init__(self, transfer, until):
        self.transfer, self.until = transfer, until

    @property
    def arrivals(self):
        return self.transfer.arrivals

    def wait(self):
        time.sleep(max(0.0, self.until - time.monotonic()))
        self.transfer.wait()


@pytest.mark.parametrize("window", [50, 200])
def test_no_more_than_a_window_is_posted(monkeypatch, small, window):
    """A message is posted when all earlier ones, except a window and one more, are complete. So later rounds can overtake, and a
    link is not idle for a delay between two messages longer than the window.
    """
    monkeypatch.setattr(send_queue, "WINDOW_NBYTES", window)
    seen = {}

    def wrap(group):
        seen[group.rank] = Slow(group, 0.03)
        return seen[group.rank]

    # eight messages of 112 bytes; two fit into the window
    rounds(tw.exchange.Direct(), tw.codecs.Identity(), deltas(2, 128), wrap)
    times = [at for at, _ in seen[0].posts]
    assert len(times) == 8 and times[-1] - times[0] > 0.08


def test_encoding_sending_and_decoding_of_chunks_overlap(small):
    """The first chunk is decoded before the last is encoded, so encoding, sending and decoding overlap."""
    waited = []

    def replica(group):
        air, x, encoded, settled = SendContext(group), torch.randn(400), [], threading.Event()

        class Telling(tw.codecs.Identity):
            def encode(self, x, payload, key):
                encoded.append(x.numel())
                if sum(encoded) == 400:
                    waited.append(settled.wait(600.0))
                super().encode(x, payload, key)

        round_ = Round(air, Telling(), 400, Key(sender=group.rank), lambda begin, end: x[begin:end])
        for _ in tw.exchange.Direct().arrive(tw.exchange.Direct().depart(round_, {})):
            settled.set()
        round_.close()
        air.close()

    tw.run_threads(2, replica)
    assert waited == [True, True]


@pytest.mark.parametrize("name", each(METHODS))
def test_a_steady_round_allocates_no_buffer(name):
    """Over many rounds, the number of buffers as large as the fragment does not grow (how many rounds overlap is chance)."""
    counts, strategy, model = [], METHODS[name], toy()
    optimizer = own(strategy, model)
    (group,) = tw.ThreadGroup.create(1)
    with tw.Replica(strategy, model, optimizer, group, validation=validation(model)) as replica:
        buffers = replica._driver._flights.buffers
        inner_step(model, optimizer, *batch(0, 0, 1))
        for _ in range(100):
            optimizer.step()  # always with the same gradients: what is trained does not matter here
            counts.append(len(buffers._lent) + sum(map(len, buffers._free.values())))
    assert counts[-1] <= counts[49] + 10, counts


def test_an_encoder_failure_is_raised_and_not_its_consequence():
    class Broken(tw.codecs.E3M0):
        def encode(self, x, payload, key):
            raise RuntimeError("a bug in an encoder")

    for exchange in (tw.exchange.Direct(), tw.exchange.TwoShot()):
        with pytest.raises(RuntimeError, match="a bug in an encoder"):  # at once, not when the group times out
            journey(tw.Strategy(codec=Broken(), exchange=exchange), 2, steps=2)
