"""The core's recipes, with one row for each: write one in a file beside this and add its row. A package of yours adds its own by an entry point."""

from collections.abc import Callable

from thinwire.recipes.gradients import data_parallel as data_parallel
from thinwire.recipes.deltas import local_sgd as local_sgd
from thinwire.recipes.deltas import diloco as diloco
from thinwire.recipes.streaming import streaming_diloco as streaming_diloco
from thinwire.recipes.streaming import streaming_sign as streaming_sign
from thinwire.recipes.streaming import streaming_sparse as streaming_sparse
from thinwire.recipes.streaming import finetune as finetune
from thinwire.recipes.streaming import eager_diloco as eager_diloco
from thinwire.recipes.deltas import sparse_loco as sparse_loco
from thinwire.recipes.deltas import qsr as qsr
from thinwire.recipes.deltas import muloco as muloco

from thinwire.strategy import Strategy

# ruff: noqa: I001  # in the order in which they are shown
RECIPES: dict[str, Callable[..., Strategy]] = {
    name: made
    for name, made in list(globals().items())
    if getattr(made, "__module__", "").startswith("thinwire.recipes.")
}
