"""README and docs are true: commands exist, blocks run, links lead to a target, numbers are those of the result files."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages import PAGES, ROOT, blocks, commands
from pieces import over
from torch.distributed.run import get_args_parser

from thinwire.app.cli import options
from thinwire.app.cli.verbs import verbs
from thinwire.app.records.units import text_of_rate
from thinwire.app.trainer.run import Run
from thinwire.catalogue.methods import RECIPES
from thinwire.codecs import E3M0
from thinwire.errors import ConfigurationError
from thinwire.lab.cli.simulate.command import STUDIES

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder in which the tests create the files that commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def check_thinwire(arguments: list[str], folder: Path) -> None:
    """Checks that the verb exists and takes these options, after creating the run files that the command names."""
    verb, *rest = arguments
    assert verb in verbs()
    if verb == "resume":
        verb, rest = "train", ["--resume", "--out", *rest]
    for place, argument in enumerate(rest):
        file = (
            Path(argument)
            if argument.endswith(".toml")
            else Path(rest[place + 1], "run.toml")
            if argument == "--out"
            else None
        )
        if file is not None:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            Run().save(folder / file)
    if verb == "plan" and f"plan.{rest[0]}" in verbs():
        verb, *rest = f"plan.{rest[0]}", *rest[1:]
    if verb == "simulate":
        study, *rest = rest
        assert study in STUDIES
        module = importlib.import_module(f"thinwire.lab.cli.simulate.{study}")
    else:
        module = verbs()[verb].load()
    if rest == ["--help"]:
        return
    asked = options.read(module.Options, verb, rest, "")
    for strategy in getattr(asked, "strategies", ()):
        Run.of(strategy=strategy)


def check(command: str, folder: Path) -> None:
    program, *arguments = shlex.split(command)
    match program:
        case "thinwire":
            check_thinwire(arguments, folder)
        case "make":
            assert set(arguments) <= TARGETS
        case "source":
            assert arguments == [".venv/bin/activate"]
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert arguments[0] == "install" and arguments[1:] in [["."], *([f".[{extra}]"] for extra in extras)]
        case "torchrun":
            asked = get_args_parser().parse_args(arguments)
            if asked.module:
                assert asked.training_script == "thinwire"
                check_thinwire(asked.training_script_args, folder)
            else:
                check(shlex.join(["python", asked.training_script, *asked.training_script_args]), folder)
        case "python":
            file = ROOT / arguments[0]
            assert file.is_file()
            assert all(f'"{flag}"' in file.read_text() for flag in arguments[1:] if flag.startswith("--"))
        case _:
            pytest.fail(f"{program} is not a command that this test knows")


@over("block, command", commands())
def test_commands_on_pages_exist(block, command, elsewhere):
    check(command, elsewhere)


def test_wrong_commands_are_found(elsewhere, capsys):
    for wrong in (
        "thinwire trian",
        "pip install thinwire",
        "thinwire train --stepz 3",
        "make tests",
        "python examples/00.py",
        "curl x",
    ):
        with pytest.raises((AssertionError, SystemExit, ConfigurationError, pytest.fail.Exception)):
            check(wrong, elsewhere)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_on_pages_run(page, elsewhere):
    """The blocks of a page run one after the other, as a reader would paste them."""
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        # line numbers in a traceback are those of the page
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


def test_replicas_of_the_readme_end_equal():
    import torch

    names: dict[str, object] = {}
    exec(blocks(ROOT / "README.md", "python")[0].text, names)
    first, second = names["models"]  # type: ignore[misc]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_the_loop_of_the_readme_is_short():
    lines = [line for line in blocks(ROOT / "README.md", "python")[0].text.splitlines() if line.strip()]
    body = [line for line in lines if not line.startswith(("import", "models"))]
    assert len(body) <= 14


@over("page", PAGES)
def test_run_files_on_pages_load(page, tmp_path):
    for block in blocks(page, "toml"):
        (tmp_path / "run.toml").write_text(block.text)
        assert Run.load(tmp_path / "run.toml")
        assert tomllib.loads(block.text)


@over("page", PAGES)
def test_every_fence_names_a_language_that_is_checked(page):
    opened = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= {"bash", "python", "toml", "text"}


@over("page", PAGES)
def test_links_lead_to_existing_files_and_headings(page):
    """A link leads to a file and, inside a page, to a heading."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if "://" not in target:
            file, _, heading = target.partition("#")
            assert (page.parent / file).exists(), target
            assert not heading or heading in headings(page.parent / file if file else page), target


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page: its headings in lower case, without punctuation, with hyphens for spaces."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


