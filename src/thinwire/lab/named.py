"""What the lab has for `--strategy`, by name: what the entry point `thinwire.methods` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.lab.methods import CODISTILL, METHODS
from thinwire.lab.pairs.method import a2cid2, ad_psgd
from thinwire.lab.recipes import RECIPES
from thinwire.lab.samples.method import plexus
from thinwire.lab.sites.method import halos

UNEQUAL = {f.__name__: f for f in (halos, ad_psgd, a2cid2, plexus)}  # replicas of unlike speed
NAMED: dict[str, Callable[..., Any]] = {**RECIPES, **METHODS, **UNEQUAL, **CODISTILL}
