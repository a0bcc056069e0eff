"""`thinwire top`: all replicas of a run on one screen."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console, RenderableType
from rich.live import Live

from thinwire.app.cli import options
from thinwire.app.report.scraped import ScrapedTop, is_address
from thinwire.app.report.terminal import reading
from thinwire.app.report.top import Top
from thinwire.files import write_whole

FRAME_SECONDS = 1.0
PAGE_WIDTH = 150  # columns


@dataclass(frozen=True)
class Options:
    """The options of `thinwire top`."""

    run: tyro.conf.Positional[str] = "runs"
    """A run folder, or a folder of several: then the run that was written last. An ended run is shown in its last state. Or HOST:PORT of a
    run with --log prometheus."""
    once: bool = False
    """Print one frame and end, as it does if stdout is no terminal."""
    page: Path | None = None
    """Keep this HTML file at the newest frame, until Ctrl-C or the end. A browser reloads it every two seconds. Default: no file."""
    json: bool = False
    """One frame; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(
        Options, "top", arguments, "Show all replicas of a run on one screen, until Ctrl-C or its end."
    )
    console = options.console(asked.json)
    elsewhere = is_address(asked.run) and not Path(asked.run).exists()
    top = ScrapedTop(asked.run) if elsewhere else Top(Path(asked.run))
    with reading(console, [top.folder]) if isinstance(top, Top) else nullcontext():
        top.read(time.time())
    if asked.page and not (asked.once or asked.json):
        console.print(f"page: {asked.page}", soft_wrap=True, highlight=False)
        while not top.over:
            _write(asked.page, top.picture(time.time(), PAGE_WIDTH), live=True)
            time.sleep(FRAME_SECONDS)
            top.read(time.time())
    if asked.page:
        _write(asked.page, top.picture(time.time(), PAGE_WIDTH), live=not top.over)
        if not (asked.once or asked.json):
            return 0
    if asked.once or asked.json or not console.is_terminal:
        console.print(top.picture(time.time(), console.width))
        return options.answer(asked.json, top.facts(time.time()))
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while not top.over:
            live.update(top.picture(time.time(), console.width), refresh=True)
            time.sleep(FRAME_SECONDS)
            top.read(time.time())
    console.print(top.picture(time.time(), console.width))
    return 0


def _write(path: Path, picture: RenderableType, live: bool) -> None:
    """Replace the page by this frame; a `live` page reloads itself."""
    sheet = Console(file=io.StringIO(), record=True, width=PAGE_WIDTH)
    sheet.print(picture)
    text = sheet.export_html(inline_styles=True)
    head = "<head><title>thinwire top</title>" + ('<meta http-equiv="refresh" content="2">' if live else "")
    write_whole(path, text.replace("<head>", head, 1))
