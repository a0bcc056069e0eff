"""Settings that check themselves: the type of each field, and the range of numbers."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigurationError


class CheckedSettings:
    """A dataclass that checks types and ranges when it is made. Raises `ConfigurationError` naming the setting."""

    at_least_one: ClassVar[tuple[str, ...]] = ()
    positive: ClassVar[tuple[str, ...]] = ()
    not_negative: ClassVar[tuple[str, ...]] = ()
    at_most: ClassVar[Mapping[str, int]] = {"replicas": 1_000_000, "timeout": 1_000_000_000, "lora": 1_000_000}

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not fits(value := getattr(self, field.name), hints[field.name]):
                raise unfit(field.name, value, hints[field.name])
            if isinstance(value, tuple) and "" in value:
                raise ConfigurationError(f"{field.name}={list(value)}: an empty name was given; leave it out.")
        given = {name: value for name, value in vars(self).items() if value is not None}
        for name in self.at_least_one:
            several = value if isinstance(value := given.get(name, 1), tuple) else (value,)
            if not several or min(several) < 1:
                raise ConfigurationError(f"{name}={given[name]}: at least 1 is needed.")
        for name, most in self.at_most.items():
            if given.get(name, 0) > most:
                raise ConfigurationError(f"{name}={given[name]}: at most {most:,} is possible.")
        for name in self.positive:
            if not 0 < given.get(name, 1) < math.inf:
                raise ConfigurationError(f"{name}={given[name]}: a finite number above 0 is needed.")
        for name in self.not_negative:
            if not 0 <= given.get(name, 0) < math.inf:
                raise ConfigurationError(f"{name}={given[name]}: 0 or more is needed.")


def check_batches(batch: int | tuple[int, ...], replicas: int, carrier: str) -> None:
    """Raise `ConfigurationError` if `batch` has one number for each replica and does not suit them."""
    if isinstance(batch, int):
        return
    if len(batch) != replicas:
        raise ConfigurationError(
            f"batch={list(batch)} with replicas={replicas}: one number for each is needed, or one for all; give --replicas {len(batch)}, or "
            "another --batch."
        )
    if len(set(batch)) > 1 and "elastic" in carrier:
        raise ConfigurationError(
            f"batch={list(batch)} with carrier={carrier!r}: micro-batches differ in a fixed group only; give one number, or choose another carrier."
        )


def unfit(name: str, value: object, hint: Any) -> ConfigurationError:
    """The error for a value that does not fit its type."""
    size = ", below 2**63" if type(value) is int and abs(value) >= 2**63 else ""
    return ConfigurationError(f"{name}={value!r:.200}: {_in_words(hint)} is needed{size}.")


def _in_words(hint: Any) -> str:
    """A field's type in words, as a run file writes its values."""
    kinds = [one for one in get_args(hint) if one is not types.NoneType]
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return " or ".join(map(_in_words, kinds))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, kinds))
    if get_origin(hint) is tuple:
        return f"a list of {'text' if kinds[0] is str else 'numbers'} in [brackets]"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
    return words[hint]


def fits(value: object, hint: Any) -> bool:
    """Whether `value` has a field's type. A whole number is also a float; a bool is not a number."""
    if isinstance(hint, types.UnionType) or (origin := get_origin(hint)) is Union:
        return any(fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if type(value) is int and not -(2**63) <= value < 2**63:
        return False
    return type(value) in ((int, float) if hint is float else (hint,))
