"""A small network under Lightning's `Trainer`. As a program it is one of two replicas: `torchrun ... lightning_trainer.py FOLDER`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup
from thinwire.integrations.lightning import ThinwireCallback

EPOCH, EPOCHS = 7, 3  # steps in an epoch, and epochs

STREAMING = tw.streaming_diloco(every=6, fragments=2, delay=2)


class Points(Dataset):
    """A dataset whose sample i is drawn with seed i."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.seen.append(index)
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sin().sum(0, keepdim=True)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.losses.append(nn.functional.mse_loss(self.layers(x), y).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class BySteps(Module):
    """Its learning rate falls by steps. `events` are set after the first step."""

    event: threading.Event | None = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.event:
            self.event.set()


class ByHand(Module):
    """It steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, last = self.layers[0].parameters(), self.layers[3].parameters()
        return [torch.optim.Adam(first, lr=1e-2), torch.optim.Adam(last, lr=1e-2)]


class Swaps(Callback):
    """A user's callback that keeps averages of the weights, and puts them into the model for validations; with `ends` also at the end."""

    def __init__(self, ends: bool = False) -> None:
        self.ends, self.average, self.trained = ends, {}, {}

    def on_train_batch_end(self, trainer: Any, module: LightningModule, *_: Any) -> None:
        now = {name: value.clone() for name, value in module.state_dict().items()}
        self.average = {name: 0.9 * self.average.get(name, value) + 0.1 * value for name, value in now.items()}

    def on_validation_start(self, trainer: Any, module: LightningModule) -> None:
        self.trained = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(self.average or self.trained)

    def on_validation_end(self, trainer: Any, module: LightningModule) -> None:
        module.load_state_dict(self.trained)

    def on_train_end(self, trainer: Any, module: LightningModule) -> None:
        if self.ends:
            module.load_state_dict(self.average)


class SwapsInModule(Module):
    """A module that does the same in its own hooks, which Lightning calls around those of callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.swaps = Swaps()

    def on_train_batch_end(self, *given: Any) -> None:
        self.swaps.on_train_batch_end(None, self)

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.swaps.on_validation_start(None, self)

    def on_validation_model_train(self) -> None:
        self.swaps.on_validation_end(None, self)
        super().on_validation_model_train()


class Normed(Module):
    """Its running statistics differ between replicas. It saves a checkpoint in each validation."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(1))
        self.path = folder / "within.ckpt"
        self.saved: list[Any] = []
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, index: int) -> None:
        self.trainer.save_checkpoint(self.path)
        self.saved.append(torch.load(self.path, weights_only=True))
        self.validated.append(self.layers[-1].running_mean.clone())
        super().validation_step(batch, index)


def fit(
    folder: Path,
    callback: ThinwireCallback | None = None,
    sampler: Any = None,
    count: int = 2 * EPOCH,
    resume: Path | Callable[[Trainer], str | None] | None = None,
    keep: Callback | None = None,
    loader: Any = DataLoader,
    module: Module | None = None,
    callbacks: list[Callback] | None = None,
    **options: Any,
) -> Module:
    """Trains with batches of two. Checkpoints at the end of each epoch are in `folder`/checkpoints."""
    torch.manual_seed(5)
    module, data = module or Module(), Points(count)
    if sampler is None:
        sampler = callback.share(data) if callback else DistributedSampler(data, 1, 0)
    loader = loader(data, batch_size=2, sampler=sampler)
    keep = keep or ModelCheckpoint(
        folder / "checkpoints", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    given = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": False}
    trainer = Trainer(
        default_root_dir=folder,
        enable_model_summary=False,
        callbacks=[*(callbacks or filter(None, [callback])), keep],
        **(given | options),
    )
    module.began = resume(trainer) if callable(resume) else resume
    trainer.fit(module, loader, DataLoader(Points(4), batch_size=4), ckpt_path=module.began)
    module.seen = data.seen
    return module


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def refused(folder: Path, callback: ThinwireCallback, **options: Any) -> str:
    try:
        fit(folder, callback, **options)
    except tw.ThinwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: Path) -> None:
    first = ThinwireCallback(STREAMING)
    rank, found = first.rank, {}
    mine = folder / f"replica-{rank}"
    found["with the world of torchrun"] = weights(fit(mine / "first", first))

    calls: list[str] = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "all_gather_object"):
        plain = getattr(dist, name)
        setattr(dist, name, lambda *a, _name=name, _plain=plain, **k: (calls.append(_name), _plain(*a, **k))[1])
    ledger = Ledger()
    group = LinkedGroup(CountedGroup(tw.TorchGroup.from_world(2, timeout=600.0), ledger), Link.parse("50mbit,5ms"))
    calls.clear()
    whole = fit(mine / "whole", ThinwireCallback(STREAMING, group), count=4 * EPOCH)
    found |= {"whole": weights(whole), "losses": whole.losses, "seen": whole.seen, "packets": ledger.sent("packet")}
    found["shapes"] = [fragment.shapes for fragment in STREAMING.partition.fragments(whole)]
    kept = mine / "whole" / "checkpoints"
    found["saved"] = torch.load(kept / "epoch=0.ckpt", weights_only=True)
    resumed = fit(mine / "again", ThinwireCallback(STREAMING, group), count=4 * EPOCH, resume=kept / "epoch=0.ckpt")
    found["resumed"] = weights(resumed)
    own = fit(mine / "own", ThinwireCallback(STREAMING, group, weights="own"), count=4 * EPOCH)
    found["own"], found["calls"] = own.losses, list(calls)

    other = folder / f"replica-{1 - rank}" / "whole" / "checkpoints" / "epoch=0.ckpt"
    one = ThinwireCallback(STREAMING, group)
    found["of another"] = refused(mine / "other", one, count=4 * EPOCH, resume=other)
    found["one folder"] = refused(folder / "shared", ThinwireCallback(STREAMING, group))
    found["no share"] = refused(mine / "share", one, sampler=DistributedSampler(Points(2 * EPOCH), 1, 0))
    found["other steps"] = refused(mine / "steps", one, max_epochs=EPOCHS + rank)
    found["own data"] = weights(
        fit(
            mine / "data",
            ThinwireCallback(STREAMING, group, own_data=True),
            torch.utils.data.SequentialSampler(range(14)),
        )
    )
    torch.save(found, folder / f"{rank}.pt")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
