"""One member of four spoils rounds or lies about its counters: the others name it, leave it out, and go on as if it were not there."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from elastic_toy import RecordedRun, Toy, agree, one_thread
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.comm.group import TAGS
from thinwire.errors import EndedError, LinkError
from thinwire.membership.channel import mac
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.packet import HEADER_NBYTES, MAGIC

__all__ = ["one_thread"]  # a fixture
HONEST, STEPS = "abc", 120


def votes_no(cluster: SimulatedCluster, toy: Toy) -> None:
    """It votes before two of the others, whose link is slow."""
    cluster.slow("b", "c", 0.5)
    loop = toy.elastic.rounds.loop
    decide = loop._decide
    loop._decide = lambda view, plan, ready, moved, yes, what: decide(view, plan, ready, moved, False, what)  # type: ignore[method-assign]


def votes_for_another_result(cluster: SimulatedCluster, toy: Toy) -> None:
    toy.elastic.rounds.loop._summary = lambda *about: "0" * 32  # type: ignore[method-assign]


def sends_nan(cluster: SimulatedCluster, toy: Toy) -> None:
    def encode(self: Identity, x: Tensor, out: Tensor, key: Any) -> Any:
        nbytes = Identity.encode(self, x, out, key)
        out[:4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)
        return nbytes

    spoilt = type("Identity", (Identity,), {"encode": encode})
    toy.elastic.rounds.loop.codecs = [spoilt(), spoilt()]


def sends_unlike_bytes(cluster: SimulatedCluster, toy: Toy) -> None:
    """Its packets are whole, and differ by receiver."""
    carry = cluster.carry

    def carried(sender: str, receiver: str, message: Tensor, deliver: Callable[[Tensor], None]) -> None:
        if sender == "m" and message.numel() > HEADER_NBYTES and bytes(message[:4].tolist()) == MAGIC:
            message = message.clone()
            message[HEADER_NBYTES] = ord(receiver)
            view = message.numpy().data
            body = zlib.crc32(view[HEADER_NBYTES:], zlib.crc32(bytes(4), zlib.crc32(view[: HEADER_NBYTES - 4])))
            message[HEADER_NBYTES - 4 : HEADER_NBYTES] = torch.tensor(
                list(body.to_bytes(4, "little")), dtype=torch.uint8
            )
        carry(sender, receiver, message, deliver)

    cluster.carry = carried  # type: ignore[method-assign]


def connects_to_no_group(cluster: SimulatedCluster, toy: Toy) -> None:
    membership = toy.elastic.rounds.loop.membership
    connected, presence = membership._connected, membership._presence

    def connect(*about: Any) -> Any:
        if toy.step <= 8:
            return connected(*about)
        raise LinkError("it connects to none")

    membership._connected = connect  # type: ignore[method-assign]
    membership._presence = lambda *about: replace(presence(*about), **({"holds": ""} if toy.step > 8 else {}))  # type: ignore[method-assign]


def greets(spoilt: Callable[[str, list[int]], list[int]], seconds: float) -> Callable[[SimulatedCluster, Toy], None]:
    """It connects to each group, sends its greeting as `spoilt` for each receiver, and leaves after so many `seconds`."""

    def greets_wrongly(cluster: SimulatedCluster, toy: Toy) -> None:
        membership = toy.elastic.rounds.loop.membership
        greet, presence = membership._greet, membership._presence

        def wrong(group: Any, epoch: str, members: Any) -> dict[str, float]:
            if toy.step <= 8:
                return greet(group, epoch, members)
            hello = list(mac(b"", "hello", epoch.encode(), members[group.rank].incarnation.encode())[:16])
            sent = {rank: spoilt(members[rank].name, hello) for rank in range(group.size) if rank != group.rank}
            group.post(TAGS, {rank: torch.tensor(text, dtype=torch.uint8) for rank, text in sent.items() if text}, {})
            membership.sleep(seconds)
            raise LinkError("it has left")

        membership._greet = wrong  # type: ignore[method-assign]
        membership._presence = lambda *about: replace(presence(*about), **({"holds": ""} if toy.step > 8 else {}))  # type: ignore[method-assign]

    return greets_wrongly


def sends_nothing(cluster: SimulatedCluster, toy: Toy) -> None:
    """It greets the others, and waits until they have given up."""
    loop = toy.elastic.rounds.loop
    send = loop._fly

    def silent(*about: Any) -> Any:
        if toy.step <= 8:
            return send(*about)
        loop.membership.sleep(loop.membership.timeouts.transfer + 1.0)
        raise LinkError("it sends nothing")

    loop._fly = silent  # type: ignore[method-assign]


def votes_late(cluster: SimulatedCluster, toy: Toy) -> None:
    loop = toy.elastic.rounds.loop
    decide = loop._decide

    def late(*about: Any) -> bool | None:
        loop.membership.sleep(8.0)
        return decide(*about)

    loop._decide = late  # type: ignore[method-assign]


def never_votes(names: str) -> Callable[[SimulatedCluster, Toy], None]:
    """It blames `names`."""

    def never_votes(cluster: SimulatedCluster, toy: Toy) -> None:
        loop = toy.elastic.rounds.loop

        def never(*about: Any) -> bool:
            loop.membership.sleep(16.0)
            return False

        loop._decide = never  # type: ignore[method-assign]
        blame = loop._conduct.blame
        loop._conduct.blame = lambda view, blames, sums: blame(view, dict.fromkeys(names, "did not vote in time"), sums)  # type: ignore[method-assign]

    return never_votes


def asks_late(cluster: SimulatedCluster, toy: Toy) -> None:
    membership = toy.elastic.rounds.loop.membership
    next_view = membership.next_view

    def late(*about: Any) -> Any:
        membership.sleep(4.0)
        return next_view(*about)

    membership.next_view = late  # type: ignore[method-assign]


def sends_late(cluster: SimulatedCluster, toy: Toy) -> None:
    for name in HONEST:
        cluster.slow("m", name, 4.0)


def sends_late_to_one(cluster: SimulatedCluster, toy: Toy) -> None:
    """The others wait for that member's ballots."""
    carry = cluster.carry

    def carried(sender: str, receiver: str, message: Tensor, deliver: Callable[[Tensor], None]) -> None:
        later = partial(carry, sender, receiver, message.clone(), deliver)
        cluster.time.after(4.0, later) if (sender, receiver) == ("m", "c") else later()

    cluster.carry = carried  # type: ignore[method-assign]


