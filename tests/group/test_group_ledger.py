from __future__ import annotations

import json
import threading

import pytest
import torch

from thinwire.errors import LinkError
from thinwire.group import CountedGroup, Ledger, ThreadGroup


def zeros(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_counts_by_purpose_and_peer():
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
    assert report["sent"] == {
        "packet": {"1": {"nbytes": 10, "messages": 1}, "2": {"nbytes": 20, "messages": 1}},
        "vote": {"1": {"nbytes": 3, "messages": 1}},
    }
    assert report["received"] == {} and set(report["waited_seconds"]) == {"packet", "vote"}


def test_what_did_not_arrive_is_not_received_and_waiting_is_counted():
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


def test_a_second_wait_counts_nothing():
    ledger = Ledger()
    zero, one = ThreadGroup.create(2)
    zero.post(0, {1: zeros(8)}, {})
    transfer = CountedGroup(one, ledger).post(0, {}, {0: zeros(8)})
    transfer.wait()
    transfer.wait()
    assert ledger.received() == 8


def test_threads_may_write_at_once():
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
