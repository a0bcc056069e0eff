"""`thinwire plan topology`: the neighbours of a graph, its speed of agreement, and its load on the busiest link."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.plan.links import Links, store
from thinwire.app.records.units import text_of_nbytes, text_of_seconds
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.app.trainer.run import Run
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.files import check_place
from thinwire.lab.plan.graph import graph_chart, halving_seconds, within_budget
from thinwire.lab.topology import Listed, Topology, check_size, fewest_meetings, meeting_rates, resistances, spectrum
from thinwire.lab.topology.base import MOST_REPLICAS, Weights
from thinwire.lab.topology.reading import topology_of

TRIED = ("complete", "ring", "mesh", "torus", "exponential", "one_peer_exponential", "random_pairs", "random_regular")


@dataclass(frozen=True)
class Options:
    """The options of `thinwire plan topology`."""

    topologies: tyro.conf.Positional[tuple[str, ...]] = ()
    """Graphs to compare: ring, torus, RandomRegular(4), links.json, ... Default: all that fit the number of replicas."""
    replicas: int | None = None
    """Number of replicas. Default: that of LINKS, or 8."""
    links: str | None = None
    """links.toml (from `thinwire probe`), or one link for all, such as 50mbit,30ms: also shows the time until the distance has halved. Default:
    no time is shown."""
    degree: int | None = None
    """With --links: also search the best graph in which each replica has at most this number of neighbours. Default: no search."""
    out: Path | None = None
    """With --degree: write the edges of that graph here, for --topology FILE.json. Default: no file."""
    rates: bool = False
    """Also show the number of meetings that suffice without rounds (DADAO), with one rate for all edges and with the best rates."""
    strategy: str = "d_psgd"
    """The gossip method whose bytes are shown."""
    model: str = "tiny"
    """The model size whose bytes are shown."""
    explain: bool = False
    """Also print the neighbours of each replica, round by round if they change; with --rates also the rates of their meetings."""
    plot: Path | None = None
    """Draw the first graph, or that of --degree: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    about = "Compare graphs for gossip: neighbours, spectrum, and bytes on the busiest link (predicted)."
    asked = options.read(Options, "plan topology", arguments, about)
    if asked.model not in SIZES:
        raise ConfigurationError(f"model={asked.model!r}: one of {', '.join(SIZES)} is needed.")
    figures.check(asked.plot)
    if asked.out:
        check_place(asked.out)
    links, size = _links(asked)
    found: list[tuple[str, Topology]] = []
    if asked.degree is not None:
        if links is None:
            raise ConfigurationError("--degree searches the best graph over given links; give --links links.toml too.")
        nbytes = _row(asked, "", topology_of("ring"), size, None)["link_nbytes"]
        found.append((f"best of degree {asked.degree}", within_budget(links, asked.degree, nbytes)))
    elif asked.out:
        raise ConfigurationError("--out writes the graph that --degree finds; give both.")
    found += [(text, topology) for text in asked.topologies for topology in _fitting(asked, text, size)]
    if not asked.topologies:
        found += [(text, topology) for text in TRIED for topology in _fitting(asked, text, size, named=False)]
    if not found:
        _fitting(asked, TRIED[0], size)  # raises the reason
    rows = [_row(asked, text, topology, size, links) for text, topology in found]
    console = options.console(asked.json)
    console.print(_table(asked, rows, size))
    if asked.explain:
        say = options.teller(console)
        for row in rows:
            say(f"{row['topology']}:")
            for line in row["edges"]:
                say(f"  {line}")
    _written(asked, found, size, links, options.teller(console))
    return options.answer(asked.json, {"word": "predicted", "replicas": size, "rows": rows})


def _links(asked: Options) -> tuple[Links | None, int]:
    """The links of --links, and the number of replicas."""
    size = 8 if asked.replicas is None else asked.replicas
    if not 1 <= size <= MOST_REPLICAS:
        raise ConfigurationError(f"--replicas {size}: 1 to {MOST_REPLICAS} are needed.")
    if asked.links is None:
        return None, size
    if not asked.links.endswith(".toml"):
        return Links.uniform(Link.parse(asked.links), size), size
    links = Links.load(Path(asked.links))
    if asked.replicas not in (None, len(links)):
        raise ConfigurationError(f"--replicas {asked.replicas}: {asked.links} has {len(links)}; leave it out.")
    return links, len(links)


def _fitting(asked: Options, text: str, size: int, named: bool = True) -> list[Topology]:
    """The graph; empty for a graph that does not fit, unless it was `named`. Raises `ConfigurationError`."""
    try:
        topology = topology_of(text)
        check_size(topology, size)
        spectrum(topology, size)
        _strategy(asked, topology, size)
        return [topology]
    except ConfigurationError:
        if named:
            raise
        return []


