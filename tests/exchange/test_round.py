"""The record of a round, by hand."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import thinwire as tw
from thinwire.comm import Group
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import Message
from thinwire.exchange.send_queue import Outgoing
from thinwire.rng import Key


def a_round(group: Group, clock=lambda: 10.0) -> Round:
    return Round(SendContext(group, clock), tw.codecs.Identity(), 4, Key(), lambda begin, end: torch.zeros(end - begin))


def outgoing() -> Outgoing:
    return Outgoing(Message(0, 0, ()), torch.empty(0))


def test_a_rounds_own_failure_is_found():
    def replica(group):
        round_, failure = a_round(group), ValueError("of the encoder")
        pending, cancelled, written, failed = (outgoing() for _ in range(4))
        cancelled.written.cancel()
        written.written.set_result(None)
        round_.outgoing += [pending, cancelled, written]
        assert round_.own_failure() is None
        failed.written.set_exception(failure)
        round_.outgoing.append(failed)
        assert round_.own_failure() is failure
        round_.context.close()

    tw.run_threads(1, replica)


def test_a_packet_is_over_when_the_carrier_has_taken_it():
    waits, queued, (first, second, third) = [], [Future[None]() for _ in range(3)], (outgoing() for _ in range(3))
    for one, posted in zip((first, second, third), queued):
        one.leaves_with(posted)
    queued[0].cancel()
    with pytest.raises(CancelledError):  # by the queue's end: it is never written
        first.wait()
    for one in (second, third):
        one.written.set_result(None)
        one.transfer = SimpleNamespace(wait=lambda: waits.append("sent"))
    queued[1].set_exception(OSError("of the carrier"))
    assert second.wait() is second.packet
    with pytest.raises(OSError, match="of the carrier"):
        second.wait_sent()
    queued[2].set_result(None)
    third.wait_sent()
    third.wait_taken()  # a second wait, which does not reach the carrier
    assert waits == ["sent"] and third.flags == 0


def test_a_round_gives_its_packets_back_when_all_are_sent():
    """If a peer does not take one, the buffers may still be read, and the trace names the peer."""

    def replica(group):
        for peer in (None, 2):
            round_, one = a_round(group), outgoing()
            refused = []
            round_.packets.append(round_.context.buffers.bytes(7))
            assert (round_.flags, round_.order, round_.step) == (0, (), 0)
            round_.outgoing.append(one)
            one.written.set_result(None)
            if peer is None:
                round_.close()
            else:
                gone = tw.LinkError("gone")
                gone.peer = peer
                one.transfer = SimpleNamespace(wait=Mock(side_effect=gone))
                round_.trace.not_taken = refused.append
                with pytest.raises(tw.LinkError, match="gone"):
                    round_.close()
            assert refused == ([] if peer is None else [peer])
            assert bool(round_.packets) == bool(round_.context.buffers._lent) == (peer is not None)
            round_.context.close()

    tw.run_threads(1, replica)


def test_round_times_are_the_carriers():
    def sent(packet, posted, queued, seconds):
        packet.posted = posted
        packet.transfer = SimpleNamespace(queued_seconds=queued, transfer_seconds=seconds)

    def replica(group):
        round_ = a_round(group)
        assert round_.remembers({}) == {}
        after = round_.remembers({"kept": torch.zeros(3)})  # one state for all ranges
        assert after["kept"].numel() == 3 and round_.remembers({"kept": torch.zeros(3)}) is after
        round_.outgoing += [outgoing() for _ in range(4)]
        sent(round_.outgoing[1], 11.0, 0.0, 0.0)  # by a carrier that does not know the times
        assert round_.times() == (0.0, 0.0)
        sent(round_.outgoing[2], 12.0, 3.0, 4.0)
        sent(round_.outgoing[3], 13.0, 1.0, 2.0)
        assert round_.times() == (4.0, 5.0)  # the first bit left at 14, the last arrived at 19
        assert (round_.rank, round_.size, round_.peers) == (0, 1, [])
        round_.context.close()

    tw.run_threads(1, replica)
