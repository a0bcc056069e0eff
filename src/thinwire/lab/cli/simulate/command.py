"""`thinwire simulate`: studies in virtual time. Each study has its own file in this folder."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from thinwire.choices import nearest
from thinwire.errors import ConfigurationError

STUDIES = {
    "utilization": "the rate that a link needs for a given compute utilization, layer by layer (the paper's table)",
    "run": "a run file, or any strategy: replicas, links, stragglers and failures, step by step",
    "pipeline": "stages joined by slow hops: one step of 1F1B, beside closed forms",
    "fabric": "flows through leaves and spines: random paths (ECMP), splitting, spraying, failed spines",
    "overlap": "a reduce-scatter that begins while its input is still computed (T3)",
    "stragglers": "replicas that are sometimes late: waiting, ignoring them, gradient codes, sequential codes",
    "disrupted": "replicas of a gossip graph drop out: its largest part, isolated replicas, and the accuracy of the rest",
    "sampled": "peers that train in samples and come and go (plexus): rounds, time, pings, what is learned",
}

_USAGE = "\n".join(
    [
        "usage: thinwire simulate STUDY [options]      (thinwire simulate STUDY --help shows the options)",
        "",
        *(f"  {study:<13}{text}" for study, text in STUDIES.items()),
        "",
        "All figures are simulated: virtual time, no processes and no tensors.",
    ]
)


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    study, *rest = arguments
    if study not in STUDIES:
        raise ConfigurationError(f"{study!r} is no study{nearest(study, STUDIES)}; there are {', '.join(STUDIES)}.")
    return int(importlib.import_module(f"thinwire.lab.cli.simulate.{study}").main(rest))