def _strategy(asked: Options, topology: Topology, size: int) -> Any:
    return Run.of(strategy=asked.strategy, topology=repr(topology), replicas=size).make_strategy()


def _row(asked: Options, text: str, topology: Topology, size: int, links: Links | None) -> dict[str, Any]:
    """The row of a graph. Raises `ConfigurationError`."""
    strategy, found = _strategy(asked, topology, size), spectrum(topology, size)
    with torch.device("meta"):  # only shapes are needed
        model = Transformer(SIZES[asked.model])
    shapes = [fragment.shapes for fragment in strategy.partition.fragments(model)]
    degrees = [topology.edges(size, number).sum(1) for number in range(topology.rounds(size) or 1)]
    least, most = int(np.min(degrees)), int(np.max(degrees))
    sent, steps = strategy.nbytes_per_period(shapes, size), strategy.exchange.rule.steps  # gossip steps of a round
    second = found.second**steps
    row = {
        "topology": Path(text).name if isinstance(topology, Listed) else repr(topology),
        "neighbours": f"{most}" if least == most else f"{least} to {most}",
        "second": second,
        "gap": 1 - second,
        "halving": found.halving / steps,
        "link_nbytes": sent // most if most else 0,
        "sent_nbytes": sent,
    }
    if links is not None:
        row["halving_seconds"] = halving_seconds(links, topology, row["link_nbytes"] // steps)
    rates = _rates(topology, size) if asked.rates else None
    if asked.rates:
        row |= {"meetings_even": None, "meetings": None}
    if rates is not None:
        chi1, chi2 = resistances(meeting_rates(topology, size, 2 / size))
        row |= {"meetings_even": math.sqrt(2 * chi1 * chi2), "meetings": float(rates.sum() / 2)}
    return row | {"edges": _edges(topology, size, rates)}


def _rates(topology: Topology, size: int) -> Weights | None:
    """The best rates of the edges; None if neighbours change, or edges have one direction."""
    edges = topology.edges(size)
    return fewest_meetings(topology, size) if topology.fixed and (edges == edges.T).all() else None


def _table(asked: Options, rows: Sequence[dict[str, Any]], size: int) -> Table:
    table = options.table(f"{asked.strategy} among {size} replicas, model {asked.model} (predicted)")
    table.add_column("topology")
    heads = ["neighbours", "|λ₂|", "gap", "rounds to halve", "a round on a link", "a round sent"]
    heads += ["to halve"] * (asked.links is not None) + ["meetings, even", "meetings, best"] * asked.rates
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        halving = row["halving"]
        cells = [
            row["topology"], row["neighbours"], f"{row['second']:.4f}", f"{row['gap']:.4f}",
            "never" if math.isinf(halving) else f"{halving:.2f}", text_of_nbytes(row["link_nbytes"]), text_of_nbytes(row["sent_nbytes"]),
        ]  # fmt: skip
        cells += [text_of_seconds(row["halving_seconds"])] if asked.links is not None else []
        for name in ("meetings_even", "meetings") if asked.rates else ():
            cells.append("–" if row[name] is None else f"{row[name]:.2f}")
        table.add_row(*cells)
    return table


def _written(
    asked: Options, found: Sequence[tuple[str, Topology]], size: int, links: Links | None, say: Callable[[str], object]
) -> None:
    """Write the edges and the picture of the first graph, if they were requested."""
    topology = found[0][1] if found else None
    if topology is None:
        return
    edges = topology.edges(size)
    if asked.out:
        store(asked.out, json.dumps([[int(a), int(b)] for a, b in np.argwhere(np.triu(edges))]) + "\n")
        say(f"written: {asked.out}")
    if asked.plot:
        rates = _rates(topology, size) if asked.rates else None
        if rates is not None:
            values, unit = rates, "meetings"
        elif links is not None:
            values, unit = links.rates / 1e6, "Mbit/s"
        else:
            values, unit = edges.astype(np.float64), "edges"
        chart = graph_chart(edges, values, unit, links.names if links and str(asked.links).endswith(".toml") else ())
        figures.draw(chart, f"{found[0][0]}, {size} replicas", asked.plot, "predicted", say)


def _edges(topology: Topology, size: int, rates: Weights | None) -> list[str]:
    """Lines with the receivers of each replica, and the rates of their meetings; only the first three of random rounds."""
    lines = []
    if rates is not None:
        for rank, row in enumerate(rates):
            lines.append(f"{rank} -> {', '.join(f'{int(to)} ({row[to]:.3f})' for to in np.flatnonzero(row)) or '-'}")
        return lines
    for number in range(topology.rounds(size) or 3):
        prefix = "" if topology.fixed else f"round {number}: "
        for rank, row in enumerate(topology.edges(size, number)):
            lines.append(f"{prefix}{rank} -> {', '.join(str(int(to)) for to in np.flatnonzero(row)) or '-'}")
    return lines
