"""What users may lean on: what `import thinwire` gives at the top, every recipe and piece, and the protocols of pieces."""

from __future__ import annotations

import thinwire as tw
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.decoupled.method import DECOUPLED
from thinwire.methods import METHODS
from thinwire.recipes import RECIPES

PROTOCOLS: dict[str, object] = {
    kind.__name__: kind
    for kind in (
        tw.codecs.Codec,
        tw.exchange.Exchange,
        tw.pieces.aggregate.Aggregate,
        tw.pieces.inner_optimizers.Inner,
        tw.pieces.merge.Merge,
        tw.pieces.outer.Outer,
        tw.pieces.partition.Partition,
        tw.pieces.policy.Policy,
        tw.pieces.schedule.Schedule,
        tw.pieces.transforms.Filter,
    )
}
COMPOSED: dict[str, object] = RECIPES | METHODS | DECOUPLED  # what `--strategy` takes
BESIDE: dict[str, object] = {
    each.__name__: each for each in (tw.pieces.partition.Fragment, tw.pieces.schedule.short_first, parse)
}
DOCUMENTED: dict[str, object] = (
    {name: getattr(tw, name) for name in tw.__all__} | COMPOSED | PIECES | PROTOCOLS | BESIDE
)
