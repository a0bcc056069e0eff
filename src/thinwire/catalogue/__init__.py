"""The table of pieces, with one row for each. To add a piece, write one file and add one row here.

Pieces of other packages, thinwire.lab among them, come by the entry points `thinwire.pieces`: see registered.py. The parser's
names and the pieces that the laws test follow from both. A piece whose arguments all have
defaults is tested with these defaults and the `claims` that it declares. Other pieces, and further settings of a piece, have rows in
tests/support/pieces.py.
"""

# ruff: noqa: I001  # by kind, not by module

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from thinwire.catalogue import parsing as parsing
else:

    def __getattr__(name: str) -> object:
        """`catalogue.parsing` at its first use, because it reads all rows."""
        if name == "parsing":
            return _import_module("thinwire.catalogue.parsing")
        raise AttributeError(f"module 'thinwire.catalogue' has no attribute {name!r}")


# How values become bytes.
from thinwire.codecs.block import E2M1 as E2M1
from thinwire.codecs.block import E3M0 as E3M0
from thinwire.codecs.block import E4M3 as E4M3
from thinwire.codecs.block import E5M2 as E5M2
from thinwire.codecs.block import Int as Int
from thinwire.codecs.cast import Cast as Cast
from thinwire.codecs.cast import Identity as Identity
from thinwire.codecs.codebook import Codebook as Codebook
from thinwire.codecs.sign import Sign as Sign
from thinwire.codecs.sparse import ChunkedTopK as ChunkedTopK
from thinwire.codecs.sparse import RandomK as RandomK
from thinwire.codecs.sparse import TopK as TopK
from thinwire.codecs.transform import DCT as DCT
from thinwire.codecs.transform import Hadamard as Hadamard
from thinwire.codecs.transform import Squares as Squares

# When fragments depart and land.
from thinwire.pieces.schedule import Every as Every
from thinwire.pieces.schedule import Quadratic as Quadratic
from thinwire.pieces.schedule import Staggered as Staggered

# Which parameters form a fragment.
from thinwire.pieces.partition import BySize as BySize
from thinwire.pieces.partition import Sequential as Sequential
from thinwire.pieces.partition import Strided as Strided
from thinwire.pieces.partition import Whole as Whole

# How the codec changes over time.
from thinwire.pieces.policy import Constant as Constant
from thinwire.pieces.policies import DenseLast as DenseLast
from thinwire.pieces.policies import DenseUntil as DenseUntil
from thinwire.pieces.policies import DensityWarmup as DensityWarmup

# What changes deltas before the codec and estimates after it.
from thinwire.pieces.transforms import Clip as Clip
from thinwire.pieces.transforms import Moments as Moments
from thinwire.pieces.transforms import Momentum as Momentum
from thinwire.pieces.transforms import Settled as Settled
from thinwire.pieces.transforms import Signs as Signs

# What keeps the errors of the codec for the next delta.
from thinwire.pieces.feedback import Feedback as Feedback

# How packets become one estimate.
from thinwire.exchange.all_reduce import AllReduce as AllReduce
from thinwire.exchange.direct import Direct as Direct
from thinwire.exchange.hierarchy import Hierarchy as Hierarchy
from thinwire.exchange.two_shot import TwoShot as TwoShot

# How the deltas of all replicas are aggregated.
from thinwire.pieces.aggregate import Mean as Mean
from thinwire.pieces.aggregate import MeanOverSenders as MeanOverSenders

# How the anchor moves.
from thinwire.pieces.outer import Average as Average
from thinwire.pieces.outer import DelayedNesterov as DelayedNesterov
from thinwire.pieces.outer import HeavyBall as HeavyBall
from thinwire.pieces.outer import Nesterov as Nesterov

# The weight of a delta that arrives late.
from thinwire.pieces.staleness import Alike as Alike
from thinwire.pieces.staleness import ByTokens as ByTokens
from thinwire.pieces.staleness import HeLoCo as HeLoCo

# How a replica receives the anchor.
from thinwire.pieces.merge import Eager as Eager
from thinwire.pieces.merge import Keep as Keep
from thinwire.pieces.merge import KeepUnsent as KeepUnsent
from thinwire.pieces.merge import Mix as Mix
from thinwire.pieces.merge import Reset as Reset

# Inner optimizers that belong to a method.
from thinwire.pieces.inner_optimizers import AdamW as AdamW
from thinwire.pieces.inner_optimizers import Muon as Muon
from thinwire.pieces.inner_optimizers import SAM as SAM
from thinwire.pieces.inner_optimizers import SGD as SGD

# Limits on the norm of deltas, and on what packets reveal.
from thinwire.pieces.guard import Guard as Guard

# What replicas exchange, and the whole strategy.
from thinwire.strategy import Deltas as Deltas
from thinwire.strategy import Gradients as Gradients
from thinwire.strategy import Strategy as Strategy
