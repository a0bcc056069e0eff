"""A state transfer delivers exactly what was sent, or raises an error that names the sender."""

import hashlib
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.comm import state_transfer
from thinwire.comm.group import Group
from thinwire.comm.threads import ThreadGroup
from thinwire.drivers.elastic.global_state import REMEMBERED, GlobalState
from thinwire.membership.channel import MOST_MEMBERS

Given = tuple[dict[str, Tensor], dict[str, Any]]


def between(send: Callable[[Group], object], limit: int = 1 << 20) -> Given:
    """Runs a transfer in which replica 0 sends and replica 1 receives."""
    first, second = ThreadGroup.create(2)
    thread = threading.Thread(target=send, args=(first,))
    thread.start()
    try:
        return state_transfer.take(second, 0, limit)
    finally:
        first.close()
        second.close()
        thread.join()


@pytest.mark.parametrize("piece", [7, 64, 1 << 22])
def test_a_transferred_state_is_received_bit_for_bit(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(state_transfer, "MESSAGE_NBYTES", piece)
    tensors = {
        "0/anchor": torch.randn(33), "0/outer.momentum": torch.randn(2, 3).t(), "empty": torch.empty(0), "half": torch.ones(3).bfloat16()
    }  # fmt: skip
    sent: list[int] = []
    taken, facts = between(
        lambda group: sent.append(state_transfer.give(group, [1], tensors, {"turn": 4, "who": {"3": ["é"]}}))
    )
    assert facts == {"turn": 4, "who": {"3": ["é"]}} and taken.keys() == tensors.keys()
    assert all(
        torch.equal(taken[name], tensor) and taken[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert sent[0] >= 48 + 4 * (33 + 6) + 6


def raw(*messages: bytes) -> Callable[[Group], None]:
    def send(group: Group) -> None:
        for message in messages:
            group.post(
                state_transfer._TAG, {1: torch.frombuffer(bytearray(message), dtype=torch.uint8)}, {}, "state transfer"
            ).wait()

    return send


def framed(body: bytes, **changes: Any) -> tuple[bytes, ...]:
    fields = {
        "magic": b"TWHO",
        "version": 1,
        "nbytes": len(body),
        "digest": hashlib.blake2b(body, digest_size=32).digest(),
    }
    *header, digest = (fields | changes).values()
    return struct.pack("<4sIQ", *header), body, digest


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        (framed(b"x" * 9, magic=b"HTTP")[:1], "began a state transfer with b'HTTP'"),
        (framed(b"x" * 9, nbytes=1 << 60)[:1], "at most 1,048,576 are expected"),
        (framed(b"x" * 9, digest=bytes(32)), "damaged in transit"),
        (framed(b"x" * 9), "cannot be read"),
        (framed(struct.pack("<Q", 2) + b"{}"), "cannot be read"),
        (framed(struct.pack("<Q", 1 << 40) + b"{}"), "cannot be read"),
    ],
)
def test_hostile_state_bytes_are_refused_by_name(messages: tuple[bytes, ...], match: str) -> None:
    with pytest.raises(tw.PacketError, match=f"replica 0.*{match}|{match}"):
        between(raw(*messages))


def test_waiting_members_learn_of_a_failed_transfer() -> None:
    """The receiver has gone. A waiting member does not wait until its patience ends."""
    donor, taker, other = ThreadGroup.create(3, 60.0)
    taker.close()

    def give() -> None:
        with pytest.raises(tw.LinkError):
            state_transfer.give_parts(donor, [1], [{"x": torch.zeros(3)}], {}, others=[2])

    thread = threading.Thread(target=give)
    thread.start()
    with pytest.raises(tw.LinkError, match="state transfer of replica 0 to others failed"):
        state_transfer.stand_by(other, 0)
    thread.join()


def test_only_the_parts_that_a_receiver_asks_for_are_sent() -> None:
    """One receiver asks for parts 0 and 2, the other for none. A receiver that ends in between has kept what had arrived."""
    donor, first, second = ThreadGroup.create(3, 60.0)
    parts = [{f"{i}.x": torch.full((50,), float(i))} for i in range(3)]
    sent: list[int] = []
    thread = threading.Thread(
        target=lambda: sent.append(state_transfer.give_parts(donor, [1, 2], parts, {"round": 7}, [])), daemon=True
    )
    thread.start()
    facts = [state_transfer.take_facts(group, 0) for group in (first, second)]
    assert facts == [{"round": 7}] * 2 and list(state_transfer.take_parts(second, 0, set(), [200] * 3)) == []
    arrived = dict(state_transfer.take_parts(first, 0, {2, 0}, [200] * 3))
    thread.join()
    assert list(arrived) == [0, 2] and all(torch.equal(arrived[i][f"{i}.x"], parts[i][f"{i}.x"]) for i in arrived)
    header = 48
    assert 2 * 200 < sent[0] - 4 * header < 2 * 200 + 4 * 200  # two parts of 200 bytes; the rest is names and facts


def test_the_facts_of_the_largest_run_fit() -> None:
    names = [f"{number:064}" for number in range(MOST_MEMBERS)]
    state = GlobalState([torch.zeros(1)], [{}], run="a" * 32)
    state.counted = {number: (0, tuple(names), "a" * 8) for number in range(REMEMBERED)}

    def body(group: Group) -> dict[str, Any]:
        if group.rank == 0:
            state_transfer.give_parts(group, [1], state.parts(), state.facts())
            return {}
        facts = state_transfer.take_facts(group, 0)
        assert not list(state_transfer.take_parts(group, 0, [], [4]))
        return facts

    _, facts = tw.run_threads(2, body, 600.0)
    assert state.read(facts).counted == state.counted


def test_all_choose_the_donor_that_is_nearest_to_the_farthest_receiver() -> None:
    """Ranks 0 and 1 receive; 2, 3 and 4 have the state. Clocks are read before and after each probe."""
    clocks = {0: iter([0.0, 1.0, 0.0, 5.0, 0.0, 2.0]), 1: iter([0.0, 4.0, 0.0, 1.0, 0.0, 3.0])}

    def choose(group: Group) -> int:
        return state_transfer.nearest(group, [2, 3, 4], [0, 1], lambda: next(clocks[group.rank]))

    assert tw.run_threads(6, choose) == [4] * 6  # 4, 5 and 3 seconds at the farther one


def test_times_that_are_no_times_are_refused_by_name() -> None:
    def choose(group: Group) -> str:
        clock = iter([0.0, float("nan")])
        with pytest.raises(tw.PacketError) as refused:
            state_transfer.nearest(group, [1], [0], lambda: next(clock))
        return str(refused.value)

    assert all("replica 0 measured nan seconds" in told for told in tw.run_threads(2, choose))
