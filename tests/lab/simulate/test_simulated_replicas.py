"""The simulator of runs: against real replicas, a slow event-by-event simulator and the layer model; its laws and its cost."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from oracle import Oracle
from pieces import over
from simulated_runs import FAST, NUMELS, STREAM, Recorder, alike, sizes_for
from strategies import METHODS

import thinwire as tw
from thinwire.comm import Link
from thinwire.lab.simulate.layers import Stack, compute_utilization
from thinwire.lab.simulate.replicas import SimulationResult, simulate
from thinwire.lab.simulate.scenario import Failures, Outages, Scenario, Stragglers, Wire, spread
from thinwire.pieces.policy import Deciding
from thinwire.pieces.schedule import Calendar
from thinwire.testing.toy import Toy, journey

# ---- against real replicas


@pytest.mark.parametrize("name", METHODS)
def test_departures_landings_and_bytes_equal_those_of_real_replicas(name):
    """Fragment, step, bytes and landing step of the same strategy on replicas in threads and in virtual time."""
    strategy = METHODS[name]
    real = journey(strategy, replicas=2, steps=14)[0]
    heard = Recorder()
    shapes = [fragment.shapes for fragment in strategy.partition.fragments(Toy())]
    outcome = simulate(strategy, shapes, alike(2), 14, heard, lambda step: 0.01)  # the learning rate of the toy
    left = [(r.fragment, r.number, r.step, r.nbytes) for r in heard.left]
    came = [(r.fragment, r.number, step) for r, step, *_ in heard.came]
    # Gradients are exchanged before the step is counted.
    shift = 1 if isinstance(strategy.signal, tw.strategy.Gradients) else 0
    weighed = [(e["fragment"], e["round"], e["step"] + shift, e["nbytes"]) for e in real.heard("depart")]
    if isinstance(strategy.policy, Deciding):  # it decides by data, which a simulation lacks: the bytes are a bound
        assert [where[:3] for where in left] == [where[:3] for where in weighed]
        assert all(most[3] >= real[3] for most, real in zip(left, weighed))
        return
    assert left == weighed
    assert came == [(e["fragment"], e["round"], e["step"] + shift) for e in real.heard("land")]
    assert outcome.nbytes_sent[0] == sum(e["nbytes"] for e in real.heard("depart"))


def test_the_simulator_calls_the_strategys_schedule_and_exchange(monkeypatch):
    asked: list[tuple[str, int]] = []
    departs, nbytes_sent = tw.pieces.schedule.Staggered.departs, tw.exchange.Direct.nbytes_sent
    monkeypatch.setattr(tw.pieces.schedule.Staggered, "departs", lambda *a: asked.append(("step", a[1])) or departs(*a))
    monkeypatch.setattr(tw.exchange.Direct, "nbytes_sent", lambda *a: asked.append(("size", a[3])) or nbytes_sent(*a))
    simulate(STREAM, NUMELS, alike(3), 30)
    assert [step for what, step in asked if what == "step"] == list(range(1, 31))
    assert {size for what, size in asked if what == "size"} == {3}


# ---- laws


@over("more", [0, 1])
@over("name", METHODS)
def test_sent_bytes_match_nbytes_per_period(name, more):
    strategy, numels = METHODS[name], sizes_for(METHODS[name])
    periods = 5
    steps = periods * strategy.schedule.every + more
    outcome = simulate(strategy, numels, alike(3), steps)
    calendar = Calendar(strategy.schedule, len(numels), lambda step: 1.0)
    departures = [(p, step) for step in range(1, steps + 1) for p in calendar.departs(step)]
    departed, last = [p for p, _ in departures], dict(departures)
    forgets = strategy.merge.forgets  # then no delta contains the steps of the flight
    ended = strategy.schedule.delay if forgets else 0
    dense = strategy.policy.last is not strategy.policy  # then every fragment has a last round
    rounds = [dense or last.get(p, 0) + ended < steps for p in range(len(numels))]  # one more round in `finish`
    if isinstance(strategy.signal, tw.strategy.Gradients):
        rounds = [False] * len(numels)
    expected = sum(
        strategy.exchange.nbytes_sent(*strategy.coded(((numel,),), number, number == departed.count(p)), 3)
        for p, numel in enumerate(numels)
        for number in range(departed.count(p) + rounds[p])
    )
    assert outcome.nbytes_sent.tolist() == [expected] * 3
    assert outcome.busy_seconds == pytest.approx([8 * expected / 1e6] * 3)


@over("name", METHODS)
def test_events_follow_their_causes(name):
    strategy, heard = METHODS[name], Recorder()
    speeds = spread(1.0, 0.3, 4, 0, "speeds")
    scenario = alike(4, step_seconds=speeds, jitter=0.2, encode_seconds=1e-6, decode_seconds=2e-6)
    outcome = simulate(strategy, sizes_for(strategy), scenario, 40, heard)
    for flight, _, begin, stall, _ in heard.came:
        arrival = flight.messages.arrival
        assert (flight.departed <= flight.messages.asked).all() and (
            flight.messages.asked <= flight.messages.begin
        ).all()
        assert (flight.messages.begin < arrival).all()
        assert flight.landed is not None and (flight.landed >= arrival.max()).all()
        assert (stall >= 0).all() and (begin + stall >= flight.landed - 1e-9).all()
    assert outcome.wall_seconds == pytest.approx(outcome.compute_seconds + outcome.stall_seconds)
    for (_, _, _, end), (_, _, begin, _) in zip(heard.steps, heard.steps[1:]):
        assert (begin >= end).all()


@over("name", METHODS)
def test_a_perfect_link_leaves_only_compute_time(name):
    outcome = simulate(METHODS[name], sizes_for(METHODS[name]), alike(3, FAST), 50)
    assert outcome.compute_utilization == pytest.approx(1, abs=1e-6)
    assert outcome.wall_seconds == pytest.approx([50.0] * 3) and outcome.compute_seconds.tolist() == [50.0] * 3


@over("name", METHODS)
def test_one_replica_sends_nothing_and_never_waits(name):
    outcome = simulate(METHODS[name], sizes_for(METHODS[name]), alike(1, Link(1.0, 100.0)), 50)
    assert outcome.nbytes_sent.tolist() == [0] and outcome.stall_seconds.tolist() == [0]
    assert outcome.wall_seconds.tolist() == [50.0] and outcome.busy_seconds.tolist() == [0]


TROUBLE = {
    "jitter": 0.3,
    "stragglers": Stragglers(20.0, 3.0),
    "failures": Failures(60.0, 10.0, 1.0),
    "shares": (0, 0, 1, 1),
    "wires": (Wire(Link(2e6, 0.1), 0.1, Outages(30.0, 4.0, seed=5)), Wire(Link(1e6, 0.2))),
}


def values_of(outcome: SimulationResult) -> list[Any]:
    return [np.asarray(getattr(outcome, field.name)).tolist() for field in dataclasses.fields(outcome)]


def test_the_same_seed_gives_the_same_run():
    first, again, other = (
        values_of(simulate(STREAM, NUMELS, alike(4, seed=seed, **TROUBLE), 100)) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("trouble", [(), ("jitter",), ("shares",), ("jitter", "shares", "stragglers")])
def test_more_rate_never_takes_longer(trouble):
    walls = []
    for rate in np.geomspace(1e4, 1e9, 30):
        wires = (Wire(Link(rate, 0.1)),) * 4
        scenario = alike(4, step_seconds=(1.0, 1.3, 0.8, 1.0), wires=wires)
        scenario = dataclasses.replace(scenario, **{name: TROUBLE[name] for name in trouble})
        walls.append(simulate(STREAM, NUMELS, scenario, 80).wall_seconds.max())
    assert (np.diff(walls) <= 1e-9).all() and walls[0] > 5 * walls[-1]


# ---- against the slow simulator


def random_scenario(draw: random.Random) -> Scenario:
    replicas = draw.choice([1, 2, 3, 4, 6])
    count = draw.choice([replicas, replicas, 1, 2])
    shares = None if count == replicas else tuple(draw.randrange(count) for _ in range(replicas))
    links = [Link(10 ** draw.uniform(4, 7), draw.choice([0.0, 0.1, 2.5])) for _ in range(count)]
    steps = tuple(draw.choice([1.0, draw.uniform(0.5, 2)]) for _ in range(replicas))
    return Scenario(steps, tuple(map(Wire, links)), shares)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.exchange == tw.exchange.Direct()])
def test_times_equal_those_of_a_simulation_event_by_event(name):
    strategy, draw = METHODS[name], random.Random(name)
    for _ in range(8):
        scenario, numels = random_scenario(draw), [n + draw.randrange(9999) for n in sizes_for(strategy)]
        slow, heard = Oracle(strategy, numels, scenario), Recorder()
        slow.run(40)
        fast = simulate(strategy, numels, scenario, 40, heard)
        assert fast.wall_seconds == pytest.approx(slow.wall, rel=1e-12), scenario
        assert fast.compute_seconds == pytest.approx(slow.compute)
        landings = np.array([begin + stall for _, _, begin, stall, _ in heard.came])
        # in `finish` all requests come at the same instant, so their order is arbitrary; a dense end has two a fragment
        before = len(landings) - len(numels) * (1 if strategy.policy.last is strategy.policy else 2)
        assert np.allclose(landings.T[:, :before], np.array(slow.landings)[:, :before], rtol=1e-12, atol=0), scenario


@pytest.mark.parametrize(
    "name", ["diloco", "streaming_diloco", "eager_diloco", "feedback in the air", "torchft's phase"]
)
def test_rounds_take_as_long_as_separate_messages_to_each_peer(name):
    """The simulator completes a round for all at once; the oracle delivers its messages one by one."""
    strategy, draw = METHODS[name], random.Random(name)
    for replicas in (3, 4, 8):
        steps = tuple(draw.uniform(0.5, 2) for _ in range(replicas))
        wires = tuple(Wire(Link(10 ** draw.uniform(5, 7), 0.1)) for _ in range(replicas))
        numels, scenario = sizes_for(strategy), Scenario(steps, wires)
        slow = Oracle(strategy, numels, scenario, messages=True)
        slow.run(300)
        fast = simulate(strategy, numels, scenario, 300)
        assert fast.wall_seconds.max() == pytest.approx(max(slow.wall), rel=2e-3)
        used = np.mean(np.array(slow.compute) / np.array(slow.wall))
        assert fast.compute_utilization == pytest.approx(used, abs=5e-3)


# ---- against the layer model


@pytest.mark.parametrize(("delay", "rate"), [(0, 1e5), (0, 1e7), (1, 1e5), (1, 3e5), (5, 2e5), (11, 1e5)])
def test_a_model_of_one_layer_is_the_same_in_both_simulators(delay, rate):
    """The only layer departs at the end of step t and is needed at the begin of step t + 1 + τ."""
    codec, numel = tw.codecs.Cast(), 100_000
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(12, delay), codec=codec, outer=tw.pieces.outer.Nesterov())
    bits = 8 * strategy.exchange.nbytes_sent(codec, numel, 2) / numel
    layers = compute_utilization(Stack(numel, 1, 1.0), strategy, bits, np.array([rate]))[0]
    steps = 12 * 500
    outcome = simulate(strategy, [numel], alike(2, Link(rate)), steps)
    assert outcome.compute_utilization == pytest.approx(layers, rel=5e-3)
    assert layers < 1 or delay > 1


# ---- scale


def test_events_are_counted_and_memory_does_not_grow_with_the_rounds():
    """Departures, arrivals, landings and inner steps are counted. Arrays of finished rounds are freed."""
    replicas, peaks = 500, []
    for steps in (120, 1200):
        tracemalloc.start()
        outcome = simulate(STREAM, NUMELS, alike(replicas, Link(1e10)), steps)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert outcome.rounds == 3 * (steps // 12)  # `finish` sends the last round of two fragments
        assert outcome.events == replicas * (steps + 3 * outcome.rounds)
    assert peaks[1] < 2 * peaks[0]  # ten times as many rounds


def test_only_departures_and_landings_cost_array_operations(monkeypatch):
    """The work is linear in departures and landings. The number of steps between them does not matter."""
    from thinwire.lab.simulate import replicas as room

    calls = []
    settle = room._Fleet._compute
    monkeypatch.setattr(room._Fleet, "_compute", lambda *given: calls.append(given[1:]) or settle(*given))
    simulate(tw.diloco(every=1000), [100], alike(4), 10_000)
    assert len([steps for _, steps in calls if steps]) == 10


# ---- exchanges of several hops


@pytest.mark.parametrize("exchange", [tw.exchange.Direct(), tw.exchange.TwoShot(), tw.exchange.AllReduce()])
def test_a_round_on_an_idle_link_takes_the_time_that_the_exchange_predicts(exchange):
    """Bytes over the rate, and one delay for each of its 1 or 2 hops."""
    link = Link(8e6, 0.3)
    strategy = tw.diloco(every=10, codec=tw.codecs.Identity(), exchange=exchange)
    heard = Recorder()
    simulate(strategy, [100_000], alike(4, link), 10, heard)
    stall = heard.came[0][3]
    assert stall == pytest.approx([exchange.seconds(tw.codecs.Identity(), 100_000, 4, link)] * 4)
    hops = 1 if exchange == tw.exchange.Direct() else 2
    assert stall[0] == pytest.approx(exchange.nbytes_sent(tw.codecs.Identity(), 100_000, 4) / 1e6 + 0.3 * hops)


def test_only_the_center_of_a_star_sends_the_mean_to_all():
    """The others' packets come first: their time is before that of the mean, which the center sends to each."""
    star, link = tw.lab.star.exchange.Star(1), Link(8e6, 0.3)
    strategy, heard = tw.diloco(every=10, exchange=star), Recorder()
    outcome = simulate(strategy, [100_000], alike(4, link), 20, heard)
    sent = [star.nbytes_sent(tw.codecs.Identity(), 100_000, 4, rank) for rank in range(4)]
    assert sent[1] > 2.9 * sent[0] and outcome.nbytes_sent.tolist() == [2 * nbytes for nbytes in sent]
    assert heard.came[0][3] == pytest.approx([star.seconds(tw.codecs.Identity(), 100_000, 4, link)] * 4)


def test_a_round_of_a_hierarchy_takes_the_predicted_time():
    exchange, link = tw.exchange.Hierarchy(sites=((0, 1), (2, 3))), Link(8e6, 0.3)
    heard = Recorder()
    simulate(tw.diloco(every=10, codec=tw.codecs.Identity(), exchange=exchange), [100_000], alike(4, link), 10, heard)
    assert heard.came[0][3] == pytest.approx([exchange.seconds(tw.codecs.Identity(), 100_000, 4, link)] * 4)
