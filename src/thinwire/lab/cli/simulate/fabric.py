"""`thinwire simulate fabric`: paths of flows through leaves and spines, loads of links, and completion time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.records.units import text_of_nbytes, text_of_rate, text_of_seconds
from thinwire.comm import Link, quantities
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate import fabric
from thinwire.lab.simulate.fabric import POLICIES, Fabric, Pattern, Policy
from thinwire.lab.simulate.figure import fabric_chart
from thinwire.rng import derive


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate fabric`."""

    leaves: int = 8
    """Leaf switches: racks, or sites."""
    spines: int = 8
    """Spine switches: the paths from one leaf to another."""
    hosts: int = 4
    """Number of machines per leaf."""
    flows: int = 3
    """Equal flows from each machine to each leaf that it sends to."""
    nbytes: str = "1MB"
    """Bytes of one flow."""
    rate: str = "100gbit"
    """Rate of every link between a leaf and a spine."""
    failed: int = 0
    """Number of failed spines, which the senders know."""
    pattern: Pattern = "all-to-all"
    """all-to-all: each machine sends to every other leaf; ring: to the next one only."""
    policy: Policy | None = None
    """One policy. Default: all of them."""
    draws: int = 5
    """Number of random draws, for random policies."""
    seed: int = 0
    """Seed of these draws."""
    plot: Path | None = None
    """Draw the busiest link against the number of flows: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "Paths of equal flows through a leaf-spine fabric: ECMP, splitting, spraying (simulated)."
    asked = options.read(Options, "simulate fabric", arguments, description)
    figures.check(asked.plot)
    if not 1 <= asked.draws <= 100:
        raise ConfigurationError(f"draws={asked.draws}: between 1 and 100 are needed.")
    given = Fabric(asked.leaves, asked.spines, asked.hosts, asked.failed, Link.parse(asked.rate).bits_per_second)
    nbytes = quantities.nbytes(asked.nbytes)
    rows = [_row(asked, given, nbytes, policy) for policy in ([asked.policy] if asked.policy else POLICIES)]
    console = options.console(asked.json)
    console.print(_table(asked, given, nbytes, rows))
    if asked.plot is not None:
        chart = fabric_chart(given, asked.pattern, asked.seed)
        figures.draw(chart, _title(asked, given), asked.plot, "simulated", options.teller(console))
    names = ("leaves", "spines", "hosts", "flows", "failed", "pattern", "draws", "seed")
    setting = {name: getattr(asked, name) for name in names}
    setting |= {"flow_nbytes": nbytes, "bits_per_second": given.bits_per_second}
    return options.answer(asked.json, {"study": "fabric", "provenance": "simulated", **setting, "policies": rows})


def _row(asked: Options, given: Fabric, nbytes: int, policy: Policy) -> dict[str, Any]:
    """The row of one policy; for random policies the mean of the draws, and the worst one."""
    best = fabric.even_load(given, asked.pattern, asked.flows)
    found, times, parts = [], [], []
    for draw in range(asked.draws if policy in fabric.BY_CHANCE else 1):
        parts = fabric.route(given, policy, asked.pattern, asked.flows, derive(asked.seed, "fabric", draw))
        found.append(float(fabric.most_loaded(given, parts) / best))
        times.append(fabric.seconds(given, parts, nbytes))
    flows = fabric.flow_count(given, asked.pattern, asked.flows)
    return {
        "policy": policy,
        "most_loaded": statistics.fmean(found),
        "worst_most_loaded": max(found),
        "seconds": statistics.fmean(times),
        "worst_seconds": max(times),
        "cuts": None if policy == "spray" else len(parts) - flows,
    }


def _title(asked: Options, given: Fabric) -> str:
    down = f" ({given.failed} of them down)" if given.failed else ""
    return f"{given.leaves} leaves of {given.hosts} hosts, {given.spines} spines{down}, {asked.pattern}"


_SAYS = {
    "ecmp": "each flow on a random spine",
    "round-robin": "whole flows in turn, from a random spine on",
    "split": "the rest is cut evenly: exactly equal loads",
    "wrap": "flows are cut only where a spine is full (our own)",
    "spray": "every flow on all spines, packet by packet",
}


def _table(asked: Options, given: Fabric, nbytes: int, rows: Sequence[dict[str, Any]]) -> Table:
    flows = fabric.flow_count(given, asked.pattern, asked.flows)
    table = options.table(
        f"{_title(asked, given)}\n{flows:,} flows of {text_of_nbytes(nbytes)} at once, {asked.flows} from a host to a leaf, "
        f"links of {text_of_rate(given.bits_per_second)} (simulated)"
    )
    table.add_column("policy")
    for head in ("busiest link", "worst", "all there in", "cuts"):
        table.add_column(head, justify="right")
    table.add_column("")
    for row in rows:
        cuts = "–" if row["cuts"] is None else f"{row['cuts']:,}"
        table.add_row(
            row["policy"], f"{row['most_loaded']:.3f} ×", f"{row['worst_most_loaded']:.3f} ×", text_of_seconds(row["seconds"]),
            cuts, _SAYS[row["policy"]],
        )  # fmt: skip
    leaf = given.hosts * asked.flows * fabric.sinks(given, asked.pattern)
    expected = fabric.expected_most(leaf, given.usable)
    table.caption = (
        f"busiest link: × an even load; by chance the mean and the worst of {asked.draws} draws. Of one leaf's {leaf:,} flows alone, "
        f"ecmp puts\n{expected:.3f} × on the busiest uplink (predicted). Hosts' own links, queues and packets are not in it"
    )
    return table
