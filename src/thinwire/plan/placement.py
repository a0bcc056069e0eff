"""Which site takes which stage of a pipeline, by measured links. *Predicted*.

Pipette (arXiv 2405.18093): in asynchronous 1F1B only p micro-batches are in flight, so every p of them the chain of hops is
paid again. What a step takes then is `simulate.pipeline.pipeline_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np

from thinwire.plan.links import Links

Order = tuple[int, ...]
EXACT = 7  # places: 5,040 orders


def best_chain(links: Links, places: Sequence[int], nbytes: float) -> tuple[Order | None, float]:
    """The order of sites along a pipeline with the shortest chain: an activation through all stages and its gradient back, each
    hop at its own direction's rate and delay. Of more than `EXACT` sites no order, and what any takes at least: every site
    but the last has a hop to another, which is no cheaper than its cheapest.
    """
    among = np.ix_(places, places)
    hops = links.delays[among] + 8 * nbytes / links.rates[among]
    both = hops + hops.T
    if len(places) > EXACT:
        cheapest = (both + np.diag([np.inf] * len(places))).min(axis=1)
        return None, float(cheapest.sum() - cheapest.max())
    table = both.tolist()
    seconds, order = min((sum(table[a][b] for a, b in pairwise(o)), o) for o in permutations(range(len(places))))
    return tuple(places[index] for index in order), float(seconds)
