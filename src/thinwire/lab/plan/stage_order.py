"""Assigns the stages of a pipeline to sites by measured links. *Predicted*.

Pipette (arXiv 2405.18093): in asynchronous 1F1B only p micro-batches are in flight, so the time of the chain of hops is added once
for every p micro-batches. `simulate.pipeline.pipeline_seconds` predicts the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np

from thinwire.app.plan.links import Links

Order = tuple[int, ...]
EXACT_SITES = 7  # places: 5,040 orders


def best_chain(links: Links, places: Sequence[int], nbytes: float) -> tuple[Order | None, float]:
    """The order of sites with the shortest chain, and its seconds: an activation through all stages and its gradient back, each hop at
    the rate and delay of its direction. For more than `EXACT_SITES` sites the order is None, and the seconds are a lower bound for every
    order: each site except the last has a hop to another, which takes at least as long as its cheapest hop.
    """
    among = np.ix_(places, places)
    hops = links.delays[among] + 8 * nbytes / links.rates[among]
    both = hops + hops.T
    if len(places) > EXACT_SITES:
        cheapest = (both + np.diag([np.inf] * len(places))).min(axis=1)
        return None, float(cheapest.sum() - cheapest.max())
    table = both.tolist()
    seconds, order = min((sum(table[a][b] for a, b in pairwise(o)), o) for o in permutations(range(len(places))))
    return tuple(places[index] for index in order), float(seconds)
