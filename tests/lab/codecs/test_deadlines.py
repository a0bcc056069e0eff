"""Levels by deadlines: on an uplink whose rate changes, in virtual time, and in the rounds of a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from thinwire.codecs import E3M0, Cast, Identity, Int, Sign, TopK
from thinwire.codecs.base import may_skip
from thinwire.comm.group import WrappedGroup
from thinwire.comm.rates import RateTrace
from thinwire.errors import NonFiniteError, PacketError
from thinwire.lab.codecs.deadlines import Deadlines
from thinwire.lab.codecs.entropy import Entropy
from thinwire.lab.codecs.levelled import Levelled
from thinwire.lab.simulate.deadlines import fixed, observed, oracle, play
from thinwire.pieces.partition import Whole
from thinwire.pieces.schedule import Staggered
from thinwire.rng import Key
from thinwire.testing.strategies import all_agree
from thinwire.testing.toy import Journey, Plan, travel

NOTHING = torch.zeros(0, dtype=torch.uint8), Key()
LEVELS = Levelled((Int(8), E3M0(32), Sign(block=512)))
SIZES = [[8000, 4250, 1060]] * 4
SCHEDULE = Staggered(every=20, delay=4)
STEP = 0.1


def played(trace: RateTrace, choose=None, steps: int = 400, skips: int = 0):
    known = Deadlines()
    sizes = [[*of, 49] for of in SIZES] if skips else SIZES
    return play(trace, SCHEDULE, sizes, steps, STEP, choose or observed(known), known, skips)


KNOWN = (2000, 2.0), (1000, 1.0)  # 1000 bytes a second, and no delay


def arrived(known: Deadlines, *rounds: tuple[int, float]) -> Deadlines:
    for nbytes, seconds in rounds:
        known.arrived("a round", 0.0, nbytes, seconds)
    return known


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
    assert levels[0] == 2 and levels[2] == 0 and 2 in levels[2:-1] and levels[-1] == 0, "up, down, and up again"


def test_levels_are_finest_while_rounds_arrive_in_time():
    """First rounds have the coarsest; where the delay is long, the next tells it from the rate."""
    for delay, first in ((0.0, [2, 2, 2, 2, 0]), (0.3, [2, 2, 2, 2, 1])):
        levels = [*played(RateTrace((0.0,), (2e6,), delay)).levels.values()]
        assert levels[:5] == first and set(levels[5:]) == {0}
    assert set(played(RateTrace((0.0,), (1.0,)), steps=60).levels.values()) == {2}, "nothing arrives: the coarsest"
    assert Deadlines().share(0.0, 1000, 1.0) == 1.0, "nothing is known, as after a resume"


def test_rounds_are_skipped_where_no_level_fits_and_no_more_in_a_row_than_allowed():
    """From 12 s to 26 s even the coarsest level takes 0.85 s; a round must take at most 0.4 s."""
    trace = RateTrace((0.0, 12.0, 26.0), (1e6, 10e3, 1e6))
    coarse, ours = played(trace), played(trace, skips=2)
    assert ours.stall_seconds < coarse.stall_seconds - 1.5 and len(ours.stalls) < len(coarse.stalls)
    for index in range(len(SIZES)):
        skipped = "".join(str(level // 3) for (of, _), level in ours.levels.items() if of == index)
        assert "111" not in skipped and skipped[:2] == "00" and skipped[-1] == "0"
    assert list(ours.levels.values()).count(3) > 10


def test_a_round_waits_for_the_rounds_before_it():
    known = arrived(Deadlines(), *KNOWN)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.9)
    known.departed("b", 0.0, 500)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.4)
    assert known.share(0.25, 1000, 1.25) == pytest.approx(0.65), "half of it has left"
    known.arrived("b", 0.5, 500, 0.5)
    assert known.share(2.0, 1000, 3.0) == pytest.approx(0.9)


def test_a_round_that_is_overdue_lowers_the_estimate():
    known = arrived(Deadlines(), *KNOWN)
    known.departed("b", 0.0, 500)
    known.departed("c", 0.0, 500)
    assert known.share(1.0, 1000, 3.0) == pytest.approx(0.4), (
        "the first of two has taken twice as long, so the other will"
    )
    known.arrived("b", 2.0, 500, 2.0)
    known.arrived("c", 4.0, 500, 2.0)
    assert known.share(4.0, 1000, 14.0) == pytest.approx(9.0 / 4.0), "the slowest of the last four"
    known = arrived(known, *KNOWN * 2)
    assert known.share(4.0, 1000, 5.0) == pytest.approx(0.9)


def test_a_larger_round_is_sent_until_delay_and_rate_are_known():
    known = arrived(Deadlines(), (1000, 0.8))
    assert known.share(0.0, 10_000, 1.0) == 0.5, "five times the last"
    assert known.share(0.0, 10_000, 0.8) == pytest.approx(0.09), "the last would be late"
    for nbytes, due in ((1499, 0.5), (1500, 0.3)):
        known.departed("b", 0.0, nbytes)
        assert known.share(0.0, 10_000, 4.0) == pytest.approx(due), "one is on its way, of a size that tells them apart"
    assert arrived(Deadlines(), (1024, 1.0)).share(0.0, 8192, 1.0 / 0.9) == 0.625, "the last would be just in time"


def test_late_rounds_lower_the_share_of_the_time_that_is_used():
    known = arrived(Deadlines(), *KNOWN)
    known.landed(late=True)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.63)
    known.landed(late=False)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.633)
    for _ in range(9):
        known.landed(late=True)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.3)
    for _ in range(300):
        known.landed(late=False)
    assert known.share(0.0, 1000, 1.0) == pytest.approx(0.9)


def test_the_estimate_separates_delay_from_rate():
    known = arrived(Deadlines(), (8000, 1.0), (1000, 0.3))  # 0.2 s of delay, and 1 s for 10,000 bytes
    assert known.share(0.0, 8000, 1.0 / 0.9) == pytest.approx(1.0)
    known.arrived("skipped", 0.0, 49, 0.2049, values=False)
    assert known.share(0.0, 8000, 1.0 / 0.9) == pytest.approx(1.0), "few bytes tell nothing of the rate"
    known.departed("b", 1.0, 1000)
    assert known.share(1.15, 8000, 1.15 + 1.0 / 0.9) == pytest.approx(1.0), "its bytes have left, and the delay remains"

    for larger, due in ((1200, 0.5), (1500, 0.0)):  # the sizes are too similar to separate; then 0.85 s of the others
        known = arrived(Deadlines(), (larger, 1.0), (1000, 0.95))
        assert known.share(0.0, 1000, 0.475 / 0.9) == pytest.approx(due)

    known = arrived(Deadlines(), (8000, 0.8), (1000, 0.1), *((8000, 1.7), (1000, 0.3)) * 4)
    assert known.share(0.0, 1000, 0.6 / 0.9) == pytest.approx(2.0), "a pair of the last eight had no such time"
    known = arrived(known, (8000, 1.7))
    assert known.share(0.0, 1000, 0.6 / 0.9) == pytest.approx(2.5), "all eight had 0.1 s"


def test_a_round_that_takes_no_time_is_estimated():
    known = arrived(Deadlines(), (1000, 0.0))
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


def test_a_skipped_round_is_a_byte_that_adds_nothing():
    skipping = replace(LEVELS, skips=2)
    assert skipping.claims == LEVELS.claims
    levels = [skipping.within(0.0, 100, skipped).level for skipped in range(4)]
    assert replace(LEVELS, skips=1).within(0.0, 100).level == 3
    assert levels == [3, 3, 2, 2] and LEVELS.within(0.0, 100).level == 2
    payload = torch.ones(skipping.nbytes(100), dtype=torch.uint8)
    assert skipping.within(0.0, 100).encode(torch.ones(100), payload, Key()) == 1 and payload[0] == 3 == payload.sum()
    out = torch.arange(100.0)
    skipping.decode_add(payload[:1], out, Key())
    assert torch.equal(out, torch.arange(100.0))
    payload[0] = 4
    with pytest.raises(PacketError, match="level 4"):
        skipping.decode_add(payload, out, Key())
    with pytest.raises(NonFiniteError):
        skipping.within(0.0, 100).encode(torch.full((100,), torch.nan), payload, Key())


@pytest.mark.parametrize("skips", [-1, 256, True, 1.0])
def test_invalid_numbers_of_skips_are_refused(skips):
    assert replace(LEVELS, skips=255).skips == 255
    with pytest.raises(tw.ConfigurationError, match="skips"):
        replace(LEVELS, skips=skips)


def test_the_level_is_that_of_a_codec_or_one_more_where_rounds_are_skipped():
    """Receivers do not need to know it, so it is no part of what makes two codecs equal."""
    assert [replace(LEVELS, level=level).level for level in range(3)] == [0, 1, 2]
    assert replace(LEVELS, skips=1, level=3) == replace(LEVELS, skips=1) and LEVELS.level == LEVELS.skips == 0
    assert str(replace(LEVELS, level=2)) == str(LEVELS) and hash(replace(LEVELS, level=2)) == hash(LEVELS)
    assert LEVELS.varies and not LEVELS.biased and LEVELS.nbytes(0) == 0 == LEVELS.encode(torch.zeros(0), *NOTHING)
    for skips, level in ((0, -1), (0, 3), (1, 4)):
        with pytest.raises(tw.ConfigurationError, match="each level must have fewer"):
            replace(LEVELS, skips=skips, level=level)


def test_skipping_needs_a_feedback_that_keeps_the_delta():
    skipping = replace(LEVELS, skips=2)
    with pytest.raises(tw.ConfigurationError, match="a skipped delta would be lost"):
        tw.streaming_sign(codec=skipping, feedback=None)
    with pytest.raises(tw.ConfigurationError, match="a mean that its owner skips would be lost"):
        tw.streaming_sign(codec=skipping, exchange=tw.exchange.TwoShot())
    tw.streaming_sign(codec=skipping, exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()))
    assert [may_skip(codec) for codec in (skipping, LEVELS, Entropy(E3M0()), Sign())] == [True, False, False, False]


@pytest.mark.parametrize("codecs", [(), (E3M0(),), (E3M0(), Int(8)), (E3M0(), "Sign()"), (E3M0(), LEVELS)])
def test_invalid_levels_are_refused(codecs):
    with pytest.raises(tw.ConfigurationError, match="Levelled"):
        Levelled(codecs)


class Padded(Identity):
    """It sends as many bytes again."""

    def nbytes(self, numel: int) -> int:
        return 8 * numel


def test_levels_declare_the_properties_of_their_codecs():
    drawn = Levelled((Int(8, 8, "fp32", "stochastic"), Int(4, 8, "fp32", "stochastic")))
    assert LEVELS.claims == {"contractive", "refuses"} and drawn.claims == {"odd", "unbiased", "refuses"}
    assert replace(drawn, skips=1).claims == {"odd", "drawn", "refuses"}, "values are unbiased only where all are sent"
    mixed = Levelled((Cast(), drawn.codecs[0], Sign(block=512)), skips=0)
    assert [replace(mixed, level=level).claims for level in range(3)] == [
        {"refuses"},
        {"refuses", "unbiased"},
        {"refuses"},
    ]
    assert [sum(part.nbytes for part in mixed.layout(numel)) for numel in (0, 1)] == [0, 3]
    exact = Levelled((Padded(), Identity()))
    assert exact.claims - replace(exact, skips=1).claims == {"exact"}
    assert LEVELS.grain == 512 and Levelled((Cast("bf16"), TopK(0.1))).grain is None
    assert [part.nbytes for part in replace(LEVELS, level=2).layout(100)] == [1 + LEVELS.codecs[2].nbytes(100)]
    many = tuple(Int(8, block=block) for block in range(1, 258))
    assert Levelled(many[:256]).codecs[255] == many[255]
    with pytest.raises(tw.ConfigurationError, match="from 2 to 256 codecs are needed"):
        Levelled(many)
    with pytest.raises(tw.ConfigurationError, match="one fewer"):
        Levelled(many[:256], skips=1)
    with pytest.raises(tw.ConfigurationError, match=r"\[139264, 557056, 1056768\] bytes for 1,048,576 values"):
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
@pytest.mark.parametrize("skips", [0, 2])
def test_a_late_replica_sends_less_and_all_replicas_agree(exchange, skips):
    """Only replica 1 has a slow link, and a lower level. Its feedback keeps what that level loses."""
    codec = Levelled((Int(8), E3M0(8), Sign(block=64)), skips=skips)
    strategy = tw.streaming_sign(every=4, delay=2, fragments=2, codec=codec, exchange=exchange)
    ticks = [0.0, 0.0]

    def replica(group: tw.Group) -> Journey:
        def clock() -> float:
            return ticks[group.rank]

        def tick(replica: tw.Replica, step: int) -> None:
            ticks[group.rank] = float(step)

        slow = group.rank == 1
        wrap = Slow if slow else lambda group: group
        return travel(Plan(strategy, steps=26, wrap=wrap, before_step=tick, clock=clock), group)

    journeys = tw.run_threads(2, replica, timeout=600.0)
    all_agree(journeys)
    sent = [[event["nbytes"] for event in one.heard("flight") if event["fragment"] == 0] for one in journeys]
    foreseen = [event["nbytes"] for event in journeys[1].heard("depart") if event["fragment"] == 0]
    assert all(one <= most for one, most in zip(sent[1], foreseen)), "law 5: no more than foreseen"
    assert torch.isfinite(journeys[0].final).all()
    few, many = min(sent[1]), sent[1][0]  # nothing is known of the first: the coarsest
    assert sent[1][-1] == foreseen[0], "the end has no deadline"
    assert sent[1][:-1] == ([many, few, few] * 3 if skips else [many] * 9)[: len(sent[1]) - 1], "skipped twice in a row"
    assert not skips or exchange != tw.exchange.Direct() or few == 49, "a header, and the level"


@pytest.mark.parametrize(
    ("delay", "step_seconds", "coarsest"),
    [(0, 1.0, []), (2, 0.0, [0]), (2, 0.25, range(9))],
    ids=["no deadline", "unknown speed", "half a second"],
)
def test_a_replica_sends_the_finest_level_where_no_deadline_is_known(delay, step_seconds, coarsest):
    """The link is slow. The first round before a deadline probes it."""
    codec, seconds = Levelled((Int(8), E3M0(8), Sign(block=64))), [0.0]
    strategy = tw.streaming_sign(every=4, delay=delay, fragments=1, codec=codec, partition=Whole())

    def tick(replica: tw.Replica, step: int) -> None:
        seconds[0] = step * step_seconds if replica.group.rank else seconds[0]

    def replica(group: tw.Group) -> Journey:
        wrap, clock = (Slow, lambda: seconds[0]) if group.rank else (lambda group: group, lambda: 0.0)
        return travel(Plan(strategy, steps=38, wrap=wrap, before_step=tick, clock=clock), group)

    _, slow = tw.run_threads(2, replica, timeout=600.0)
    sent, foreseen = ([event["nbytes"] for event in slow.heard(name)] for name in ("flight", "depart"))
    assert [number for number in range(9) if sent[number] < foreseen[number]] == list(coarsest)


def test_a_skipped_delta_arrives_later_in_full():
    """Replica 1 skips every other round. In the next both of its deltas arrive, each with the weight ½; all numbers are exact."""
    exact = Levelled((Identity(), Cast("bf16")), skips=1)
    strategy = tw.streaming_sign(every=2, delay=1, fragments=1, codec=exact, partition=tw.pieces.partition.Whole())

    def replica(group: tw.Group) -> tuple[list[float], list[float]]:
        model, anchors, held, steps = torch.nn.Linear(1, 1, bias=False), [], [], [0.0]
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        slow = group.rank == 1
        with tw.Replica(
            strategy, model, optimizer, Slow(group) if slow else group, clock=lambda: steps[0] if slow else 0.0
        ) as attached:
            for _ in range(9):
                model.weight.grad = torch.tensor([[-1.0 - 2 * group.rank]])
                steps[0] += 1
                optimizer.step()
                anchors.append(float(attached.anchors()[0]))
                held.append(float(attached.state()[0]["0.feedback.residual"]))
        return anchors, held

    (anchors, none), (others, held) = tw.run_threads(2, replica, timeout=600.0)
    assert anchors == others == [0, 0, 4, 4, 5, 5, 12, 12, 13], "(2 + 6)/2, (2 + 0)/2, (2 + 12)/2, (2 + 0)/2"
    assert held == [0, 0, 0, 0, -6, -6, 0, 0, -6] and not any(none)