def says(**lie: Any) -> Callable[[SimulatedCluster, Toy], None]:
    def lies(cluster: SimulatedCluster, toy: Toy) -> None:
        loop = toy.elastic.rounds.loop
        status = loop._status
        loop._status = lambda: replace(status(), **lie) if toy.step > 8 else status()  # type: ignore[method-assign]

    return lies


SPOILING = {
    f.__name__: f
    for f in (
        votes_no, votes_late, votes_for_another_result, asks_late, connects_to_no_group, sends_nan, sends_unlike_bytes, sends_late,
        sends_late_to_one, sends_nothing,
    )
} | {
    "never votes": never_votes("m"), "never votes and blames one": never_votes("a"),  # as if it had only seen what the others do
    "greets nobody": greets(lambda to, hello: [], 12.0), "greets nobody and leaves": greets(lambda to, hello: [], 0.0),
    "greets one": greets(lambda to, hello: hello * (to == "b"), 12.0), "greets all but one": greets(lambda to, hello: hello * (to != "b"), 12.0),
    "greets as another": greets(lambda to, hello: [7] * 16, 0.0), "greets with too much": greets(lambda to, hello: hello * 2, 1.0),
}  # fmt: skip
LYING = {
    "more rounds": says(round=10**6, state_digest="0" * 32), "almost all rounds": says(round=(1 << 30) - 1),
    "the last step": says(step=STEPS - 1), "the end": says(over=True, finishing=True, brings={}, claims={}),
    "an old state": says(round=1), "another run": says(run="f" * 32),
}  # fmt: skip


def play(
    spoil: Callable[[SimulatedCluster, Toy], None], to_the_end: bool = True, grace: float = 2.0
) -> tuple[dict[str, Any], RecordedRun]:
    cluster, record = SimulatedCluster(), RecordedRun()

    def honest(name: str) -> Toy:
        return Toy(cluster, name, record, least=2, grace=grace, most_steps=STEPS).train(STEPS)

    def mallory(name: str) -> str:
        toy = Toy(cluster, name, record, least=2, grace=grace, most_steps=STEPS)
        spoil(cluster, toy)
        try:
            toy.train(STEPS) if to_the_end else toy.begin().train_until(STEPS // 2)
        except (LinkError, EndedError) as error:
            return str(error)
        finally:
            toy.elastic.close()
        return "ended"

    results = cluster.play(dict.fromkeys(HONEST, honest) | {"m": mallory})
    assert all(isinstance(results[name], Toy) for name in HONEST), results
    digests = {results[name].elastic.rounds.loop.agreed.state_digest for name in HONEST}
    assert len(digests) == 1, "the honest ones hold one state"
    return results, record


def committed(record: RecordedRun, name: str) -> int:
    return sum(n == name and e == "round" and bool(f["committed"]) for n, e, f in record.events)


@pytest.mark.parametrize("kind", SPOILING)
def test_a_member_that_spoils_rounds_is_named_and_left_out(kind: str) -> None:
    _, record = play(SPOILING[kind], to_the_end=False)
    out = Counter(
        (name, fields["name"]) for name, event, fields in record.events if event == "left_out" and name in HONEST
    )
    assert {who for _, who in out} == {"m"} and {name for name, _ in out} == set(HONEST), out
    warnings = [fields["message"] for name, event, fields in record.events if event == "warning" and name == "a"]
    assert any("m" in text.split() for text in warnings), warnings
    assert committed(record, "a") >= STEPS // 4, "a round every two steps without it"


@pytest.mark.parametrize("kind", LYING)
def test_a_member_that_lies_about_its_counters_moves_nobody(kind: str) -> None:
    results, record = play(LYING[kind])
    for name in HONEST:
        trained = float(results[name].trained[0].numel() and results[name].elastic._trained)
        assert trained >= 0.9 * STEPS, f"{name} trained {trained} of {STEPS} steps"
    assert committed(record, "a") >= STEPS // 4


def test_nobody_is_left_out_for_being_a_bit_slower() -> None:
    cluster, record = SimulatedCluster(), RecordedRun()
    run = lambda name: Toy(cluster, name, record, 1.2 if name == "c" else 1.0, least=2, grace=2.0).train(STEPS)  # noqa: E731
    agree(cluster.play(dict.fromkeys("abcd", run)), record)
    assert not [event for _, event, _ in record.events if event == "left_out"]


def test_nobody_is_left_out_for_dying_now_and_then() -> None:
    """c is frozen and thawed again and again, as a slow and honest machine is."""
    cluster, record = SimulatedCluster(), RecordedRun()
    for at in range(10, 100, 20):
        cluster.later(float(at), lambda: cluster.freeze("c"))
        cluster.later(at + 7.0, lambda: cluster.thaw("c"))
    run = lambda name: Toy(cluster, name, record, least=2, keep=100.0).train(STEPS)  # noqa: E731
    results = cluster.play(dict.fromkeys("abcd", run))
    agree(results, record)
    assert not [event for _, event, _ in record.events if event == "left_out"]
