"""How packets become one estimate."""

from thinwire.exchange.all_reduce import AllReduce
from thinwire.exchange.base import Air, Arrival, Exchange, Round, Settle
from thinwire.exchange.buffers import Buffers
from thinwire.exchange.direct import Direct
from thinwire.exchange.fastest import Fastest
from thinwire.exchange.hierarchy import Hierarchy
from thinwire.exchange.testing import once
from thinwire.exchange.two_shot import TwoShot

__all__ = [
    "Air",
    "AllReduce",
    "Arrival",
    "Buffers",
    "Direct",
    "Exchange",
    "Fastest",
    "Hierarchy",
    "Round",
    "Settle",
    "TwoShot",
    "once",
]
