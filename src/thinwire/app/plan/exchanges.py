"""Predicts how packets travel fastest over measured links: each to all, in shards, over one center, or around a ring.

The closed forms of TPI-LLM (arXiv 2410.00531, §3.2) with the rates and delays of every replica, for packets of n bytes and M replicas:

    each to all    τ + 8·n·(M−1) / rate
    in shards      2·τ + 8·n·2·(M−1)/M / rate
    over a center  2·τ + 8·n·(M−1) / (center's downlink) + 8·n·(M−1) / (center's uplink), or a replica's own link if that takes longer
    a ring         2·(M−1)·τ + 8·n·2·(M−1)/M / rate of its slowest hop

A ring sends as much as shards, with a delay for each of its steps, and Thinwire has no such exchange. It would be faster only if two
replicas that are not neighbours have a slow link. gloo's own ring waits for a round trip at each step, which is twice the delays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from thinwire.app.plan import cost
from thinwire.app.plan.links import Links
from thinwire.app.plan.setting import Setting
from thinwire.app.records.units import text_of_nbytes, text_of_seconds
from thinwire.catalogue.parsing import parse
from thinwire.errors import ConfigurationError
from thinwire.exchange import Direct, Exchange, TwoShot


@dataclass(frozen=True)
class Route:
    """How packets travel, and the seconds of a round. `exchange` is None for the ring."""

    name: str
    exchange: Exchange | None
    seconds: float


def ways(links: Links, nbytes: float) -> list[Route]:
    """All ways for packets of `nbytes` among two or more replicas, the fastest first.

    >>> from thinwire.comm import Link
    >>> [(way.name, round(way.seconds, 3)) for way in ways(Links.uniform(Link(200e6, 0.05), 4), 1e6)]
    [('in shards', 0.16), ('each to all', 0.17), ('over replica-0', 0.34), ('around a ring', 0.36)]
    """
    size = len(links)
    center = min(range(size), key=lambda place: star_seconds(links, nbytes, place))
    shard = 2 * nbytes / size
    return sorted(
        [
            Route("each to all", Direct(), cost.wire_seconds(links, nbytes) + cost.way_seconds(links)),
            Route("in shards", TwoShot(), cost.wire_seconds(links, shard) + 2 * cost.way_seconds(links)),
            Route(f"over {links.names[center]}", parse(f"Star({center})"), star_seconds(links, nbytes, center)),
            Route("around a ring", None, ring_seconds(links, nbytes)),
        ],
        key=lambda way: way.seconds,
    )


def star_seconds(links: Links, nbytes: float, center: int) -> float:
    """Seconds if all send `nbytes` to `center`, which sends as much to all."""
    others = [place for place in range(len(links)) if place != center]
    count, up, down = len(others), np.array(links.up), np.array(links.down)
    to = min(links.rates[others, center].min(), up[others].min(), down[center] / count)
    back = min(links.rates[center, others].min(), down[others].min(), up[center] / count)
    way = links.delays[others, center].max() + links.delays[center, others].max()
    return float(8 * nbytes * (1 / to + 1 / back) + way)


def ring_seconds(links: Links, nbytes: float) -> float:
    """Seconds if each sends a share of 1/M to the next, 2·(M−1) times, in the order of the names."""
    hops = list(pairwise([*range(len(links)), 0]))
    steps = 2 * (len(links) - 1)
    rate = min(min(links.rates[a, b], links.up[a], links.down[b]) for a, b in hops)
    return float(steps * (max(links.delays[a, b] for a, b in hops) + 8 * nbytes / len(links) / rate))


def fitting(setting: Setting, links: Links) -> list[Route]:
    """The ways for the largest fragment of `setting` that its method accepts, and the ring; the fastest first. Empty for fewer than three
    replicas, where each to all is the fastest."""
    if setting.replicas < 3:
        return []
    nbytes = largest_packet_nbytes(setting)
    found = ways(links.among(setting.places), nbytes)
    return [way for way in found if way.exchange is None or _accepts(setting, way.exchange)]


def largest_packet_nbytes(setting: Setting) -> int:
    """Bytes of a packet of the largest fragment, with its headers."""
    return max(Direct().nbytes_sent(codec, numel, 2) for codec, numel in setting.candidate.coded)


def _accepts(setting: Setting, exchange: Exchange) -> bool:
    try:
        return bool(replace(setting.strategy, exchange=exchange))
    except ConfigurationError:
        return False


def sentence(setting: Setting, links: Links) -> str:
    """Text on the seconds of each, the fastest, and what to do; "" for fewer than three replicas."""
    found = fitting(setting, links)
    if not found:
        return ""
    told = ", ".join(f"{_named(way)} {text_of_seconds(way.seconds)}" for way in found)
    best = next(way for way in found if way.exchange)
    if repr(best.exchange) == repr(setting.strategy.exchange):
        advice = f"{best.exchange} stays"
    else:
        advice = f'--exchange "{best.exchange}" is the fastest; its means are rounded once more'
    nbytes = text_of_nbytes(largest_packet_nbytes(setting))
    return f"exchange (predicted): a round of the largest fragment, {nbytes} a packet, takes {told}. {advice}."


def _named(way: Route) -> str:
    return f"{way.name} ({way.exchange})" if way.exchange else way.name
