"""Hides all packages but those that the core needs: import it first, or give it to pytest as `-p only_core`.

The core alone is Thinwire with torch, numpy and safetensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HIDDEN = frozenset(
    (
        *("numba", "llvmlite", "rich", "tyro", "tomli_w", "tokenizers", "plotly", "grpc", "cryptography", "zstandard"),
        *("transformers", "accelerate", "lightning", "peft", "trl", "datasets", "pyarrow", "torchft", "torchtitan"),
        *("tensorboard", "prometheus_client", "wandb", "mlflow", "dp_accounting", "cairosvg"),
    )
)


class OnlyCore(PathFinder):
    """Finds nothing of what is hidden, as if it were not installed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyCore
