"""What most scripts need, as `import thinwire as tw` gives it. It is loaded, with torch, when the first of these names is asked for.

All else is in modules, which are there after the same import: `tw.recipes` (the other methods), `tw.codecs`, `tw.exchange`,
`tw.pieces.schedule`, `tw.pieces.outer` and so on. `thinwire.catalogue` lists all pieces.
"""

from thinwire.comm import Group, ThreadGroup, TorchGroup, run_threads
from thinwire.drivers.ddp_hook import GradientHook
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
from thinwire.recipes.deltas import diloco, local_sgd
from thinwire.recipes.gradients import data_parallel
from thinwire.recipes.streaming import finetune, streaming_diloco, streaming_sign
from thinwire.replica import Replica
from thinwire.strategy import Strategy

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DisagreementError",
    "GradientHook",
    "Group",
    "LinkError",
    "ModelError",
    "NonFiniteError",
    "PacketError",
    "PeerError",
    "Replica",
    "Strategy",
    "ThinwireError",
    "ThreadGroup",
    "TorchGroup",
    "data_parallel",
    "diloco",
    "finetune",
    "local_sgd",
    "run_threads",
    "streaming_diloco",
    "streaming_sign",
]
