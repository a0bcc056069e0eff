"""Methods that exchange gradients at every step, as compositions. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from thinwire.codecs import Codec, Identity
from thinwire.exchange import Direct, Exchange
from thinwire.strategy import Gradients, Strategy


def data_parallel(*, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """The control: exchange the mean gradient at every step, as DistributedDataParallel does, in fp32 by default.

        g ← (1/M)·Σ_m g_m          before every inner step

    *Differs*: packets go from each replica to every other, not around a ring, and are added in fp32 and in rank
    order; nothing overlaps with backward.
    *Wire*: (M−1)·(4·N + 48) bytes a step from each of M replicas, for N parameters in fp32.

    Args:
        codec, exchange: how gradients become bytes; how packets become their mean.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> data_parallel().signal
    Gradients()
    >>> data_parallel().nbytes_per_period([((1000, 1000),)], size=2)  # bytes
    4000384
    """
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)
