"""A trainer that is an elastic member, as a program: TRAINER FOLDER ADDRESS NAME STOPS... At each stop it waits for FOLDER/NAME.step.

While it waits it continues to take part in rounds, without a delta. At the end its weights are in FOLDER/NAME.pt.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from thinwire.membership import LighthouseRendezvous, Membership, Timeouts
from thinwire.replica import Replica

QUICK = Timeouts(heartbeat_interval=0.5, heartbeat_timeout=1.5, grace=1.0, connect=5.0, transfer=5.0, vote=7.0)
STEPS, SAVED = 24, 4


class Stops:
    def __init__(self, folder: Path, name: str, steps: list[int]) -> None:
        self.folder, self.name, self.steps = folder, name, steps

    def after(self, replica: Replica) -> None:
        if replica.step in self.steps:
            (self.folder / f"{self.name}.at.{replica.step}").touch()
            rounds: Any = replica._driver.rounds
            while not (self.folder / f"{self.name}.{replica.step}").exists():
                rounds.ask(replica.step)
                rounds.wait(lambda: rounds.idle)
                time.sleep(0.05)


def hugging_face(folder: Path, member: Membership, stops: Stops) -> tuple[torch.Tensor, int]:
    from hf_trainer import STREAMING, Tokens, arguments, model, weights
    from transformers import Trainer, TrainerCallback

    from thinwire.integrations.huggingface import ThinwireCallback

    class Stopping(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if callback.replica:
                stops.after(callback.replica)

    callback = ThinwireCallback(STREAMING, member)
    given = arguments(folder, max_steps=STEPS, save_steps=SAVED)
    trainer = Trainer(model(), given, train_dataset=callback.share(Tokens(512)), callbacks=[callback, Stopping()])
    trainer.train(resume_from_checkpoint=any((folder / member.name).glob("checkpoint-*")))
    return weights(trainer), trainer.state.global_step


def lightning(folder: Path, member: Membership, stops: Stops) -> tuple[torch.Tensor, int]:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_trainer import STREAMING, Module, fit, weights

    from thinwire.integrations.lightning import ThinwireCallback

    class Stopping(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if callback.replica:
                stops.after(callback.replica)

    callback, kept = ThinwireCallback(STREAMING, member), folder / member.name
    keep = ModelCheckpoint(kept, every_n_train_steps=SAVED, filename="{step}", save_top_k=-1, save_last=True)
    last = kept / "last.ckpt"
    module: LightningModule = fit(
        kept, callback, count=512, module=Stopping(), keep=keep, max_steps=STEPS, max_epochs=-1, limit_val_batches=0,
        resume=last if last.exists() else None,
    )  # fmt: skip
    return weights(module), module.trainer.global_step


def torchtitan(folder: Path, member: Membership, stops: Stops) -> tuple[torch.Tensor, int]:
    import torch.distributed as dist
    from titan_trainer import STREAMING, Titan

    from thinwire.integrations.torchtitan import attach
    from thinwire.testing.toy import weights

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a world of one rank
    trainer = Titan(folder / member.name, steps=STEPS, saved=SAVED)
    with attach(trainer, STREAMING, member) as replica:
        trainer.train(before=lambda: stops.after(replica))
    dist.destroy_process_group()
    return weights(trainer.model_parts[0]), trainer.step


def main() -> None:
    trainer, folder, address, name, *stops = sys.argv[1:]
    torch.set_num_threads(1)
    member = Membership(LighthouseRendezvous(address), name, least=1, timeouts=QUICK)
    run = {"hugging_face": hugging_face, "lightning": lightning, "torchtitan": torchtitan}[trainer]
    whole, step = run(Path(folder), member, Stops(Path(folder), name, [int(stop) for stop in stops]))
    torch.save({"weights": whole, "step": step}, Path(folder) / f"{name}.pt")


if __name__ == "__main__":
    main()
