from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from secure_groups import run_secure

from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup, ThreadGroup
from thinwire.errors import LinkError
from thinwire.net import Hub


def zeros(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_the_ledger_counts_by_purpose_and_peer():
    ledgers = [Ledger() for _ in range(3)]
    zero, one, two = (CountedGroup(group, ledger) for group, ledger in zip(ThreadGroup.create(3), ledgers))
    zero.post(0, {1: zeros(10), 2: zeros(20)}, {}, "packet").wait()
    zero.post(1, {1: zeros(3), 2: zeros(0)}, {}, "vote").wait()
    for transfer in (one.post(0, {}, {0: zeros(10)}), two.post(0, {}, {0: zeros(20)})):
        transfer.wait()
    one.post(1, {}, {0: zeros(3)}, "vote").wait()
    assert (ledgers[0].sent(), ledgers[0].sent("packet"), ledgers[0].sent(peer=1)) == (33, 30, 13)
    assert (ledgers[0].sent("vote", 1), ledgers[0].sent("vote", 2), ledgers[0].sent("vote", 7)) == (3, 0, 0)
    assert (ledgers[1].received(), ledgers[2].received(), ledgers[0].received()) == (13, 20, 0)
    report = json.loads(json.dumps(ledgers[0].as_dict()))
    unknown = {"queued_seconds": 0.0, "transfer_seconds": 0.0}
    assert report["sent"] == {
        "packet": {"1": {"nbytes": 10, "messages": 1} | unknown, "2": {"nbytes": 20, "messages": 1} | unknown},
        "vote": {"1": {"nbytes": 3, "messages": 1} | unknown},
    }
    assert report["received"] == {} and set(report["waited_seconds"]) == {"packet", "vote"}


def test_undelivered_bytes_are_not_counted_as_received():
    ledger = Ledger()
    zero, one = ThreadGroup.create(2, timeout=0.05)
    counted = CountedGroup(one, ledger)
    transfer = counted.post(0, {}, {0: zeros(8)})
    with pytest.raises(LinkError):
        transfer.wait()
    assert ledger.received() == 0 and ledger.waited("packet") >= 0.05 and ledger.waited("vote") == 0.0
    counted.close()
    with pytest.raises(LinkError):
        counted.post(0, {0: zeros(8)}, {})
    assert ledger.sent() == 0
    zero.close()


def test_a_second_wait_on_a_message_counts_nothing():
    ledger = Ledger()
    zero, one = ThreadGroup.create(2)
    zero.post(0, {1: zeros(8)}, {})
    transfer = CountedGroup(one, ledger).post(0, {}, {0: zeros(8)})
    transfer.wait()
    transfer.wait()
    assert ledger.received() == 8


def test_threads_may_write_to_the_ledger_concurrently():
    ledger = Ledger()

    def write():
        for _ in range(2000):
            ledger.add_sent("packet", 1, 3)
            ledger.add_received("packet", 1, 2)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ledger.sent(), ledger.received()) == (24_000, 16_000)
    assert ledger.as_dict()["sent"]["packet"]["1"]["messages"] == 8000


def test_the_ledger_counts_seconds_of_an_emulated_link(monkeypatch):
    """The sender counts what the link booked for it, the receiver the whole way."""
    ledgers = [Ledger() for _ in range(3)]
    zero, one, two = (CountedGroup(group, ledger) for group, ledger in zip(ThreadGroup.create(3), ledgers))
    linked = LinkedGroup(zero, Link(8e6, 0.05), ledgers[0])  # 20 kB take 0.02 s
    arriving = [one.post(0, {}, {0: zeros(20_000)}), two.post(0, {}, {0: zeros(10_000)}, "vote")]
    with monkeypatch.context() as still:  # both are posted at the same time
        now = time.monotonic()
        still.setattr(time, "monotonic", lambda: now)
        sending = [linked.post(0, {1: zeros(20_000)}, {}), linked.post(0, {2: zeros(10_000)}, {}, "vote")]
    for transfer in sending + arriving:
        transfer.wait()
    linked.close()
    sent = ledgers[0].as_dict()["sent"]
    assert sent["packet"]["1"] == pytest.approx(
        {"nbytes": 20_000, "messages": 1, "queued_seconds": 0.0, "transfer_seconds": 0.07}, abs=1e-6
    )
    assert sent["vote"]["2"]["transfer_seconds"] == pytest.approx(0.06)
    assert sent["vote"]["2"]["queued_seconds"] == pytest.approx(0.02)  # queued behind the packet
    for ledger, purpose, least in ((ledgers[1], "packet", 0.07), (ledgers[2], "vote", 0.07)):
        assert ledger.as_dict()["received"][purpose]["0"]["transfer_seconds"] >= least


def test_a_message_that_never_left_the_link_has_no_seconds():
    ledger = Ledger()
    sender, receiver = ThreadGroup.create(2)
    linked = LinkedGroup(CountedGroup(sender, ledger), Link(8e3), ledger)
    linked.post(0, {1: zeros(1_000_000)}, {})
    linked.close()
    assert ledger.as_dict()["sent"] == {}
    receiver.close()


def test_a_ledger_continues_from_saved_counts():
    ledger, later = Ledger(), Ledger()
    ledger.add_sent("packet", 1, 100)
    ledger.add_on_link("packet", 1, 0.5, 0.25)
    ledger.add_received("vote", 2, 8, 0.125)
    ledger.add_waited("vote", 2.0)
    for counted in (ledger.as_dict(), json.loads(json.dumps(ledger.as_dict())), {}):
        later.add(counted)
    assert (later.sent(), later.received("vote", 2), later.waited()) == (200, 16, 4.0)
    assert later.as_dict()["sent"]["packet"]["1"] == {
        "nbytes": 200, "messages": 2, "queued_seconds": 1.0, "transfer_seconds": 0.5,
    }  # fmt: skip


def test_the_bytes_that_a_carrier_counted_are_in_the_ledger(tmp_path):
    """A hub passes on to both receivers what it gets once."""
    nbytes = 500_000

    def replica(group):
        ledger, before = Ledger(), group.uploaded
        counted, same = CountedGroup(group, ledger), zeros(nbytes)
        others = [rank for rank in range(3) if rank != group.rank]
        counted.post(1, dict.fromkeys(others, same), {rank: zeros(nbytes) for rank in others}).wait()
        counted.close()
        return ledger, group.uploaded - before

    with Hub(tmp_path / "hub") as hub:
        for ledger, uploaded in run_secure(hub, 3, replica, tmp_path / "keys"):
            assert ledger.sent() == 2 * nbytes and ledger.uploaded() == uploaded >= nbytes
            later = Ledger()
            later.add(ledger.as_dict())
            later.add(ledger.as_dict())
            assert later.uploaded() == 2 * uploaded
