"""`thinwire simulate overlap`: a reduce-scatter that begins before its input is complete (T3's schedule)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.records.units import text_of_seconds, text_of_share
from thinwire.comm import Link, quantities
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.figure import overlap_chart
from thinwire.lab.simulate.overlap import (
    ORDERS,
    RingReduction,
    hidden_share,
    memory_traffic,
    overlapped_seconds,
    reduce_scatter,
    serial_seconds,
)


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate overlap`."""

    ranks: int = 8
    """Number of ranks in the ring; the product has the same number of chunks."""
    produce_seconds: float = 1e-3
    """Seconds to compute one chunk."""
    send_seconds: float = 1e-3
    """Seconds of a ring step: one chunk to the next rank."""
    nbytes: str | None = None
    """Instead of --send-seconds, with --link: bytes of the whole product, such as 64MB."""
    link: str | None = None
    """With --nbytes: the link between two ranks, such as 100gbit,5us."""
    contention: float = 0.0
    """While a rank sends, computing takes 1 + this times as long."""
    plot: Path | None = None
    """Draw the gain against sending over computing: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "A ring reduce-scatter that overlaps the computation of its input: T3's schedule (simulated)."
    asked = options.read(Options, "simulate overlap", arguments, description)
    figures.check(asked.plot)
    ring = RingReduction(asked.ranks, asked.produce_seconds, _send_seconds(asked), asked.contention)
    found = _facts(ring)
    console = options.console(asked.json)
    console.print(_table(ring, found))
    if asked.plot is not None:
        title = f"A reduce-scatter among {ring.ranks} ranks beside its product"
        figures.draw(overlap_chart(ring), title, asked.plot, "simulated", options.teller(console))
    return options.answer(asked.json, found)


def _send_seconds(asked: Options) -> float:
    if (asked.nbytes is None) != (asked.link is None):
        missing = "--link 100gbit,5us" if asked.link is None else "--nbytes 64MB"
        raise ConfigurationError(
            f"--nbytes and --link go together: {missing} is missing; or give --send-seconds alone."
        )
    if asked.nbytes is None or asked.link is None:
        return asked.send_seconds
    if asked.send_seconds != Options.send_seconds:
        raise ConfigurationError("--send-seconds and --link: both give the time of a ring step; leave one out.")
    return Link.parse(asked.link).seconds(-(-quantities.nbytes(asked.nbytes) // max(asked.ranks, 1)))


def _facts(ring: RingReduction) -> dict[str, Any]:
    """The results as JSON, for programs."""
    seconds = {order: reduce_scatter(ring, order) for order in ORDERS}
    plain, near = memory_traffic(ring.ranks)
    return {
        "study": "overlap",
        "provenance": "simulated",
        "ranks": ring.ranks,
        "produce_seconds": ring.produce_seconds,
        "send_seconds": ring.send_seconds,
        "contention": ring.contention,
        "seconds": seconds,
        "hidden_share": {order: hidden_share(ring, took) for order, took in seconds.items()},
        "speedup": seconds["serial"] / seconds["staggered"],
        "predicted": {"serial": serial_seconds(ring), "staggered": overlapped_seconds(ring)},
        "memory_traffic": {"plain": plain, "adding_in_memory": near},
    }


_SAYS = {
    "serial": "sending begins after all is computed",
    "same": "all ranks compute the same chunk first, which most may not send yet",
    "staggered": "each rank computes first the part that it sends first (T3)",
}


def _table(ring: RingReduction, found: dict[str, Any]) -> Table:
    table = options.table(
        f"{ring.ranks} ranks, {text_of_seconds(ring.produce_seconds)} to compute a chunk, {text_of_seconds(ring.send_seconds)} to send it"
    )
    table.add_column("order")
    for head in ("simulated", "predicted", "hidden"):
        table.add_column(head, justify="right")
    table.add_column("")
    for order, took in found["seconds"].items():
        predicted = found["predicted"].get(order)
        table.add_row(
            order, text_of_seconds(took), text_of_seconds(predicted), text_of_share(found["hidden_share"][order]), _SAYS[order]
        )  # fmt: skip
    traffic = found["memory_traffic"]
    less = 1 - traffic["adding_in_memory"] / traffic["plain"]
    table.caption = (
        f"{found['speedup']:.2f} times as fast as serial, of this product and its sum alone, not of a model. hidden: share of the traffic's\n"
        f"time beside the computing. Adding in memory would move {text_of_share(less)} fewer bytes (predicted, our accounting)"
    )
    return table
