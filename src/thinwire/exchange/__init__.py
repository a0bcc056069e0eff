"""Exchanges: how the packets of all replicas become one estimate."""

from thinwire.exchange.all_reduce import AllReduce
from thinwire.exchange.base import Arrival, Exchange, Settle
from thinwire.exchange.buffers import Buffers
from thinwire.exchange.direct import Direct
from thinwire.exchange.hierarchy import Hierarchy
from thinwire.exchange.one_round import once
from thinwire.exchange.round import Round, SendContext
from thinwire.exchange.two_shot import TwoShot
from thinwire.lab.fastest import Fastest
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.star.exchange import Star

__all__ = [
    "AllReduce",
    "Arrival",
    "Buffers",
    "Direct",
    "Exchange",
    "Fastest",
    "Gossip",
    "Hierarchy",
    "Round",
    "SendContext",
    "Settle",
    "Star",
    "TwoShot",
    "once",
]
