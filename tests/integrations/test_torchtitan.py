"""The bridge to torchtitan on its real optimizers, schedulers, checkpointer and overrides; its Trainer itself needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch.distributed as dist

pytest.importorskip("torchtitan")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides

import thinwire as tw
from thinwire.integrations.torchtitan import STATE, attach
from thinwire.testing.toy import Toy, batch, fill, same_bits, weights

STEPS, SAVED = 12, 7
STREAMING = tw.streaming_diloco(every=6, fragments=2, delay=2)
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def world():
    """torchtitan's own: of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class State:
    """The trainer's own state, as torchtitan's Trainer keeps it."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class ToyWithoutEmpty(Toy):
    def __init__(self) -> None:
        super().__init__()
        del self.nothing, self.frozen
        self.frozen = 1.0


def built(folder, groups=2):
    """What `Trainer.__init__` makes, by the real configs."""
    model = fill(ToyWithoutEmpty())
    options = {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01, "weight_decay": 0.1}}
    slow = {"optimizer_name": "Adam", "optimizer_kwargs": {"lr": 0.001}}
    patterns = [ParamGroupConfig(pattern=r"^head\.", **slow)] if groups == 2 else []
    config = OptimizersContainer.Config(
        param_groups=[*patterns, ParamGroupConfig(pattern=".*", **options)], implementation="for-loop"
    )
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=STEPS)
    state = State()
    keep = CheckpointManager.Config(enable=True, interval=SAVED, keep_latest_k=0, last_save_model_only=False)
    checkpointer = keep.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(folder),
    )
    checkpointer.states.pop("dataloader")  # there is none
    return SimpleNamespace(
        model_parts=[model], optimizers=optimizers, checkpointer=checkpointer, schedulers=schedulers, state=state
    )


def train(trainer, steps=STEPS, load=-1):
    """As `Trainer.train` goes."""
    model, state = trainer.model_parts[0], trainer.state
    trainer.checkpointer.load(step=load)
    while state.step < steps:
        state.step += 1
        trainer.optimizers.zero_grad()
        x, y = batch(0, 0, state.step)
        ((model(x) - y) ** 2).mean().backward()
        trainer.optimizers.step()
        trainer.schedulers.step()
        trainer.checkpointer.save(state.step, last_step=state.step == steps)
    return model


@pytest.mark.parametrize("groups", [1, 2])
def test_law_11(tmp_path, groups):
    """With one of torchtitan's optimizers, and with two: its own weights, bit for bit."""
    alone = weights(train(built(tmp_path / "alone", groups)))
    trainer, (group,) = built(tmp_path / "attached", groups), tw.ThreadGroup.create(1)
    with attach(trainer, tw.local_sgd(every=5), group) as replica:
        train(trainer)
    assert len(list(trainer.optimizers)) == groups and replica.step == STEPS
    assert same_bits(alone, weights(trainer.model_parts[0]))


def test_a_resume_from_torchtitans_checkpoint(tmp_path, capsys):
    """Bit for bit, with a round in the air, by the real CheckpointManager."""
    (group,) = tw.ThreadGroup.create(1)
    trainer = built(tmp_path)
    with attach(trainer, STREAMING, group):
        train(trainer)
    through = weights(trainer.model_parts[0])
    assert (tmp_path / "checkpoint" / f"step-{SAVED}" / ".metadata").exists()
    again = built(tmp_path)
    with attach(again, STREAMING, group) as replica:
        assert again.checkpointer.states[STATE] is replica
        train(again, steps=SAVED, load=SAVED)
        assert replica.step == SAVED and replica.in_flight
        train(again, load=SAVED)
    assert same_bits(through, weights(again.model_parts[0]))
    assert "where DistributedDataParallel sends" in capsys.readouterr().out


def test_pipeline_parts_are_refused():
    trainer = SimpleNamespace(model_parts=[Toy(), Toy()])
    with pytest.raises(tw.ConfigurationError, match=r"2 model parts .*pipeline_parallel_degree to 1"):
        attach(trainer, STREAMING, tw.ThreadGroup.create(1)[0])


class Numbers(BaseDataLoader):
    """A data loader of torchtitan's kind: rank r of n reads r, r + n, ..."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        count: int = 12

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len):
        self.numbers = range(dp_rank, config.count, dp_world_size)

    def __iter__(self):
        return iter(self.numbers)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Job(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataloader: BaseDataLoader.Config = field(default_factory=Numbers.Config)


def test_the_override_gives_each_replica_its_share():
    """By torchtitan's own mechanism, for two worlds of two ranks."""
    seen = []
    for replica in (0, 1):
        config = Job.Config()
        target = ("thinwire.integrations.torchtitan.own_share", {"replica": replica, "replicas": 2})
        apply_overrides(OverrideConfig(imports=[target]), config)
        for rank in (0, 1):
            seen += config.dataloader.build(dp_world_size=2, dp_rank=rank, seq_len=8)
    assert sorted(seen) == list(range(12))
    with pytest.raises(tw.ConfigurationError, match="replica=2 of replicas=2"):
        apply_overrides(OverrideConfig(imports=[(target[0], {"replica": 2, "replicas": 2})]), Job.Config())
