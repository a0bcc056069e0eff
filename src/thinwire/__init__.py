"""Thinwire: train one model on many replicas joined by thin links.

Every replica trains by itself; now and then one fragment of the model is exchanged in a few bits per parameter,
while training goes on.
"""

from thinwire.codecs import (
    DCT,
    E2M1,
    E3M0,
    E4M3,
    E5M2,
    Cast,
    ChunkedTopK,
    Codebook,
    Codec,
    Hadamard,
    Identity,
    Int,
    Linear,
    LowRank,
    RandomK,
    Shaped,
    Sign,
    Squares,
    TopK,
)
from thinwire.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    DisagreementError,
    LinkError,
    ModelError,
    NonFiniteError,
    PacketError,
    PeerError,
    ThinwireError,
)
from thinwire.exchange import AllReduce, Direct, Exchange, Fastest, Hierarchy, TwoShot
from thinwire.feedback import Feedback
from thinwire.group import Group, ThreadGroup, TorchGroup, run_threads
from thinwire.merge import Eager, Mix
from thinwire.outer import Average, Nesterov, Outer
from thinwire.partition import BySize, Fragment, Partition, Sequential, Strided, Whole
from thinwire.policy import Constant, DenseUntil, DensityWarmup, Policy
from thinwire.privacy import Privacy
from thinwire.recipes import data_parallel, diloco, eager_diloco, local_sgd, sparse_loco, streaming_diloco
from thinwire.replica import Replica
from thinwire.schedule import Every, Schedule, Staggered, short_first
from thinwire.strategy import Deltas, Gradients, Strategy, parse
from thinwire.version import __version__ as __version__

__all__ = [
    "DCT",
    "E2M1",
    "E3M0",
    "E4M3",
    "E5M2",
    "AllReduce",
    "Average",
    "BySize",
    "Cast",
    "CheckpointError",
    "ChunkedTopK",
    "Codebook",
    "Codec",
    "ConfigurationError",
    "Constant",
    "DataError",
    "Deltas",
    "DenseUntil",
    "DensityWarmup",
    "Direct",
    "DisagreementError",
    "Eager",
    "Every",
    "Exchange",
    "Fastest",
    "Feedback",
    "Fragment",
    "Gradients",
    "Group",
    "Hadamard",
    "Hierarchy",
    "Identity",
    "Int",
    "Linear",
    "LinkError",
    "LowRank",
    "Mix",
    "ModelError",
    "Nesterov",
    "NonFiniteError",
    "Outer",
    "PacketError",
    "Partition",
    "PeerError",
    "Policy",
    "Privacy",
    "RandomK",
    "Replica",
    "Schedule",
    "Sequential",
    "Shaped",
    "Sign",
    "Squares",
    "Staggered",
    "Strategy",
    "Strided",
    "ThinwireError",
    "ThreadGroup",
    "TopK",
    "TorchGroup",
    "TwoShot",
    "Whole",
    "data_parallel",
    "diloco",
    "eager_diloco",
    "local_sgd",
    "parse",
    "run_threads",
    "short_first",
    "sparse_loco",
    "streaming_diloco",
]
