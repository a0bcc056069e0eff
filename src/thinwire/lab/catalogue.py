"""The table of the lab's pieces, with one row for each: what the entry point `thinwire.pieces` names."""

# ruff: noqa: I001  # by kind, not by module

# How values become bytes.
from thinwire.lab.codecs.entropy import Entropy as Entropy
from thinwire.lab.codecs.levelled import Levelled as Levelled
from thinwire.lab.codecs.lowrank import LowRank as LowRank
from thinwire.lab.codecs.over_senders import OverSenders as OverSenders
from thinwire.lab.codecs.per_tensor import Each as Each
from thinwire.lab.codecs.uniform import Levels as Levels

# How the codec changes over time.
from thinwire.lab.gradients.lgreco import LGreCo as LGreCo

# How packets become one estimate.
from thinwire.lab.fastest import Fastest as Fastest
from thinwire.lab.gossip.exchange import Gossip as Gossip
from thinwire.lab.star.exchange import Star as Star

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

# Limits on the norm of deltas, and on what packets reveal.
from thinwire.lab.privacy import Privacy as Privacy

__all__ = [
    "ARC",
    "MDA",
    "MGS",
    "AdaptThenCombine",
    "BarabasiAlbert",
    "Bristle",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Choco",
    "CombineThenAdapt",
    "Complete",
    "Cut",
    "Each",
    "Entropy",
    "ErdosRenyi",
    "Exponential",
    "Fastest",
    "FlagAggregator",
    "FoolsGold",
    "GASLoC",
    "GeometricMedian",
    "Gossip",
    "Krum",
    "LGreCo",
    "Levelled",
    "Levels",
    "Listed",
    "LowRank",
    "MeaMed",
    "Median",
    "Mesh",
    "MoshpitGrid",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NoLoCo",
    "OnePeerExponential",
    "OverSenders",
    "Privacy",
    "PushSum",
    "RandomGroups",
    "RandomPairs",
    "RandomRegular",
    "Ring",
    "Star",
    "StaticClipping",
    "SybilWall",
    "Torus",
    "Tracking",
    "TrimmedMean",
]
