"""Methods as compositions, each as its paper describes it. No logic here: a recipe that needs an `if` lacks a piece."""

from __future__ import annotations

from typing import Literal

from thinwire.codecs import E3M0, ChunkedTopK, Codec, Identity, Sign
from thinwire.exchange import Direct, Exchange
from thinwire.feedback import Feedback
from thinwire.merge import Eager, Mix
from thinwire.outer import Nesterov
from thinwire.partition import Partition, Strided
from thinwire.schedule import Every, Staggered
from thinwire.strategy import Gradients, Strategy


def data_parallel(*, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """The control: the mean gradient at every step, as DistributedDataParallel, in fp32 unless another codec is given."""
    return Strategy(signal=Gradients(), codec=codec, exchange=exchange)


def local_sgd(*, every: int = 30, codec: Codec = Identity(), exchange: Exchange = Direct()) -> Strategy:
    """Local SGD (Stich, arXiv 1805.09767): average the parameters every `every` steps."""
    return Strategy(schedule=Every(every), codec=codec, exchange=exchange)


def diloco(
    *,
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec = Identity(),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """DiLoCo (Douillard et al., arXiv 2311.08105): an outer Nesterov step on the mean delta of the whole model."""
    return Strategy(
        schedule=Every(every),
        outer=Nesterov(outer_lr, outer_momentum),
        codec=codec,
        exchange=exchange,
        anchors=anchors,
    )


def streaming_diloco(
    *,
    every: int = 30,
    fragments: int | None = None,
    delay: int = 5,
    merge: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec = E3M0(),
    partition: Partition | None = None,
    offsets: tuple[int, ...] | None = None,
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments in turn, in the air for `delay` steps, in 4
    bits.

    `fragments` counts those of layers (strided); what is outside the layers is one more. By default a fragment has
    three layers, as in the paper, or fewer, so that none has more than delay / every of them: on a link that just
    carries the average, a fragment of that size flies for `delay` steps. `partition` replaces both.
    """
    return Strategy(
        schedule=Staggered(every, delay, offsets),
        partition=partition or Strided(fragments, share=delay / every),
        codec=codec,
        exchange=exchange,
        outer=Nesterov(outer_lr, outer_momentum),
        merge=Mix(merge),
        anchors=anchors,
    )


def eager_diloco(
    *,
    every: int = 30,
    fragments: int | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec = E3M0(),
    partition: Partition | None = None,
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """Eager updates (Kale et al., arXiv 2502.12996) on streaming fragments: a whole period in the air, own delta at once."""
    return Strategy(
        schedule=Staggered(every, delay=every),
        partition=partition or Strided(fragments),
        codec=codec,
        exchange=exchange,
        outer=Nesterov(outer_lr, outer_momentum),
        merge=Eager(),
        anchors=anchors,
    )


def sparse_loco(
    *,
    every: int = 30,
    decay: float = 0.95,
    codec: Codec = ChunkedTopK(4096, 64, Sign(block=64)),
    exchange: Exchange = Direct(),
    anchors: Literal["host", "device"] = "host",
) -> Strategy:
    """SparseLoCo (Sarfi et al., 2025): 64 of 4096 values, and what is held back, with decay, in place of outer momentum."""
    return Strategy(
        schedule=Every(every),
        codec=codec,
        feedback=Feedback(eta=decay, beta=decay),
        exchange=exchange,
        anchors=anchors,
    )


RECIPES = {f.__name__: f for f in (data_parallel, local_sgd, diloco, streaming_diloco, eager_diloco, sparse_loco)}
