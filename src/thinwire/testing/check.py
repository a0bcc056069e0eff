"""Runs all laws that apply to a piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from thinwire.catalogue.parsing import PIECES, parse
from thinwire.codecs import E3M0, Codec, Identity, Sign, TopK
from thinwire.codecs.base import may_skip
from thinwire.errors import ConfigurationError
from thinwire.exchange import Exchange
from thinwire.pieces.aggregate import Aggregate
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.filters import Filter
from thinwire.pieces.inner import Inner
from thinwire.pieces.merge import Merge, Mix, Reset
from thinwire.pieces.outer import Nesterov, Outer
from thinwire.pieces.partition import Partition, Strided
from thinwire.pieces.policy import Policy
from thinwire.pieces.schedule import Adaptive, Schedule, Staggered
from thinwire.strategy import Strategy
from thinwire.testing import aggregates, codecs, exchanges, pieces, strategies
from thinwire.testing.codecs import CLAIMS, BrokenLawError, law
from thinwire.testing.values import EXTREME, NORMAL, SIZES

SHAPES = ((7, 11), (5,), (4, 3, 2), (), (0, 3), (30, 20))  # of tensors, for codecs that need some
Law = tuple[str, Callable[[], None]]
Piece = (
    Codec | Outer | Exchange | Aggregate | Partition | Schedule | Adaptive | Merge | Policy | Filter | Inner | Strategy
)


@dataclass(frozen=True)
class Checked:
    """A piece, and the laws that it keeps.

    Args:
        piece: what was checked.
        laws: the names of the laws.

    >>> print(Checked("Mine()", ("is a value", "decodes alike")))
    'Mine()' keeps 2 laws: is a value, decodes alike
    """

    piece: object
    laws: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.piece!r} keeps {len(self.laws)} laws: {', '.join(self.laws)}"


def check(piece: Piece, claims: frozenset[str] | None = None) -> Checked:
    """Try all laws that apply to `piece`; a few seconds, in threads of this process.

    What a piece says of the groups and strategies that it is for (`check`, `init`, `needs_whole_period`) is respected: laws are tried where it
    may be used. What the piece itself raises has a note that names the law.

    Args:
        piece: a codec, an outer step, an exchange, an aggregate, a strategy, or a piece that is tried in a strategy alone: a partition, a
            schedule, a merge, a policy, a filter or an inner optimizer.
        claims: those of a codec, in place of what it declares: see `CLAIMS`.

    Raises:
        BrokenLawError: names the law and says what broke it.

    >>> from thinwire.pieces.outer import Average
    >>> print(check(Average()))  # doctest: +ELLIPSIS
    Average() keeps 8 laws: is a value, outer keeps its word, outer by ranges, replicas agree, ...
    """
    kept = []
    for name, try_it in _laws(piece, claims):
        try:
            try_it()
        except BrokenLawError as error:
            raise BrokenLawError(f"{piece!r} breaks the law “{name}”: {error}") from None
        except BaseException as error:
            error.add_note(f"in the law “{name}” of {piece!r}")
            raise
        kept.append(name)
    return Checked(piece, tuple(kept))


def _laws(piece: object, claims: frozenset[str] | None) -> Iterator[Law]:
    yield "is a value", partial(pieces.is_a_value, piece)
    if isinstance(piece, Strategy):
        yield from _of_a_strategy(piece)
    elif isinstance(piece, Codec):
        yield from _of_a_codec(piece, claims)
    elif isinstance(piece, Outer):
        yield _named(pieces.outer_keeps_its_word, piece)
        yield _named(pieces.outer_by_ranges, piece)
        late = piece.needs_whole_period
        schedule, merge = (Staggered(4, 4), Reset()) if late else (Staggered(4, 1), Mix(0.5))
        yield from _of_a_strategy(Strategy(schedule=schedule, partition=Strided(2), outer=piece, merge=merge))
    elif isinstance(piece, Exchange):
        yield from _of_an_exchange(piece)
    elif isinstance(piece, Aggregate):
        yield from (_named(one, piece) for one in aggregates.LAWS)
        made = Strategy(schedule=Staggered(4, 1), partition=Strided(2), aggregate=piece, merge=Mix(0.5))
        yield from _of_a_strategy(made, aggregates.fitting_size(piece))
    else:
        yield from _of_a_strategy(_composed(piece))


def _composed(piece: object) -> Strategy:
    """A strategy with a piece that says nothing by itself."""
    if isinstance(piece, Merge):
        return Strategy(schedule=Staggered(4, 4 if piece.whole_period else 1), partition=Strided(2), merge=piece)
    if isinstance(piece, Policy):
        return _with_a_codec(piece)
    if isinstance(piece, Filter):
        return Strategy(
            schedule=Staggered(4, 1), partition=Strided(2), codec=E3M0(32), filters=(piece,), merge=Mix(0.5)
        )
    if isinstance(piece, Inner):
        return Strategy(schedule=Staggered(4, 1), partition=Strided(2), inner=piece, merge=Mix(0.5))
    if isinstance(piece, Schedule | Adaptive):
        merge = Reset() if piece.delay == piece.every else Mix(0.5)
        return Strategy(schedule=piece, partition=Strided(2), merge=merge)
    if isinstance(piece, Partition):
        return Strategy(schedule=Staggered(4, 1), partition=piece, merge=Mix(0.5))
    raise ConfigurationError(
        f"check({piece!r}): a codec, an outer step, an exchange, an aggregate, a partition, a schedule, a merge, a policy, a filter, an "
        "inner optimizer or a strategy is needed; put another piece into a Strategy(...), and check that."
    )


def _with_a_codec(policy: Policy) -> Strategy:
    refused: Exception | None = None
    candidates: list[Codec] = [E3M0(32), TopK(0.3), *_registered("LowRank(1)", "Each(Int(4))")]
    for codec in candidates:
        try:
            return Strategy(
                schedule=Staggered(4, 1), partition=Strided(2), codec=codec, policy=policy, feedback=Feedback(), merge=Mix(0.5)
            )  # fmt: skip
        except ConfigurationError as error:
            refused = error
    raise ConfigurationError(
        f"check({policy!r}): it works with no codec that was tried; put it into a Strategy(...), and check that."
    ) from refused


def _registered(*texts: str) -> list[Codec]:
    """Those of the codecs that installed packages have; some pieces work with no other."""
    return [parse(text) for text in texts if text.partition("(")[0] in PIECES]


def _of_a_codec(codec: Codec, given: frozenset[str] | None) -> Iterator[Law]:
    fitted = codec.fitted(SHAPES)
    claims = fitted.claims if given is None else given
    unknown = claims - CLAIMS.keys()
    yield "claims are known", partial(law, not unknown, f"claims {sorted(unknown)}; known are {sorted(CLAIMS)}")
    every = [*NORMAL, *EXTREME]
    yield _each(codecs.size_is_known, [(fitted, n) for n in SIZES])
    yield _each(codecs.keeps_claims, [(fitted, claims, data, n) for data in every for n in (0, 1, 129)])
    for one in (codecs.decoding_adds, codecs.decoding_weighs, codecs.knows_values_apart, codecs.cuts_at_the_grain):
        yield _each(one, [(fitted, data) for data in every])
    if "local" in claims:
        yield _named(codecs.blocks_are_local, fitted)
    if "unbiased" in claims:
        yield _each(codecs.unbiased, [(fitted, data) for data in ("gaussian", "heavy tails", "constant")])
    yield _named(codecs.key_is_all_the_chance, fitted, claims)
    yield _named(codecs.refuses_what_is_not_finite, fitted)
    yield _named(codecs.survives_any_bytes, fitted)
    yield _named(codecs.adds_on_the_way, fitted)
    keeps = Feedback() if may_skip(codec) else None
    whole = Strategy(
        schedule=Staggered(4, 1), partition=Strided(2), codec=codec, feedback=keeps, outer=Nesterov(), merge=Mix(0.5)
    )
    yield from _of_a_strategy(whole)


def _of_an_exchange(exchange: Exchange) -> Iterator[Law]:
    candidates = (Identity(), E3M0(32), Sign(), TopK(0.3), *(one.fitted(SHAPES) for one in _registered("LowRank(1)")))
    fitting = [codec for codec in candidates if exchanges.fits(exchange, codec)]
    yield "takes a codec", partial(law, fitting, f"check refuses all of {', '.join(map(repr, candidates))}")
    if Identity() in fitting:
        sizes = [size for size in (1, 2, 3, 4, 5) if exchanges.group_fits(exchange, size)]
        yield _each(exchanges.exact_values_give_the_mean, [(exchange, size, n) for size in sizes for n in (0, 1, 64)])
    for one in (
        *(exchanges.all_agree, exchanges.any_order_of_arrival, exchanges.predicted_is_counted),
        exchanges.refuses_by_name,
    ):
        yield _each(one, [(exchange, codec) for codec in fitting])
    sizes = [size for size in (3, 2, 4, 1) if exchanges.group_fits(exchange, size)]
    made = Strategy(schedule=Staggered(4, 2), partition=Strided(2), codec=fitting[0], exchange=exchange, merge=Mix(0.5))
    if sizes:
        yield from _of_a_strategy(made, sizes[0])


def _of_a_strategy(strategy: Strategy, replicas: int | None = None) -> Iterator[Law]:
    for one in strategies.LAWS:
        yield _named(one, strategy, *(() if replicas is None else (replicas,)))


def _named(function: Callable[..., None], *arguments: Any) -> Law:
    return function.__name__.replace("_", " "), partial(function, *arguments)


def _each(function: Callable[..., None], cases: Sequence[tuple[Any, ...]]) -> Law:
    """One law, tried on all `cases`; the error names the case that breaks it."""

    def run() -> None:
        for case in cases:
            try:
                function(*case)
            except BrokenLawError as error:
                raise BrokenLawError(f"{error} (where {', '.join(map(str, case[1:]))})") from None

    return function.__name__.replace("_", " "), run
