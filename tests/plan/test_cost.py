"""Where the time goes, against hand-made cases, closed forms and real threads; who stands where, against all orders."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest

from thinwire import data_parallel, diloco, eager_diloco, streaming_diloco
from thinwire.group import Link
from thinwire.lm.model import SIZES
from thinwire.observe.units import text_of_seconds
from thinwire.plan import cost, placement
from thinwire.plan.cost import Traffic, follow
from thinwire.plan.links import Links
from thinwire.schedule import Staggered
from thinwire.simulate.pipeline import pipeline_seconds


def test_what_is_not_overlapped_is_waited_for() -> None:
    assert follow(diloco(every=10), 1.0, [Traffic(1, 2, 1, 1)]).utilization == pytest.approx(10 / 15)
    assert follow(data_parallel(), 2.0, [Traffic(0.5, 1, 0, 0.5)]).utilization == pytest.approx(0.5)


@pytest.mark.parametrize(("flight", "stall"), [(1.9, 0.0), (2.0, 0.0), (3.5, 1.5)])
def test_a_flight_longer_than_its_delay_stalls_by_the_rest(flight: float, stall: float) -> None:
    strategy = streaming_diloco(every=20, delay=2)
    pace = follow(strategy, 1.0, [Traffic(0, flight - 0.2, 0.2, 0)] * 4)
    assert pace.latest_seconds == pytest.approx(stall)
    assert pace.utilization == pytest.approx(20 / (20 + 4 * stall))
    assert pace.uplink_use == pytest.approx(4 * (flight - 0.2) / (20 + 4 * stall))


@pytest.mark.parametrize("busy", [0.5, 0.99, 1.5, 4.0])
def test_no_overlap_beats_the_sustained_floor_and_a_long_delay_reaches_it(busy: float) -> None:
    """U = min(1, H·T / uplink seconds of a period)."""
    strategy = streaming_diloco(every=20, delay=19, fragments=1)
    pace = follow(strategy, 1.0, [Traffic(0, busy * 20 / 5, 0, 0)] * 5)
    assert pace.utilization <= min(1, 1 / busy) + 1e-9
    assert pace.utilization == pytest.approx(min(1, 1 / busy), rel=0.06)


def test_eager_rounds_land_when_the_next_one_departs() -> None:
    for flight, expected in ((10.0, 1.0), (15.0, 10 / 15)):
        assert follow(eager_diloco(every=10), 1.0, [Traffic(0, flight, 0, 0)]).utilization == pytest.approx(expected)


def test_delays_overlap_and_wires_do_not() -> None:
    """Two fragments together: 2 × 1 s on the uplink, then the way once."""
    assert follow(diloco(every=10), 1.0, [Traffic(0, 1, 3, 0)] * 2).stall_seconds == pytest.approx(0.5)


def test_the_slowest_uplink_counts_alone_and_together() -> None:
    links = Links.uniform(Link(8e6, 0.1), 3)
    assert cost.uplink_seconds(links, 1e6) == pytest.approx(2.0) and cost.way_seconds(links) == 0.1
    shared = Links(links.names, links.alone, {pair: 2e6 if pair[0] == 1 else 6e6 for pair in links.alone})
    assert cost.uplink_seconds(shared, 1e6) == pytest.approx(4.0)
    assert cost.uplink_seconds(links.among([0]), 1e6) == 0.0 == cost.way_seconds(links.among([0]))


def test_tensor_parallelism_over_a_long_link_is_refused_with_its_number() -> None:
    links = Links.uniform(Link(1e9, 0.02), 2)
    refusal = cost.tensor_parallel(links, SIZES["1b"], 2048, micro_batch=1, micro_seconds=0.1)
    each = 0.02 + 8 * 4 * 2048 * 2048 / 1e9
    assert refusal.utilization == pytest.approx(0.05 / (0.05 + 4 * 24 * each))
    assert refusal.utilization < 0.01 and text_of_seconds(4 * 24 * each) in refusal.because


# ---- placement


@pytest.mark.parametrize(
    ("p", "n", "c", "seconds"), [(4, 16, 0.5, 71), (8, 32, 1.0, 185), (2, 32, 0.5, 115), (4, 16, 0, 57), (1, 5, 9, 15)]
)
def test_one_forward_one_backward(p: int, n: int, c: float, seconds: float) -> None:
    """Pinned by a discrete-event run (forward 1, backward 2)."""
    assert pipeline_seconds(p, n, 3.0, c) == pytest.approx(seconds)


def wan(count: int, seed: int) -> Links:
    """Rates over two decades, each direction its own."""
    draw = Random(seed)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    alone = {pair: Link(1e6 * 100 ** draw.random(), 0.1 * draw.random()) for pair in pairs}
    return Links(tuple(f"site-{i}" for i in range(count)), alone)


@pytest.mark.parametrize("seed", range(5))
def test_annealing_with_restarts_finds_what_exact_search_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    links = wan(7, seed)
    exact = placement.best_chain(links, 1e5), placement.best_ring(links, 1e5)
    monkeypatch.setattr(placement, "EXACT", 0)
    annealed = placement.best_chain(links, 1e5), placement.best_ring(links, 1e5)
    for (_, best), (order, found) in zip(exact, annealed):
        assert sorted(order) == list(range(7)) and best <= found <= 1.0001 * best


def test_the_ring_is_the_best_of_all_rings() -> None:
    links = wan(6, 1)
    order, seconds = placement.best_ring(links, 1e6)
    every_ring = [placement.ring_seconds(links, (0, *rest), 1e6) for rest in permutations(range(1, 6))]
    assert order[0] == 0 and seconds == min(every_ring) < max(every_ring) / 1.2


def test_many_places_take_seconds_and_beat_chance() -> None:
    links = wan(14, 3)
    order, seconds = placement.best_ring(links, 1e6)
    chance = [placement.ring_seconds(links, Random(s).sample(range(14), 14), 1e6) for s in range(50)]
    assert sorted(order) == list(range(14)) and seconds < min(chance)


def test_a_schedule_of_ones_own_is_followed() -> None:
    strategy = streaming_diloco(every=10, delay=3, offsets=(10, 10))
    assert strategy.schedule == Staggered(10, 3, (10, 10))
    assert follow(strategy, 1.0, [Traffic(0, 2, 0, 0)] * 2).stall_seconds == pytest.approx(
        0.1
    )  # the second waits for the first


@pytest.mark.parametrize("seed", range(20))
def test_the_simulator_says_the_same(seed: int) -> None:
    """Within 4 %: a simulated run also begins and finishes, this is the long run."""
    scenario = pytest.importorskip("thinwire.simulate.scenario", reason="there is no simulator in this version")
    simulated = pytest.importorskip("thinwire.simulate.replicas")
    draw = Random(seed)
    replicas, step, every = draw.choice([2, 3, 4]), 10 ** draw.uniform(-2, 0.5), draw.choice([10, 30, 100])
    numels = [int(10 ** draw.uniform(5, 6.5)) for _ in range(draw.choice([1, 3, 8, 12]))]
    strategies = [
        streaming_diloco(every=every, delay=draw.choice([1, 2, 5])),
        diloco(every=every),
        eager_diloco(every=every),
    ]
    strategy = draw.choice([*strategies, data_parallel()])
    floor = 8 * strategy.nbytes_per_period(numels, replicas) / (strategy.schedule.every * step)
    link = Link(floor * 10 ** draw.uniform(-0.7, 1.5), draw.choice([0.0, 0.01, 0.1]))
    links = Links.uniform(link, replicas)
    packets = [strategy.exchange.nbytes_sent(strategy.codec, numel, replicas) / (replicas - 1) for numel in numels]
    fragments = [Traffic(0, cost.uplink_seconds(links, packet), link.delay_seconds, 0) for packet in packets]
    ours = follow(strategy, step, fragments).utilization
    other = simulated.simulate(
        strategy, numels, scenario.Scenario.alike(replicas, step, link), 60 * strategy.schedule.every
    )
    assert ours == pytest.approx(other.compute_utilization, rel=0.04)
