"""`thinwire simulate disrupted`: replicas of a gossip graph drop out at once; shows the rest of the graph, and its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.disrupted import Data, Disaster, Who, structure
from thinwire.lab.simulate.figure import disrupted_chart
from thinwire.lab.topology.reading import topology_of

MOST_RUNS = 1000  # graphs, and runs


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate disrupted`."""

    topology: str = "BarabasiAlbert(2)"
    """The graph: BarabasiAlbert(2), Ring, Torus, RandomRegular(3), ..., or a JSON file of edges."""
    replicas: int = 50
    """Number of replicas."""
    who: Who = "degree"
    """The replicas that drop out: those with most neighbours, those on most shortest paths (betweenness), or random ones."""
    shares: tuple[float, ...] = (0.1, 0.2, 0.3)
    """Shares of the replicas that drop out; one row for each."""
    data: Data = "everywhere"
    """The replicas with data: all, only those that drop out (hit), or only the others (others)."""
    at_round: int = 30
    """The round after which they drop out."""
    rounds: int = 60
    """Total number of rounds."""
    graphs: int = 30
    """Number of random graphs; figures are means over them."""
    runs: int = 3
    """Number of these graphs on which a model is trained. Accuracies are means over them."""
    plot: Path | None = None
    """Draw accuracy against the share of failed replicas: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "Replicas drop out of a gossip graph: its largest part, isolated ones, accuracy (simulated)."
    asked = options.read(Options, "simulate disrupted", arguments, description)
    if not (1 <= asked.graphs <= MOST_RUNS and 1 <= asked.runs <= MOST_RUNS and asked.shares):
        raise ConfigurationError(
            f"graphs={asked.graphs}, runs={asked.runs}, shares={asked.shares}: at least 1 of each, and at most {MOST_RUNS:,} graphs and runs, are "
            "needed."
        )
    figures.check(asked.plot)
    rows = [_row(asked, share) for share in asked.shares]
    console = options.console(asked.json)
    title = f"{asked.topology}, {asked.replicas} replicas, hit by {asked.who} after round {asked.at_round} of {asked.rounds}"
    table = Table(
        "hit", "largest part", "isolated", "before", "after", "worst tenth", "in it", "alone", "unhurt", box=None
    )
    table.title = f"{title} (simulated)"
    for row in rows:
        table.add_row(*(f"{value:.2f}" for value in row.values()))
    console.print(table)
    if asked.plot:
        figures.draw(disrupted_chart(rows), title, asked.plot, "simulated", options.teller(console))
    return options.answer(asked.json, {"study": "disrupted", "provenance": "simulated", "rows": rows})


def _row(asked: Options, share: float) -> dict[str, Any]:
    topology = topology_of(asked.topology)
    found = structure(topology, asked.replicas, asked.who, share, asked.graphs)
    disaster = Disaster(topology, asked.replicas, asked.who, share, asked.at_round, asked.rounds, asked.data)
    runs = [asdict(disaster.learned(seed)) for seed in range(asked.runs)]
    means = {name: _mean([run[name] for run in runs]) for name in runs[0]}
    return {
        "hit": share,
        "giant": found.giant,
        "isolated": found.isolated,
        "before": means["before"],
        "after": means["mean"],
        "low": means["low"],
        "in_giant": means["giant"],
        "alone": means["isolated"],
        "undisturbed": means["undisturbed"],
    }


def _mean(values: list[float]) -> float:
    """The mean of the values that are numbers."""
    there = [value for value in values if not np.isnan(value)]
    return float(np.mean(there)) if there else float("nan")
