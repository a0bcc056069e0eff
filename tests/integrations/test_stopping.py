"""Replicas under a trainer stop, and choose their best model, at one step, though each has other validation data."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from member_loop import LIMIT
from safetensors.torch import load_file

import thinwire as tw
from thinwire.drivers.handshake import agree_on_resume, compare_settings
from thinwire.testing.toy import same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from hf_trainer import STEPS, Tokens, arguments, model, refused
    from lightning.pytorch import Trainer as Lightning
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from lightning_trainer import EPOCH, Module, Points, weights
    from torch.utils.data import DataLoader
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

    from thinwire.integrations.huggingface import ThinwireCallback
    from thinwire.integrations.lightning import ThinwireCallback as LightningCallback

pytestmark = [
    pytest.mark.usefixtures("late_imports"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
AVERAGE = tw.local_sgd(every=3)


def loop(group: tw.Group, settings: dict[str, Any], metrics: dict[int, float]) -> int:
    """Train as the only other replica of a Trainer, and say `metrics` after these steps, until the last one or a stop. Returns the step."""
    compare_settings(group, {"the trainer's max_steps": STEPS} | settings)
    agree_on_resume(group, 0, bytes(16))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with tw.Replica(AVERAGE, net, optimizer, group) as replica:
        while not replica.stopping and replica.step < max(metrics, default=STEPS):
            net(**{name: one[None] for name, one in Tokens()[0].items()}).loss.backward()
            optimizer.step()
            if replica.step in metrics:
                replica.mean(metrics[replica.step])
        return replica.step


@pytest.mark.parametrize("first", [True, False], ids=["stopping first", "thinwire first"])
def test_early_stopping_follows_the_mean_over_all_replicas(tmp_path: Path, first: bool) -> None:
    """The metric, the higher the better, rises on the trainer's own data, and falls on those of the other replica, a loop."""

    def trainer(group: tw.Group) -> Trainer:
        options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
        options |= {"metric_for_best_model": "loss", "greater_is_better": True}
        callback, stop = ThinwireCallback(AVERAGE, group, own_data=True), EarlyStoppingCallback(1)
        callbacks = [stop, callback] if first else [callback, stop]
        given, data = arguments(tmp_path, **options), Tokens()
        trained = Trainer(model(), given, train_dataset=data, eval_dataset=Tokens(8), callbacks=callbacks)
        trained.train()
        return trained

    settings = {"evaluations": "every 2 steps, from 0", "saves": "every 2 steps", "metric_for_best_model": "loss"}
    trained, step = tw.run_threads(
        2, lambda group: loop(group, settings, {2: 100.0, 4: 0.0}) if group.rank else trainer(group), timeout=LIMIT
    )
    own = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
    assert own[1] > own[0] and trained.state.global_step == step == 4 and trained.state.best_global_step == 2
    saved = load_file(tmp_path / "checkpoint-2/model.safetensors")
    assert all(torch.equal(one, saved[name]) for name, one in trained.model.state_dict().items() if name in saved)


