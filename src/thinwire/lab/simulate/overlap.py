"""A ring reduce-scatter that begins while its input is still computed: the schedule of T3 (arXiv 2401.16677).

N ranks compute N chunks each, for example of a matrix product, and one rank needs the sum of each chunk over all
ranks. In ring step k rank r sends chunk r − k to rank r + 1, as soon as it has computed that chunk, has received the
sum from rank r − 1, and its link is free. In T3 rank r begins with chunk r (`staggered`), so that the first one can leave
at once. T3's hardware, which tracks stores and adds in memory, is not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.layers import Floats

Order = Literal["serial", "same", "staggered"]
ORDERS: tuple[Order, ...] = get_args(Order)
MOST_RANKS = 256  # most ranks
_SAME = 1e-12  # difference of two simultaneous events, as a share of the whole time


@dataclass(frozen=True)
class RingReduction:
    """A ring reduce-scatter of N chunks over N ranks.

    Args:
        ranks: number N of ranks, 2 to 256.
        produce_seconds: seconds g in which a rank computes one chunk.
        send_seconds: seconds c of one ring step.
        contention: factor k; while a rank sends, computing takes 1 + k times as long, because both need the same memory
            and cores.

    Raises:
        ConfigurationError: a number is out of range.

    >>> RingReduction(ranks=8, produce_seconds=1.0, send_seconds=0.5).work_seconds
    8.0
    """

    ranks: int
    produce_seconds: float
    send_seconds: float
    contention: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ConfigurationError(f"ranks={self.ranks}: between 2 and {MOST_RANKS} ranks are needed.")
        for name in ("produce_seconds", "send_seconds"):
            seconds = getattr(self, name)
            if not (isfinite(seconds) and 0 < seconds <= 1e9):
                raise ConfigurationError(f"{name}={seconds}: a positive time, at most 1e9 s, is needed.")
        if not 0 <= self.contention <= 100:
            raise ConfigurationError(f"contention={self.contention}: between 0 and 100 is needed; 0.5 is a lot.")

    @property
    def work_seconds(self) -> float:
        """Seconds to compute all chunks, without traffic."""
        return self.ranks * self.produce_seconds

    @property
    def traffic_seconds(self) -> float:
        """Seconds of all ring steps, without computing."""
        return (self.ranks - 1) * self.send_seconds


def reduce_scatter(ring: RingReduction, order: Order) -> float:
    """Seconds until every rank has computed all chunks and holds its own sum, simulated.

    `serial`: sending begins after all chunks are computed. `same`: all ranks compute chunks 0, 1, …, so that most wait for
    their first chunk to send. `staggered`: rank r computes r, r − 1, …, the order in which it sends.

    Args:
        ring: the ranks and their times.
        order: `serial`, `same` or `staggered`.

    Raises:
        ConfigurationError: the order is not known.

    >>> ring = RingReduction(ranks=4, produce_seconds=1.0, send_seconds=1.0)
    >>> [reduce_scatter(ring, order) for order in ORDERS]
    [7.0, 7.0, 4.0]
    """
    return _Ranks(ring, order).run()


class _Ranks:
    """Arrays [N]: the chunks that each has computed, the rest of its next one, sends begun and ended, and receives."""

    def __init__(self, ring: RingReduction, order: Order) -> None:
        if order not in ORDERS:
            raise ConfigurationError(f"order={order!r} is not known; choose from {', '.join(ORDERS)}.")
        count = ring.ranks
        self.ring, self.now = ring, 0.0
        self.made, self.left = np.zeros(count, dtype=np.int64), np.full(count, ring.produce_seconds)
        self.sent, self.received = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.until: Floats = np.full(count, np.inf)  # the end of the message on its link
        rank, step = np.arange(count)[:, None], np.arange(count)[None, :]
        chunk = (rank - step) % count  # [N, k]: the chunk that rank r sends in step k; in step N − 1 it keeps it
        needed = {"serial": np.full_like(chunk, count), "same": chunk + 1, "staggered": step + 1 + 0 * rank}[order]
        self.needed = needed  # [N, k]: number of chunks that must be computed before it may be sent

    def run(self) -> float:
        count, ranks = self.ring.ranks, np.arange(self.ring.ranks)
        while (self.made < count).any() or (self.sent < count - 1).any():
            idle = np.isinf(self.until) & (self.sent < count - 1)
            step = np.minimum(self.sent, count - 1)
            ready = idle & (self.made >= self.needed[ranks, step]) & (self.received >= self.sent)
            self.until[ready] = self.now + self.ring.send_seconds
            self._advance()
        return self.now

    def _advance(self) -> None:
        """Advance to the next end of a chunk or of a message."""
        slow = np.where(np.isinf(self.until), 1.0, 1.0 + self.ring.contention)
        working = self.made < self.ring.ranks
        chunk_ends = np.where(working, self.now + self.left * slow, np.inf)
        now = min(chunk_ends.min(), self.until.min())
        soon = now * (1 + _SAME)
        self.left = np.where(working, self.left - (now - self.now) / slow, self.left)
        over = self.until <= soon
        self.sent += over
        self.received += np.roll(over, 1)
        self.until[over] = np.inf
        done = chunk_ends <= soon
        self.made += done
        self.left[done] = self.ring.produce_seconds
        self.now = float(now)


def serial_seconds(ring: RingReduction) -> float:
    """T = N·g + (N−1)·c, predicted and exact: all chunks are computed, then all are sent.

    Args:
        ring: the ranks and their times.

    >>> serial_seconds(RingReduction(ranks=8, produce_seconds=1.0, send_seconds=0.5))
    11.5
    """
    return ring.work_seconds + ring.traffic_seconds


def overlapped_seconds(ring: RingReduction) -> float:
    """T = g + (N−1)·max(c, g + c·k/(1+k)), predicted; exact for `staggered`.

    Either the link is busy from the first chunk on, or the ranks compute all the time, and lose c·k/(1+k) for every
    message beside it. With k = 0 these are g + (N−1)·c and N·g.

    Args:
        ring: the ranks and their times.

    >>> [overlapped_seconds(RingReduction(8, 1.0, c)) for c in (0.5, 1.0, 2.0)]
    [8.0, 8.0, 15.0]
    """
    g, c, k = ring.produce_seconds, ring.send_seconds, ring.contention
    return g + (ring.ranks - 1) * max(c, g + c * k / (1 + k))


def hidden_share(ring: RingReduction, seconds: float) -> float:
    """The overlap's efficiency: the share of the traffic's time that hides behind the work, [0, 1]; 0 for `serial`.

    Args:
        ring: the ranks and their times.
        seconds: seconds that the reduction took, as `reduce_scatter` returns them.

    >>> hidden_share(RingReduction(ranks=8, produce_seconds=1.0, send_seconds=1.0), seconds=8.0)
    1.0
    """
    return round(1 - (seconds - ring.work_seconds) / ring.traffic_seconds, 12) + 0.0  # no −0


def memory_traffic(ranks: int) -> tuple[float, float]:
    """Bytes that one rank's memory moves for a byte of the product, as (plain, with adding in memory).

    Written once by the product. Then, for each of the N−1 chunks that arrive: read what is there, read what arrived,
    write the sum; against one write that adds, and one read to send on. An accounting of our own, for ratios.

    Args:
        ranks: number N of ranks.

    >>> memory_traffic(8)
    (3.625, 2.75)
    """
    share = (ranks - 1) / ranks
    return 1 + 3 * share, 1 + 2 * share
