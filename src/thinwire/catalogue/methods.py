"""Everything that has a name for `--strategy`: the core's recipes and methods, and those that packages add by entry points."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from thinwire import registered
from thinwire.drivers.unequal.method import DECOUPLED
from thinwire.recipes import table
from thinwire.strategy import Strategy

NAMED: dict[str, Callable[..., Any]] = {**table.RECIPES, **DECOUPLED, **registered.registered(registered.METHODS)}

# those that are compositions of pieces
RECIPES: dict[str, Callable[..., Strategy]] = {
    name: made for name, made in NAMED.items() if signature(made).return_annotation in (Strategy, "Strategy")
}
