"""The lab's recipes, by name; docs/strategies.md tells which is for whom."""

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
from thinwire.lab.gradients.delta_recipes import co2, l_greco, outer_dgc
from thinwire.lab.gradients.recipes import cgx, demo, dgc, econtrol, ef14, ef21, one_bit_adam, power_sgd, qsgd

RECIPES = {
    f.__name__: f
    for f in (
        *(co2, l_greco, dgc, outer_dgc, one_bit_adam, ef14, ef21, econtrol, power_sgd, qsgd, cgx, demo),
        *(noloco, gasloc, d_psgd, choco, sgp, gradient_tracking, moshpit, dfedsam, dfedsam_mgs, bristle, sybil_wall),
    )
}

__all__ = ["RECIPES", *sorted(RECIPES)]
