"""`thinwire top`: all replicas of a run on one screen."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.live import Live

from thinwire.cli import options
from thinwire.report.top import Top

FRAME_SECONDS = 1.0


@dataclass(frozen=True)
class Options:
    """What `thinwire top` takes."""

    run: tyro.conf.Positional[Path] = Path("runs")
    """A run folder, or one with several: then the run that was written last. One that has ended is shown as it ended."""
    once: bool = False
    """Print one frame and end; so it is where stdout is no terminal."""
    json: bool = False
    """One frame; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(
        Options, "top", arguments, "Show all replicas of a run on one screen, until Ctrl-C or its end."
    )
    console = options.console(asked.json)
    top = Top(asked.run)
    top.read()
    if asked.once or asked.json or not console.is_terminal:
        console.print(top.picture(time.time()))
        if asked.json:
            print(json.dumps(top.facts(time.time())))
        return 0
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while not top.over:
            live.update(top.picture(time.time()), refresh=True)
            time.sleep(FRAME_SECONDS)
            top.read()
    console.print(top.picture(time.time()))
    return 0
