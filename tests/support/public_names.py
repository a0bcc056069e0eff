"""The public names. `DOCUMENTED` are those that pages must mention; `PUBLIC` are all whose docstrings are checked."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from pages import PAGES, ROOT, blocks

import thinwire as tw
from thinwire.catalogue.methods import NAMED
from thinwire.catalogue.parsing import PIECES, parse

PROTOCOLS: dict[str, object] = {
    kind.__name__: kind
    for kind in (
        tw.codecs.Codec,
        tw.exchange.Exchange,
        tw.pieces.aggregate.Aggregate,
        tw.pieces.inner.Inner,
        tw.pieces.merge.Merge,
        tw.pieces.outer.Outer,
        tw.pieces.partition.Partition,
        tw.pieces.policy.Policy,
        tw.pieces.schedule.Schedule,
        tw.pieces.filters.Filter,
    )
}
COMPOSED: dict[str, object] = {**NAMED}  # what `--strategy` takes
BESIDE: dict[str, object] = {
    each.__name__: each for each in (tw.pieces.partition.Fragment, tw.pieces.schedule.short_first, parse)
}

# Names outside the table of pieces that pages and examples import.
MODULES = {
    "thinwire.codecs": "check_finite",
    "thinwire.comm": "CountedGroup Link LinkedGroup gather start_torch",
    "thinwire.net": "Hub admit invite join",
    "thinwire.app.diagnosis": "Rules",
    "thinwire.exchange": "Arrival",
    "thinwire.integrations.accelerate": "LocalSGD",
    "thinwire.integrations.huggingface": "ThinwireCallback",
    "thinwire.integrations.torchtitan": "attach",
    "thinwire.app.jobs.ema": "EMA",
    "thinwire.membership": "LighthouseRendezvous Membership",
    "thinwire.membership.timeouts": "Timeouts",
    "thinwire.lab.methods": "Extragradient Masha1 Masha2 Saddle Simplexes nbytes_sent saddle",
    "thinwire.rng": "Key",
    "thinwire.testing": "check",
    "thinwire.lab.topology": "spectrum",
}
NEEDS = {"thinwire.integrations.torchtitan": "torchtitan"}  # the extra `dev` does not have it
IMPORTED: dict[str, object] = {
    name: getattr(import_module(module), name)
    for module, names in MODULES.items()
    if module not in NEEDS or find_spec(NEEDS[module])
    for name in names.split()
}
DOCUMENTED: dict[str, object] = (
    {name: getattr(tw, name) for name in tw.__all__} | COMPOSED | PIECES | PROTOCOLS | BESIDE | IMPORTED
)

# Packages without `__all__`, all of whose modules are public.
WHOLE = ("thinwire.lab.simulate", "thinwire.app.plan.sharding")
# Names whose docstring cannot show an example in one process; a test runs the example in this file.
EXAMPLES = {
    "thinwire.comm.torch.start_torch": "examples/02_processes.py",
    "thinwire.net.hub.Hub": "examples/12_own_loop_over_a_hub.py",
    "thinwire.net.group.join": "examples/12_own_loop_over_a_hub.py",
    "thinwire.integrations.huggingface.ThinwireCallback": "examples/10_hugging_face_trainer.py",
    "thinwire.integrations.lightning.ThinwireCallback": "examples/11_lightning_trainer.py",
    "thinwire.integrations.accelerate.LocalSGD": "docs/integrations/accelerate.md",
    "thinwire.integrations.torchtitan.attach": "docs/integrations/torchtitan.md",
    "thinwire.lab.plan.split.split": "examples/14_tensor_parallel.py",
    "thinwire.checkpoint.save": "docs/own-loop.md",
    "thinwire.checkpoint.read": "docs/own-loop.md",
    "thinwire.checkpoint.load": "docs/own-loop.md",
    "thinwire.checkpoint.newest_common": "docs/own-loop.md",
}


def qualified(thing: object) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


def exported() -> Iterator[object]:
    """Yields what packages list in `__all__`, and all that the modules of `WHOLE` define."""
    for _, name, is_package in pkgutil.walk_packages(tw.__path__, "thinwire."):
        whole = name.startswith(WHOLE)
        if (is_package or whole) and not name.startswith(("thinwire.app.cli", "thinwire.lab.cli")):
            module = import_module(name)
            own = [n for n, thing in vars(module).items() if n[0] != "_" and getattr(thing, "__module__", "") == name]
            yield from (getattr(module, each) for each in [*getattr(module, "__all__", []), *(own if whole else [])])


def shown() -> Iterator[object]:
    """Yields what the code of pages and examples imports from thinwire, or reaches through it."""
    texts = [block.text for page in PAGES for block in blocks(page, "python")]
    texts += [path.read_text() for path in ROOT.glob("examples/*.py")]
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("thinwire")
                and importable(node.module)
            ):
                yield from (getattr(import_module(str(node.module)), alias.name) for alias in node.names)
        for path in re.findall(r"\b(?:tw|thinwire)((?:\.\w+)+)", text):
            thing: object = tw
            for name in path[1:].split("."):
                thing = getattr(thing, name, None)
                yield thing


def importable(module: str | None) -> bool:
    return module not in NEEDS or find_spec(NEEDS[str(module)]) is not None


def in_the_reference() -> Iterator[object]:
    """Yields the names that the site's API reference shows in addition to those of packages: `BESIDE` in docs/site_hooks.py."""
    for statement in ast.parse((ROOT / "docs/site_hooks.py").read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "BESIDE":
            for module, names in ast.literal_eval(statement.value).items():
                yield from (getattr(import_module(module), name) for name in names)


PUBLIC: dict[str, object] = {
    qualified(thing): thing
    for thing in [*DOCUMENTED.values(), *exported(), *shown(), *in_the_reference()]
    if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith("thinwire")
}
