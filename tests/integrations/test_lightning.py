"""Lightning's `Trainer` with a ThinwireCallback: one process, two processes under torchrun, and an elastic member."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from member_loop import LIMIT, beside, membership
from pages import ROOT
from resumed_optimizers import SAM
from torch.utils.data import DistributedSampler

import thinwire as tw
from thinwire.integrations.traffic import gradient_nbytes
from thinwire.membership import Lighthouse
from thinwire.testing.toy import same_bits

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning_trainer import (
        EPOCH,
        EPOCHS,
        STREAMING,
        ByHand,
        BySteps,
        Module,
        Normed,
        Points,
        Swaps,
        SwapsInModule,
        fit,
        refused,
        weights,
    )

    from thinwire.integrations.lightning import ThinwireCallback

pytestmark = [
    pytest.mark.usefixtures("late_imports"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plain", "more"]
)
def test_one_replica_with_average_changes_nothing(tmp_path, options):
    """Law 11: weights and losses equal those of the trainer without Thinwire, bit for bit."""
    alone = fit(tmp_path / "alone", **options)
    callback = ThinwireCallback(tw.local_sgd(every=5), weights="own")
    attached = fit(tmp_path / "attached", callback, **options)
    assert same_bits(weights(alone), weights(attached)) and attached.losses == alone.losses
    assert alone.seen == attached.seen and callback.replica is None


@pytest.mark.parametrize("first", [True, False], ids=["thinwire first", "averages first"])
@pytest.mark.parametrize("averages", ["callback", "lightning's", "in the module"])
def test_averages_that_are_swapped_in_for_validations_change_nothing(tmp_path, averages, first):
    """Law 11 for weights, losses of validations at rounds' ends, and what a checkpoint within a validation resumes from."""

    def trained(folder: Path, callback: ThinwireCallback | None, resume: Path | None = None) -> Module:
        module = SwapsInModule() if averages == "in the module" else Module()
        swap = {"callback": Swaps, "lightning's": lambda: EMAWeightAveraging(decay=0.9)}.get(averages)
        swaps = [swap()] if swap else []
        keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, monitor="step", mode="max")
        options = {"check_val_every_n_epoch": None, "val_check_interval": 2}
        callbacks = [
            *([callback] if callback and first else []),
            *swaps,
            *([callback] if callback and not first else []),
        ]
        return fit(folder, callback, count=28, module=module, keep=keep, callbacks=callbacks, resume=resume, **options)

    alone = trained(tmp_path / "alone", None)
    attached = trained(tmp_path / "attached", ThinwireCallback(tw.local_sgd(every=2)))
    assert same_bits(weights(alone), weights(attached)) and attached.losses == alone.losses
    kept = max((tmp_path / "attached").glob("*.ckpt"), key=lambda path: -path.stat().st_mtime)
    assert (tmp_path / "alone" / kept.name).exists()
    saved, due = (torch.load(tmp_path / name / kept.name, weights_only=False) for name in ("attached", "alone"))
    state = saved["callbacks"]["ThinwireCallback"]["own"]
    plain = due.get("current_model_state", due["state_dict"])
    assert all(torch.equal(value, plain[name]) for name, value in state.items()) or averages == "in the module"


def test_averages_that_are_left_in_the_model_are_equal_on_all_replicas(tmp_path):
    """A user's callback ends with the average of its replica's own weights: all end with the mean of these averages."""

    def replica(group: tw.Group) -> tuple[Module, Swaps]:
        callback, swaps = ThinwireCallback(tw.local_sgd(every=3), group), Swaps(ends=True)
        callbacks = [swaps, callback] if group.rank else [callback, swaps]
        return fit(tmp_path / f"{group.rank}", callback, count=28, callbacks=callbacks), swaps

    (zero, own), (one, others) = tw.run_threads(2, replica, timeout=LIMIT)
    assert same_bits(weights(zero), weights(one))
    name = "layers.0.weight"
    assert not torch.equal(own.average[name], others.average[name])
    assert torch.equal(zero.state_dict()[name], (own.average[name] + others.average[name]) / 2)


