"""One replica of exchange.py: takes part in rounds and says when each began and ended.

The clock is the machine's, which all namespaces share: replicas agree on the instant at which a round begins, so that a round's time is not
that of waiting for the other process. One JSON line on stdout: for every case its rounds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.catalogue.parsing import parse
from thinwire.codecs import Codec
from thinwire.comm import CountedGroup, Ledger, TorchGroup, gather, start_torch
from thinwire.exchange import Exchange, SendContext, once
from thinwire.packet import HEADER_NBYTES
from thinwire.rng import Key

TIMEOUT = 120.0  # seconds; nobody dies here
ALL_REDUCE = "gloo all-reduce"


@dataclass(frozen=True)
class Case:
    """Rounds of one size, after one that warms up."""

    exchange: str  # the text of a piece, or `ALL_REDUCE` of the same tensor in fp32
    codec: str
    nbytes: int  # of a packet, about; the tensor follows from it
    rounds: int
    uplink: float | None = None  # `TorchGroup`'s
    idle_seconds: float = 0.0  # before each round


@dataclass(frozen=True)
class Part:
    """What one replica is to do."""

    rank: int
    size: int
    address: str
    port: int
    rtt_seconds: float
    cases: tuple[Case, ...]
    seed: int = 0


def numel_of(codec: Codec, nbytes: int) -> int:
    """The most elements whose packet has at most `nbytes`; at least one."""
    low, high = 1, 2
    while HEADER_NBYTES + codec.nbytes(high) <= nbytes:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if HEADER_NBYTES + codec.nbytes(middle) <= nbytes else (low, middle)
    return low


def instant(group: TorchGroup, seconds: float) -> float:
    """When all begin: `seconds` after the last of them was ready, and late enough for all to know it."""
    ready = [float(text) for text in gather(group, repr(time.monotonic()).encode(), 64, "ready")]
    return max(ready) + seconds


class Carriers:
    """The groups of this process, one for each pace; all replicas come to them in the same order."""

    def __init__(self, part: Part) -> None:
        start_torch(part.rank, part.size, part.address, part.port, TIMEOUT)
        self.size, self.ledger = part.size, Ledger()
        self._groups: dict[float | None, TorchGroup] = {}

    def group(self, uplink: float | None) -> TorchGroup:
        if uplink not in self._groups:
            self._groups[uplink] = TorchGroup.from_world(self.size, timeout=TIMEOUT, uplink=uplink)
        return self._groups[uplink]


def measured(part: Part, case: Case, carriers: Carriers, noise: Tensor) -> dict[str, Any]:
    codec = parse(case.codec)
    numel = numel_of(codec, case.nbytes)
    delta = noise.repeat(math.ceil(numel / noise.numel()))[:numel]
    group, ledger = carriers.group(case.uplink), carriers.ledger
    round_ = _round(part, case, codec, CountedGroup(group, ledger), delta)
    margin = 3 * part.rtt_seconds + 0.02 + case.idle_seconds  # gather takes two round trips and a half
    spans, cpu, sent = [], [], []
    for number in range(1 + case.rounds):
        before = ledger.sent()
        begin = instant(group, margin)
        time.sleep(max(0.0, begin - time.monotonic()))
        busy = time.process_time()
        began = time.monotonic()
        round_(number)
        spans.append((began, time.monotonic()))
        cpu.append(time.process_time() - busy)
        sent.append(ledger.sent() - before)
    return {"numel": numel, "spans": spans[1:], "cpu_seconds": cpu[1:], "sent_nbytes": sent[1:]}


def _round(part: Part, case: Case, codec: Codec, group: CountedGroup, delta: Tensor) -> Callable[[int], None]:
    """One exchange of `delta`."""
    if case.exchange == ALL_REDUCE:
        landing = delta.clone()

        def reduce(number: int) -> None:
            dist.all_reduce(landing)
            landing.div_(part.size)

        return reduce
    exchange: Exchange = parse(case.exchange)

    air, states = SendContext(group), [exchange.init(codec, delta.numel(), part.rank, part.size)]

    def round_(number: int) -> None:
        key = Key(part.seed, 0, number, part.rank)
        estimate, arrival = once(exchange, air, codec, delta, key, states[-1])
        states[-1] = arrival.state
        assert estimate is not None  # the noise is finite

    return round_


def main() -> None:
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    cases = tuple(Case(**case) for case in given["cases"])
    part = Part(**{**given, "cases": cases})
    carriers = Carriers(part)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(part.seed + part.rank))
    print(json.dumps([measured(part, case, carriers, noise) for case in part.cases]), flush=True)
    os._exit(0)  # not destroy_process_group, which waits


if __name__ == "__main__":
    main()
