"""A method is a composition of pieces: take a recipe apart, change a piece, and see the effect on a model and on the wire.

    python examples/06_pieces.py
    python examples/06_pieces.py --model 1b --replicas 4

Nothing is trained, and no weights are made, because the models are on the meta device.
"""

import argparse
from dataclasses import replace

import torch

import thinwire as tw
from thinwire.app.trainer.model import SIZES, Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="35m", help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    options = parser.parse_args()
    with torch.device("meta"):
        model = Transformer(SIZES[options.model])

    recipe = tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(every=30, delay=5),  # when fragments depart and land
        partition=tw.pieces.partition.Strided(share=5 / 30),  # which layers travel together: every P-th, at most three
        codec=tw.codecs.E3M0(),  # how a delta becomes bytes: 4 bits and a scale for each block
        exchange=tw.exchange.Direct(),  # how packets become one estimate: each to all, mean in fp32
        outer=tw.pieces.outer.Nesterov(lr=0.4, momentum=0.9),  # how the anchor moves
        merge=tw.pieces.merge.Mix(0.5),  # how the anchor reaches the replica's own parameters
    )
    assert recipe == tw.streaming_diloco()  # the recipe is exactly this

    variants = {
        "as the recipe has it": recipe,
        "three layers a fragment, as in the paper": replace(recipe, partition=tw.pieces.partition.Strided()),
        "fragments of equal size": replace(recipe, partition=tw.pieces.partition.BySize(6)),
        "16 bits": replace(recipe, codec=tw.codecs.Cast("bf16")),
        "plain DiLoCo": tw.diloco(every=30),
    }
    for name, strategy in variants.items():
        print(f"{name}\n{strategy}\n{strategy.describe(model, options.replicas)}\n")
        assert tw.catalogue.parsing.parse(repr(strategy)) == strategy  # the printed text can be parsed

    try:
        replace(recipe, schedule=tw.pieces.schedule.Staggered(every=30, delay=30))
    except tw.ConfigurationError as error:
        print(f"What cannot work fails when it is made, and says what to do:\n{error}")


if __name__ == "__main__":
    main()
