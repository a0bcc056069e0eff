"""Chooses the exchange with the shortest predicted round on a given link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from thinwire.codecs import Codec
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError
from thinwire.exchange.all_reduce import AllReduce
from thinwire.exchange.base import Exchange, ExchangeTraits, Ranges, fits
from thinwire.exchange.direct import Direct
from thinwire.exchange.round import Round
from thinwire.exchange.two_shot import TwoShot
from thinwire.pieces.feedback import Feedback
from thinwire.types import State


class _Departure(NamedTuple):
    exchange: Exchange
    departure: Any
    state: State


@dataclass(frozen=True)
class Fastest(Exchange):
    """Choose for each fragment the exchange in `among` with the shortest predicted round, if every uplink is `link` (a rate and
    a one-way delay, as in `--link`); the first one in a tie.

        chosen = argmin_{e in among} seconds_e(codec, n, M, link)      n elements, M replicas

    The prediction depends on the link, the codec, and the numbers of elements and replicas, so all replicas choose alike. Replicas with
    another `link` have another strategy, and are refused at first contact. Exchanges that do not accept the codec are skipped.
    `TwoShot` rounds twice. `Strategy.describe` shows the choice with its reason, and so does a run at its start.

    *Source*: none; the predictions are those of the exchanges. *Wire*: the bytes of the chosen exchange.

    Args:
        link: the uplink of every replica, such as '20mbit,40ms'.
        among: the exchanges to choose from.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import E3M0
    >>> for size in (2, 8):
    ...     Fastest("20mbit,40ms").chosen(E3M0(), 1_000_000, size)
    Direct()
    TwoShot(feedback=None)
    """

    link: str
    among: tuple[Exchange, ...] = field(default=(Direct(), TwoShot(), AllReduce()))

    needs_fixed_group: ClassVar[str] = "chooses for a number of replicas"

    def __post_init__(self) -> None:
        Link.parse(self.link)
        if not self.among or not all(isinstance(one, Exchange) and not isinstance(one, type) for one in self.among):
            raise ConfigurationError(
                f"Fastest(among={self.among!r}): exchanges are needed, such as (Direct(), TwoShot())."
            )

    @property
    def traits(self) -> ExchangeTraits:
        each = [exchange.traits for exchange in self.among]
        return ExchangeTraits(
            gathers=all(one.gathers for one in each), agrees=all(one.agrees for one in each),
            multiplies=all(one.multiplies for one in each), needs_hub=any(one.needs_hub for one in each),
            sends_own=all(one.sends_own for one in each),
        )  # fmt: skip

    @property
    def feedback(self) -> Feedback | None:
        return next((exchange.feedback for exchange in self.among if exchange.feedback), None)

    def check_beside(self, strategy: Any) -> None:
        for exchange in self.among:
            exchange.check_beside(strategy)

    def check_size(self, size: int) -> None:
        for exchange in self.among:
            exchange.check_size(size)

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        return self.chosen(codec, numel, size).owns(codec, numel, rank, size)

    def nbytes_products(self, size: int) -> int:
        return max(exchange.nbytes_products(size) for exchange in self.among)

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        for exchange in self._fitting(codec):
            exchange.check(codec, feedback)
        if not self._fitting(codec):
            raise ConfigurationError(
                f"{self} with {codec}: none of these accepts it; add Direct(), which accepts any codec."
            )

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        self.check_size(size)
        return self.chosen(codec, numel, size).init(codec, numel, rank, size)

    def depart(self, round_: Round, state: State) -> _Departure:
        exchange = self.chosen(round_.codec, round_.numel, round_.size)
        due = exchange.init(round_.codec, round_.numel, round_.rank, round_.size)
        known, own = ({name: kept.shape for name, kept in one.items()} for one in (state, due))
        # a state of other tensors is that of another exchange, for another codec
        return _Departure(exchange, exchange.depart(round_, state if known == own else due), state)

    def arrive(self, departure: _Departure) -> Ranges:
        arrival = yield from departure.exchange.arrive(departure.departure)
        return arrival if arrival.state else replace(arrival, state=departure.state)

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return self.chosen(codec, numel, size).nbytes_sent(codec, numel, size, rank)

    def nbytes_of_each(self, codec: Codec, numel: int, size: int) -> list[int]:
        return self.chosen(codec, numel, size).nbytes_of_each(codec, numel, size)

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return self.chosen(codec, numel, size).seconds(codec, numel, size, link)

    def chosen(self, codec: Codec, numel: int, size: int) -> Exchange:
        """The exchange chosen for a fragment of `numel` elements among `size` replicas."""
        link = Link.parse(self.link)
        return min(self._fitting(codec), key=lambda exchange: exchange.seconds(codec, numel, size, link))

    def why(self, fragments: Sequence[tuple[Codec, int]], size: int) -> list[str]:
        link, lines = Link.parse(self.link), []
        of = [self.chosen(codec, numel, size) for codec, numel in fragments]
        for exchange in dict.fromkeys(of):
            codec, numel = max((f for f, one in zip(fragments, of) if one == exchange), key=lambda f: f[1])
            seconds = {repr(one): one.seconds(codec, numel, size, link) for one in self._fitting(codec)}
            others = ", ".join(f"{name} {s:.3g} s" for name, s in seconds.items() if name != repr(exchange))
            lines.append(
                f"{exchange} for {of.count(exchange)} of {len(of)} fragment(s), among {size} replicas on {self.link}: a round of "
                f"the largest takes {seconds[repr(exchange)]:.3g} s"
                + (f"; {others}" if others else "")
                + " (predicted)"
            )
        return lines

    def _fitting(self, codec: Codec) -> list[Exchange]:
        return [exchange for exchange in self.among if fits(exchange, codec)]
