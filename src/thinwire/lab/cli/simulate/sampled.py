"""`thinwire simulate sampled`: peers that train in samples (plexus), of whom some are away at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from thinwire.app.cli import options
from thinwire.errors import ConfigurationError
from thinwire.lab.samples.rules import SampleRules
from thinwire.lab.simulate.sampled import Network


@dataclass(frozen=True)
class Options:
    """What `thinwire simulate sampled` takes."""

    peers: int = 100
    """Number of peers."""
    sample: int = 10
    """Number of peers that train in a round."""
    aggregators: int = 1
    """Number of aggregators to which each of them sends its model."""
    offline: tuple[float, ...] = (0.0, 0.5, 0.8)
    """Shares of the peers that are away at any time; a row for each."""
    away: float = 1000.0
    """Seconds for which a peer is away, in the mean."""
    patience: float = 60.0
    """Seconds for which an aggregator waits for models."""
    rounds: int = 50
    """Number of rounds."""
    seconds: float = 50000.0
    """Virtual time after which a run ends in any case."""
    seed: int = 0
    """Of all that is drawn."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "Peers train in samples and come and go: rounds, time, pings, and what is learned (simulated)."
    asked = options.read(Options, "simulate sampled", arguments, description)
    if not asked.offline:
        raise ConfigurationError("--offline without a share: at least 1 is needed, such as 0.5.")
    rules = SampleRules(sample=asked.sample, aggregators=asked.aggregators, patience=asked.patience)
    networks = [Network(asked.peers, rules, share, asked.away, asked.seed) for share in asked.offline]
    rows = [
        {"offline": share} | asdict(network.run(asked.rounds, asked.seconds))
        for share, network in zip(asked.offline, networks)
    ]
    table = Table(
        "offline", "rounds", "seconds", "asked", "found", "fewest", "most", "pings a round", "left to learn", box=None
    )
    table.title = f"{asked.peers} peers, samples of {asked.sample} (simulated)"
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    options.console(asked.json).print(table)
    return options.answer(asked.json, {"study": "sampled", "provenance": "simulated", "rows": rows})
