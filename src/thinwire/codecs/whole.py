"""The check of whole numbers among a codec's settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from thinwire.errors import ConfigurationError


def check_whole(codec: Any) -> None:
    """Raise `ConfigurationError` if a setting of `codec` that is declared as a whole number is none, or has more than 64 bits."""
    for field in fields(codec):
        value = getattr(codec, field.name)
        whole = field.type == "int" or (field.type == "int | None" and value is not None)
        if whole and (type(value) is not int or not -(2**63) <= value < 2**63):
            raise ConfigurationError(
                f"{type(codec).__name__}({field.name}={value!r}): a whole number is needed, below 2**63."
            )
