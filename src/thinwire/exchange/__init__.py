"""Exchanges: how the packets of all replicas become one estimate."""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.exchange.all_reduce import AllReduce as AllReduce
    from thinwire.exchange.base import Arrival as Arrival
    from thinwire.exchange.base import Arriving as Arriving
    from thinwire.exchange.base import Exchange as Exchange
    from thinwire.exchange.base import ExchangeTraits as ExchangeTraits
    from thinwire.exchange.base import Range as Range
    from thinwire.exchange.base import Ranges as Ranges
    from thinwire.exchange.buffers import Buffers as Buffers
    from thinwire.exchange.direct import Direct as Direct
    from thinwire.exchange.hierarchy import Hierarchy as Hierarchy
    from thinwire.exchange.one_round import once as once
    from thinwire.exchange.round import Round as Round
    from thinwire.exchange.round import SendContext as SendContext
    from thinwire.exchange.two_shot import TwoShot as TwoShot

_HOMES = {
    "AllReduce": "all_reduce",
    **dict.fromkeys(("Arrival", "Arriving", "Exchange", "ExchangeTraits", "Range", "Ranges"), "base"),
    "Buffers": "buffers",
    "Direct": "direct",
    "Hierarchy": "hierarchy",
    "once": "one_round",
    **dict.fromkeys(("Round", "SendContext"), "round"),
    "TwoShot": "two_shot",
}
__all__ = sorted(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
