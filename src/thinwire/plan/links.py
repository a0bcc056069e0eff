"""What links carry: facts that a person can read and edit, in `links.toml`.

    names = ["oslo", "lyon"]
    [[link]]
    from = "oslo"                      # or: between = ["oslo", "lyon"], for both directions
    to = "lyon"
    alone = "95.2mbit,21.3ms"          # rate, and one-way delay (half a round trip), with nothing else on it
    together = "48mbit"                # while everybody sends to everybody; optional

In place of a file, one link that all replicas have: `50mbit,30ms`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from thinwire.errors import ConfigurationError
from thinwire.files import contents, parsed
from thinwire.group import Link
from thinwire.plan.quantities import rate, rounded

Pair = tuple[int, int]  # sender, receiver
_KEYS = {"from", "to", "between", "alone", "together"}


@dataclass(frozen=True)
class Links:
    """Directed links between replicas, by their places in `names`. `together` is empty where it was not measured."""

    names: tuple[str, ...]
    alone: Mapping[Pair, Link]
    together: Mapping[Pair, float] = field(default_factory=dict)
    word: str = "given"

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names) or not self.names:
            raise ConfigurationError(f"names {list(self.names)}: at least one, all different, are needed.")
        pairs = [(a, b) for a in range(len(self.names)) for b in range(len(self.names)) if a != b]
        missing = [pair for pair in pairs if pair not in self.alone]
        if missing:
            a, b = missing[0]
            back = "; the way back is there, but the two directions may differ" if (b, a) in self.alone else ""
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ConfigurationError(
                f"the link {self.names[a]} → {self.names[b]}{more} is missing{back}; every replica sends to every other. Add it, or "
                f"write between = [{self.names[a]!r}, {self.names[b]!r}] where both directions are alike."
            )

    @classmethod
    def uniform(cls, link: Link, replicas: int) -> Links:
        """All links alike."""
        pairs = {(a, b): link for a in range(replicas) for b in range(replicas) if a != b}
        return cls(tuple(f"replica-{rank}" for rank in range(replicas)), pairs)

    def __len__(self) -> int:
        return len(self.names)

    def among(self, places: Sequence[int]) -> Links:
        """Only these replicas, in this order."""
        index = {place: rank for rank, place in enumerate(places)}
        inside = [pair for pair in self.alone if pair[0] in index and pair[1] in index]
        return Links(
            tuple(self.names[place] for place in places),
            {(index[a], index[b]): self.alone[a, b] for a, b in inside},
            {(index[a], index[b]): self.together[a, b] for a, b in inside if (a, b) in self.together},
            self.word,
        )

    def asymmetric(self, factor: float = 2.0) -> list[Pair]:
        """Pairs (slower direction first) whose two directions differ by more than `factor` in rate."""
        rates = {pair: link.bits_per_second for pair, link in self.alone.items()}
        return [(a, b) for a, b in rates if rates[b, a] > factor * rates[a, b]]

    def save(self, path: Path, comment: str = "") -> None:
        """Write `links.toml`, with `comment` at its top."""
        rows = []
        for (a, b), link in sorted(self.alone.items()):
            row = {"from": self.names[a], "to": self.names[b], "alone": str(rounded(link))}
            if (a, b) in self.together:
                row["together"] = str(rounded(Link(self.together[a, b])))
            rows.append(row)
        written = tomli_w.dumps({"word": self.word, "names": list(self.names), "link": rows})
        replace(path, "".join(f"# {line}\n" for line in comment.splitlines()) + written)

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
                    raise ConfigurationError(f"{where}: {names[pair[0]]} → {names[pair[1]]} is there twice; keep one.")
                try:
                    alone[pair] = Link.parse(str(row.get("alone", "")))
                    if "together" in row:
                        together[pair] = rate(str(row["together"]))
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


def replace(path: Path, text: str) -> None:
    """Write `path` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _pairs(row: Any, names: Sequence[str], where: str) -> list[Pair]:
    """The directions that a [[link]] speaks of."""
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
            f"{where}: {strange[0]!r} is not among names = {list(names)}; add it, or mend the name."
        )
    a, b = (list(names).index(end) for end in ends)
    return [(a, b), (b, a)] if both is not None else [(a, b)]
