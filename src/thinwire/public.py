"""What most scripts need, as `import thinwire as tw` gives it. Each is loaded, with torch, when it is asked for.

All else is in modules, which are there after the same import: `tw.recipes` (the other methods), `tw.codecs`, `tw.exchange`,
`tw.pieces.schedule`, `tw.pieces.outer` and so on. `thinwire.catalogue` lists all pieces.
"""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.comm.group import Group as Group
    from thinwire.comm.threads import ThreadGroup as ThreadGroup
    from thinwire.comm.threads import run_threads as run_threads
    from thinwire.comm.torch import TorchGroup as TorchGroup
    from thinwire.drivers.ddp_hook import GradientHook as GradientHook
    from thinwire.errors import CheckpointError as CheckpointError
    from thinwire.errors import ConfigurationError as ConfigurationError
    from thinwire.errors import DataError as DataError
    from thinwire.errors import DisagreementError as DisagreementError
    from thinwire.errors import LinkError as LinkError
    from thinwire.errors import ModelError as ModelError
    from thinwire.errors import NonFiniteError as NonFiniteError
    from thinwire.errors import PacketError as PacketError
    from thinwire.errors import PeerError as PeerError
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.recipes.deltas import diloco as diloco
    from thinwire.recipes.deltas import local_sgd as local_sgd
    from thinwire.recipes.gradients import data_parallel as data_parallel
    from thinwire.recipes.streaming import finetune as finetune
    from thinwire.recipes.streaming import streaming_diloco as streaming_diloco
    from thinwire.recipes.streaming import streaming_sign as streaming_sign
    from thinwire.replica import Replica as Replica
    from thinwire.strategy import Strategy as Strategy

_HOMES = {
    "Group": "comm.group",
    **dict.fromkeys(("ThreadGroup", "run_threads"), "comm.threads"),
    "TorchGroup": "comm.torch",
    "GradientHook": "drivers.ddp_hook",
    **dict.fromkeys(
        (
            "CheckpointError",
            "ConfigurationError",
            "DataError",
            "DisagreementError",
            "LinkError",
            "ModelError",
            "NonFiniteError",
            "PacketError",
            "PeerError",
            "ThinwireError",
        ),
        "errors",
    ),
    **dict.fromkeys(("diloco", "local_sgd"), "recipes.deltas"),
    "data_parallel": "recipes.gradients",
    **dict.fromkeys(("finetune", "streaming_diloco", "streaming_sign"), "recipes.streaming"),
    "Replica": "replica",
    "Strategy": "strategy",
}
__all__ = [  # written out, for type checkers
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
__getattr__ = lazily("thinwire", _HOMES)
