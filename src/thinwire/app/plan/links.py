"""Rates and delays of links, in a file `links.toml` that a person can read and edit.

    names = ["oslo", "lyon"]
    [[link]]
    from = "oslo"                      # or: between = ["oslo", "lyon"], for both directions
    to = "lyon"
    alone = "95.2mbit,21.3ms"          # rate and one-way delay (half a round trip) of the idle link
    together = "48mbit"                # the rate while every replica sends to every other; optional

One link for all replicas can be given instead of a file: `50mbit,30ms`.

A site's links share its uplink and its downlink. The rate of each of these is the sum of the site's rates `together` if all were
measured, otherwise the fastest of its rates `alone`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.files import contents, parsed, write_whole

Pair = tuple[int, int]  # sender, receiver
MOST_REPLICAS = 1024  # replicas with one link for all
_KEYS = {"from", "to", "between", "alone", "together"}


@dataclass(frozen=True)
class Links:
    """Directed links between replicas, by their indices in `names`. `together` is empty if it was not measured.

    `up` and `down` are the bits per second that each replica can send and receive in total; default: from `alone` and `together`.
    """

    names: tuple[str, ...]
    alone: Mapping[Pair, Link]
    together: Mapping[Pair, float] = field(default_factory=dict)
    word: str = "given"
    up: tuple[float, ...] = ()
    down: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ConfigurationError(f"names {list(self.names)}: at least one, all different, are needed.")
        pairs = [(a, b) for a in range(len(self.names)) for b in range(len(self.names)) if a != b]
        missing = [pair for pair in pairs if pair not in self.alone]
        if missing:
            a, b = missing[0]
            back = "; the opposite direction is given, but the two may differ" if (b, a) in self.alone else ""
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ConfigurationError(
                f"the link {self.names[a]} → {self.names[b]}{more} is missing{back}; every replica sends to every other. Add it, or "
                f"write between = [{self.names[a]!r}, {self.names[b]!r}] where both directions are alike."
            )
        if not self.up:
            object.__setattr__(self, "up", self._capacities(self.rates, self._together))
            object.__setattr__(self, "down", self._capacities(self.rates.T, self._together.T))

    @cached_property
    def rates(self) -> NDArray[np.float64]:
        """Bits per second of each link alone: [sender, receiver]; infinite from a replica to itself."""
        return self._table({pair: link.bits_per_second for pair, link in self.alone.items()}, np.inf)

    @cached_property
    def delays(self) -> NDArray[np.float64]:
        """Seconds one way: [sender, receiver]."""
        return self._table({pair: link.delay_seconds for pair, link in self.alone.items()}, 0.0)

    @cached_property
    def _together(self) -> NDArray[np.float64]:
        return self._table(self.together, np.nan)

    def _table(self, values: Mapping[Pair, float], otherwise: float) -> NDArray[np.float64]:
        table = np.full((len(self), len(self)), otherwise)
        if values:
            table[tuple(np.array(list(values)).T)] = list(values.values())
        return table

    def _capacities(self, alone: NDArray[np.float64], together: NDArray[np.float64]) -> tuple[float, ...]:
        """Bits per second that the replica of each row can send (or receive) in total."""
        others = ~np.eye(len(self), dtype=bool)
        fastest = np.where(others, alone, 0.0).max(axis=1)
        summed = np.where(others, together, 0.0).sum(axis=1)  # NaN if one rate was not measured
        return tuple(float(c) if c > 0 else np.inf for c in np.where(np.isnan(summed), fastest, summed))

    @classmethod
    def uniform(cls, link: Link, replicas: int) -> Links:
        """`replicas` with the same link between any two. Raises `ConfigurationError` unless they are 1 to 1024."""
        if not 1 <= replicas <= MOST_REPLICAS:
            raise ConfigurationError(
                f"{replicas} replicas: 1 to {MOST_REPLICAS} are needed, because a link of each with each is kept."
            )
        pairs = {(a, b): link for a in range(replicas) for b in range(replicas) if a != b}
        return cls(tuple(f"replica-{rank}" for rank in range(replicas)), pairs)

    def __len__(self) -> int:
        return len(self.names)

    def among(self, places: Sequence[int]) -> Links:
        """The links between these replicas, in this order. Rates `together` are kept only if all replicas stay."""
        pairs = {(a, b): (places[a], places[b]) for a in range(len(places)) for b in range(len(places)) if a != b}
        every = len(places) == len(self)
        return Links(
            tuple(self.names[place] for place in places),
            {pair: self.alone[given] for pair, given in pairs.items()},
            {pair: self.together[given] for pair, given in pairs.items() if given in self.together} if every else {},
            self.word,
            tuple(self.up[place] for place in places),
            tuple(self.down[place] for place in places),
        )

    def asymmetric(self) -> list[Pair]:
        """Pairs, slower direction first, of whose two directions one has more than twice the rate of the other."""
        return [(int(a), int(b)) for a, b in zip(*np.nonzero(2 * self.rates < self.rates.T))]

    def save(self, path: Path, comment: str = "") -> None:
        """Write `links.toml`, with `comment` at its top."""
        rows = []
        for (a, b), link in sorted(self.alone.items()):
            row = {"from": self.names[a], "to": self.names[b], "alone": str(_rounded(link))}
            if (a, b) in self.together:
                row["together"] = str(_rounded(Link(self.together[a, b])))
            rows.append(row)
        written = tomli_w.dumps({"word": self.word, "names": list(self.names), "link": rows})
        store(path, "".join(f"# {line}\n" for line in comment.splitlines()) + written)

    @classmethod
    def load(cls, path: Path) -> Links:
        """Read `links.toml`. Raises `ConfigurationError` naming what is wrong, and where."""
        facts = read(path, "`thinwire probe` writes one as links.toml")
        names, rows = facts.get("names"), facts.get("link", [])
        if (
            not isinstance(names, list)
            or not all(isinstance(name, str) for name in names)
            or not isinstance(rows, list)
        ):
            raise ConfigurationError(f'{path}: names = ["oslo", "lyon"] and a [[link]] for each direction are needed.')
        alone: dict[Pair, Link] = {}
        together: dict[Pair, float] = {}
        for number, row in enumerate(rows, 1):
            where = f"{path}, link {number}"
            for pair in _pairs(row, names, where):
                if pair in alone:
                    raise ConfigurationError(f"{where}: {names[pair[0]]} → {names[pair[1]]} is given twice; keep one.")
                try:
                    alone[pair] = Link.parse(str(row.get("alone", "")))
                    if "together" in row:
                        together[pair] = Link.parse(str(row["together"])).bits_per_second
                except ConfigurationError as error:
                    raise ConfigurationError(f"{where}: {error}") from None
        try:
            return cls(tuple(names), alone, together, str(facts.get("word", "given")))
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None


def read(path: Path, advice: str) -> dict[str, Any]:
    """A TOML file as a dictionary, or a `ConfigurationError`."""
    try:
        return dict(parsed(tomllib.loads, contents(path)))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); {advice}.") from None


def store(path: Path, text: str) -> None:
    """Write `path` whole or not at all, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def _pairs(row: Any, names: Sequence[str], where: str) -> list[Pair]:
    """The directions that a [[link]] describes."""
    unknown = sorted(set(row) - _KEYS) if isinstance(row, dict) else ["it"]
    both = row.get("between") if isinstance(row, dict) else None
    ends = both if both is not None else [row.get("from"), row.get("to")] if isinstance(row, dict) else []
    if unknown or not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
        raise ConfigurationError(
            f"{where}: {', '.join(unknown) + ' not known; ' if unknown else ''}from and to (or between = [a, b]), two replicas, and alone = "
            '"50mbit,30ms" are needed.'
        )
    strange = [end for end in ends if end not in names]
    if strange:
        raise ConfigurationError(
            f"{where}: {strange[0]!r} is not among names = {list(names)}; add it, or correct the name."
        )
    a, b = (list(names).index(end) for end in ends)
    return [(a, b), (b, a)] if both is not None else [(a, b)]


def _rounded(link: Link) -> Link:
    """Four significant digits, because a measurement is no more exact."""
    return Link(float(f"{link.bits_per_second:.4g}"), float(f"{link.delay_seconds:.4g}"))
