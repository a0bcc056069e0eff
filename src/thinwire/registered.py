"""What installed packages add to Thinwire, by the entry points that they declare: pieces, methods, readers of settings, and verbs.

    thinwire.pieces      modules (all in `__all__`) or mappings: names that a composition may call
    thinwire.methods     the same: names for `--strategy`, each a function that makes a strategy or a method
    thinwire.settings    by the setting's name: topology, attack (functions of its text), reduce (thinwire.lab.star.reducing)
    thinwire.models      folders that hold models other than a run's: classes like thinwire.lab.experts.ensemble.Ensemble
    thinwire.plans       functions (task, best) that return what `thinwire plan` refuses, with the numbers that say why
    thinwire.verbs       by the verb's name, also "plan.VERB": values of thinwire.app.cli.verbs.Verb

The parts of thinwire.lab come in by the same door: they stand in our own pyproject.toml. Nothing is loaded before a text is parsed, a
method is chosen by its name, or a verb is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from thinwire.errors import ConfigurationError

PIECES, METHODS, SETTINGS = "thinwire.pieces", "thinwire.methods", "thinwire.settings"
MODELS, PLANS, VERBS = "thinwire.models", "thinwire.plans", "thinwire.verbs"
REINSTALL = "Thinwire's own entry points are not installed: run `pip install` for it once more (`pip install -e .` in a checkout)."


@cache
def points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of `group`, in the order of their names."""
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, point.value)))


def absent(group: str) -> str:
    """What to do if the entry points of Thinwire itself lack `group`, as in a checkout of before or one that is only on the path; "" if they have
    it. It follows a message about a name that nobody knows."""
    own = any(point.value.partition(":")[0].startswith("thinwire.") for point in points(group))
    return "" if own else f" {REINSTALL}"


@cache
def registered(group: str) -> Mapping[str, Any]:
    """The values that the entry points of `group` name, by their own names. A point names a mapping, or a module: then all in its `__all__`.

    Raises:
        ConfigurationError: a point cannot be loaded, or two name unlike values by one name.
    """
    found: dict[str, Any] = {}
    for point in points(group):
        for name, value in _named(point):
            if found.setdefault(name, value) is not value:
                raise ConfigurationError(
                    f"{name!r} is in two entry points of {group}: {point.value} and another. Uninstall one of the two packages."
                )
    return found


def version_of(module: str) -> str:
    """The name and the version of the package that adds pieces from `module`; "": it is ours, or of no package."""
    top = module.partition(".")[0]
    if top == "thinwire":
        return ""
    found = (point.dist for point in points(PIECES) if point.value.partition(":")[0].partition(".")[0] == top)
    return next((f"{dist.name} {dist.version}" for dist in found if dist), "")


def setting(name: str) -> Any:
    """What a package has for the setting `name` of the command. Raises `ConfigurationError` if none has it."""
    for point in points(SETTINGS):
        if point.name == name:
            return load(point)
    raise ConfigurationError(f"{name}: no installed package has it.{absent(SETTINGS)}")


def load(point: EntryPoint) -> Any:
    """The value that `point` names. Raises `ConfigurationError` if it cannot be loaded."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        package = point.dist.name if point.dist else "a package"
        raise ConfigurationError(
            f"{package} declares {point.value} in its entry points {point.group}, and it cannot be loaded ({error}). Repair or uninstall {package}."
        ) from error


def _named(point: EntryPoint) -> Iterator[tuple[str, Any]]:
    value = load(point)
    if isinstance(value, ModuleType):
        yield from ((name, getattr(value, name)) for name in value.__all__)
    elif isinstance(value, Mapping):
        yield from value.items()
    else:
        yield point.name, value
