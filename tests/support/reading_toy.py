"""Toys that read samples. Parameter x of every fragment counts how often the sample at position x was trained, so the deltas
themselves show which samples are in the anchors, independently of the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from elastic_toy import RecordedRun, Toy
from torch import Tensor

from thinwire.data_ledger import DataLedger, LeasedReader
from thinwire.data_ledger.ranges import Range
from thinwire.membership.testing.cluster import Killed, SimulatedCluster

POSITIONS = 2048  # more than any toy reads
STEP = 2  # samples in an inner step


class NotingReader(LeasedReader):
    """A reader that remembers its last draw."""

    now: list[Range]

    def trained(self, number: int | None = None) -> None:
        before = len(self._fresh)
        super().trained(number)
        self.now = self._fresh[before:]


def new_record() -> RecordedRun:
    return RecordedRun(start=[torch.zeros(POSITIONS), torch.zeros(POSITIONS)])


def inner(toy: Toy, fragment: int) -> Tensor:
    """Returns the change of one inner step: 1 for each sample, in both fragments."""
    reader = toy.reader
    assert isinstance(reader, NotingReader)
    if fragment == 0:
        reader.draw(STEP)
        reader.trained()
    more = torch.zeros(POSITIONS)
    for begin, end in reader.now:
        more[begin:end] += 1
    return more


def train(
    cluster: SimulatedCluster,
    record: RecordedRun,
    samples: int,
    replicas: int,
    steps: int,
    come: float = 0.0,
    away: float = 0.0,
    **settings: Any,
) -> Callable[[str], Toy]:
    """Returns a replica that reads. It joins after `come` seconds; `away` seconds after its death it returns, with its last checkpoint
    if it saves any.
    """

    def run(name: str) -> Toy:
        if come:
            with cluster.time:
                cluster.wait(name, lambda: False, come)
        while True:
            try:
                reader = NotingReader(3, replicas, STEP, samples)
                return Toy(cluster, name, record, inner=inner, reader=reader, **settings).train(steps)
            except Killed:
                cluster.revive(name)
                with cluster.time:
                    cluster.wait(name, lambda: False, away)

    return run


def landed(record: RecordedRun, state_digest: str) -> list[Counter[int]]:
    """Returns, by fragment, how often each position is in the anchors of `state_digest`, computed from the deltas that made them."""
    sums = [torch.zeros(POSITIONS), torch.zeros(POSITIONS)]
    for one in record.history(state_digest):
        sums[one.fragment] -= reduce(torch.add, one.deltas, torch.zeros(POSITIONS))
    return [Counter({x: round(float(total[x])) for x in range(POSITIONS) if total[x]}) for total in sums]


def check_once(record: RecordedRun, toy: Toy) -> None:
    """Checks that each position is at most once in the anchors."""
    anchors = landed(record, toy.elastic.rounds.loop.agreed.state_digest)
    assert all(number == 1 for anchor in anchors for number in anchor.values()), "trained twice"


def check(record: RecordedRun, toy: Toy) -> tuple[DataLedger, set[int]]:
    """Checks that each position is at most once in the anchors, and is either in all of them, named as lost, or leased. Returns the ledger
    and the lost positions."""
    agreed = toy.elastic.rounds.loop.agreed
    ledger, anchors = agreed.ledger, landed(record, agreed.state_digest)
    assert ledger is not None
    check_once(record, toy)
    own: set[int] = set()
    for lease in ledger.leases:
        for begin, end in ledger.positions(lease, lease.first, lease.tail_at + 2 * POSITIONS):
            own.update(range(begin, end))
    everywhere = anchors[0].keys() & anchors[1].keys()
    gone = {x for x in range(POSITIONS) if x not in own} - everywhere
    settled = everywhere - own
    assert (len(settled), len(gone)) == (ledger.trained, ledger.lost), "what is not in all anchors is not what is named"
    named: dict[str, set[int]] = {"trained": set(), "lost": set()}
    for name, event, fields in record.events:
        if event == "data" and name == toy.name:
            for kind, found in named.items():
                found.update(x for _, begin, end in fields[kind] for x in range(begin, end))
    if not any(name == toy.name and event == "caught_up" for name, event, _ in record.events):
        assert named == {"trained": settled, "lost": gone}, "its own record says otherwise"
    return ledger, gone
