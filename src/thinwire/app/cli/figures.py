"""Pictures that verbs write on request: FILE.svg, FILE.png or FILE.html, by the suffix."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from thinwire.app.report.charts import Chart
from thinwire.app.report.page import chart_place, page, word
from thinwire.app.report.svg import drawing
from thinwire.errors import ConfigurationError
from thinwire.files import check_place, write_whole

ENDINGS = (".svg", ".png", ".html")
SCALE = 2  # pixels of a PNG for one of the SVG's


def check(path: Path | None) -> None:
    """Check the name before any work. Raises `ConfigurationError` if it cannot be drawn, `OSError` if it cannot be written."""
    if path is None:
        return
    if path.suffix not in ENDINGS:
        raise ConfigurationError(f"{path}: a name that ends with .svg, .html or .png is needed.")
    if path.suffix == ".png":
        _converter(path)
    check_place(path)


def draw(chart: Chart, title: str, path: Path, provenance: str, say: Callable[[str], object]) -> None:
    """Write the chart's first view as a picture, or the whole chart as a page, in a folder that is made if it is missing, and say where. The
    PNG is the SVG in pixels on a light background.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        body = f"<h1>{escape(title)} {word(provenance)}</h1><section>{chart_place('figure', chart)}</section>"
        write_whole(path, page(title, body, {"figure": chart}))
    else:
        picture = drawing(chart.views[0], title, " ".join(chart.remarks))
        write_whole(path, picture if path.suffix == ".svg" else _converter(path).svg2png(picture.encode(), scale=SCALE))
    say(f"figure: {path}")


def _converter(path: Path):  # type: ignore[no-untyped-def]  # a module without types
    try:
        import cairosvg
    except (ImportError, OSError) as error:  # OSError: the package is there, the cairo library is not
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(
            f"{path}: a PNG is drawn by CairoSVG, and that failed ({cause}). pip install 'thinwire[png]', and libcairo2 where "
            f"the system lacks it; or write {path.with_suffix('.svg')}, which needs neither."
        ) from None
    return cairosvg
