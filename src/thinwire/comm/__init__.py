"""Who carries bytes between replicas: threads or processes under torch.distributed; counted, or on an emulated link."""

from thinwire.comm.emulated import Link, LinkedGroup, parse_link
from thinwire.comm.group import Group, Transfer, gather
from thinwire.comm.ledger import CountedGroup, Ledger
from thinwire.comm.threads import ThreadGroup, run_threads
from thinwire.comm.torch import TorchGroup, start_torch

__all__ = [
    "CountedGroup",
    "Group",
    "Ledger",
    "Link",
    "LinkedGroup",
    "ThreadGroup",
    "TorchGroup",
    "Transfer",
    "gather",
    "parse_link",
    "run_threads",
    "start_torch",
]
