"""Which replicas take part in an elastic run: rendezvous, heartbeats, the agreed view, and the commit of a round.

The names are loaded at their first use: the lighthouse's own process needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.membership.lighthouse import LighthouseRendezvous as LighthouseRendezvous
    from thinwire.membership.rendezvous import Membership as Membership
    from thinwire.membership.server import Lighthouse as Lighthouse
    from thinwire.membership.timeouts import Timeouts as Timeouts
    from thinwire.membership.view import Member as Member
    from thinwire.membership.view import View as View

_HOMES = {
    "Timeouts": "timeouts",
    "Lighthouse": "server",
    "LighthouseRendezvous": "lighthouse",
    "Member": "view",
    "Membership": "rendezvous",
    "View": "view",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