def test_optimizers_that_the_module_steps_by_hand(tmp_path):
    """One replica changes nothing; two end equal; a replica's resume within its training is bit for bit."""
    alone, attached = fit(tmp_path / "a", module=ByHand()), ByHand()
    fit(tmp_path / "b", ThinwireCallback(tw.local_sgd(every=2)), module=attached)
    assert same_bits(weights(alone), weights(attached)) and alone.trainer.global_step == 2 * EPOCH * EPOCHS
    whole = fit(tmp_path / "c", ThinwireCallback(STREAMING), module=ByHand())
    again = fit(
        tmp_path / "d", ThinwireCallback(STREAMING), module=ByHand(), resume=tmp_path / "c/checkpoints/epoch=0.ckpt"
    )
    assert same_bits(weights(whole), weights(again))

    def replica(group: tw.Group) -> Module:
        return fit(tmp_path / f"{group.rank}", ThinwireCallback(STREAMING, group), count=4 * EPOCH, module=ByHand())

    assert same_bits(*map(weights, tw.run_threads(2, replica, timeout=LIMIT)))


def test_one_replica_resumes_bit_for_bit(tmp_path):
    """Rounds are in the air at the checkpoint, which holds the anchors or the own weights, as asked."""
    for asked in ("anchors", "own"):
        whole = fit(tmp_path / asked, ThinwireCallback(STREAMING, weights=asked))
        kept = tmp_path / asked / "checkpoints" / "epoch=0.ckpt"
        resumed = fit(tmp_path / "again" / asked, ThinwireCallback(STREAMING, weights=asked), resume=kept)
        assert same_bits(weights(whole), weights(resumed))
        saved = torch.load(kept, weights_only=True)
        state = saved["callbacks"]["ThinwireCallback"]
        assert state["facts"]["step"] == EPOCH and state["facts"]["flights"]
        same = all(torch.equal(value, saved["state_dict"][name]) for name, value in state["own"].items())
        assert same == (asked == "own")


def test_an_optimizer_inside_another_resumes_bit_for_bit(tmp_path):
    """Lightning saves the state dict of the outer one, which has not the moments of the inner one."""

    class Sharp(Module):
        def configure_optimizers(self):
            return SAM(self.parameters(), torch.optim.AdamW, lr=1e-2)

    whole = fit(tmp_path / "whole", ThinwireCallback(STREAMING), module=Sharp())
    kept = tmp_path / "whole" / "checkpoints" / "epoch=0.ckpt"
    assert same_bits(
        weights(whole), weights(fit(tmp_path / "again", ThinwireCallback(STREAMING), module=Sharp(), resume=kept))
    )


def test_what_an_optimizer_holds_and_no_checkpoint_can_have_is_named_after_the_first_step(tmp_path):
    class Cycling(torch.optim.SGD):
        def step(self, closure=None):
            self.rates = getattr(self, "rates", None) or itertools.cycle([0.1, 0.2])
            return super().step(closure)

    class Cycled(Module):
        def configure_optimizers(self):
            return Cycling(self.parameters(), lr=0.1)

    module = Cycled()
    with pytest.raises(tw.CheckpointError, match=r"optimizer\.rates: a cycle cannot be saved"):
        fit(tmp_path, ThinwireCallback(STREAMING), module=module)
    assert module.trainer.global_step == 1


@pytest.mark.parametrize("asked", ["anchors", "own"])
def test_a_checkpoint_on_an_exception_has_the_replicas_own_state(tmp_path, asked):
    """The callback leaves the group after the checkpoint is written. A resume continues with its rounds in the air."""

    class Cut(Module):
        def training_step(self, batch, index):
            if self.trainer.global_step == EPOCH + 2:
                raise OSError("the power is cut")
            return super().training_step(batch, index)

    callback, module = ThinwireCallback(STREAMING, weights=asked), Cut()
    keep = ModelCheckpoint(tmp_path / "kept", filename="cut", save_on_exception=True, save_top_k=0)
    with pytest.raises(OSError, match="the power is cut"):
        fit(tmp_path, callback, module=module, keep=keep)
    assert callback.replica is None
    saved = torch.load(tmp_path / "kept" / "cut.ckpt", weights_only=True)
    state, own = saved["callbacks"]["ThinwireCallback"], dict(module.named_parameters())
    assert state["facts"]["step"] == saved["global_step"] == EPOCH + 2 and state["facts"]["flights"]
    assert all(torch.equal(value, own[name]) for name, value in state["own"].items())
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in own.items()) == (asked == "own")
    for _ in range(2):  # the same callback serves two trainings, the second without an exception
        fit(tmp_path / "again", callback, resume=tmp_path / "kept" / "cut.ckpt")
        assert callback.replica is None


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    program = ROOT / "tests" / "support" / "lightning_trainer.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(program), str(folder)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)], done.stdout + done.stderr


