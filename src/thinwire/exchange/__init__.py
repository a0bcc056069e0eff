"""How packets become one estimate."""

from thinwire.exchange.base import Air, Arrival, Exchange, Round, Settle
from thinwire.exchange.buffers import Buffers
from thinwire.exchange.direct import Direct
from thinwire.exchange.two_shot import TwoShot

__all__ = ["Air", "Arrival", "Buffers", "Direct", "Exchange", "Round", "Settle", "TwoShot"]
