"""The end of a gossip run: all replicas take the mean of their weights, or another aggregate, once."""

from __future__ import annotations

from torch import Tensor

from thinwire.codecs import Identity
from thinwire.comm.group import Group, Messages, Sized, Transfer, WrappedGroup
from thinwire.errors import NonFiniteError
from thinwire.exchange import SendContext, TwoShot, once
from thinwire.pieces.aggregate import Aggregate, Mean
from thinwire.rng import Key


def mean_of_all(group: Group, own: Tensor, key: Key, aggregate: Aggregate = Mean()) -> Tensor:
    """The mean, or `aggregate`, of all replicas' flat fp32 `own`, with the same bits on all; 8·(M−1)/M bytes per element.

    Raises `NonFiniteError`, `LinkError`.
    """
    context = SendContext(_CountedAsMean(group))
    mean, _ = once(TwoShot(), context, Identity(), own, key, {}, aggregate=aggregate)
    context.close(wait=True)
    if mean is None:
        raise NonFiniteError(
            "some replica's weights hold NaN or infinity at the end, so there is no mean over all; resume from the last checkpoint "
            "with a smaller learning rate."
        )
    return mean


class _CountedAsMean(WrappedGroup):
    """The same group; its messages have their own purpose in the ledger."""

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`."""
        return self.group.post(tag, send, recv, "mean", sized)
