"""The carriers of bytes between replicas: threads, processes under torch.distributed, or a hub over mutual TLS; counted, or on an emulated link.

Names are loaded at their first use, because a hub's process needs no torch.
"""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.comm.emulated import LinkedGroup as LinkedGroup
    from thinwire.comm.group import Group as Group
    from thinwire.comm.group import Transfer as Transfer
    from thinwire.comm.group import gather as gather
    from thinwire.comm.ledger import CountedGroup as CountedGroup
    from thinwire.comm.ledger import Ledger as Ledger
    from thinwire.comm.threads import ThreadGroup as ThreadGroup
    from thinwire.comm.threads import run_threads as run_threads
    from thinwire.comm.torch import TorchGroup as TorchGroup
    from thinwire.comm.torch import start_torch as start_torch
    from thinwire.comm.uplink import Link as Link
    from thinwire.comm.uplink import parse_link as parse_link

_HOMES = {
    "LinkedGroup": "emulated",
    **dict.fromkeys(("Group", "Transfer", "gather"), "group"),
    **dict.fromkeys(("CountedGroup", "Ledger"), "ledger"),
    **dict.fromkeys(("ThreadGroup", "run_threads"), "threads"),
    **dict.fromkeys(("TorchGroup", "start_torch"), "torch"),
    **dict.fromkeys(("Link", "parse_link"), "uplink"),
}
__all__ = sorted(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
