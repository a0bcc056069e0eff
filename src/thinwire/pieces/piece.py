"""What all pieces declare, and the check of a piece that a user may have written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

from thinwire.errors import ConfigurationError

DIGEST_OF_FILE = "__thinwire_digest__"  # the name in a module of a user's own file


class Piece(Protocol):
    """What all pieces declare."""

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round, as the end of a sentence that begins with the piece; empty: they may come and go."""


def check_piece(name: str, value: object, protocol: Any) -> None:
    """Raise `ConfigurationError` unless `value` has all that `protocol` says of a piece."""
    if isinstance(value, protocol) and not isinstance(value, type):
        return
    kind = getattr(protocol, "__name__", name.title())
    wanted = f"{'an' if kind[0] in 'AEO' else 'a'} {kind} is needed"
    if is_dataclass(value) and not isinstance(value, type) and isinstance(protocol, type):
        lacks = [member for member in _members(protocol) if not hasattr(value, member)]
        raise ConfigurationError(
            f"{name}={value!r}: {wanted}, which has {', '.join(lacks)}; make it a subclass of "
            f"{protocol.__module__.removesuffix('.base')}.{protocol.__qualname__}, which has defaults for the rest."
        )
    raise ConfigurationError(f"{name}={value!r}: {wanted}; see `thinwire docs pieces`.")


def _members(protocol: type) -> list[str]:
    """The members that a piece must write itself; all of them, if the protocol answers everything."""
    own: frozenset[str] = getattr(protocol, "__abstractmethods__", frozenset())
    return sorted(own or {name for kind in protocol.__mro__ for name in vars(kind) if not name.startswith("_")})


def digests(value: object) -> dict[str, str]:
    """For each piece in a strategy, method or piece that is not ours: the digest of the user's own file, or the version of its package."""
    from thinwire import registered  # few strategies have such a piece

    found: dict[str, str] = {}
    for piece in _nested(value):
        name, module = type(piece).__name__, type(piece).__module__
        if digest := getattr(sys.modules.get(module), DIGEST_OF_FILE, None):
            found[f"own file of {name}"] = digest
        elif version := registered.version_of(module):
            found[f"package of {name}"] = version
    return found


def _nested(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _nested(item)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _nested(getattr(value, field.name))
