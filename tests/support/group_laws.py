"""The laws of a carrier: each law is a function that all replicas run at the same time on a fresh group.

`run_processes` runs a function in real processes joined by gloo on loopback.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm import CountedGroup, Group, Ledger, Link, LinkedGroup, TorchGroup, gather, start_torch
from thinwire.comm.group import TAGS
from thinwire.errors import LinkError

Law = Callable[[Group], None]
NOISE = torch.randint(0, 256, (6_000_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
TIMEOUT = 600.0  # far longer than any law takes; it only ends a hang


def message(source: int, destination: int, what: int, nbytes: int) -> Tensor:
    """Returns bytes that differ for every sender, receiver and purpose."""
    start = 100_000 * source + 10_000 * destination + 7 * what
    return NOISE[start : start + nbytes].clone()


def peers(group: Group) -> list[int]:
    return [peer for peer in range(group.size) if peer != group.rank]


class Exchange:
    """Each replica sends `nbytes` to each other; `check` waits and compares."""

    def __init__(self, group: Group, tag: int, what: int, nbytes: int, purpose: str = "packet") -> None:
        self.group, self.what = group, what
        self.buffers = {peer: torch.zeros(nbytes, dtype=torch.uint8) for peer in peers(group)}
        sent = {peer: message(group.rank, peer, what, nbytes) for peer in peers(group)}
        self.sent = sent
        self.transfer = group.post(tag, sent, self.buffers, purpose)

    def check(self) -> None:
        self.transfer.wait()
        for peer, buffer in self.buffers.items():
            assert torch.equal(buffer, message(peer, self.group.rank, self.what, buffer.numel()))


def order_within_a_tag(group: Group) -> None:
    """Messages of a pair under one tag are matched in posting order, in whatever order they are waited for."""
    for exchange in reversed([Exchange(group, 3, what, 1000) for what in range(6)]):
        exchange.check()


def many_open_posts(group: Group) -> None:
    exchanges = [Exchange(group, tag, tag, 100 + tag) for tag in range(40)]
    random.Random(group.rank).shuffle(exchanges)
    for exchange in exchanges:
        exchange.check()


def two_threads(group: Group) -> None:
    failures: list[BaseException] = []

    def run(tag: int) -> None:
        try:
            for what in range(25):
                Exchange(group, tag, what, 1 + 997 * ((what * tag) % 60)).check()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(tag,)) for tag in (5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def any_size(group: Group) -> None:
    for what, nbytes in enumerate((0, 1, 7, 65_537, 0, 5_000_000)):
        Exchange(group, 0, what, nbytes).check()


def buffers_are_free_after_wait(group: Group) -> None:
    """The bytes that arrive are those at the time of the post. A transfer may be waited for twice."""
    first = Exchange(group, 1, 1, 200_000)
    first.check()
    for sent in first.sent.values():
        sent.zero_()
    second = Exchange(group, 1, 2, 200_000)
    second.check()
    first.check()


def one_way(group: Group) -> None:
    """Each replica sends only to the next one, and expects no message from it."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.size == 1:
        group.post(2, {}, {}).wait()
        return
    buffer = torch.zeros(500, dtype=torch.uint8)
    group.post(2, {after: message(group.rank, after, 0, 500)}, {before: buffer}).wait()
    assert torch.equal(buffer, message(before, group.rank, 0, 500))


def gathered(group: Group) -> None:
    payloads = [bytes([rank]) * (1000 * rank) for rank in range(group.size)]  # the first is empty
    for _ in range(2):
        assert gather(group, payloads[group.rank], 3000, "vote") == payloads


def lying_length(group: Group) -> None:
    """A length beyond the limit is refused before anything is allocated."""
    if group.rank == 0:
        length = torch.frombuffer(bytearray((1 << 60).to_bytes(8, "little")), dtype=torch.uint8)
        lengths = {peer: torch.zeros(8, dtype=torch.uint8) for peer in peers(group)}
        group.post(TAGS, {peer: length for peer in peers(group)}, lengths).wait()
        return
    with pytest.raises(LinkError, match=r"replica 0 announces 1152921504606846976 bytes, at most 100"):
        gather(group, b"", 100, "vote")


def close_wakes_everybody(group: Group) -> None:
    if group.rank > 0:
        with pytest.raises(LinkError, match="replica 0"):
            group.post(4, {}, {0: torch.zeros(9, dtype=torch.uint8)}).wait()
        return
    told: list[str] = []

    def wait(peer: int) -> None:
        with pytest.raises(LinkError) as caught:
            group.post(5, {}, {peer: torch.zeros(9, dtype=torch.uint8)}).wait()
        told.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(peer,)) for peer in peers(group)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)  # most likely the threads wait by now; the law holds in either case
    group.close()
    for thread in threads:
        thread.join()
    # the error may instead be that the peer has left
    assert len(told) == group.size - 1 and all("closed" in text or "has left" in text for text in told)
    with pytest.raises(LinkError, match="is closed"):
        group.post(4, {}, {})
    group.close()


