"""Fine-tunes a language model with forward passes only and one byte for each value; a third replica joins later.

    python examples/07_just_one_byte.py
    python examples/07_just_one_byte.py --pretrain 400 --steps 600

The model learns to spell from the source of Python's json package, then to write sums such as 12+7=19.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import ModelSpec
from thinwire.app.trainer.setup import make_model
from thinwire.comm import CountedGroup, Ledger
from thinwire.lab.methods import ZerothOrder, just_one_byte


def sums(seed: str, batch: int = 8, length: int = 32) -> tuple[Tensor, Tensor]:
    """Returns lines of sums as bytes, and the byte after each."""
    pairs = random.Random(seed)
    lines = (f"{(a := pairs.randrange(20))}+{(b := pairs.randrange(20))}={a + b}\n" for _ in range(20 * batch))
    tokens = torch.frombuffer(bytearray("".join(lines).encode()), dtype=torch.uint8).long()[: batch * length + 1]
    return tokens[:-1].view(batch, length), tokens[1:].view(batch, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=int, default=200, help="inner steps of the main job (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="iterations of fine-tuning (default: %(default)s)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) / "run"
    text = (str(Path(json.__file__).parent),)
    run = Run.of(text=text, model="nano", steps=options.pretrain, batch=4, sequence=64, carrier="threads")
    run_folder.new_folder(run, folder, resume=False)
    launch.train_threads(run, folder, False, lambda: None)

    names, half = ("amber", "birch", "cedar"), options.steps // 2
    two, three = tw.ThreadGroup.create(2), tw.ThreadGroup.create(3, timeout=600.0)
    ledgers = [Ledger() for _ in names]

    def tune(group: tw.ThreadGroup) -> tuple[float, float]:
        model = make_model(ModelSpec(model=str(folder / "model.safetensors")), 64, 0, 256).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rank = group.rank

        def go_on(tuner: ZerothOrder, upto: int) -> None:
            while tuner.step < upto:
                tuner.iterate(lambda j: model(*sums(f"{rank}/{tuner.step}/{j}")).loss)

        with torch.no_grad():
            before = float(model(*sums("held out", 64)).loss)
        first = CountedGroup(two[rank] if rank < 2 else tw.ThreadGroup.create(1)[0], ledgers[rank])
        tuner = just_one_byte().attach(model, optimizer, first, names=names[:2] if rank < 2 else names[2:])
        if rank < 2:
            go_on(tuner, half)
        tuner.meet(CountedGroup(three[rank], ledgers[rank]), names)  # cedar receives the log and replays it
        go_on(tuner, options.steps)
        with torch.no_grad():
            return before, float(model(*sums("held out", 64)).loss)

    for name, (before, after), ledger in zip(names, tw.run_threads(3, tune, timeout=600.0), ledgers):
        print(f"{name}: loss on sums {before:.8f} before, {after:.8f} after; {ledger.sent('packet'):,} bytes sent")


if __name__ == "__main__":
    main()
