"""Who carries bytes between replicas: threads or processes under torch.distributed; counted, or on an emulated link.

Replicas that come and go find each other with a `Roster`, at a lighthouse (`LighthouseMeeting`) or as threads
(`Rehearsal`).
"""

from thinwire.group.base import Group, Transfer, gather
from thinwire.group.deadlines import Deadlines
from thinwire.group.ledger import CountedGroup, Ledger
from thinwire.group.lighthouse import Lighthouse, LighthouseMeeting
from thinwire.group.link import Link, LinkedGroup, parse_link
from thinwire.group.rehearsal import Rehearsal
from thinwire.group.roster import Member, Muster, Roster
from thinwire.group.threads import ThreadGroup, run_threads
from thinwire.group.torch import TorchGroup, start_torch

__all__ = [
    "CountedGroup",
    "Deadlines",
    "Group",
    "Ledger",
    "Lighthouse",
    "LighthouseMeeting",
    "Link",
    "LinkedGroup",
    "Member",
    "Muster",
    "Rehearsal",
    "Roster",
    "ThreadGroup",
    "TorchGroup",
    "Transfer",
    "gather",
    "parse_link",
    "run_threads",
    "start_torch",
]
