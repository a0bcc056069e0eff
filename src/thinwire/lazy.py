"""Names and modules of a package that are loaded at their first use, so that nobody loads what is not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` for `package`: a name from its file in `homes`, or a module of the package.

    >>> lazily("thinwire.comm", {"Link": "uplink"})("Link")
    <class 'thinwire.comm.uplink.Link'>
    """

    def get(name: str) -> object:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    return get
