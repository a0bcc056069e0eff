"""Exchanges: how the packets of all replicas become one estimate."""

from thinwire.exchange.all_reduce import AllReduce
from thinwire.exchange.base import Arrival, Exchange, Settle
from thinwire.exchange.buffers import Buffers
from thinwire.exchange.direct import Direct
from thinwire.exchange.fastest import Fastest
from thinwire.exchange.gossip import Gossip
from thinwire.exchange.hierarchy import Hierarchy
from thinwire.exchange.one_round import once
from thinwire.exchange.round import Round, SendContext
from thinwire.exchange.star import Star
from thinwire.exchange.two_shot import TwoShot

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
