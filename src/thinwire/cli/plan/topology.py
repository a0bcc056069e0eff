"""`thinwire plan topology`: the neighbours of a graph, its speed of agreement, and its load on the busiest link."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tyro

from thinwire.cli import options
from thinwire.errors import ConfigurationError
from thinwire.lm.model import SIZES, Transformer
from thinwire.lm.run import Run
from thinwire.lm.settings import topology_of
from thinwire.records.units import text_of_nbytes
from thinwire.topology import Topology, check_size, spectrum

TRIED = ("complete", "ring", "mesh", "torus", "exponential", "one_peer_exponential", "random_pairs", "random_regular")


@dataclass(frozen=True)
class Options:
    """What `thinwire plan topology` takes."""

    topologies: tyro.conf.Positional[tuple[str, ...]] = ()
    """Graphs to compare: ring, torus, RandomRegular(4), links.json, ... Default: all that fit the number of replicas."""
    replicas: int = 8
    """Number of replicas."""
    strategy: str = "d_psgd"
    """The gossip method whose bytes are told."""
    model: str = "tiny"
    """The model size whose bytes are told."""
    explain: bool = False
    """Also print the neighbours of each replica, round by round if they change."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    about = "Compare graphs for gossip: neighbours, spectrum, and bytes on the busiest link (predicted)."
    asked = options.read(Options, "plan topology", arguments, about)
    if asked.model not in SIZES:
        raise ConfigurationError(f"model={asked.model!r}: one of {', '.join(SIZES)} is needed.")
    rows = [row for text in asked.topologies or TRIED for row in _row(asked, text, bool(asked.topologies))]
    console = options.console(asked.json)
    table = options.table(f"{asked.strategy} among {asked.replicas} replicas, model {asked.model} (predicted)")
    table.add_column("topology")
    for head in ("neighbours", "|λ₂|", "gap", "rounds to halve", "a round on a link", "a round sent"):
        table.add_column(head, justify="right")
    for row in rows:
        halving = row["halving"]
        table.add_row(
            row["topology"], row["neighbours"], f"{row['second']:.4f}", f"{row['gap']:.4f}",
            "never" if math.isinf(halving) else f"{halving:.2f}", text_of_nbytes(row["link_nbytes"]), text_of_nbytes(row["sent_nbytes"]),
        )  # fmt: skip
    console.print(table)
    if asked.explain:
        say = options.teller(console)
        for row in rows:
            say(f"{row['topology']}:")
            for line in row["edges"]:
                say(f"  {line}")
    if asked.json:
        print(json.dumps({"word": "predicted", "replicas": asked.replicas, "rows": rows}))
    return 0


def _row(asked: Options, text: str, named: bool) -> list[dict[str, Any]]:
    """The row of a graph; None for a graph that does not fit, unless it was `named`. Raises `ConfigurationError`."""
    try:
        topology = topology_of(text)
        check_size(topology, asked.replicas)
        found = spectrum(topology, asked.replicas)
        strategy = Run.of(strategy=asked.strategy, topology=repr(topology), replicas=asked.replicas).make_strategy()
    except ConfigurationError:
        if named:
            raise
        return []
    with torch.device("meta"):  # shapes alone
        model = Transformer(SIZES[asked.model])
    shapes = [fragment.shapes for fragment in strategy.partition.fragments(model)]
    degrees = [topology.edges(asked.replicas, number).sum(1) for number in range(topology.rounds(asked.replicas) or 1)]
    least, most = int(np.min(degrees)), int(np.max(degrees))
    sent = strategy.nbytes_per_period(shapes, asked.replicas)
    return [
        {
            "topology": repr(topology),
            "neighbours": f"{most}" if least == most else f"{least} to {most}",
            "second": found.second,
            "gap": found.gap,
            "halving": found.halving,
            "link_nbytes": sent // most if most else 0,
            "sent_nbytes": sent,
            "edges": _edges(topology, asked.replicas),
        }
    ]


def _edges(topology: Topology, size: int) -> list[str]:
    """Lines with the receivers of each replica; of random rounds the first three."""
    lines = []
    for number in range(topology.rounds(size) or 3):
        prefix = "" if topology.fixed else f"round {number}: "
        for rank, row in enumerate(topology.edges(size, number)):
            lines.append(f"{prefix}{rank} -> {', '.join(str(int(to)) for to in np.flatnonzero(row)) or '-'}")
    return lines
