"""What users may lean on: what `import thinwire` gives at the top, every recipe and piece, and the protocols of pieces."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import thinwire as tw
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.decoupled.method import DECOUPLED
from thinwire.methods import CODISTILL, METHODS
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
COMPOSED: dict[str, object] = RECIPES | METHODS | DECOUPLED | CODISTILL  # what `--strategy` takes
BESIDE: dict[str, object] = {
    each.__name__: each for each in (tw.pieces.partition.Fragment, tw.pieces.schedule.short_first, parse)
}

# Outside the table of pieces: what pages and examples tell users to import.
MODULES = {
    "thinwire.codecs": "check_finite",
    "thinwire.comm": "CountedGroup Link LinkedGroup gather start_torch",
    "thinwire.comm.secure": "Hub admit invite join",
    "thinwire.diagnosis": "Rules",
    "thinwire.exchange": "Arrival",
    "thinwire.integrations.accelerate": "LocalSGD",
    "thinwire.integrations.huggingface": "ThinwireCallback",
    "thinwire.integrations.torchtitan": "attach",
    "thinwire.jobs.ema": "EMA",
    "thinwire.membership": "LighthouseRendezvous Membership",
    "thinwire.membership.timeouts": "Timeouts",
    "thinwire.methods": "Extragradient Masha1 Masha2 Saddle Simplexes nbytes_sent saddle",
    "thinwire.rng": "Key",
    "thinwire.testing": "check",
    "thinwire.topology": "spectrum",
}
NEEDS = {"thinwire.integrations.torchtitan": "torchtitan"}  # is not in the extra `dev`
IMPORTED: dict[str, object] = {
    name: getattr(import_module(module), name)
    for module, names in MODULES.items()
    if module not in NEEDS or find_spec(NEEDS[module])
    for name in names.split()
}
# Their examples need processes or a hub: they run from these files.
EXAMPLES = {
    "start_torch": "examples/02_processes.py",
    **dict.fromkeys(("Hub", "admit", "invite", "join"), "examples/12_own_loop_over_a_hub.py"),
    "ThinwireCallback": "examples/10_hugging_face_trainer.py",
    "LocalSGD": "docs/integrations/accelerate.md",
    "attach": "docs/integrations/torchtitan.md",
}
DOCUMENTED: dict[str, object] = (
    {name: getattr(tw, name) for name in tw.__all__} | COMPOSED | PIECES | PROTOCOLS | BESIDE | IMPORTED
)
