"""The packet header, the errors and the test files that pages name equal those of the code."""

from __future__ import annotations

import inspect
import re
import struct

from pages import PAGES, ROOT

from thinwire import errors, packet


def page(name: str) -> str:
    """Returns the text of a page with its lines joined, so that wrapping hides no sentence."""
    return re.sub(r"\s*\n\s*", " ", (ROOT / name).read_text())


def rows(name: str, head: str) -> list[list[str]]:
    """Returns the cells of the table of a page that begins with `head`."""
    lines = (ROOT / name).read_text().split(head, 1)[1].splitlines()[2:]
    table = lines[: next(place for place, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_test_file_that_a_page_names_exists():
    files = {path.name for path in ROOT.glob("tests/**/*.py")}
    named = {(page, name) for page in PAGES for name in re.findall(r"test_\w+\.py", page.read_text())}
    assert named and {(str(page), name) for page, name in named if name not in files} == set()


# ---- the wire


def test_the_table_of_the_packet_header_equals_the_struct():
    """The sizes are in the order of the struct, on the page and in the module's docstring; the names are those of `Header`."""
    letters = re.findall(r"\d*[a-zA-Z]", packet._LAYOUT.format.lstrip("<"))
    sizes = [struct.calcsize(f"<{letter}") for letter in letters]
    told = [(int(nbytes), field) for nbytes, field, _ in rows("docs/design.md", "| bytes | field | meaning |")]
    assert [nbytes for nbytes, _ in told] == sizes and sum(sizes) == packet.HEADER_NBYTES
    assert {field for _, field in told} == {
        *inspect.signature(packet.Header).parameters,
        "magic",
        "version",
        "checksum",
    }
    docstring = re.findall(r"^\| (\d+) +\| (\w+)", packet.__doc__ or "", re.MULTILINE)
    assert [(int(nbytes), field) for nbytes, field in docstring] == told
    assert f"{packet.HEADER_NBYTES} bytes of header" in page("docs/design.md") and packet.MAGIC.decode() in page(
        "docs/design.md"
    )


# ---- errors


def test_every_error_is_on_the_page_of_the_design():
    """The page names every error class of errors.py, and no other."""
    named = set(re.findall(r"\b\w+Error\b", page("docs/how.md")))
    assert named == {name for name, kind in vars(errors).items() if isinstance(kind, type)}
