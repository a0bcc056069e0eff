"""All that `import thinwire` gives: loaded, with torch, when the first of these names is asked for."""

from thinwire.catalogue import *  # noqa: F403
from thinwire.codecs import Codec
from thinwire.comm import Group, ThreadGroup, TorchGroup, run_threads
from thinwire.ddp_hook import GradientHook
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
from thinwire.exchange import Exchange
from thinwire.parsing import PIECES, parse
from thinwire.pieces.aggregate import Aggregate
from thinwire.pieces.inner_optimizers import Inner
from thinwire.pieces.merge import Merge
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Fragment, Partition
from thinwire.pieces.policy import Policy
from thinwire.pieces.schedule import Schedule, short_first
from thinwire.pieces.transforms import Filter
from thinwire.recipes import (
    cgx,
    co2,
    data_parallel,
    demo,
    dgc,
    diloco,
    eager_diloco,
    econtrol,
    ef14,
    ef21,
    finetune,
    l_greco,
    local_sgd,
    muloco,
    one_bit_adam,
    outer_dgc,
    power_sgd,
    qsgd,
    qsr,
    sparse_loco,
    streaming_diloco,
)
from thinwire.replica import Replica

__all__ = [
    "Aggregate",
    "CheckpointError",
    "Codec",
    "ConfigurationError",
    "DataError",
    "DisagreementError",
    "Exchange",
    "Filter",
    "Fragment",
    "GradientHook",
    "Group",
    "Inner",
    "LinkError",
    "Merge",
    "ModelError",
    "NonFiniteError",
    "Outer",
    "PacketError",
    "Partition",
    "PeerError",
    "Policy",
    "Replica",
    "Schedule",
    "ThinwireError",
    "ThreadGroup",
    "TorchGroup",
    "cgx",
    "co2",
    "data_parallel",
    "demo",
    "dgc",
    "diloco",
    "eager_diloco",
    "econtrol",
    "ef14",
    "ef21",
    "finetune",
    "l_greco",
    "local_sgd",
    "muloco",
    "one_bit_adam",
    "outer_dgc",
    "parse",
    "power_sgd",
    "qsgd",
    "qsr",
    "run_threads",
    "short_first",
    "sparse_loco",
    "streaming_diloco",
]
__all__ += sorted(PIECES)