@pytest.mark.slow
def test_two_replicas_end_equal_in_the_predicted_bytes(world):
    """They run no collective of torch.distributed, and each validates the weights that it was asked to."""
    (first, second), said = world
    for name in ("with the world of torchrun", "whole", "own data"):
        assert same_bits(first[name], second[name]), name
    assert first["calls"] == second["calls"] == []
    assert not same_bits(first["whole"], weights(Module()))
    rounds = EPOCH * EPOCHS // STREAMING.schedule.every
    nbytes = STREAMING.nbytes_per_period(first["shapes"], 2)
    assert rounds * nbytes <= first["packets"] <= (rounds + 2) * nbytes
    assert first["losses"][1:] == second["losses"][1:] and first["own"][1:] != second["own"][1:]
    assert f"DistributedDataParallel sends {gradient_nbytes(Module(), 2):,}" in said
    epoch = 2 * EPOCH
    for begin in range(0, EPOCHS * epoch, epoch):
        shares = [one["seen"][begin : begin + epoch] for one in (first, second)]
        assert sorted(shares[0] + shares[1]) == list(range(2 * epoch)), "every sample once"


@pytest.mark.slow
def test_two_replicas_resume_bit_for_bit(world):
    """Rounds are in the air at the checkpoint."""
    for one in world[0]:
        assert same_bits(one["whole"], one["resumed"])
        assert one["saved"]["callbacks"]["ThinwireCallback"]["facts"]["flights"]
    first, second = (one["saved"]["state_dict"] for one in world[0])
    assert all(torch.equal(first[name], second[name]) for name in first), "the anchors"


@pytest.mark.slow
def test_unsupported_settings_of_two_replicas_are_refused(world):
    for rank, one in enumerate(world[0]):
        assert f"a checkpoint of replica {1 - rank} of 2: one of replica {rank} of 2" in one["of another"]
        assert "would write checkpoints into one folder" in one["one folder"]
        assert f"not share {rank} of 2" in one["no share"] and "callback.share(data)" in one["no share"]
        assert "max_epochs: 4 there, 3 on replica 0" in one["other steps"]


def test_unsupported_settings_are_refused(tmp_path):
    (group,) = tw.ThreadGroup.create(1)
    callback = ThinwireCallback(STREAMING, group)

    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(tw.ConfigurationError, match=r"automatic_optimization=False with a GradScaler .*bf16"):
        fit(tmp_path, callback, module=ByHand(), plugins=[scaled])
    with pytest.raises(tw.ConfigurationError, match=r"save_weights_only=True.*weights='own'"):
        fit(tmp_path, callback, keep=ModelCheckpoint(tmp_path / "bare", save_weights_only=True))
    with pytest.raises(tw.ConfigurationError, match=r"strategy of Gradients\(\): one of deltas"):
        ThinwireCallback(tw.data_parallel())
    with pytest.raises(tw.ConfigurationError, match="'anchors' or 'own'"):
        ThinwireCallback(STREAMING, weights="all")
    fit(tmp_path, callback)
    with pytest.raises(tw.CheckpointError, match=r"a checkpoint of Strategy.*: one of Strategy.*own strategy"):
        fit(tmp_path / "x", ThinwireCallback(tw.diloco(), group), resume=tmp_path / "checkpoints" / "epoch=0.ckpt")


def test_validations_use_the_mean_of_the_buffers_and_checkpoints_have_own_ones(tmp_path):
    def replica(group: tw.Group) -> Normed:
        folder = tmp_path / f"{group.rank}"
        module = Normed(folder)
        options = {"check_val_every_n_epoch": None, "val_check_interval": 2, "num_sanity_val_steps": 0}
        callback = ThinwireCallback(tw.local_sgd(every=3), group)
        fit(folder, callback, count=4 * EPOCH, module=module, max_epochs=1, **options)
        return module

    both = tw.run_threads(2, replica, timeout=LIMIT)
    zero, one = both
    assert zero.losses == one.losses and len(zero.losses) == 3
    assert all(torch.equal(*means) for means in zip(zero.validated, one.validated))
    running = [[saved["state_dict"]["layers.4.running_mean"] for saved in module.saved] for module in both]
    assert not any(torch.equal(*own) for own in zip(*running))  # a resume continues with them
    means = [(own + other) / 2 for own, other in zip(*running)]
    assert all(torch.equal(*means) for means in zip(means, zero.validated))


