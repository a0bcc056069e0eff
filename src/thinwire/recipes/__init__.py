"""Methods as compositions of pieces, each as in its paper; `streaming_sign` and the rates of `finetune` are ours.

Symbols: M replicas with N parameters each; θ_m are those of replica m, g_m its gradient, Δ_m = anchor − θ_m its delta, all fp32 tensors of
the model's shapes; H is `every` and τ is `delay`, both in inner steps; C is the codec. *Differs* names the differences from the paper.
*Wire* gives the bytes that a replica sends; 48 bytes are the header of a message, which carries up to half a megabyte. The last example
of each recipe predicts these bytes for a period and a model of one matrix of 1000 × 1000.
"""

from typing import TYPE_CHECKING

from thinwire.lazy import lazily

if TYPE_CHECKING:
    from thinwire.recipes.deltas import diloco as diloco
    from thinwire.recipes.deltas import local_sgd as local_sgd
    from thinwire.recipes.deltas import muloco as muloco
    from thinwire.recipes.deltas import qsr as qsr
    from thinwire.recipes.deltas import sparse_loco as sparse_loco
    from thinwire.recipes.gradients import data_parallel as data_parallel
    from thinwire.recipes.streaming import eager_diloco as eager_diloco
    from thinwire.recipes.streaming import finetune as finetune
    from thinwire.recipes.streaming import streaming_diloco as streaming_diloco
    from thinwire.recipes.streaming import streaming_sign as streaming_sign
    from thinwire.recipes.streaming import streaming_sparse as streaming_sparse
    from thinwire.recipes.table import RECIPES as RECIPES

_HOMES = {
    **dict.fromkeys(("diloco", "local_sgd", "muloco", "qsr", "sparse_loco"), "deltas"),
    "data_parallel": "gradients",
    **dict.fromkeys(
        ("eager_diloco", "finetune", "streaming_diloco", "streaming_sign", "streaming_sparse"), "streaming"
    ),
    "RECIPES": "table",
}
__all__ = sorted(_HOMES)
__getattr__ = lazily(__name__, _HOMES)
