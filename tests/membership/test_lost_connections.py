"""Connections of members end while their lighthouse lives on: what nobody will read does not stay there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from thinwire.membership import Lighthouse, LighthouseRendezvous, Membership, Timeouts

LIMIT = 600.0  # only ends a hang
TIMES = Timeouts(heartbeat_interval=0.05, heartbeat_timeout=LIMIT)


def test_ballots_of_views_before_a_lost_connection_are_deleted() -> None:
    """After thousands of such losses a member had no room for another ballot, and took part in no round."""
    lighthouse, together = Lighthouse("127.0.0.1", 0, LIMIT), threading.Barrier(2, timeout=LIMIT)

    def run(name: str) -> Membership:
        rendezvous = LighthouseRendezvous(lighthouse.address)
        membership = Membership(rendezvous, name, timeouts=TIMES)
        for _ in range(12):
            assert membership.next_view({}, LIMIT).decide("land", True, LIMIT)
            together.wait()
            assert rendezvous._vote_store is not None
            rendezvous._vote_store.channel.close()
            together.wait()
        return membership

    with ThreadPoolExecutor(2) as threads:
        members = list(threads.map(run, ("oslo", "paris")))
    keys = lighthouse._registry._keys
    for _ in range(60_000):  # heartbeats bring what is to be deleted
        if len(keys._voters["oslo"][1]) == len(keys._voters["paris"][1]) == 1:
            break
        threading.Event().wait(0.01)
    assert [len(ballots) for _, ballots in keys._voters.values()] == [1, 1], "those of the last view"
    for membership in members:
        membership.close()
    lighthouse.close()
