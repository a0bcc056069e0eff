"""The core's recipes, by name. To add one, write it in a file beside this and add its name here; a package of yours adds it by an entry point."""

from thinwire.recipes.deltas import diloco, local_sgd, muloco, qsr, sparse_loco
from thinwire.recipes.gradients import data_parallel
from thinwire.recipes.streaming import eager_diloco, finetune, streaming_diloco, streaming_sign, streaming_sparse

RECIPES = {
    f.__name__: f
    for f in (
        *(data_parallel, local_sgd, diloco, streaming_diloco, streaming_sign, streaming_sparse, finetune),
        *(eager_diloco, sparse_loco, qsr, muloco),
    )
}