# ---- the tree in CONTRIBUTING.md


def tree() -> list[str]:
    """Returns the paths in the tree."""
    text = next(block.text for block in blocks(ROOT / "CONTRIBUTING.md", "text") if block.text.startswith("src/"))
    paths, folder = [], ""
    for line in text.splitlines():
        names = re.match(r"\s*((?:[\w./-]+\s{1,2})*[\w./-]+)(?:\s{3,}|$)", line)
        assert names, line
        if not line.startswith(" "):
            folder = names[1] if names[1].endswith("/") else ""
        paths += [(folder if line.startswith(" ") else "") + name for name in names[1].split()]
    return paths


def test_every_path_in_the_tree_exists():
    assert len(tree()) > 30
    for path in tree():
        assert (ROOT / path).exists(), path


def test_the_tree_names_every_package():
    ours = [*ROOT.glob("src/thinwire/*"), *ROOT.glob("[a-z]*/")]
    hidden = {"__init__.py", "__main__.py", "py.typed", "__pycache__", "runs", "shared", "build", "dist", "src", "site"}
    names = {path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "") for path in ours}
    assert {name for name in names if Path(name).name not in hidden} <= set(tree())


def test_every_example_is_on_a_page():
    pages = "".join(page.read_text() for page in PAGES if page.name != "CHANGELOG.md")
    assert not [path.name for path in ROOT.glob("examples/*.py") if f"examples/{path.name}" not in pages]


# ---- numbers


def tables():
    return importlib.import_module("tables")


