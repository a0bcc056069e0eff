"""One round without training: for the mean at the end of a gossip run, and for measurements and tests of an exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.exchange.base import Arrival, Arriving, Exchange
from thinwire.exchange.round import Round, SendContext
from thinwire.packet import REFUSED
from thinwire.pieces.aggregate import Aggregate, Mean
from thinwire.rng import Key
from thinwire.types import State


def once(
    exchange: Exchange,
    context: SendContext,
    codec: Codec,
    delta: Tensor,
    key: Key,
    state: State,
    aggregate: Aggregate = Mean(),
) -> tuple[Tensor | None, Arrival]:
    """Exchange flat fp32 `delta` with all replicas of `context`, outside of any training.

    Args:
        exchange: how packets become their mean.
        context: the group, its send queue and its buffers.
        codec: the codec of the packets.
        delta: flat fp32.
        key: of this replica's packet.
        state: of the exchange, as its `init` made it.
        aggregate: makes one estimate of what all sent; one without a state.

    Returns:
        The estimate, or None where more replicas refused the round than the aggregate tolerates; and what else arrived.

    >>> from thinwire import run_threads
    >>> from thinwire.codecs import Identity
    >>> from thinwire.exchange import Direct
    >>> def replica(group):
    ...     own = torch.tensor([1.0, 3.0]) * group.rank
    ...     estimate, _ = once(Direct(), SendContext(group), Identity(), own, Key(sender=group.rank), {})
    ...     return estimate.tolist()
    >>> run_threads(2, replica)
    [[0.5, 1.5], [0.5, 1.5]]
    """
    estimate = torch.empty_like(delta)

    def signal(begin: int, end: int) -> Tensor:
        return delta[begin:end]

    round_ = Round(context, codec, delta.numel(), key, signal, 0, (key.round,), aggregate=aggregate, decodes_own=False)
    arriving = Arriving(exchange.arrive(exchange.depart(round_, state)))
    for begin, mean, _ in arriving:
        estimate[begin : begin + mean.numel()] = mean
    round_.close()
    arrival = arriving.arrival
    refused = arrival.void or sum(bool(said & REFUSED) for said in arrival.flags) > aggregate.tolerates(round_.size)
    return None if refused else estimate, arrival
