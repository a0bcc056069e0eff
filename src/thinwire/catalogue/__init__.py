"""The table of pieces, with one row for each. To add a piece, write one file and add one row here.

The parser's names, the table in docs/pieces.md and the pieces that the laws test follow from it. A piece whose arguments all have
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
from thinwire.lab.codecs.entropy import Entropy as Entropy
from thinwire.lab.codecs.levelled import Levelled as Levelled
from thinwire.lab.codecs.lowrank import LowRank as LowRank
from thinwire.lab.codecs.over_senders import OverSenders as OverSenders
from thinwire.lab.codecs.per_tensor import Each as Each
from thinwire.codecs.sign import Sign as Sign
from thinwire.codecs.sparse import ChunkedTopK as ChunkedTopK
from thinwire.codecs.sparse import RandomK as RandomK
from thinwire.codecs.sparse import TopK as TopK
from thinwire.codecs.transform import DCT as DCT
from thinwire.codecs.transform import Hadamard as Hadamard
from thinwire.codecs.transform import Squares as Squares
from thinwire.lab.codecs.uniform import Levels as Levels

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
from thinwire.pieces.policy import DenseLast as DenseLast
from thinwire.pieces.policy import DenseUntil as DenseUntil
from thinwire.pieces.policy import DensityWarmup as DensityWarmup
from thinwire.lab.gradients.lgreco import LGreCo as LGreCo

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
from thinwire.lab.fastest import Fastest as Fastest
from thinwire.lab.gossip.exchange import Gossip as Gossip
from thinwire.exchange.hierarchy import Hierarchy as Hierarchy
from thinwire.lab.star.exchange import Star as Star
from thinwire.exchange.two_shot import TwoShot as TwoShot

# Which replicas exchange with which, if not all exchange with all.
from thinwire.lab.topology.fixed import Complete as Complete
from thinwire.lab.topology.fixed import Ring as Ring
from thinwire.lab.topology.fixed import Mesh as Mesh
from thinwire.lab.topology.fixed import Torus as Torus
from thinwire.lab.topology.fixed import Exponential as Exponential
from thinwire.lab.topology.drawn import OnePeerExponential as OnePeerExponential
from thinwire.lab.topology.drawn import RandomPairs as RandomPairs
from thinwire.lab.topology.drawn import RandomGroups as RandomGroups
from thinwire.lab.topology.fixed import MoshpitGrid as MoshpitGrid
from thinwire.lab.topology.drawn import RandomRegular as RandomRegular
from thinwire.lab.topology.drawn import ErdosRenyi as ErdosRenyi
from thinwire.lab.topology.drawn import BarabasiAlbert as BarabasiAlbert
from thinwire.lab.topology.fixed import Listed as Listed
from thinwire.lab.topology.fixed import Cut as Cut

# How a replica combines its neighbours' vectors with its own.
from thinwire.lab.gossip.rules import NoLoCo as NoLoCo
from thinwire.lab.gossip.rules import AdaptThenCombine as AdaptThenCombine
from thinwire.lab.gossip.rules import CombineThenAdapt as CombineThenAdapt
from thinwire.lab.gossip.rules import Choco as Choco
from thinwire.lab.gossip.rules import PushSum as PushSum
from thinwire.lab.gossip.rules import Tracking as Tracking
from thinwire.lab.gossip.gasloc import GASLoC as GASLoC
from thinwire.lab.gossip.mgs import MGS as MGS
from thinwire.lab.gossip.trust import Bristle as Bristle
from thinwire.lab.gossip.trust import SybilWall as SybilWall

# How the deltas of all replicas are aggregated.
from thinwire.pieces.aggregate import Mean as Mean
from thinwire.pieces.aggregate import MeanOverSenders as MeanOverSenders
from thinwire.lab.robust.coordinates import Median as Median
from thinwire.lab.robust.coordinates import TrimmedMean as TrimmedMean
from thinwire.lab.robust.coordinates import MeaMed as MeaMed
from thinwire.lab.robust.by_products import GeometricMedian as GeometricMedian
from thinwire.lab.robust.by_products import CenteredClipping as CenteredClipping
from thinwire.lab.robust.by_products import Krum as Krum
from thinwire.lab.robust.by_products import MultiKrum as MultiKrum
from thinwire.lab.robust.by_products import Bulyan as Bulyan
from thinwire.lab.robust.by_products import MDA as MDA
from thinwire.lab.robust.direction_weights import FoolsGold as FoolsGold
from thinwire.lab.robust.direction_weights import FlagAggregator as FlagAggregator
from thinwire.lab.robust.pre_aggregation import NearestNeighbourMixing as NearestNeighbourMixing
from thinwire.lab.robust.pre_aggregation import Bucketing as Bucketing
from thinwire.lab.robust.pre_aggregation import StaticClipping as StaticClipping
from thinwire.lab.robust.pre_aggregation import ARC as ARC

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
from thinwire.lab.privacy import Privacy as Privacy

# What replicas exchange, and the whole strategy.
from thinwire.strategy import Deltas as Deltas
from thinwire.strategy import Gradients as Gradients
from thinwire.strategy import Strategy as Strategy
