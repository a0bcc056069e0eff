"""Methods as compositions of pieces, each as in its paper; `streaming_sign` and the rates of `finetune` are ours.

Symbols: M replicas with N parameters each; θ_m are those of replica m, g_m its gradient, Δ_m = anchor − θ_m its delta, all fp32 tensors of
the model's shapes; H is `every` and τ is `delay`, both in inner steps; C is the codec. *Differs* names the differences from the paper.
*Wire* gives the bytes that a replica sends; 48 bytes are the header of a message, which carries up to half a megabyte. The last example
of each recipe predicts these bytes for a period and a model of one matrix of 1000 × 1000.
"""

from thinwire.lab.gossip.recipes import (
    choco,
    d_psgd,
    dfedsam,
    dfedsam_mgs,
    gasloc,
    gradient_tracking,
    moshpit,
    noloco,
    sgp,
)
from thinwire.lab.gossip.trust_recipes import bristle, sybil_wall
from thinwire.recipes.deltas import co2, diloco, l_greco, local_sgd, muloco, outer_dgc, qsr, sparse_loco
from thinwire.recipes.gradients import (
    cgx,
    data_parallel,
    demo,
    dgc,
    econtrol,
    ef14,
    ef21,
    one_bit_adam,
    power_sgd,
    qsgd,
)
from thinwire.recipes.streaming import eager_diloco, finetune, streaming_diloco, streaming_sign, streaming_sparse

RECIPES = {
    f.__name__: f
    for f in (
        *(data_parallel, local_sgd, diloco, streaming_diloco, streaming_sign, streaming_sparse, finetune),
        *(eager_diloco, sparse_loco),
        *(qsr, co2, l_greco),
        *(dgc, outer_dgc, one_bit_adam, ef14, ef21, econtrol, power_sgd, qsgd, cgx, demo, muloco),
        *(noloco, gasloc, d_psgd, choco, sgp, gradient_tracking, moshpit, dfedsam, dfedsam_mgs, bristle, sybil_wall),
    )
}

__all__ = [
    "RECIPES",
    "bristle",
    "cgx",
    "choco",
    "co2",
    "d_psgd",
    "data_parallel",
    "demo",
    "dfedsam",
    "dfedsam_mgs",
    "dgc",
    "diloco",
    "eager_diloco",
    "econtrol",
    "ef14",
    "ef21",
    "finetune",
    "gasloc",
    "gradient_tracking",
    "l_greco",
    "local_sgd",
    "moshpit",
    "muloco",
    "noloco",
    "one_bit_adam",
    "outer_dgc",
    "power_sgd",
    "qsgd",
    "qsr",
    "sgp",
    "sparse_loco",
    "streaming_diloco",
    "streaming_sign",
    "streaming_sparse",
    "sybil_wall",
]
