"""Thinwire: train one model on many replicas joined by thin links.

Every replica trains by itself; now and then one fragment of the model is exchanged in a few bits per parameter,
while training continues.
"""

import typing as _typing
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec

from thinwire.version import __version__ as __version__

if _typing.TYPE_CHECKING:
    import thinwire.catalogue
    import thinwire.codecs
    import thinwire.exchange
    import thinwire.membership
    import thinwire.pieces
    import thinwire.recipes
    import thinwire.testing  # noqa: F401
    from thinwire.public import *  # noqa: F403
    from thinwire.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """A module, or a public name, at its first use: `thinwire lighthouse` and `thinwire --help` need no torch."""
        if not name.startswith("_") and _find_spec(f"thinwire.{name}"):
            return _import_module(f"thinwire.{name}")
        public = _import_module("thinwire.public")
        if name == "__all__":
            return public.__all__
        if name in public.__all__:
            globals()[name] = getattr(public, name)
            return globals()[name]
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}{_hint(name)}", name=name)

    def _hint(name: str) -> str:
        """The module of ours that has `name`, in words."""
        if name.startswith("_"):
            return ""
        for module in ("comm", "recipes", "codecs", "exchange", "membership"):
            if hasattr(_import_module(f"thinwire.{module}"), name):
                return f"; it is thinwire.{module}.{name}"
        registered = _import_module("thinwire.registered")
        for group in (registered.METHODS, registered.PIECES):
            if name in (found := registered.registered(group)):
                return f"; it is {found[name].__module__}.{name}"
        return ""

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), *globals()})
