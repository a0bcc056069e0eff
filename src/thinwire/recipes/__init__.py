"""Methods as compositions of pieces, each as in its paper; `streaming_sign` and the rates of `finetune` are ours.

Symbols: M replicas with N parameters each; θ_m are those of replica m, g_m its gradient, Δ_m = anchor − θ_m its delta, all fp32 tensors of
the model's shapes; H is `every` and τ is `delay`, both in inner steps; C is the codec. *Differs* names the differences from the paper.
*Wire* gives the bytes that a replica sends; 48 bytes are the header of a message, which carries up to half a megabyte. The last example
of each recipe predicts these bytes for a period and a model of one matrix of 1000 × 1000.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.recipes.table import *  # noqa: F403
    from thinwire.recipes.table import RECIPES as RECIPES
else:

    def __getattr__(name: str) -> object:
        """A recipe of the table, or a module, at its first use."""
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        table = import_module(f"{__name__}.table")
        if name == "__all__":
            return sorted([*table.RECIPES, "RECIPES"])
        if name == "RECIPES" or name in table.RECIPES:
            return getattr(table, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
