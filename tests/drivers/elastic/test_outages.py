"""Outages of a hub or lighthouse, and flapping links, in virtual time: no step is lost, no sample counts twice, all replicas end equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from elastic_toy import RecordedRun, Toy, agree, one_thread
from reading_toy import STEP, check, new_record, train

from thinwire.membership.testing.cluster import SimulatedCluster

__all__ = ["one_thread"]  # a fixture
STEPS = 40
NAMES = "abc"


def train_three(cluster: SimulatedCluster) -> tuple[dict[str, Toy], RecordedRun]:
    """Trains three replicas; a round needs two of them."""
    record = new_record()
    results = cluster.play({name: train(cluster, record, 500, len(NAMES), STEPS, least=2) for name in NAMES})
    agree(results, record)
    return results, record


def hold_all(results: dict[str, Toy], record: RecordedRun) -> None:
    """Checks that the anchors hold everything that was trained, once, and that all replicas end at the same step."""
    for name in NAMES:
        ledger, lost = check(record, results[name])
        assert results[name].step == STEPS and not results[name].restored and not lost, name
    assert record.trained[0].max() == 1.0 and ledger.trained == record.trained[0].sum() > STEPS * STEP
    assert not any(fields["returned"] for _, event, fields in record.events if event == "data")


@pytest.mark.parametrize("phase", ["call", "called", "all", "wait"])
def test_a_hub_outage_of_a_minute_loses_no_step(phase: str) -> None:
    """The outage begins at any request of a member, and the hub keeps its state."""
    cluster = SimulatedCluster()

    def away() -> None:
        cluster.lighthouse.stop()
        cluster.later(60.0, cluster.lighthouse.start)

    cluster.at("b", phase, away, 5)
    hold_all(*train_three(cluster))
    assert cluster.time.now > 60.0 + STEPS


def flap(cluster: SimulatedCluster, down: Callable[[], None], up: Callable[[], None], seconds: float) -> None:
    """Calls `down` every ten seconds, and `up` after `seconds`, until the run has ended."""

    def begin() -> None:
        down()
        cluster.later(seconds, up)
        if cluster.time.now < 4 * STEPS:
            cluster.later(10.0, begin)

    cluster.later(10.0, begin)


@pytest.mark.parametrize("seconds", [1.0, 5.0])
@pytest.mark.parametrize("what", ["a link", "the links of one", "the hub"])
def test_a_link_that_flaps_every_ten_seconds_loses_no_step(what: str, seconds: float) -> None:
    cluster = SimulatedCluster()
    cut = {"a link": ["ab"], "the links of one": ["ab", "bc"], "the hub": []}[what]
    down: list[Callable[[], None]] = [lambda pair=pair: cluster.cut(*pair) for pair in cut] or [cluster.lighthouse.stop]
    up: list[Callable[[], None]] = [lambda pair=pair: cluster.heal(*pair) for pair in cut] or [cluster.lighthouse.start]
    flap(cluster, lambda: [one() for one in down] and None, lambda: [one() for one in up] and None, seconds)
    hold_all(*train_three(cluster))