def test_validations_at_other_steps_are_refused_for_a_model_whose_buffers_are_averaged(tmp_path):
    """The replicas would wait for each other."""

    def replica(group: tw.Group) -> str:
        options = {"check_val_every_n_epoch": None, "val_check_interval": 2 + group.rank, "num_sanity_val_steps": 0}
        folder = tmp_path / f"{group.rank}"
        callback = ThinwireCallback(tw.local_sgd(every=3), group)
        return refused(folder, callback, module=Normed(folder), **options)

    for said in tw.run_threads(2, replica, timeout=LIMIT):
        assert said.startswith("DisagreementError") and "validation: every 3 batches" in said
    group = tw.ThreadGroup.create(2)[0]
    by_time = Trainer(accelerator="cpu", val_check_interval="00:00:00:01", logger=False)
    with pytest.raises(tw.ConfigurationError, match=r"val_check_interval as a time.*a number of batches"):
        ThinwireCallback(tw.local_sgd(every=3), group).setup(by_time, Normed(tmp_path), "fit")


def test_averages_of_each_replicas_own_weights_are_refused(tmp_path):
    """The replicas would end with different weights."""
    for average in (StochasticWeightAveraging(1e-3), EMAWeightAveraging()):
        callback = ThinwireCallback(STREAMING, tw.ThreadGroup.create(2)[0])
        with pytest.raises(
            tw.ConfigurationError, match=r"^StochasticWeightAveraging or WeightAveraging: .*leave it out"
        ):
            fit(tmp_path, callback, keep=average)


def test_replicas_that_resume_at_different_steps_are_told_both(tmp_path):
    def replica(group: tw.Group) -> str:
        folder = tmp_path / f"{group.rank}"
        fit(folder, ThinwireCallback(STREAMING, group), count=4 * EPOCH)
        kept = folder / "checkpoints" / f"epoch={1 - group.rank}.ckpt"
        return refused(folder, ThinwireCallback(STREAMING, group), count=4 * EPOCH, resume=kept)

    for said in tw.run_threads(2, replica, timeout=LIMIT):
        assert f"replica 1 resumes at step {EPOCH}, replica 0 at step {2 * EPOCH}; choose one step for all" in said


def test_one_form_starts_and_resumes_from_the_newest_checkpoint_that_all_hold_whole(tmp_path):
    """A logger gives each start a folder of its own. Replica 1 loses its newest, then that of replica 0 is torn."""

    def replica(group: tw.Group) -> tuple[list[str | None], list[Any]]:
        folder, names, got = tmp_path / f"{group.rank}", [], []
        for start in range(3):
            callback = ThinwireCallback(STREAMING, group)
            keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
            given = {"resume": callback.newest, "keep": keep, "count": 4 * EPOCH, "logger": CSVLogger(folder)}
            module = fit(folder, callback, **given)
            names.append(module.began and Path(module.began).name)
            got.append(weights(module))
            newest = max(folder.rglob("*.ckpt"), key=lambda path: path.name)
            if start == 0 and group.rank == 1:
                newest.unlink()
            elif start == 1 and group.rank == 0:
                os.truncate(newest, 1000)
        return names, got

    for names, got in tw.run_threads(2, replica, timeout=LIMIT):
        assert names == [None, "epoch=1.ckpt", "epoch=1.ckpt"]
        assert all(one.shape == got[0].shape for one in got)
    callback = ThinwireCallback(STREAMING)
    whole = weights(fit(tmp_path / "alone", callback, resume=callback.newest))
    (tmp_path / "alone/checkpoints/epoch=2.ckpt").unlink()
    again = fit(tmp_path / "alone", callback, resume=callback.newest)
    assert Path(again.began).name == "epoch=1.ckpt" and same_bits(weights(again), whole)


def test_the_ddp_strategy_of_lightning_is_refused(tmp_path):
    """The error comes before DDP wraps the model, and names the bytes that DDP would send."""
    callback = ThinwireCallback(STREAMING, tw.ThreadGroup.create(1)[0])
    trainer = Trainer(
        strategy="fsdp" if torch.cuda.is_available() else "ddp", accelerator="cpu", devices=1, logger=False
    )
    with pytest.raises(
        tw.ConfigurationError, match=r"DDPStrategy over 1 processes.*Write Trainer\(devices=1, num_nodes=1\)"
    ):
        callback.setup(trainer, Module(), "fit")
    assert Points(3)[0][0].shape == (4,)


