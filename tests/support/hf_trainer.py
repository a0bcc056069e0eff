"""A tiny GPT-2 under transformers' `Trainer`. As a program it is one of two replicas: `torchrun ... hf_trainer.py FOLDER`."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup
from thinwire.integrations.huggingface import ThinwireCallback

STEPS, SAVED = 12, 4
STREAMING = tw.streaming_diloco(every=4, fragments=2, delay=2)


class Tokens(torch.utils.data.Dataset):
    """A dataset whose sample i is drawn with seed i."""

    def __init__(self, count: int = 64) -> None:
        self.count, self.seen = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.seen.append(index)
        tokens = torch.randint(0, 32, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Then(TrainerCallback):
    """Sets `event` after the first step."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self.event.set()


class PowerCut(TrainerCallback):
    """Raises an error when the trainer has written a checkpoint."""

    def on_save(self, args: object, state: object, control: object, **_: object) -> None:
        raise OSError("the power is cut")


class Swaps(TrainerCallback):
    """A user's averages of the weights, put into the model for evaluations, and with `ends` also at the end."""

    def __init__(self, back: str, ends: bool = False) -> None:
        self.ends, self.average, self.trained = ends, {}, None
        setattr(self, back, self.swap_back)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        now = {name: value.clone() for name, value in given["model"].state_dict().items()}
        self.average = {name: 0.5 * self.average.get(name, value) + 0.5 * value for name, value in now.items()}
        if control.should_evaluate:
            self.trained = now
            given["model"].load_state_dict(self.average)

    def swap_back(self, *_: Any, **given: Any) -> None:
        if self.trained:
            given["model"].load_state_dict(self.trained)
            self.trained = None

    def on_train_end(self, *_: Any, **given: Any) -> None:
        if self.ends:
            given["model"].load_state_dict(self.average)


class Normed(nn.Module):
    """Its running statistics depend on its samples. `losses` are those of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.losses: list[float] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = self.layers(input_ids.float()).square().mean()
        if not self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


def model() -> GPT2LMHeadModel:
    set_seed(0)
    shape = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))  # its default has dropout


def arguments(folder: Path, **options: object) -> TrainingArguments:
    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": [], "use_cpu": True,
        "save_steps": SAVED, "logging_steps": 4, "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **(given | options))


def train(folder: Path, callback: ThinwireCallback | None, resume: object = None, **options: object) -> Trainer:
    callbacks = [callback] if callback else []
    data = Tokens()
    trainer = Trainer(
        model(), arguments(folder, **options), train_dataset=data, eval_dataset=Tokens(8), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()])


def losses(trainer: Trainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def refused(folder: Path, callback: ThinwireCallback, **options: object) -> str:
    try:
        train(folder, callback, **options)
    except tw.ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        callback.close()
    return "nothing"


def main(folder: Path) -> None:
    arguments(folder / "world")  # accelerate joins the world
    rank, calls = dist.get_rank(), []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "all_gather_object"):
        plain = getattr(dist, name)
        setattr(dist, name, lambda *a, _name=name, _plain=plain, **k: (calls.append(_name), _plain(*a, **k))[1])
    ledger = Ledger()
    group = LinkedGroup(CountedGroup(tw.TorchGroup.from_world(2, timeout=600.0), ledger), Link.parse("50mbit,5ms"))
    found: dict[str, object] = {}

    calls.clear()
    evaluated = {"eval_strategy": "steps", "eval_steps": 4}
    whole = train(folder / "whole", ThinwireCallback(STREAMING, group), **evaluated)
    found["weights"], found["losses"], found["steps"] = weights(whole), losses(whole), whole.state.global_step
    found["seen"], found["unwrapped"] = whole.train_dataset.seen, whole.model_wrapped is whole.model
    found["packets"] = ledger.sent("packet")
    found["shapes"] = [fragment.shapes for fragment in STREAMING.partition.fragments(whole.model)]
    found["own"] = losses(train(folder / "own", ThinwireCallback(STREAMING, group, weights="own"), **evaluated))
    found["calls"] = list(calls)

    train(folder / "cut", ThinwireCallback(STREAMING, group), save_total_limit=1, save_steps=6, max_steps=STEPS)
    found["rotated"] = sorted(
        path.name for path in (folder / "cut" / ("replica-1" if rank else "")).glob("checkpoint-*")
    )
    resumed = train(
        folder / "whole",
        ThinwireCallback(STREAMING),
        resume=str(folder / "whole" / ("replica-1" if rank else "") / "checkpoint-8"),
    )
    found["resumed"] = weights(resumed)
    found["restarts"], restarted = [], folder / "restarted"
    for lost in ("none", "12", "8"):
        callback, kept = ThinwireCallback(STREAMING), restarted / ("replica-1" if rank else "")
        trainer = Trainer(model(), arguments(restarted), train_dataset=Tokens(), callbacks=[callback])
        newest = callback.newest()
        trainer.train(resume_from_checkpoint=newest)
        found["restarts"].append((newest and Path(newest).name, weights(trainer)))
        if rank and lost == "none":  # it was killed before its last save
            shutil.rmtree(kept / "checkpoint-12")
        elif lost == "12" and not rank:  # the save of the other was cut off
            shutil.rmtree(kept / "checkpoint-12")
            shutil.rmtree(kept / "checkpoint-8/thinwire")
    found["of another"] = refused(
        folder / "whole",
        ThinwireCallback(STREAMING, group),
        resume=str(folder / "whole" / f"{'' if rank else 'replica-1'}" / "checkpoint-8"),
    )
    found["other steps"] = refused(folder / "steps", ThinwireCallback(STREAMING, group), max_steps=STEPS + rank)
    found["own data"] = weights(train(folder / "data", ThinwireCallback(STREAMING, group, own_data=True), max_steps=2))
    found["twice"], same = [], arguments(folder / "twice", max_steps=2)
    for _ in range(2):
        trainer = Trainer(model(), same, train_dataset=Tokens(), callbacks=[ThinwireCallback(STREAMING)])
        trainer.train()
        found["twice"].append(same.output_dir)
    torch.save(found, folder / f"{rank}.pt")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
