"""Simulated outages, lost bytes, shared wires, slow replicas and failures; scenarios that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_runs import FAST, NUMELS, STREAM, Recorder, alike

import thinwire as tw
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.replicas import simulate
from thinwire.lab.simulate.scenario import Failures, Outages, Stragglers, Wire


def test_an_outage_delays_a_message_by_its_length():
    """Sending takes 10 s from t = 4 (H = 4, 1 s per step). With an outage from 6 to 9 the message arrives at 17, not at 14."""
    strategy = tw.diloco(every=4, codec=tw.codecs.Cast())
    nbytes = strategy.exchange.nbytes_sent(strategy.codec, 1000, 2)
    link = Link(8 * nbytes / 10)
    for down, arrival in (((), 14.0), (((6.0, 9.0),), 17.0), (((3.0, 5.0),), 15.0), (((1.0, 2.0), (14.5, 90.0)), 14.0)):
        heard = Recorder()
        scenario = alike(2, wires=(Wire(link), Wire(link, outages=down)))
        simulate(strategy, [1000], scenario, 4, heard)
        assert heard.left[0].messages.arrival[1] == pytest.approx(arrival), down
        assert heard.came[0][3] == pytest.approx([arrival - 4] * 2)  # both wait for it


def test_many_short_outages_slow_a_link_by_their_share():
    """A wire that is down for a tenth of the time takes a ninth longer in the long run."""
    down = tuple((float(t), t + 0.1) for t in range(1, 5000))
    strategy, link = tw.local_sgd(every=1), Link(8e4)
    plain = simulate(strategy, [10_000], alike(2, link), 300)
    broken = simulate(strategy, [10_000], alike(2, wires=(Wire(link, outages=down),) * 2), 300)
    sending = plain.stall_seconds[0]
    assert broken.stall_seconds[0] == pytest.approx(sending / 0.9, rel=0.01)
    assert broken.busy_seconds == pytest.approx(plain.busy_seconds)


def test_random_outages_last_for_the_whole_run():
    """The wire is down for 2 s after 18 s on average: a tenth of the time of a run of any length."""
    strategy, link = tw.local_sgd(every=1), Link(8e4)
    plain = simulate(strategy, [20_000], alike(2, link), 3000)
    broken = simulate(strategy, [20_000], alike(2, wires=(Wire(link, outages=Outages(18.0, 2.0)), Wire(link))), 3000)
    assert broken.stall_seconds[0] == pytest.approx(plain.stall_seconds[0] / 0.9, rel=0.05)


def test_lost_bytes_are_sent_again():
    plain = simulate(tw.diloco(every=5), [10_000], alike(2, Link(1e5)), 50)
    lossy = simulate(tw.diloco(every=5), [10_000], alike(2, wires=(Wire(Link(1e5), loss=0.2),) * 2), 50)
    assert lossy.busy_seconds == pytest.approx(plain.busy_seconds / 0.8)
    assert lossy.nbytes_sent.tolist() == plain.nbytes_sent.tolist()


def test_replicas_that_share_a_wire_wait_for_each_other():
    alone = simulate(tw.diloco(every=5), [10_000], alike(4, Link(1e6)), 50)
    shared = simulate(tw.diloco(every=5), [10_000], alike(4, Link(1e6), shares=(0, 0, 0, 0)), 50)
    assert shared.stall_seconds == pytest.approx(4 * alone.stall_seconds)
    assert shared.busy_seconds[0] == pytest.approx(alone.busy_seconds.sum()) and not shared.busy_seconds[1:].any()


def test_the_slowest_replica_sets_the_pace():
    outcome = simulate(STREAM, NUMELS, alike(4, FAST, step_seconds=(1.0, 1.0, 2.0, 1.0)), 200)
    assert outcome.wall_seconds == pytest.approx([400.0] * 4)
    assert outcome.compute_seconds.tolist() == [200.0, 200.0, 400.0, 200.0]


def test_jitter_and_pauses_have_the_requested_means():
    scenario = alike(2000, FAST, jitter=0.5, stragglers=Stragglers(10.0, 2.0))
    outcome = simulate(tw.local_sgd(every=100), [1], scenario, 100)
    assert outcome.compute_seconds.mean() == pytest.approx(100 + 100 / 10 * 2, rel=0.01)
    variance = 100 * 0.5**2 + 10 * 2 * 2.0**2  # gamma steps plus a compound Poisson sum of exponentials
    assert outcome.compute_seconds.var() == pytest.approx(variance, rel=0.1)


def test_a_failure_costs_the_others_the_time_to_detect_it():
    """Replica 1 dies at 7.3 s. The round of step 10 waits until this is detected; later rounds run without the replica."""
    heard = Recorder()
    scenario = alike(3, FAST, failures=Failures(1e9, 22.0, 5.0))
    fleet_failures = iter([np.array([1e9, 7.3, 1e9])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "thinwire.lab.simulate.replicas._Fleet._next_failures",
            lambda self, now: next(fleet_failures, np.full(len(now), 1e9)),
        )
        outcome = simulate(tw.local_sgd(every=10), [100], scenario, 60, heard)
    stalls = [stall.tolist() for _, _, _, stall, _ in heard.came]
    assert stalls[0] == pytest.approx([2.3, 0, 2.3], abs=1e-3)
    assert all(s == pytest.approx([0, 0, 0], abs=1e-3) for s in stalls[1:])
    assert [(who, what) for who, _, what in heard.changes] == [
        ([1], "this replica dies"),
        ([1], "this replica is back, with the anchors"),
    ]
    times = [seconds[0] for _, seconds, _ in heard.changes]
    assert times == pytest.approx([7.3, 32.3], abs=1e-2)  # repaired at 29.3 s, back at the next landing
    assert outcome.failures == 1
    assert outcome.steps.tolist() == [60, 37, 60]  # 7 before, 30 after
    assert outcome.compute_seconds == pytest.approx([60, 37.3, 60], abs=1e-2)
    away = [flight.nbytes for flight in heard.left]
    assert away[0] == tw.local_sgd().exchange.nbytes_sent(tw.codecs.Identity(), 100, 2) < away[-1]


def test_after_the_death_of_all_the_first_to_return_continues():
    """No step is skipped. A single replica takes the time of all steps, and for each failure the repair and part of a step."""
    alone, heard = alike(1, FAST, failures=Failures(10.0, 50.0)), Recorder()
    outcome = simulate(STREAM, NUMELS, alone, 600, heard)
    assert outcome.failures == pytest.approx(60, rel=0.4) and outcome.steps.tolist() == [600]
    lost = outcome.wall_seconds[0] - 600 - 50 * outcome.failures
    assert 0 < lost < outcome.failures and outcome.compute_seconds[0] == pytest.approx(600, abs=lost + 1e-6)
    assert [int(done.sum()) for _, done, *_ in heard.steps if done.any()] and sum(
        int(d.sum()) for _, d, *_ in heard.steps
    ) == 600
    three = simulate(STREAM, NUMELS, alike(3, FAST, failures=Failures(3.0, 50.0)), 60)
    assert three.failures > 10 and (three.wall_seconds > 300).all() and (three.steps <= 60).all()
    assert three.steps.sum() >= 60 and 0 < three.compute_utilization < 0.3


def test_steps_of_zero_seconds_are_counted():
    """With a jitter of 10 most steps underflow to zero seconds."""
    outcome = simulate(tw.local_sgd(every=1), [1], alike(50, FAST, jitter=10.0, failures=Failures(500.0, 5.0)), 200)
    assert outcome.steps.max() == 200 and outcome.steps.min() > 100 and np.isfinite(outcome.compute_seconds).all()


def test_utilization_falls_as_failures_rise():
    used = [
        simulate(STREAM, NUMELS, alike(20, FAST, failures=Failures(every, 30.0, 2.0)), 500).compute_utilization
        for every in (1e6, 3000.0, 300.0, 60.0)
    ]
    assert used == sorted(used, reverse=True) and used[0] > 0.99 and used[-1] < 0.7


# ---- invalid input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: alike(step_seconds=(1.0, 0.0)), r"step_seconds=\(1.0, 0.0\): a positive time"),
        (lambda: alike(step_seconds=(float("nan"),) * 20), "step_seconds=20 times"),
        (lambda: alike(step_seconds=()), "a positive time for every replica"),
        (lambda: alike(3, wires=(Wire(FAST),)), "3 replicas, 1 wires"),
        (lambda: alike(shares=(0, 2)), r"shares=\(0, 2\)"),
        (lambda: alike(shares=(0,)), "2 replicas, 2 wires"),
        (lambda: alike(jitter=-0.1), "jitter=-0.1: between 0 and 10"),
        (lambda: alike(decode_seconds=float("inf")), "decode_seconds=inf"),
        (lambda: alike(jitter=1e300), "jitter=1e\\+300: between 0 and 10"),
        (lambda: alike(step_seconds=(1e308, 1.0)), "at most 1e\\+09 s"),
        (lambda: alike(link=Link(0.0)), "a rate of 0.0 bit/s"),
        (lambda: Wire(FAST, loss=1.0), "loss=1.0: a share"),
        (lambda: Wire(FAST, outages=((3.0, 2.0),)), "ascending and apart"),
        (lambda: Wire(FAST, outages=((1.0, 3.0), (2.0, 4.0))), "ascending and apart"),
        (lambda: Wire(FAST, outages=((-1.0, 3.0),)), "ascending and apart"),
        (lambda: alike(failures=Failures(0.5, 1.0)), "a failure every 0.5 s with steps of 1 s: hardly a step"),
        (lambda: Outages(1e-6, 1.0), "more than a millisecond apart"),
        (lambda: Outages(0.0, 1.0), "every_seconds=0.0: a positive time"),
        (lambda: Stragglers(0.0, 1.0), "every_seconds=0.0: a positive time"),
        (lambda: Failures(1.0, -1.0), "repair_seconds=-1.0: a positive time"),
        (lambda: Failures(1.0, 1.0, -1.0), "detect_seconds=-1.0"),
        (lambda: simulate(STREAM, NUMELS, alike(), 0), "steps=0"),
        (lambda: simulate(STREAM, [], alike(), 5), "0 fragments"),
    ],
)
def test_invalid_scenarios_are_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()