def test_a_step_that_the_scaler_skips_counts_but_trains_nothing(tmp_path):
    """The trainer counts such a step too."""
    plugin = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu")) for _ in range(2)]

    class Poisoned(Module):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (float("inf") if self.trainer.global_step == 3 else 1.0)

    alone = fit(tmp_path / "alone", module=Poisoned(), plugins=plugin[:1])
    attached = fit(
        tmp_path / "attached", ThinwireCallback(tw.local_sgd(every=5)), module=Poisoned(), plugins=plugin[1:]
    )
    assert plugin[1].scaler.get_scale() < 65536.0 and same_bits(weights(alone), weights(attached))


def test_a_trainer_that_joins_late_starts_at_the_step_of_the_others(tmp_path):
    """It takes their weights, step and learning rate, and trains samples that no other replica trains; its checkpoint holds them."""
    due = 12
    with beside(STREAMING, Module(), facts={"max_steps": str(due)}, steps=due, alone=6, samples=512) as (
        other,
        trained,
    ):
        callback, module = ThinwireCallback(STREAMING, membership(other.address, "trainer")), BySteps()
        module.event = other.go
        keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, filename="{step}", save_top_k=-1)
        fit(tmp_path, callback, count=512, module=module, keep=keep, max_steps=due, max_epochs=-1)
        whole = weights(trained.result(600))
    saved = torch.load(
        max((tmp_path / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime), weights_only=True
    )
    trains = int(saved["optimizer_states"][0]["state"][0]["step"].item())
    assert saved["global_step"] == saved["lr_schedulers"][0]["last_epoch"] == due and 0 < trains <= due - 6
    assert same_bits(weights(module), whole)
    assert not set(module.seen[: 2 * trains]) & set(other.seen)


def test_a_trainer_that_returns_takes_only_what_has_moved(tmp_path):
    """It resumes from Lightning's checkpoint before it meets the others: one of two fragments has moved since."""
    due, kept = 12, tmp_path / "kept"

    class Cut(BySteps):
        def on_train_batch_start(self, batch, index):
            if self.trainer.global_step == 7:
                raise OSError("the power is cut")

    def begin(module: Module, resume: Path | None = None) -> Module:
        callback = ThinwireCallback(STREAMING, membership(other.address, "trainer"))
        keep = ModelCheckpoint(kept, every_n_train_steps=1, filename="{step}", save_top_k=-1)
        return fit(tmp_path, callback, count=512, module=module, keep=keep, max_steps=due, max_epochs=-1, resume=resume)

    facts = {"max_steps": str(due)}
    with beside(STREAMING, Module(), facts=facts, steps=due, alone=6, away=9, samples=512) as (other, trained):
        with pytest.raises(OSError, match="the power is cut"):
            begin(Cut())
        other.go.set()
        assert other.moved.wait(LIMIT)
        module = BySteps()
        module.event = other.back
        begin(module, kept / "step=7.ckpt")
        whole = weights(trained.result(LIMIT))
    assert module.trainer.global_step == due and same_bits(weights(module), whole)
    assert 0 < sum(other.given[1:]) < other.given[0]


def test_unsupported_settings_of_an_elastic_member_are_refused(tmp_path):
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, b"", lambda _: None)
    member, given = membership(lighthouse.address, "a"), {"max_steps": 4, "max_epochs": -1}
    with pytest.raises(
        tw.ConfigurationError, match=r"max_steps=-1, max_epochs=3: .* member of an elastic run.*Trainer\(max_steps"
    ):
        fit(tmp_path, ThinwireCallback(STREAMING, member), module=BySteps())
    with pytest.raises(tw.ConfigurationError, match="other members read too"):
        fit(tmp_path, ThinwireCallback(STREAMING, member), DistributedSampler(Points(14), 1, 0), **given)
    with pytest.raises(tw.ConfigurationError, match=r'by epochs.*"interval": "step"'):
        fit(tmp_path, ThinwireCallback(STREAMING, member), **given)
    with pytest.raises(tw.ConfigurationError, match=r"WeightAveraging: .* member of an elastic run.*leave it out"):
        fit(tmp_path, ThinwireCallback(STREAMING, member), keep=EMAWeightAveraging(), **given)
    member.close()
    lighthouse.close()