def test_tables_on_pages_equal_those_of_the_results():
    found = [name for page in tables().PAGES for _, name, *_ in tables().BLOCK.findall((ROOT / page).read_text())]
    results = {f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert results <= set(found)
    for page in tables().PAGES:
        text = (ROOT / page).read_text()
        assert tables().filled(text, page=page) == text, f"{page}: run `make tables`"


def test_methods_of_the_headline_have_been_measured():
    result = json.loads((ROOT / "benchmarks/results/utilization.json").read_text())
    assert {row["method"] for row in result["rows"]} >= set(tables().HEADLINE)


def provenance() -> dict:
    machine, versions = {"cpu": "A CPU", "cores": 2}, {"torch": "2.13.0"}
    return {
        "word": "emulated",
        "date": "2026-11-21T00:00:00+00:00",
        "machine": machine,
        "versions": versions,
        "commit": "0123456789",
    }


def test_a_result_becomes_a_table(tmp_path):
    row = {"megabits_per_second": 20.0, "of_bare": 0.98, "utilization": 0.985, "wire_nbytes_per_period": 4e6}
    rows = [
        row | {"method": "bare", "megabits_per_second": None},
        row | {"method": "ours"},
        row | {"method": "ddp", "utilization": None},
        {"method": "theirs", "megabits_per_second": 10.0, "problem": "not installed"},
    ]
    result = provenance() | {"benchmark": "utilization", "setting": {"every": 30}, "rows": rows}
    (tmp_path / "u.json").write_text(json.dumps(result))
    lines = tables().filled("<!-- table: u.json all -->\nold\n<!-- end -->", tmp_path).splitlines()
    assert lines[3:6] == [
        "| 20 | ours | 98.0% | 98.5% | 4.00 |",
        "|  | ddp | 98.0% | – | 4.00 |",
        "| 10 | theirs | – | – | not installed |",
    ]
    assert lines[7] == "*Emulated: [u.json](u.json), 2026-11-21, commit 0123456; A CPU, 2 cores, torch 2.13.0.*"
    assert lines[-1] == "<!-- end -->"


def test_a_comparison_becomes_a_table(tmp_path):
    """The rows are those that `thinwire compare` writes into comparison.json."""
    control = {
        "strategy": "data_parallel",
        "eval_loss": 2.0,
        "eval_loss_spread": 0.01,
        "bits_per_parameter_per_step": 32.0,
        "seeds": 3,
    }
    ours = control | {"strategy": "streaming_diloco", "eval_loss": 2.01, "bits_per_parameter_per_step": 0.16}
    (tmp_path / "q.json").write_text(json.dumps(provenance() | {"benchmark": "quality", "rows": [control, ours]}))
    lines = tables().table(tmp_path / "q.json", "q.json", True).splitlines()
    assert lines[2:4] == [
        "| data_parallel | 2.0000 ± 0.0100 | control | 32 | – | 3 |",
        "| streaming_diloco | 2.0100 ± 0.0100 | +0.50% | 0.16 | 200× | 3 |",
    ]


def family(seeds=3):
    """Returns a result as benchmarks/family.py writes it, with few methods."""
    rows = [
        {"strategy": name, "eval_loss": loss, "eval_loss_spread": spread if seeds > 1 else None, "seeds": seeds}
        | {"bits_per_parameter_per_step": bits, "composition": repr(RECIPES[name]())}
        for name, loss, spread, bits in (
            ("data_parallel", 1.5, 0.01, 32.0),
            ("co2", 1.55, 0.02, 1.1),
            ("qsr", 1.6, 0.0, 0.5),
        )
    ]
    setting = {"model": "nano", "steps": 2000, "replicas": 2}
    return provenance() | {"benchmark": "family", "setting": setting, "word": "measured", "rows": rows}


def test_a_result_of_the_family_becomes_a_table(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps(family()))
    lines = tables().table(tmp_path / "f.json", "f.json", True, "../").splitlines()
    assert lines[2] == "| data_parallel | `(signal=Gradients())` | 1.5000 ± 0.0100 | control | 32 | – | 3 |"
    assert lines[3].startswith("| co2 | `(Every(30, 30), outer=HeavyBall(gap=1.0, clip=1.0), merge=Reset())` | 1.5500")
    assert lines[-1] == "![family](../docs/pictures/family.svg)"


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_picture_of_the_family_shows_methods_spreads_and_provenance(seeds):
    """Valid XML with a dot and a name for each method, and a bar for each spread above zero."""
    picture = tables().family_picture(family(seeds))
    root = ElementTree.fromstring(picture)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"data_parallel", "co2", "qsr", "evaluation loss"} <= set(texts)
    assert "Measured, 2026-11-21" in " ".join(map(str, texts)) and "commit 0123456" in " ".join(map(str, texts))
    assert picture.count("<polyline") == (2 if seeds > 1 else 0)


def frontier():
    """Returns a result as benchmarks/frontier.py writes it: the third composition is worse than the second with as many bits."""
    rows = [
        {"strategy": name, "label": label, "eval_loss": loss, "eval_loss_spread": 0.01, "seeds": 3}
        | {"bits_per_parameter_per_step": 32 / fewer}
        for name, label, loss, fewer in (
            ("data_parallel", "data_parallel", 2.0, 1),
            ("streaming_sign", "signs", 1.99, 209),
            ("streaming_sign(every=15)", "signs, H = 15", 2.02, 550),
            ("diloco(every=500)", "diloco", 2.03, 570),
            ("sparse_loco", "sparse", 2.2, 4_000),
        )
    ]
    setting = {"model": "nano", "steps": 2000, "replicas": 2}
    return provenance() | {"benchmark": "frontier", "setting": setting, "word": "measured", "rows": rows}


