"""What `probe` finds is what the link is; raw samples are kept; every pair meets once."""

from __future__ import annotations

from itertools import combinations

import pytest

from thinwire import run_threads
from thinwire.errors import ConfigurationError
from thinwire.group import Group, Link, LinkedGroup
from thinwire.plan.probe import Probe, line, pairings, probe_links


@pytest.mark.parametrize("size", range(2, 11))
def test_every_pair_meets_once_and_nobody_is_in_two_pairs(size: int) -> None:
    rounds = pairings(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    assert len(rounds) == size - 1 + size % 2
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in rounds)


def found(links: list[Link], seconds: float = 0.5) -> Probe:
    def body(group: Group) -> Probe:
        linked = LinkedGroup(group, links[group.rank])
        return probe_links(linked, name=f"r{group.rank}", seconds=seconds, trips=5)

    results = run_threads(len(links), body)
    assert all(result.links == results[0].links for result in results)
    return results[0]


def test_an_emulated_uplink_is_recovered() -> None:
    """Two replicas with different uplinks: rates within 5 %, delay within 1 ms (half of the two ways together)."""
    given = [Link(20e6, 0.010), Link(5e6, 0.004)]
    probe = found(given)
    for sender, receiver in ((0, 1), (1, 0)):
        link = probe.links.alone[sender, receiver]
        assert link.bits_per_second == pytest.approx(given[sender].bits_per_second, rel=0.05)
        assert link.delay_seconds == pytest.approx(0.007, abs=1e-3)
        assert probe.links.together[sender, receiver] == pytest.approx(given[sender].bits_per_second, rel=0.1)
    assert probe.round is not None and probe.round.latency_seconds == pytest.approx(0.010, abs=0.01)
    assert len(probe.samples["apart"]) == 2 and len(probe.samples["round_trips"][0]["seconds"]) == 5


def test_a_shared_uplink_shows_when_all_send() -> None:
    """Three replicas of 9 Mbit/s each: alone a link has all of it, together half."""
    probe = found([Link(9e6)] * 3, seconds=0.3)
    for pair, link in probe.links.alone.items():
        assert link.bits_per_second == pytest.approx(9e6, rel=0.1)
        assert probe.links.together[pair] == pytest.approx(4.5e6, rel=0.15)
    assert probe.round is not None and probe.round.bits_per_second == pytest.approx(9e6, rel=0.2)


def test_names_that_meet_twice_get_their_rank() -> None:
    probe = run_threads(2, lambda group: probe_links(group, name="home", seconds=0.01, trips=1))[0]
    assert probe.links.names == ("home-0", "home-1")


@pytest.mark.parametrize(("seconds", "trips"), [(0.0, 5), (-1.0, 5), (float("nan"), 5), (1.0, 0)])
def test_a_probe_that_measures_nothing_is_refused(seconds: float, trips: int) -> None:
    with pytest.raises(ConfigurationError, match="more than 0 s"):
        run_threads(2, lambda group: probe_links(group, "a", seconds, trips))


def test_one_replica_has_no_link() -> None:
    with pytest.raises(ConfigurationError, match="at least 2"):
        run_threads(1, lambda group: probe_links(group, "a"))


def test_a_line() -> None:
    assert line([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx((1.0, 1.0))
