"""The measurement of links: rates and delays of known links, raw samples, and one meeting for each pair."""

from __future__ import annotations

import os
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
from torch import Tensor

from thinwire import run_threads
from thinwire.app.plan import probe
from thinwire.app.plan.probe import TRAINS, Probe, line, pairings, probe_links
from thinwire.comm import Group, Link, LinkedGroup
from thinwire.comm.group import Transfer
from thinwire.comm.uplink import Uplink
from thinwire.errors import ConfigurationError


@pytest.mark.parametrize("size", range(2, 11))
def test_every_pair_meets_once_and_no_replica_is_in_two_pairs_of_a_round(size: int) -> None:
    rounds = pairings(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    assert len(rounds) == size - 1 + size % 2
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in rounds)


class Clock(threading.local):
    """A clock with separate seconds for each thread."""

    now = 0.0


class VirtualUplinks:
    """A group with simulated uplinks in the virtual time of each replica, so the results do not depend on the machine."""

    def __init__(self, group: Group, link: Link, clock: Clock, due: dict[tuple[int, int, int], deque[float]]) -> None:
        self.group, self.rank, self.size, self.close = group, group.rank, group.size, group.close
        self.uplink, self.clock, self.due = Uplink(link), clock, due

    def post(
        self,
        tag: int,
        send: Mapping[int, Tensor],
        recv: Mapping[int, Tensor],
        purpose: str = "packet",
        sized: Any = None,
    ) -> Transfer:
        sent = [self.uplink.book(self.clock.now, message.numel())[1] for message in send.values()]
        for peer, due in zip(send, sent):
            self.due[self.rank, peer, tag].append(due)
        transfer = self.group.post(tag, send, recv, purpose, sized)
        wait = transfer.wait

        def later() -> None:
            wait()
            came = [self.due[peer, self.rank, tag].popleft() for peer in recv]
            self.clock.now = max([self.clock.now, *sent, *came])

        transfer.wait = later  # type: ignore[method-assign]
        return transfer


def probe_in_virtual_time(monkeypatch: pytest.MonkeyPatch, links: list[Link], seconds: float) -> Probe:
    clock, due = Clock(), defaultdict[tuple[int, int, int], deque[float]](deque)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock.now)

    def body(group: Group) -> Probe:
        return probe_links(VirtualUplinks(group, links[group.rank], clock, due), f"r{group.rank}", seconds, trips=5)

    results = run_threads(len(links), body)
    assert all(result.links == results[0].links for result in results)
    return results[0]


UPLINKS = [Link(20e6, 0.010), Link(5e6, 0.004)]


def check(probe: Probe, rate: float, delay: float) -> None:
    """Check that each direction has its sender's rate, and that the delay is half of the round trip."""
    for sender, receiver in ((0, 1), (1, 0)):
        link, given = probe.links.alone[sender, receiver], UPLINKS[sender].bits_per_second
        assert link.bits_per_second == pytest.approx(given, rel=rate)
        assert link.delay_seconds == pytest.approx(0.007, abs=delay)
        assert probe.links.together[sender, receiver] == pytest.approx(given, rel=2 * rate)
    assert probe.round is not None and 0 <= probe.round.latency_seconds < 0.010 + 10 * delay


def test_the_rate_and_the_delay_of_an_uplink_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are exact in virtual time, except that the byte of a round trip takes a little time, too."""
    probe = probe_in_virtual_time(monkeypatch, UPLINKS, seconds=0.25)
    check(probe, rate=1e-6, delay=1e-5)
    assert len(probe.samples["apart"]) == 2 * TRAINS and len(probe.samples["round_trips"][0]["seconds"]) == 5


@pytest.mark.slow
def test_an_emulated_uplink_is_recovered_within_five_percent_and_a_millisecond() -> None:
    if os.getloadavg()[0] > 3 * (os.cpu_count() or 1):
        pytest.skip("this machine is busy: the measurement would include other processes")

    def body(group: Group) -> Probe:
        return probe_links(LinkedGroup(group, UPLINKS[group.rank]), f"r{group.rank}", seconds=1.0, trips=5)

    check(run_threads(2, body)[0], rate=0.05, delay=1e-3)


def test_an_uplink_is_shared_when_all_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three replicas with 9 Mbit/s each: a link alone has all of it, two together half each."""
    probe = probe_in_virtual_time(monkeypatch, [Link(9e6)] * 3, seconds=0.15)
    for pair, link in probe.links.alone.items():
        assert link.bits_per_second == pytest.approx(9e6, rel=1e-6)
        assert probe.links.together[pair] == pytest.approx(4.5e6, rel=1e-6)
    assert probe.round is not None and probe.round.bits_per_second == pytest.approx(9e6, rel=1e-6)


def test_duplicate_names_get_their_rank() -> None:
    probe = run_threads(2, lambda group: probe_links(group, name="home", seconds=0.01, trips=1))[0]
    assert probe.links.names == ("home-0", "home-1")


@pytest.mark.parametrize(("seconds", "trips"), [(0.0, 5), (-1.0, 5), (float("nan"), 5), (1.0, 0)])
def test_a_probe_that_measures_nothing_is_refused(seconds: float, trips: int) -> None:
    with pytest.raises(ConfigurationError, match="more than 0 s"):
        run_threads(2, lambda group: probe_links(group, "a", seconds, trips))


def test_one_replica_alone_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 2"):
        run_threads(1, lambda group: probe_links(group, "a"))


def test_line_fits_intercept_and_slope() -> None:
    assert line([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx((1.0, 1.0))