def test_a_callback_stops_all_replicas_of_a_trainer_at_one_step(tmp_path: Path) -> None:
    def trainer(group: tw.Group) -> Trainer:
        callback = ThinwireCallback(AVERAGE, group, own_data=True)

        class Request(TrainerCallback):
            def on_step_end(self, *_: object, **__: object) -> None:
                callback.replica.request_stop()

        trained = Trainer(model(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[callback, Request()])
        trained.train()
        return trained

    settings = {"metric_for_best_model": None}
    trained, step = tw.run_threads(
        2, lambda group: loop(group, settings, {}) if group.rank else trainer(group), timeout=LIMIT
    )
    assert trained.state.global_step == step < STEPS


def test_an_evaluation_that_another_callback_asks_for_has_the_anchors_and_one_that_it_runs_a_warning(
    tmp_path: Path,
) -> None:
    """So has one at the start of a training that resumes."""

    class Ask(TrainerCallback):
        def on_step_end(self, args: object, state: Any, control: Any, **_: object) -> None:
            control.should_evaluate |= state.global_step == 5

    def evaluated(*callbacks: TrainerCallback, resume: object = None, **options: Any) -> list[float]:
        given = arguments(tmp_path, **({"max_steps": 6} | options))
        trainer = Trainer(model(), given, train_dataset=Tokens(), eval_dataset=Tokens(8), callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    replica = tw.local_sgd(every=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (anchors,) = evaluated(Ask(), ThinwireCallback(replica))
        assert evaluated(ThinwireCallback(replica), Ask()) == [anchors], "in any order"
        both = evaluated(Ask(), ThinwireCallback(replica), eval_strategy="steps", eval_steps=4, save_steps=5)
        again = evaluated(ThinwireCallback(replica), resume=tmp_path / "checkpoint-5", eval_on_start=True)
    assert both[:2] == [anchors, anchors], "the fifth step has moved no anchor"
    assert again == [anchors] * 3, "of both steps before, and at the start"

    class Evaluate(TrainerCallback):
        def on_step_end(self, args: object, state: Any, control: Any, **_: object) -> None:
            if state.global_step == 5:
                self.loss = trainer.evaluate()["eval_loss"]

    data = {"train_dataset": Tokens(), "eval_dataset": Tokens(8)}
    ask = Evaluate()
    trainer = Trainer(model(), arguments(tmp_path, max_steps=6), callbacks=[ThinwireCallback(replica), ask], **data)
    with pytest.warns(RuntimeWarning, match=r"did not know of.*control.should_evaluate"):
        trainer.train()
    assert ask.loss != anchors


def test_a_trainer_that_would_not_stop_or_begin_as_the_others_is_refused(tmp_path: Path) -> None:
    assert "enable_jit_checkpoint" in refused(tmp_path, ThinwireCallback(AVERAGE), enable_jit_checkpoint=True)
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=Tokens())
    trainer.add_callback(ThinwireCallback(AVERAGE))
    with pytest.raises(tw.ConfigurationError, match=r"after the Trainer was made.*callbacks=\[callback\]"):
        trainer.train()


@pytest.mark.parametrize("kept", ["anchors", "own"])
@pytest.mark.parametrize("logged", ["validation", "training"])
def test_lightning_stops_saves_and_schedules_by_the_mean(tmp_path: Path, kept: Any, logged: str) -> None:
    """The loss falls on replica 0 and rises on replica 1, and their mean rises."""

    class Judged(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if logged == "training":
                self.log("judged", self.judgement(), on_epoch=True, on_step=False)
            return super().training_step(batch, index)

        def on_validation_epoch_end(self) -> None:
            if logged == "validation":
                self.log("judged", self.judgement())

        def judgement(self) -> float:
            return float(5 * self.trainer.current_epoch if self.rank else 9 - self.trainer.current_epoch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "judged"}}

    def replica(group: tw.Group) -> tuple[Any, ...]:
        callback, data, module = LightningCallback(AVERAGE, group, weights=kept), Points(4 * EPOCH), Judged()
        module.rank = group.rank
        stop, best = EarlyStopping("judged", patience=2), ModelCheckpoint(tmp_path / f"{group.rank}", monitor="judged")
        trainer = Lightning(
            accelerator="cpu", devices=1, max_epochs=9, enable_progress_bar=False, enable_model_summary=False, logger=False,
            callbacks=[stop, callback, best],
        )  # fmt: skip
        loader = DataLoader(data, batch_size=2, sampler=callback.share(data))
        trainer.fit(module, loader, DataLoader(Points(4), batch_size=4))
        (rate,) = (one["lr"] for one in trainer.optimizers[0].param_groups)
        return trainer.global_step, best.best_model_path.split("/")[-1], rate, weights(module)

    zero, one = tw.run_threads(2, replica, timeout=LIMIT)
    assert zero[:3] == one[:3] == (3 * EPOCH, f"epoch=0-step={EPOCH}.ckpt", 0.025) and same_bits(zero[3], one[3])


def test_a_callback_stops_all_replicas_of_lightning_at_one_step(tmp_path: Path) -> None:
    def replica(group: tw.Group) -> int:
        callback, data = LightningCallback(AVERAGE, group), Points(4 * EPOCH)

        class Request(Callback):
            def on_train_batch_end(self, *_: object) -> None:
                if group.rank:
                    callback.replica.request_stop()

        trainer = Lightning(
            accelerator="cpu", devices=1, max_epochs=9, enable_progress_bar=False, enable_model_summary=False, logger=False,
            default_root_dir=tmp_path / f"{group.rank}", callbacks=[callback, Request()], enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, batch_size=2, sampler=callback.share(data)))
        return int(trainer.global_step)

    zero, one = tw.run_threads(2, replica, timeout=LIMIT)
    assert zero == one < EPOCH
