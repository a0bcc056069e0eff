"""Levels by deadlines: on an uplink whose rate changes, in virtual time, and in the rounds of a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from thinwire.codecs import E3M0, Cast, Int, Levelled, Sign, TopK
from thinwire.comm.group import WrappedGroup
from thinwire.errors import PacketError
from thinwire.pieces.schedule import Staggered
from thinwire.rng import Key
from thinwire.runtime.deadlines import Deadlines
from thinwire.simulate.deadlines import RateTrace, fixed, observed, oracle, play
from thinwire.testing.strategies import all_agree
from thinwire.testing.toy import Journey, Plan, travel

LEVELS = Levelled((Int(8), E3M0(32), Sign(block=512)))
SIZES = [[8000, 4250, 1060]] * 4
SCHEDULE = Staggered(every=20, delay=4)
STEP = 0.1


def played(trace: RateTrace, choose=None, steps: int = 400):
    known = Deadlines()
    return play(trace, SCHEDULE, SIZES, steps, STEP, choose or observed(known), known)


@pytest.mark.parametrize("delay", [0.0, 0.15])
def test_levels_follow_a_rate_that_falls_and_recovers(delay):
    """A round may take 0.4 s. At first all levels fit, then only the one of a ninth, then all again."""
    trace = RateTrace((0.0, 12.0, 26.0), (1e6, 40e3, 1e6), delay)
    ours, full, known = played(trace), played(trace, fixed(0)), played(trace, oracle(trace))
    assert full.stall_seconds > 5 and known.stall_seconds == 0, "the trace is one that matters"
    assert len(ours.stalls) <= 1, "what was on its way when the rate fell is late, and nothing after it"
    assert ours.utilization > 0.95 > full.utilization
    levels = [
        level for _, level in sorted((number, level) for (index, number), level in ours.levels.items() if index == 0)
    ]
    assert levels[0] == 0 and 2 in levels and levels[-1] == 0, "it goes down, and up again"


def test_levels_stay_finest_while_rounds_arrive_in_time():
    for delay in (0.0, 0.3):
        assert set(played(RateTrace((0.0,), (2e6,), delay)).levels.values()) == {0}
    assert set(played(RateTrace((0.0,), (1.0,)), steps=60).levels.values()) == {0, 2}, "nothing arrives: the coarsest"


def test_a_round_waits_for_the_rounds_before_it():
    known = Deadlines()
    known.landed(1000, 1.0)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.9)
    known.departed(0.0, 500)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.4) and known.share(2.0, 1000, 3.0) == pytest.approx(0.9)


def test_the_estimate_separates_delay_from_rate():
    known = Deadlines()
    for nbytes, seconds in ((8000, 1.0), (1000, 0.3)):  # 0.2 s of delay, and 1 s for 10,000 bytes
        known.landed(nbytes, seconds)
    assert known.share(0.0, 8000, 1.0 / 0.9) == pytest.approx(1.0)

    for larger, due in ((1200, 0.5), (1500, 0.0)):  # the sizes are too similar to separate; then 0.85 s of the others
        known = Deadlines()
        for nbytes, seconds in ((larger, 1.0), (1000, 0.95)):
            known.landed(nbytes, seconds)
        assert known.share(0.0, 1000, 0.475 / 0.9) == pytest.approx(due)

    known = Deadlines()
    for nbytes, seconds in ((8000, 0.8), (1000, 0.1), *((8000, 1.7), (1000, 0.3)) * 4):
        known.landed(nbytes, seconds)
    assert known.share(0.0, 1000, 0.15 / 0.9) == pytest.approx(0.5), "a pair of the last eight had no such time"
    known.landed(8000, 1.7)
    assert known.share(0.0, 1000, 0.2 / 0.9) == pytest.approx(0.5), "all eight had 0.1 s"


def test_a_round_that_takes_no_time_is_estimated():
    known = Deadlines()
    known.landed(1000, 0.0)
    assert known.share(1.0, 1000, 1.0) == 1.0 and known.share(1.0, 1000, 0.9) == 0.0


# ---- on the wire


def test_truncated_payloads_and_unknown_levels_are_refused():
    x = torch.linspace(-1, 1, 100)
    payload = torch.empty(LEVELS.nbytes(100), dtype=torch.uint8)
    for level, share in enumerate((1.0, 0.8, 0.0)):
        used = LEVELS.within(share, 100).encode(x, payload, Key())
        assert payload[0] == level and used == 1 + LEVELS.codecs[level].nbytes(100)
        out, plain = torch.zeros(100), torch.zeros(100)
        LEVELS.decode_add(payload[:used], out, Key())
        LEVELS.codecs[level].decode_add(payload[1:used], plain, Key())
        assert torch.equal(out, plain)
        with pytest.raises(PacketError, match="level"):
            LEVELS.decode_add(payload[: used - 1], out, Key())
    payload[0] = 3
    with pytest.raises(PacketError, match="level 3"):
        LEVELS.decode_add(payload, out, Key())
    with pytest.raises(PacketError, match="level"):
        LEVELS.decode_add(payload[:0], out, Key())


@pytest.mark.parametrize("codecs", [(), (E3M0(),), (E3M0(), Int(8)), (E3M0(), "Sign()"), (E3M0(), LEVELS)])
def test_invalid_levels_are_refused(codecs):
    with pytest.raises(tw.ConfigurationError, match="Levelled"):
        Levelled(codecs)


def test_levels_declare_the_properties_of_their_codecs():
    drawn = Levelled((Int(8, 8, "fp32", "stochastic"), Int(4, 8, "fp32", "stochastic")))
    assert LEVELS.claims == {"contractive", "refuses"} and drawn.claims == {"odd", "unbiased", "refuses"}
    assert LEVELS.grain == 512 and Levelled((Cast("bf16"), TopK(0.1))).grain is None
    assert [part.nbytes for part in replace(LEVELS, level=2).layout(100)] == [1 + LEVELS.codecs[2].nbytes(100)]
    many = tuple(Int(8, block=block) for block in range(1, 258))
    assert Levelled(many[:256]).codecs[255] == many[255]
    with pytest.raises(tw.ConfigurationError, match="from 2 to 256 codecs are needed"):
        Levelled(many)
    with pytest.raises(tw.ConfigurationError, match="for 1,048,576 values"):
        Levelled(LEVELS.codecs[::-1])


class Slow(WrappedGroup):
    """Reports that its messages take long, without taking any time."""

    class Sent:
        queued_seconds, transfer_seconds = 0.0, 1e6

        def __init__(self, transfer) -> None:
            self.transfer, self.wait = transfer, transfer.wait

        @property
        def arrivals(self):
            return self.transfer.arrivals

    def post(self, tag, send, recv, purpose="packet", sized=None):
        transfer = self.group.post(tag, send, recv, purpose, sized)
        return self.Sent(transfer) if send and purpose == "packet" else transfer


@pytest.mark.parametrize(
    "exchange", [tw.exchange.Direct(), tw.exchange.TwoShot(tw.pieces.feedback.Feedback())], ids=str
)
def test_a_late_replica_sends_less_and_all_replicas_agree(exchange):
    """Only replica 1 has a slow link and a lower level. Its feedback keeps what that level loses."""
    codec = Levelled((Int(8), E3M0(8), Sign(block=64)))
    strategy = tw.streaming_sign(every=4, delay=2, fragments=2, codec=codec, exchange=exchange)
    ticks = [0.0, 0.0]

    def replica(group: tw.Group) -> Journey:
        def clock() -> float:
            return ticks[group.rank]

        def tick(replica: tw.Replica, step: int) -> None:
            ticks[group.rank] = float(step)

        slow = group.rank == 1
        wrap = Slow if slow else lambda group: group
        return travel(Plan(strategy, steps=24, wrap=wrap, before_step=tick, clock=clock), group)

    journeys = tw.run_threads(2, replica, timeout=600.0)
    all_agree(journeys)
    sizes = [[event["nbytes"] for event in one.heard("flight") if event["fragment"] == 1] for one in journeys]
    foreseen = [event["nbytes"] for event in journeys[1].heard("depart") if event["fragment"] == 1]
    assert sizes[1][0] == sizes[0][0] == foreseen[0], "nothing is known yet"
    assert all(size == min(sizes[1]) < foreseen[0] for size in sizes[1][1:-1]), "the coarsest"
    assert all(one <= most for one, most in zip(sizes[1], foreseen)), "law 5: no more than foreseen"
    assert torch.isfinite(journeys[0].final).all()
