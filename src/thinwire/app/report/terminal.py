"""The console for people, to which no text can send control characters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from thinwire.app.records.printable import printable_lines
from thinwire.app.records.units import text_of_nbytes, text_of_seconds


class Terminal(Console):
    """rich's console. It spells out control characters in all text, and reads no markup in it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.replace("\n", " ").isprintable():
                yield segment
            else:
                yield Segment(printable_lines(segment.text, len(segment.text)), segment.style)


def screen(columns: Mapping[str, Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table of columns, by their heads; those of `left` are set to the left, and a state may have several lines."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "state")
    for row in zip(*columns.values()):
        table.add_row(*map(Text, row))
    return table


def reading(console: Console, folders: Iterable[Path]) -> AbstractContextManager[None]:
    """Show that the event logs of runs are read, which takes minutes if these trained for weeks."""
    nbytes = sum(path.stat().st_size for folder in folders for path in folder.glob("events/*.jsonl"))
    return waiting(console, f"reading {text_of_nbytes(nbytes)} of event logs")


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show `what`, and for how long it has taken, until it ends; only on a terminal."""
    if not console.is_terminal:
        yield
        return
    begun = time.monotonic()

    def shown() -> Text:
        return Text(f"{what} · {text_of_seconds(round(time.monotonic() - begun))}")

    with Live(console=console, get_renderable=shown, transient=True, refresh_per_second=4):
        yield
