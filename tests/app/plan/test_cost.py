"""Predicted times: stalls and utilization by hand and by closed forms, rounds against fair flows, the order of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from random import Random

import pytest

from thinwire import data_parallel, diloco, streaming_diloco
from thinwire.app.plan import cost
from thinwire.app.plan.cost import FragmentSeconds, follow
from thinwire.app.plan.links import Links
from thinwire.app.records.units import text_of_seconds
from thinwire.app.trainer.model import SIZES
from thinwire.comm import Link
from thinwire.lab.plan import stage_order
from thinwire.lab.simulate.pipeline import pipeline_seconds
from thinwire.pieces.schedule import Staggered
from thinwire.recipes import eager_diloco


def test_time_without_overlap_is_a_stall() -> None:
    assert follow(diloco(every=10), 1.0, [FragmentSeconds(1, 2, 1, 1)]).utilization == pytest.approx(10 / 15)
    assert follow(data_parallel(), 2.0, [FragmentSeconds(0.5, 1, 0, 0.5)]).utilization == pytest.approx(0.5)


def test_the_work_of_rounds_takes_time_from_training_and_is_no_stall() -> None:
    pace = follow(streaming_diloco(every=10, delay=5), 1.0, [FragmentSeconds(0, 1, 0, 0, taken_seconds=1.25)] * 2)
    assert (pace.utilization, pace.taken, pace.stall_seconds) == pytest.approx((0.8, 0.2, 0.0))


@pytest.mark.parametrize(("flight", "stall"), [(1.9, 0.0), (2.0, 0.0), (3.5, 1.5)])
def test_a_flight_longer_than_its_delay_stalls_by_the_difference(flight: float, stall: float) -> None:
    strategy = streaming_diloco(every=20, delay=2)
    pace = follow(strategy, 1.0, [FragmentSeconds(0, flight - 0.2, 0.2, 0)] * 4)
    assert pace.latest_seconds == pytest.approx(stall)
    assert pace.utilization == pytest.approx(20 / (20 + 4 * stall))
    assert pace.wire_use == pytest.approx(4 * (flight - 0.2) / (20 + 4 * stall))


@pytest.mark.parametrize("busy", [0.5, 0.99, 1.5, 4.0])
def test_utilization_is_bounded_by_the_sustained_rate_and_a_long_delay_reaches_it(busy: float) -> None:
    """U ≤ min(1, H·T / seconds that a period takes on the uplink)."""
    strategy = streaming_diloco(every=20, delay=19, fragments=1)
    pace = follow(strategy, 1.0, [FragmentSeconds(0, busy * 20 / 5, 0, 0)] * 5)
    assert pace.utilization <= min(1, 1 / busy) + 1e-9
    assert pace.utilization == pytest.approx(min(1, 1 / busy), rel=0.06)


def test_eager_rounds_land_when_the_next_one_departs() -> None:
    for flight, expected in ((10.0, 1.0), (15.0, 10 / 15)):
        assert follow(eager_diloco(every=10), 1.0, [FragmentSeconds(0, flight, 0, 0)]).utilization == pytest.approx(
            expected
        )


def test_link_delays_overlap_and_transfers_on_one_uplink_do_not() -> None:
    """Two fragments depart together: 2 × 1 s on the uplink, then one delay."""
    assert follow(diloco(every=10), 1.0, [FragmentSeconds(0, 1, 3, 0)] * 2).stall_seconds == pytest.approx(0.5)


def test_a_round_takes_the_time_of_the_slowest_wire() -> None:
    links = Links.uniform(Link(8e6, 0.1), 3)
    assert cost.wire_seconds(links, 1e6) == pytest.approx(2.0) and cost.way_seconds(links) == 0.1
    shared = Links(links.names, links.alone, {pair: 2e6 if pair[0] == 1 else 6e6 for pair in links.alone})
    assert cost.wire_seconds(shared, 1e6) == pytest.approx(4.0)
    assert cost.wire_seconds(links, 1e6, [0]) == 0.0 == cost.way_seconds(links, [0])
    assert cost.wire_seconds(shared, 1e6, [0, 2]) == pytest.approx(1.0)  # with two replicas a link is used alone


def fluid_seconds(links: Links, nbytes: float) -> float:
    """All flows run at once, each with its max-min fair share of its link, its sender's uplink and its receiver's downlink."""
    left = {pair: 8 * nbytes for pair in links.alone}
    clock = 0.0
    while left:
        room = {("link", pair): links.alone[pair].bits_per_second for pair in left}
        room |= {("up", a): links.up[a] for a, _ in left} | {("down", b): links.down[b] for _, b in left}
        uses = {pair: (("link", pair), ("up", pair[0]), ("down", pair[1])) for pair in left}
        rate: dict[tuple[int, int], float] = {}
        while len(rate) < len(left):
            waiting = {wire: sum(wire in uses[pair] for pair in left if pair not in rate) for wire in room}
            fullest = min((room[wire] / count, wire) for wire, count in waiting.items() if count)
            for pair in [pair for pair in left if pair not in rate and fullest[1] in uses[pair]]:
                rate[pair] = fullest[0]
                for wire in uses[pair]:
                    room[wire] -= fullest[0]
        step = min(left[pair] / rate[pair] for pair in left)
        clock += step
        left = {
            pair: bits - step * rate[pair] for pair, bits in left.items() if bits - step * rate[pair] > 1e-6 * nbytes
        }
    return clock


@pytest.mark.parametrize("seed", range(10))
def test_a_round_takes_as_long_as_its_most_loaded_wire(seed: int) -> None:
    """Sites with different uplinks and downlinks, against flows that share them fairly."""
    draw = Random(seed)
    count = draw.randint(2, 6)
    up, down = ([10 ** draw.uniform(6, 9) for _ in range(count)] for _ in range(2))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    links = Links(tuple(map(str, range(count))), {(a, b): Link(min(up[a], down[b])) for a, b in pairs})
    assert cost.wire_seconds(links, 1e6) == pytest.approx(fluid_seconds(links, 1e6))


def test_tensor_parallelism_over_a_long_link_is_refused_with_its_utilization() -> None:
    links = Links.uniform(Link(1e9, 0.02), 2)
    refusal = cost.tensor_parallel(links, SIZES["1b"], 2048, micro_batch=1, micro_seconds=0.1)
    each = 0.02 + 8 * 4 * 2048 * 2048 / 1e9
    assert refusal.utilization == pytest.approx(0.05 / (0.05 + 4 * 24 * each))
    assert refusal.utilization < 0.01 and text_of_seconds(4 * 24 * each) in refusal.because


# ---- the order of stages


@pytest.mark.parametrize(
    ("p", "n", "c", "seconds"), [(4, 16, 0.5, 71), (8, 32, 1.0, 185), (2, 32, 0.5, 115), (4, 16, 0, 57), (1, 5, 9, 15)]
)
def test_pipeline_seconds_match_a_discrete_event_run(p: int, n: int, c: float, seconds: float) -> None:
    """1F1B with a forward pass of 1 s and a backward pass of 2 s."""
    assert pipeline_seconds(p, n, 3.0, c) == pytest.approx(seconds)


def random_links(count: int, seed: int) -> Links:
    """Links with rates over two decades, different in each direction."""
    draw = Random(seed)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    alone = {pair: Link(1e6 * 100 ** draw.random(), 0.1 * draw.random()) for pair in pairs}
    return Links(tuple(f"site-{i}" for i in range(count)), alone)


def every_chain(links: Links, places: Sequence[int], nbytes: float) -> dict[tuple[int, ...], float]:
    hops = [[(a, b) for a, b in pairwise(order)] for order in permutations(places)]
    seconds = [
        sum(links.alone[a, b].seconds(nbytes) + links.alone[b, a].seconds(nbytes) for a, b in hop) for hop in hops
    ]
    return dict(zip(permutations(places), seconds))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_a_pipeline_is_the_best_of_all_or_a_bound_for_many_sites(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, places = random_links(7, seed), (1, 6, 0, 4, 2)
    chains = every_chain(links, places, 100_000)
    order, seconds = stage_order.best_chain(links, places, 100_000)
    assert order is not None and chains[order] == pytest.approx(min(chains.values())) == pytest.approx(seconds)
    monkeypatch.setattr(stage_order, "EXACT_SITES", 4)
    order, least = stage_order.best_chain(links, places, 100_000)
    assert order is None and 0.3 * seconds < least <= seconds


def test_given_offsets_of_a_schedule_are_followed() -> None:
    strategy = streaming_diloco(every=10, delay=3, offsets=(10, 10))
    assert strategy.schedule == Staggered(10, 3, (10, 10))
    # The second waits for the first.
    assert follow(strategy, 1.0, [FragmentSeconds(0, 2, 0, 0)] * 2).stall_seconds == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(20))
def test_predicted_and_simulated_utilization_agree(seed: int) -> None:
    """Within 4 %: the prediction is for a long run, a simulated run also has a beginning and an end."""
    scenario = pytest.importorskip("thinwire.lab.simulate.scenario", reason="there is no simulator in this version")
    simulated = pytest.importorskip("thinwire.lab.simulate.replicas")
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
    fragments = [FragmentSeconds(0, cost.wire_seconds(links, packet), link.delay_seconds, 0) for packet in packets]
    ours = follow(strategy, step, fragments).utilization
    other = simulated.simulate(
        strategy, numels, scenario.Scenario.alike(replicas, step, link), 60 * strategy.schedule.every
    )
    assert ours == pytest.approx(other.compute_utilization, rel=0.04)


def test_lateness_that_only_a_warm_up_has_is_not_told() -> None:
    """Its first rounds are up to 4.8 s late, those that follow 4.4 s."""
    fragments = [FragmentSeconds(0, 0, 0, 1.3), FragmentSeconds(0, 2.7, 1.0, 0.1), FragmentSeconds(0, 0, 3.0, 2.8)]
    pace = follow(streaming_diloco(every=2, delay=1, fragments=3), 1.0, fragments)
    assert pace.latest_seconds == pytest.approx(4.4)