def test_the_frontier_recommends_the_lowest_loss_of_those_with_few_enough_bits(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps(frontier()))
    lines = tables().table(tmp_path / "f.json", "f.json", True, "../").splitlines()
    assert [line.split(" | ")[-1].removesuffix(" |") for line in lines[2:7]] == [
        "–",
        "10×, 20×, 50×, 100×, 200×",
        "500×",
        "–",
        "1,000×, 2,000×",
    ]
    assert lines[3].startswith("| `streaming_sign` | 1.9900 ± 0.0100 | -0.50% | 0.153 | 209× | 3 |")
    assert lines[-1] == "![frontier](../docs/pictures/frontier.svg)"


def test_the_picture_of_the_frontier_sets_the_recommended_apart():
    """The control has no dot: its distance from itself is none."""
    texts = [text.text for text in ElementTree.fromstring(tables().frontier_picture(frontier())).iter()]
    assert {"signs", "signs, H = 15", "diloco", "sparse", "recommended", "others"} <= set(texts)
    assert "data_parallel" not in texts


def test_a_result_of_the_simulator_becomes_a_table(tmp_path):
    case = {"replicas": 10_000, "sharing": 10, "virtual_seconds": 90_000.0, "events": 1.1e9, "seconds": 30.0}
    case |= {"cpu_seconds": 12.0, "nanoseconds_per_flight_event": 21.5, "peak_nbytes": 25e6}
    (tmp_path / "s.json").write_text(json.dumps(provenance() | {"benchmark": "simulate", "cases": [case]}))
    lines = tables().table(tmp_path / "s.json", "s.json", True).splitlines()
    assert lines[2] == "| 10,000, 10 an uplink | 25.0 h | 1,100 | 30.0 | 12.0 | 22 | 25 |"
    assert lines[0].count("|") == lines[2].count("|")


def test_a_result_of_the_calibration_becomes_a_table(tmp_path):
    row = {"replicas": 4, "how": "sleeps", "method": "diloco", "of_floor": 1.2, "bits_per_second": 38.35e6}
    result = provenance() | {"benchmark": "calibration", "rows": [row | {"simulated": 0.475, "emulated": 0.465}]}
    (tmp_path / "c.json").write_text(json.dumps(result))
    lines = tables().table(tmp_path / "c.json", "c.json", True).splitlines()
    assert lines[2] == "| 4 | diloco | sleeps | 1.2 | 38.4 | 47.5% | 46.5% | +2.2% |"


def test_a_result_of_the_codecs_becomes_a_table(tmp_path):
    """The table has large tensors only: GB/s, and the median of each ratio."""
    row = {
        "codec": "E3M0(block=128, rounding='stochastic')",
        "nbytes": 1 << 24,
        "bits": 4.0625,
        "copy": 20.0,
        "encode": 15.04,
        "decode": 21.0,
    }
    row |= {"encode_of_copy": [0.7, 0.752, 0.8], "decode_of_copy": [1.0, 1.05, 1.1]}
    row |= {"encode_reference": 0.412, "decode_reference": 1.0}
    result = provenance() | {"benchmark": "codecs", "rows": [row | {"nbytes": 1 << 20}, row]}
    (tmp_path / "c.json").write_text(json.dumps(result))
    lines = tables().table(tmp_path / "c.json", "c.json", True).splitlines()
    assert lines[2:4] == [
        "| `E3M0(rounding='stochastic')` | 4.06 | 16 | 20.0 | 15.0 (0.75) | 21.0 (1.05) | 0.41 | 1 |",
        "",
    ]


def test_the_table_of_floors_equals_the_formula():
    page = (ROOT / "docs/strategies.md").read_text()
    rows = page.split("<!-- floors -->")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    assert len(rows) >= 4
    bits = 8 * E3M0().nbytes(1 << 20) / (1 << 20)
    for row in rows:
        size, step, *rates = [cell.strip() for cell in row.strip("|").split("|")]
        number, unit = size.split()
        parameters, seconds = float(number) * {"M": 1e6, "B": 1e9}[unit], float(step.removesuffix(" s"))
        floors = [b * parameters / (every * seconds) for b, every in ((32, 1), (32, 30), (bits, 30), (bits, 100))]
        assert rates == [text_of_rate(floor) for floor in floors]
