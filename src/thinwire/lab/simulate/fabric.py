"""Flows through a leaf-spine fabric: the choice of their paths, the loads of links, and the completion time.

Leaves (racks, sites) are joined by spines; a flow from leaf i to leaf j takes one of them, up and down again. All links
have one rate; hosts' own links are no limit, and flows inside a leaf stay there. All flows begin together and are
equal, as in one step of a collective. Shares of a flow are fractions, so that loads are compared exactly.

* `ecmp`: each flow on a random spine, as by a hash of its header.
* `round-robin`: the flows of each pair of host and leaf on one spine after the other, from a random one on; no flow is cut.
* `split` (arXiv 2407.00550, Ethereal): of n flows on s spines the first n − r go whole, round robin, r = n mod s; each of the last r
  is cut into s / gcd(r, s) equal parts, which go round robin too. Every spine gets n / s flows, exactly.
* `wrap` (ours, after McNaughton's rule): flows end to end, cut wherever a spine has its n / s: at most s − 1 cuts.
* `spray`: every flow on all spines evenly, packet by packet: the best that is possible, if packets may arrive out of order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, isfinite
from random import Random
from typing import Literal, NamedTuple, get_args

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.layers import Floats
from thinwire.lab.simulate.uplinks import Integers

Policy = Literal["ecmp", "round-robin", "split", "wrap", "spray"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Pattern = Literal["all-to-all", "ring"]
BY_CHANCE: tuple[Policy, ...] = ("ecmp", "round-robin")  # policies with random loads
PARTS = 30_000  # most parts of flows, which are simulated one by one
_WHOLE = Fraction(1)
_SAME = 1e-9  # share of a flow at which it counts as done

Placement = list[tuple[int, Fraction]]  # (spine, share of one flow)


@dataclass(frozen=True)
class Fabric:
    """A leaf-spine fabric: every leaf has one link to every spine, and all these links have the same rate.

    Args:
        leaves: number of leaves (racks, sites), 2 to 4096.
        spines: number of spines, 1 to 4096.
        hosts: number of hosts on each leaf.
        failed: number of spines that are down; nothing is sent over them.
        bits_per_second: the rate of one link between a leaf and a spine, in bits per second.

    Raises:
        ConfigurationError: a number is out of range, no spine works, or the rate is not positive.

    >>> Fabric(leaves=4, spines=8, failed=1).usable
    7
    """

    leaves: int
    spines: int
    hosts: int = 1
    failed: int = 0
    bits_per_second: float = 100e9

    def __post_init__(self) -> None:
        for name, least in (("leaves", 2), ("spines", 1), ("hosts", 1), ("failed", 0)):
            if not least <= getattr(self, name) <= 4096:
                raise ConfigurationError(f"{name}={getattr(self, name)}: between {least} and 4096 is needed.")
        if self.failed >= self.spines:
            raise ConfigurationError(
                f"failed={self.failed} of {self.spines} spines: one that works is needed, so at most {self.spines - 1}."
            )
        if not (isfinite(self.bits_per_second) and self.bits_per_second > 0):
            raise ConfigurationError(f"bits_per_second={self.bits_per_second}: a positive rate is needed.")

    @property
    def usable(self) -> int:
        """Number of working spines."""
        return self.spines - self.failed


class Part(NamedTuple):
    """The share of one flow that goes over one spine.

    Args:
        source: number of the leaf that sends, from 0.
        sink: number of the leaf that receives, from 0.
        spine: number of the spine in between, from 0.
        share: share of the flow, (0, 1], an exact fraction.

    >>> Part(source=0, sink=1, spine=2, share=Fraction(1, 2)).spine
    2
    """

    source: int
    sink: int
    spine: int
    share: Fraction


def place(policy: Policy, flows: int, spines: int, random: Random) -> Placement:
    """The parts of `flows` equal flows of one host to one leaf.

    Args:
        policy: the choice of paths; the module describes each.
        flows: number of flows.
        spines: number of working spines.
        random: draws the spines, or the first of them.

    Returns:
        (spine, share of one flow) for each part.

    >>> [str(share) for _, share in place("split", 3, 2, Random(0))]
    ['1', '1', '1/2', '1/2']
    """
    return _PLACE[policy](flows, spines, random)


def _ecmp(flows: int, spines: int, random: Random) -> Placement:
    return [(random.randrange(spines), _WHOLE) for _ in range(flows)]


def _round_robin(flows: int, spines: int, random: Random) -> Placement:
    first = random.randrange(spines)
    return [((first + flow) % spines, _WHOLE) for flow in range(flows)]


def _split(flows: int, spines: int, random: Random) -> Placement:
    first, rest = random.randrange(spines), flows % spines
    pieces = spines // gcd(rest, spines)
    shares = [_WHOLE] * (flows - rest) + [Fraction(1, pieces)] * (rest * pieces)
    return [((first + part) % spines, share) for part, share in enumerate(shares)]


def _wrap(flows: int, spines: int, random: Random) -> Placement:
    edges = sorted({*map(Fraction, range(flows + 1)), *(Fraction(flows * spine, spines) for spine in range(spines))})
    return [(int(begin * spines / flows), end - begin) for begin, end in pairwise(edges)]


def _spray(flows: int, spines: int, random: Random) -> Placement:
    return [(spine, Fraction(flows, spines)) for spine in range(spines)]


_PLACE: dict[Policy, Callable[[int, int, Random], Placement]] = {
    "ecmp": _ecmp,
    "round-robin": _round_robin,
    "split": _split,
    "wrap": _wrap,
    "spray": _spray,
}


def route(fabric: Fabric, policy: Policy, pattern: Pattern, flows: int, seed: int = 0) -> list[Part]:
    """The parts of all flows when every host sends `flows` equal flows to each other leaf (all-to-all), or to the next leaf (ring).

    Args:
        fabric: the leaves and spines.
        policy: the choice of paths; the module describes each.
        pattern: `all-to-all` or `ring`.
        flows: number of flows from a host to a leaf.
        seed: seed of random paths; an integer number.

    Raises:
        ConfigurationError: fewer than one flow, or more than 30,000 parts of flows.

    >>> len(route(Fabric(leaves=2, spines=2), "split", "ring", flows=3))
    8
    """
    if flows < 1:
        raise ConfigurationError(f"flows={flows}: at least 1 from a host to a leaf is needed.")
    pairs = flow_count(fabric, pattern, 1)
    if pairs * max(flows, fabric.usable) > PARTS:
        raise ConfigurationError(
            f"{pairs:,} pairs of host and leaf with {flows} flows on {fabric.usable} spines: at most {PARTS:,} parts of flows are "
            "simulated; take fewer leaves, hosts or flows, or the pattern `ring`."
        )
    random = Random(seed)
    return [
        Part(source, sink, spine, share)
        for source, sink in _pairs(fabric, pattern)
        for spine, share in place(policy, flows, fabric.usable, random)
    ]


def sinks(fabric: Fabric, pattern: Pattern) -> int:
    """The number of leaves to which one host sends.

    Args:
        fabric: the leaves and spines.
        pattern: `all-to-all` or `ring`.

    >>> sinks(Fabric(leaves=4, spines=2), "all-to-all")
    3
    """
    return fabric.leaves - 1 if pattern == "all-to-all" else 1


def flow_count(fabric: Fabric, pattern: Pattern, flows: int) -> int:
    """The number of flows of all hosts together.

    Args:
        fabric: the leaves and spines.
        pattern: `all-to-all` or `ring`.
        flows: number of flows from a host to a leaf.

    >>> flow_count(Fabric(leaves=4, spines=2, hosts=8), "ring", flows=2)
    64
    """
    return fabric.leaves * fabric.hosts * sinks(fabric, pattern) * flows


def even_load(fabric: Fabric, pattern: Pattern, flows: int) -> Fraction:
    """The load of each link at best, in flows: a leaf's flows divided by the working spines.

    Args:
        fabric: the leaves and spines.
        pattern: `all-to-all` or `ring`.
        flows: number of flows from a host to a leaf.

    >>> even_load(Fabric(leaves=4, spines=2, hosts=8), "ring", flows=1)
    Fraction(4, 1)
    """
    return Fraction(fabric.hosts * sinks(fabric, pattern) * flows, fabric.usable)


def _pairs(fabric: Fabric, pattern: Pattern) -> Iterator[tuple[int, int]]:
    """Yield pairs of the leaf of a host and a leaf to which it sends."""
    for source in range(fabric.leaves):
        ahead = range(1, 1 + sinks(fabric, pattern))
        for _ in range(fabric.hosts):
            yield from ((source, (source + away) % fabric.leaves) for away in ahead)


def loads(fabric: Fabric, parts: Sequence[Part]) -> tuple[dict[tuple[int, int], Fraction], ...]:
    """The load of every uplink and every downlink, in flows, as exact fractions.

    Args:
        fabric: the leaves and spines.
        parts: what `route` returned.

    Returns:
        Two dictionaries by (leaf, spine): the uplinks' loads and the downlinks'.

    >>> fabric = Fabric(leaves=2, spines=2)
    >>> up, down = loads(fabric, route(fabric, "split", "ring", flows=1))
    >>> [str(load) for load in up.values()]
    ['1/2', '1/2', '1/2', '1/2']
    """
    links = [(leaf, spine) for leaf in range(fabric.leaves) for spine in range(fabric.usable)]
    up, down = dict.fromkeys(links, Fraction(0)), dict.fromkeys(links, Fraction(0))
    for (source, sink, spine, share), count in Counter(parts).items():
        up[source, spine] += share * count
        down[sink, spine] += share * count
    return up, down


def most_loaded(fabric: Fabric, parts: Sequence[Part]) -> Fraction:
    """The load of the busiest link, in flows.

    Args:
        fabric: the leaves and spines.
        parts: what `route` returned.

    >>> fabric = Fabric(leaves=4, spines=2, hosts=8)
    >>> most_loaded(fabric, route(fabric, "split", "ring", flows=1))
    Fraction(4, 1)
    """
    return max(max(side.values()) for side in loads(fabric, parts))


def seconds(fabric: Fabric, parts: Sequence[Part], flow_nbytes: float) -> float:
    """Simulated seconds until the last part has arrived, when all flows share the links fairly at any time (max-min).

    There are no packets and no queues. Cost: the rates of all parts are computed again whenever a part ends.

    Args:
        fabric: the leaves and spines.
        parts: what `route` returned.
        flow_nbytes: bytes of one whole flow, at most 1e18.

    Raises:
        ConfigurationError: `flow_nbytes` is not positive, or too large.

    >>> fabric = Fabric(leaves=2, spines=2, bits_per_second=8e9)
    >>> seconds(fabric, route(fabric, "split", "ring", flows=2), flow_nbytes=1e9)
    1.0
    """
    if not (isfinite(flow_nbytes) and 0 < flow_nbytes <= 1e18):
        raise ConfigurationError(f"flow_nbytes={flow_nbytes}: a positive size, at most 1e18 bytes, is needed.")
    spines = fabric.usable
    up = np.array([part.source * spines + part.spine for part in parts])
    down = np.array([part.sink * spines + part.spine for part in parts]) + fabric.leaves * spines
    left = np.array([float(part.share) for part in parts])
    now = 0.0
    while len(left):
        rates = _fair(up, down, 2 * fabric.leaves * spines)
        step = float((left / rates).min())
        now += step
        left = left - step * rates
        going = left > _SAME
        up, down, left = up[going], down[going], left[going]
    return now * 8 * flow_nbytes / fabric.bits_per_second


def _fair(up: Integers, down: Integers, links: int) -> Floats:
    """Max-min fair rates of flows over two links each, with links of rate 1: the flows of the tightest link first, then the rest."""
    rates = np.zeros(len(up))
    capacity = np.ones(links)
    open_ = np.arange(len(up))
    while len(open_):
        count = np.bincount(up[open_], minlength=links) + np.bincount(down[open_], minlength=links)
        share = np.where(count > 0, capacity / np.maximum(count, 1), np.inf)
        least = share.min()
        tight = share <= least * (1 + 1e-12)
        now = tight[up[open_]] | tight[down[open_]]
        fixed = open_[now]
        rates[fixed] = least
        for side in (up, down):
            capacity -= least * np.bincount(side[fixed], minlength=links)
        capacity = np.maximum(capacity, 0.0)
        open_ = open_[~now]
    return rates


def expected_most(flows: int, spines: int) -> float:
    """Predicted: the load of the busiest of `spines` links over an even share, when each flow draws its link (`ecmp`). Exact.

    E[max] = Σ_m P(max > m), and P(max ≤ m) is the coefficient of x^n in (Σ_{k≤m} x^k/k!)^s, times n!/s^n. It is computed
    with Poisson weights, by a Fourier transform.

    Args:
        flows: number n of flows, 1 to 100,000.
        spines: number s of links, 1 to 4096.

    Raises:
        ConfigurationError: a number is out of range.

    >>> [round(expected_most(n, s), 2) for n, s in ((8, 8), (32, 8), (64, 16))]
    [2.6, 1.76, 1.97]
    """
    if not (1 <= flows <= 10**5 and 1 <= spines <= 4096):
        raise ConfigurationError(
            f"{flows} flows on {spines} spines: at least 1 of each, and at most 1e5 on 4096, are needed."
        )
    mean = flows / spines
    least = -(-flows // spines)  # max cannot be less
    most = float(least)
    weights, whole = _poisson(mean, flows), _poisson(float(flows), flows)[flows]
    for top in range(least, flows):
        size = 1 << (spines * top).bit_length()  # above the power's degree
        below = np.fft.irfft(np.fft.rfft(weights[: top + 1], size) ** spines, size)[flows] / whole
        most += 1 - min(1.0, float(below))
        if below > 1 - 1e-9:
            break
    return most / mean


def _poisson(mean: float, most: int) -> Floats:
    """P(0), …, P(most)."""
    numbers = np.arange(1, most + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(mean) - np.log(numbers))]) - mean
    return np.exp(logs)
