"""Promises of the thread carrier alone, and misuse that every carrier refuses."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire.comm import Group, Link, LinkedGroup, ThreadGroup, gather, run_threads
from thinwire.errors import ConfigurationError, LinkError, PacketError


def octets(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_a_thread_group_implements_the_group_protocol():
    assert isinstance(ThreadGroup.create(1)[0], Group)


def test_the_senders_buffer_is_copied_at_once():
    zero, one = ThreadGroup.create(2)
    sent, landing = octets(1, 2), octets(0, 0)
    zero.post(0, {1: sent}, {})
    sent.zero_()
    one.post(0, {}, {0: landing}).wait()
    assert landing.tolist() == [1, 2]


def test_receives_match_in_posting_order_before_and_after_the_send():
    zero, one = ThreadGroup.create(2)
    landings = [octets(0) for _ in range(4)]
    transfers = [one.post(0, {}, {0: landing}) for landing in landings[:2]]
    for value in (1, 2, 3, 4):
        zero.post(0, {1: octets(value)}, {})
    transfers += [one.post(0, {}, {0: landing}) for landing in landings[2:]]
    for transfer in transfers:
        transfer.wait()
    assert [int(landing) for landing in landings] == [1, 2, 3, 4]


def test_a_size_mismatch_names_both_sizes():
    zero, one = ThreadGroup.create(2)
    zero.post(0, {1: octets(1, 2, 3)}, {})
    with pytest.raises(PacketError, match=r"replica 0 sent 3 bytes where 2 were expected"):
        one.post(0, {}, {0: octets(0, 0)}).wait()


def test_a_timeout_names_the_late_peer_and_protects_the_buffer():
    zero, one, two = ThreadGroup.create(3, timeout=0.05)
    landing = octets(0)
    two.post(4, {1: octets(9)}, {})
    with pytest.raises(LinkError, match=r"no message from replica 0 \(tag 4\) within 0.05 s"):
        one.post(4, {}, {0: landing, 2: octets(0)}).wait()
    zero.post(4, {1: octets(7)}, {})  # too late: it would belong to the receive that failed
    zero.post(4, {1: octets(8)}, {})
    later = octets(0)
    one.post(4, {}, {0: later}).wait()
    assert (int(landing), int(later)) == (0, 8)


def test_messages_sent_before_close_arrive_and_later_ones_are_refused():
    zero, one = ThreadGroup.create(2)
    zero.post(0, {1: octets(5)}, {})
    zero.close()
    landing = octets(0)
    one.post(0, {}, {0: landing}).wait()
    assert int(landing) == 5
    with pytest.raises(LinkError, match="replica 0 closed"):
        one.post(0, {}, {0: landing}).wait()
    with pytest.raises(LinkError, match="replica 0 closed"):
        one.post(0, {0: landing}, {}).wait()


def test_completed_tags_hold_no_memory():
    zero, one = ThreadGroup.create(2)
    for tag in range(10):
        zero.post(tag, {1: octets(5)}, {})
        one.post(tag, {}, {0: octets(0)}).wait()
    assert not zero._hub.mail and not zero._hub.due


@pytest.mark.parametrize(
    "tag, messages, said",
    [
        (-1, {1: octets(1)}, "tag -1"),
        (1 << 31, {1: octets(1)}, "tag 2147483648"),
        (0, {0: octets(1)}, "a message for replica 0 was given to replica 0 of 2"),
        (0, {2: octets(1)}, "replica 2"),
        (0, {1: torch.zeros(3)}, "float32"),
        (0, {1: octets(1, 2, 3, 4)[::2]}, "contiguous"),
        (0, {1: octets(1, 2).view(1, 2)}, r"shape \(1, 2\)"),
    ],
)
def test_invalid_messages_are_refused_by_every_carrier(tag, messages, said):
    zero, _ = ThreadGroup.create(2)
    with pytest.raises(ConfigurationError, match=said):
        zero.post(tag, messages, {})
    with pytest.raises(ConfigurationError, match=said):
        zero.post(tag, {}, messages)


def test_run_threads_gives_results_in_rank_order():
    started = threading.Barrier(4)

    def fn(group):
        started.wait()  # all run at the same time
        return group.rank, gather(group, str(group.rank).encode(), 10, "name")

    assert run_threads(4, fn) == [(rank, [b"0", b"1", b"2", b"3"]) for rank in range(4)]


def test_run_threads_raises_the_first_cause_and_ends_all_threads():
    def fn(group):
        if group.rank == 2:
            raise KeyError("the cause")
        group.post(0, {}, {(group.rank + 1) % 3: octets(0)}).wait()

    with pytest.raises(KeyError, match="the cause") as caught:
        run_threads(3, fn)
    assert caught.value.__notes__ == ["raised in replica 2 of 3"]


def test_a_replica_that_leaves_early_is_not_waited_for():
    def fn(group):
        if group.rank == 1:
            group.post(0, {}, {0: octets(0)}).wait()

    with pytest.raises(LinkError, match="replica 0 closed"):
        run_threads(2, fn, timeout=600.0)


def test_invalid_sizes_and_timeouts_are_refused():
    for size, timeout in ((0, 1.0), (2, 0.0), (2, float("nan"))):
        with pytest.raises(ConfigurationError, match=f"size={size}"):
            ThreadGroup.create(size, timeout)


def test_gather_refuses_payloads_beyond_the_local_limit():
    group = ThreadGroup.create(1)[0]
    assert gather(group, b"12345", 5, "name") == [b"12345"]
    with pytest.raises(LinkError, match="name: 6 bytes to send, at most 5"):
        gather(group, b"123456", 5, "name")


def test_an_emulated_link_has_a_thread_only_while_messages_are_in_flight():
    before = threading.active_count()
    first, second = (LinkedGroup(group, Link(8e6, delay)) for group, delay in zip(ThreadGroup.create(2), (3600.0, 0.0)))
    assert threading.active_count() == before
    byte = torch.zeros(1, dtype=torch.uint8)
    on_the_way = [first.post(0, {1: byte}, {}), second.post(0, {0: byte}, {})]
    on_the_way[1].wait()  # its message has been delivered; that of the other takes an hour
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "uplink-0"]
    first.close()
    waiting.join()
    with pytest.raises(LinkError):
        on_the_way[0].wait()
    for thread in threading.enumerate():
        if thread.name == "uplink-1":
            thread.join()
    assert threading.active_count() == before
