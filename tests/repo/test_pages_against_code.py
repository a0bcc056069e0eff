"""Figures and names on pages equal those of the code. test_pages.py and test_method_pages.py hold tables of results and recipes."""

from __future__ import annotations

import inspect
import json
import re
import struct

from pages import PAGES, ROOT, blocks

import thinwire
from thinwire import errors, packet
from thinwire.cli import VERBS
from thinwire.cli.train import DEMO
from thinwire.diagnosis import Rules
from thinwire.diagnosis.records import recorded
from thinwire.lm.data import Corpus
from thinwire.lm.model import SIZES, Transformer
from thinwire.lm.placement import Placement
from thinwire.lm.settings import NAMED
from thinwire.lm.tokens import SUFFIXES
from thinwire.membership import channel, server
from thinwire.runtime import gradient_driver


def page(name: str) -> str:
    """Returns the text of a page with its lines joined, so that wrapping hides no sentence."""
    return re.sub(r"\s*\n\s*", " ", (ROOT / name).read_text())


def rows(name: str, head: str) -> list[list[str]]:
    """Returns the cells of the table of a page that begins with `head`."""
    lines = (ROOT / name).read_text().split(head, 1)[1].splitlines()[2:]
    table = lines[: next(place for place, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


NAMED_BY_DEFAULT = DEMO.method.strategy  # of `thinwire train`


def test_every_test_file_that_a_page_names_exists():
    """The log is left out: its entries name files as they were."""
    files = {path.name for path in ROOT.glob("tests/**/*.py")}
    named = {
        (page, name)
        for page in PAGES
        if page.name != "log.md"
        for name in re.findall(r"test_\w+\.py", page.read_text())
    }
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


# ---- the demo


def test_the_start_page_describes_the_demo_truly():
    text, strategy, model = page("docs/start.md"), thinwire.streaming_sign(), Transformer(SIZES[DEMO.model.model])
    count = len(strategy.partition.fragments(model))
    landing = (
        next(t for t in range(1, DEMO.optimizer.steps) if strategy.schedule.departs(t, fragments=count))
        + strategy.schedule.delay
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (
        DEMO.placement.replicas == 2
        and DEMO.method.strategy == "streaming_sign"
        and DEMO.placement.link == "5mbit,30ms"
    )
    assert f"transformer of {parameters / 1e6:.1f} million parameters" in text
    assert f"{DEMO.optimizer.steps} steps each" in text and "5 Mbit/s up and 30 ms one way" in text
    assert f"The first fragment lands after step {landing}." in text
    assert f"the last {['none', 'one', 'two', 'three'][DEMO.placement.keep]}" in text


def test_the_start_page_describes_text_truly():
    text = page("docs/start.md").split("## Your own text")[1].split("## The next run")[0]
    assert f"reads {', '.join(SUFFIXES[:-1])} and {SUFFIXES[-1]}" in text
    assert f"in the field `{DEMO.data.column}`" in text
    share = inspect.signature(Corpus.open).parameters["held_out_share"].default
    assert f"{100 * share:g} % of the text is held out" in text


def test_pages_name_the_defaults_of_the_code():
    strategy = thinwire.streaming_sign()
    assert f"`every={strategy.schedule.every}, delay={strategy.schedule.delay}` is the default" in page("docs/how.md")
    codec, numel = strategy.coded(((1024, 1024),))
    bits = codec.nbytes(numel) * 8 / numel
    every = strategy.schedule.every
    assert f"{bits:.2f} / {every} = {bits / every:.3f} bits per parameter and step (predicted)" in page("README.md")
    assert f"the fewest replicas that hold a round ({Placement.least})" in page("docs/elastic.md")


def test_the_readme_counts_methods_and_names_verbs():
    assert f"any of {len(NAMED)} methods" in page("README.md")
    assert all(f"thinwire {verb}" in page("README.md") for verb in VERBS)


def test_the_page_names_the_packages_without_a_folder_of_tests():
    packages = {path.parent.name for path in (ROOT / "src/thinwire").glob("*/__init__.py")}
    without = sorted(package for package in packages if not (ROOT / "tests" / package).is_dir())
    told = re.search(r"for each package of `src/thinwire`, except (.*?), which", page("docs/design.md"))
    assert told and re.findall(r"`(\w+)`", told[1]) == without


def test_the_citation_names_the_default_method():
    assert f"{NAMED_BY_DEFAULT}, the default of Thinwire" in (ROOT / "CITATION.cff").read_text()


def test_the_page_names_the_spread_of_the_bare_loop():
    bare = json.loads((ROOT / "benchmarks/results/utilization.json").read_text())["bare"]
    least, most = (1 / seconds for seconds in reversed(bare["spread"]))
    assert f"{bare['runs']} windows without any exchange had {least:.2f} to {most:.2f} steps/s" in page(
        "docs/measured.md"
    )


# ---- errors and bounds


def test_every_error_is_on_the_page_of_the_design():
    """The page names every error class of errors.py, and no other."""
    named = set(re.findall(r"\b\w+Error\b", page("docs/how.md")))
    assert named == {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def test_pages_name_the_bounds_of_the_lighthouse():
    text = page("docs/elastic.md")
    assert f"reads {channel.INTRODUCTION.size} bytes" in text
    assert f"{server._MOST_STRANGERS} such connections" in text
    assert (
        f"within {channel.ANSWER_SECONDS:.0f} seconds" in text
        and f"at most {channel.MOST_PRESENCE >> 10} KiB of itself" in text
    )
    assert f"{channel.MOST_MEMBERS} replicas may be there" in text
    for name in ("docs/elastic.md", "docs/machines.md"):
        assert str(channel.LIGHTHOUSE_PORT) in page(name)


def test_pages_name_the_rules_of_the_diagnosis():
    text = page("docs/diagnosis.md")
    assert f"{Rules()!r}\n" in [block.text for block in blocks(ROOT / "docs/diagnosis.md", "text")]
    first = next(number for number in range(1 << 20) if not recorded(number)) - 1
    assert f"the first {first} are recorded" in text
    assert f"every {gradient_driver.STEPS_BETWEEN_COMPARISONS} steps" in page(
        "docs/how.md"
    ) and f"every {gradient_driver.STEPS_BETWEEN_COMPARISONS} steps" in page("docs/own-loop.md")


def test_pages_that_name_gpus_say_what_has_run_there():
    """A page that names GPU kernels, or runs on GPUs, says that nothing has run there, or leads to the page that says what has."""
    for path in PAGES:
        text = page(path.relative_to(ROOT).as_posix())
        if path.name not in ("log.md", "CHANGELOG.md", "gpus.md") and re.search(
            r"GPU kernels|Triton|[Rr]un on (?:a )?GPUs?|of 8 GPUs", text
        ):
            assert re.search(r"never run on (?:a )?GPU|gpus\.md", text), path.name
