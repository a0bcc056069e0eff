"""Who stands where: the order of a ring, and which site takes which stage of a pipeline, by measured links. *Predicted*.

Pipette (arXiv 2405.18093) for pipelines: in asynchronous 1F1B only p micro-batches are in flight, so every p of them the
chain of hops is paid again. What a step takes then is `simulate.pipeline.pipeline_seconds`.
Exact search up to 9 places, simulated annealing with restarts above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, permutations
from random import Random

from thinwire.plan.links import Links
from thinwire.seeds import derive

Order = tuple[int, ...]
EXACT = 9  # places: 8! orders
_MOVES, _RESTARTS = 4000, 8


def chain_seconds(links: Links, order: Sequence[int], nbytes: float) -> float:
    """An activation through all stages and its gradient back, each hop at its own direction's rate and delay."""
    there = sum(links.alone[a, b].seconds(int(nbytes)) for a, b in pairwise(order))
    back = sum(links.alone[b, a].seconds(int(nbytes)) for a, b in pairwise(order))
    return there + back


def ring_seconds(links: Links, order: Sequence[int], nbytes: float) -> float:
    """The slowest edge of a ring with one `nbytes` message on each: what a ring all-reduce goes at, step by step."""
    if len(order) < 2:
        return 0.0
    return max(links.alone[a, b].seconds(int(nbytes)) for a, b in zip(order, (*order[1:], order[0])))


def best_chain(links: Links, nbytes: float) -> tuple[Order, float]:
    """The order of sites along a pipeline with the shortest chain."""
    return best_order(len(links), lambda order: chain_seconds(links, order, nbytes), first_is_free=True)


def best_ring(links: Links, nbytes: float) -> tuple[Order, float]:
    """The order around a ring with the fastest slowest edge; of equal ones, that with the least time in all."""

    def cost(order: Order) -> float:
        total = sum(links.alone[a, b].seconds(int(nbytes)) for a, b in zip(order, (*order[1:], order[0])))
        return ring_seconds(links, order, nbytes) * (1 + 1e-9) + 1e-6 * total

    order, _ = best_order(len(links), cost, first_is_free=False)
    return order, ring_seconds(links, order, nbytes)


def best_order(count: int, cost: Callable[[Order], float], first_is_free: bool) -> tuple[Order, float]:
    """The cheapest order of `count` places. On a ring the first one does not matter: it stays 0."""
    if count <= EXACT:
        head, rest = ((), range(count)) if first_is_free else ((0,), range(1, count))
        best = min(((*head, *order) for order in permutations(rest)), key=cost)
        return best, cost(best)
    return min((_anneal(count, cost, restart) for restart in range(_RESTARTS)), key=lambda found: found[1])


def _anneal(count: int, cost: Callable[[Order], float], seed: int) -> tuple[Order, float]:
    """Simulated annealing: reverse a segment, move one, or swap two; the temperature is a share of the cost."""
    draw = Random(derive(seed, "placement"))
    order = tuple(draw.sample(range(count), count))
    now = best_cost = cost(order)
    best = order
    for move in range(_MOVES):
        i, j = sorted(draw.sample(range(count), 2))
        match draw.randrange(3):
            case 0:
                tried = (*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :])
            case 1:
                tried = (*order[:i], *order[i + 1 : j + 1], order[i], *order[j + 1 :])
            case _:
                swapped = list(order)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                tried = tuple(swapped)
        then = cost(tried)
        temperature = 0.3 * best_cost * (1 - move / _MOVES) ** 2
        if then <= now or (temperature > 0 and draw.random() < math.exp((now - then) / temperature)):
            order, now = tried, then
        if now < best_cost:
            best, best_cost = order, now
    return best, best_cost
