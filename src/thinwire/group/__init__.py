"""Who carries bytes between replicas: threads or processes under torch.distributed; counted, or on an emulated link."""

from thinwire.group.base import Group, Transfer, gather
from thinwire.group.ledger import CountedGroup, Ledger
from thinwire.group.link import Link, LinkedGroup, parse_link
from thinwire.group.threads import ThreadGroup, run_threads
from thinwire.group.torch import TorchGroup, start_torch

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
