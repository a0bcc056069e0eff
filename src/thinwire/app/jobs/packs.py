"""Packs documents of different lengths into batches of about equal cost; for a ledger a batch, not a document, is then a sample.

Attention is quadratic, so equal tokens are not equal time (ByteScale, arXiv 2502.21231). The balanced cost is
cost(l) = 24·l·h² + 2·l²·h, the operations forward in a layer of width h (causal: half of 4·l²·h). Batches depend on the lengths alone:
every replica makes the same ones, in every epoch, and in each epoch the ledger puts them in another order.

A batch has at most `capacity` tokens, and batches have different numbers of them. So the mean of their means is not the mean over
tokens: a loss is a sum, divided by the tokens of all batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from thinwire.errors import DataError

Cost = Callable[[int], float]
WINDOW = 4096  # number of documents that are packed together


def attention_cost(width: int) -> Cost:
    """Forward operations of a sequence in one layer of that width.

    >>> attention_cost(1024)(2048) / attention_cost(1024)(1024)
    2.1538461538461537
    """
    return lambda length: 24.0 * length * width**2 + 2.0 * length**2 * width


def packs(lengths: Sequence[int], capacity: int, cost: Cost) -> list[tuple[int, ...]]:
    """The numbers of the documents in each batch, every document in one: of `WINDOW` documents the longest first, onto the batch of least
    cost that has room, with as few batches as that needs. Raises `DataError` for a document that does not fit.

    >>> packs([4, 3, 3, 2], capacity=6, cost=float)
    [(0, 3), (1, 2)]
    """
    if not lengths or min(lengths) < 1 or max(lengths) > capacity:
        found = f"of {min(lengths)} to {max(lengths)} tokens" if lengths else "at all"
        raise DataError(
            f"{len(lengths)} documents {found} for batches of at most {capacity}: at least one is needed, each of 1 to {capacity} tokens. "
            "Cut longer ones, or raise the capacity."
        )
    made: list[tuple[int, ...]] = []
    for first in range(0, len(lengths), WINDOW):
        own = lengths[first : first + WINDOW]
        count = -(-sum(own) // capacity)
        while (batches := _onto(own, count, capacity, cost)) is None:
            count += max(1, count // 64)
        made += [tuple(first + index for index in sorted(batch)) for batch in batches if batch]
    return made


def _onto(lengths: Sequence[int], count: int, capacity: int, cost: Cost) -> list[list[int]] | None:
    """The documents on `count` batches; None if these have no room."""
    load, room = np.zeros(count), np.full(count, capacity)
    batches: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        least = int(np.where(room >= lengths[index], load, np.inf).argmin())
        if room[least] < lengths[index]:
            return None
        load[least] += cost(lengths[index])
        room[least] -= lengths[index]
        batches[least].append(index)
    return batches
