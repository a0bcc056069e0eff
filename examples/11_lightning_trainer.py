"""Lightning's Trainer with a process for each replica: the usual script, one callback and its share of the data.

python examples/11_lightning_trainer.py                                             # starts two processes here
torchrun --nproc-per-node 2 examples/11_lightning_trainer.py --out runs/lightning   # the same, by hand
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations.lightning import ThinwireCallback


class Product(LightningModule):
    """A network that learns to multiply two numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def points(count: int, seed: int) -> TensorDataset:
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, x.prod(dim=1, keepdim=True))


def train(out: str, epochs: int, resume: str | None) -> None:
    callback = ThinwireCallback(tw.streaming_diloco(every=10, delay=2))
    folder = Path(out) / f"replica-{callback.rank}"  # each replica keeps its own checkpoints
    data = points(2048, seed=1)
    loader = DataLoader(data, batch_size=32, sampler=callback.share(data))  # each trains on its share
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,  # every process has the whole model
        default_root_dir=folder,
        callbacks=[callback, callbacks.ModelCheckpoint(monitor="step", mode="max", save_top_k=2, save_last=True)],
        enable_progress_bar=False,
        logger=False,
    )
    module = Product()
    trainer.fit(module, loader, DataLoader(points(512, seed=2), batch_size=512), ckpt_path=resume)
    (loss,) = trainer.validate(module, DataLoader(points(512, seed=2), batch_size=512), verbose=False)
    print(f"replica {callback.rank}: step {trainer.global_step}, loss {loss['loss']:.9f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/lightning", help="for checkpoints (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="of 32 inner steps each (default: %(default)s)")
    parser.add_argument("--resume", choices=["last"], help="go on from each replica's last checkpoint")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.out, options.epochs, options.resume)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*torchrun, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1"}))


if __name__ == "__main__":
    main()