def last_message_arrives(group: Group) -> None:
    """A waited-for message has been sent, so a sender that leaves at once takes nothing from the others."""
    Exchange(group, 0, 0, 2_000_000).check()
    group.close()


def ledgers_agree(group: Group) -> None:
    """One end counts as sent what the other counts as received, and both count what was posted."""
    ledger = Ledger()
    counted = CountedGroup(group, ledger)
    for what, nbytes in enumerate((0, 1, 1000, 70_000)):
        Exchange(counted, what, what, nbytes, "packet").check()
    Exchange(counted, 9, 9, 64, "vote").check()
    assert ledger.sent() == ledger.received() == (group.size - 1) * 71_065
    assert ledger.sent("vote") == (group.size - 1) * 64
    reports = [json.loads(text) for text in gather(group, json.dumps(ledger.as_dict()).encode(), 10_000, "vote")]
    for peer in peers(group):
        for purpose, due in (("packet", {"nbytes": 71_001, "messages": 3}), ("vote", {"nbytes": 64, "messages": 1})):
            sent = reports[group.rank]["sent"][purpose][str(peer)]
            # a sender on a real link does not know these
            assert sent == due | {
                "queued_seconds": 0.0,
                "transfer_seconds": 0.0,
            }
            received = reports[peer]["received"][purpose][str(group.rank)]
            assert received.pop("transfer_seconds") > 0.0 and received == due | {"queued_seconds": 0.0}


def shorter_than_due(group: Group) -> None:
    """A message may be shorter than its buffer if the receiver reads the length from it; its real length is counted."""
    ledger = Ledger()
    counted = CountedGroup(group, ledger)
    for what, nbytes in enumerate((1, 700, 70_000, 100_000)):
        sent = {peer: message(group.rank, peer, what, nbytes) for peer in peers(group)}
        for one in sent.values():
            one[0] = what
        buffers = {peer: torch.full((100_000,), 0xEE, dtype=torch.uint8) for peer in peers(group)}
        counted.post(what, sent, buffers, sized=lambda buffer: (1, 700, 70_000, 100_000)[int(buffer[0])]).wait()
        for peer, buffer in buffers.items():
            assert torch.equal(buffer[1:nbytes], message(peer, group.rank, what, nbytes)[1:])
            assert int(buffer[0]) == what and bool((buffer[nbytes:] == 0xEE).all())
    assert ledger.sent() == ledger.received() == 170_701 * (group.size - 1)


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        order_within_a_tag,
        many_open_posts,
        two_threads,
        any_size,
        buffers_are_free_after_wait,
        one_way,
        gathered,
        lying_length,
        close_wakes_everybody,
        last_message_arrives,
        ledgers_agree,
        shorter_than_due,
    )
}
WRAPPERS: dict[str, Callable[[Group], Group]] = {
    "bare": lambda group: group,
    "counted": lambda group: CountedGroup(group, Ledger()),
    "linked": lambda group: LinkedGroup(group, Link(4e9, 1e-3)),
    "linked-counted": lambda group: LinkedGroup(CountedGroup(group, Ledger()), Link(4e9, 1e-3)),
}
CASES = [
    f"{law}-{wrapper}-{size}"
    for law in LAWS
    for wrapper in WRAPPERS
    for size in ((1, 2, 3, 4) if wrapper == "bare" else (3,))
]


def run_case(case: str, group: Group) -> None:
    law, wrapper, _ = (case.replace("linked-counted", "linked+counted")).split("-")
    wrapped = WRAPPERS[wrapper.replace("+", "-")](group)
    try:
        LAWS[law](wrapped)
    finally:
        wrapped.close()


def all_laws(rank: int, size: int) -> dict[str, str]:
    """Runs every case on gloo and returns those that failed in this process."""
    failures = {}
    for case in CASES:
        members = list(range(int(case[-1])))
        process_group = dist.new_group(members)
        if rank in members:
            try:
                run_case(case, TorchGroup(process_group, TIMEOUT))
            except BaseException:
                failures[case] = f"replica {rank}: {traceback.format_exc()}"
    return failures


def _process(fn: Callable[[int, int], Any], rank: int, size: int, port: int, folder: str, timeout: float) -> None:
    torch.set_num_threads(1)
    start_torch(rank, size, "127.0.0.1", port, timeout)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(fn(rank, size)))
    # destroy_process_group is not called, because a process whose group is dead must be able to end.
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_processes(
    fn: Callable[[int, int], Any], size: int, folder: Path, timeout: float = TIMEOUT, limit: float = 3600.0
) -> list[Any]:
    """Runs `fn(rank, size)` in `size` processes and returns their results, None for one that died. `limit` seconds end a hang."""
    context = multiprocessing.get_context("forkserver")  # torch is loaded once, not in each process
    context.set_forkserver_preload(["torch.distributed", "pytest", "thinwire.comm"])
    port = free_port()
    processes = [
        context.Process(target=_process, args=(fn, rank, size, port, str(folder), timeout), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]
