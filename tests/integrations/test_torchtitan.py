"""The bridge to torchtitan, with its real optimizers, schedulers, checkpointer and overrides. Its Trainer needs a GPU and is not run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan")

from member_loop import LIMIT, beside, membership
from titan_trainer import STREAMING, Titan, ToyWithoutEmpty
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides

import thinwire as tw
from thinwire.integrations.torchtitan import STATE, attach
from thinwire.membership import Lighthouse, LighthouseRendezvous, Membership
from thinwire.testing.toy import Toy, fill, same_bits, weights

STEPS, SAVED = 12, 7
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def world():
    """A torch.distributed world of one rank, made by torchtitan."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("groups", [1, 2])
def test_one_replica_with_average_changes_nothing(tmp_path, groups):
    """Law 11, with one and with two optimizers of torchtitan: weights equal those without Thinwire, bit for bit."""
    alone = weights(Titan(tmp_path / "alone", groups).train())
    trainer, (group,) = Titan(tmp_path / "attached", groups), tw.ThreadGroup.create(1)
    with attach(trainer, tw.local_sgd(every=5), group) as replica:
        trainer.train()
    assert len(list(trainer.optimizers)) == groups and replica.step == STEPS
    assert same_bits(alone, weights(trainer.model_parts[0]))


def test_a_resume_from_a_torchtitan_checkpoint_is_exact(tmp_path, capsys):
    """The real CheckpointManager saves while a round is in the air; the resumed run is equal, bit for bit."""
    (group,) = tw.ThreadGroup.create(1)
    trainer = Titan(tmp_path)
    with attach(trainer, STREAMING, group):
        trainer.train()
    through = weights(trainer.model_parts[0])
    assert (tmp_path / "checkpoint" / f"step-{SAVED}" / ".metadata").exists()
    again = Titan(tmp_path, load=SAVED)
    with attach(again, STREAMING, group) as replica:
        assert again.checkpointer.states[STATE] is replica
        assert again.step == replica.step == SAVED and replica.in_flight
        again.train()
    assert same_bits(through, weights(again.model_parts[0]))
    assert "where DistributedDataParallel sends" in capsys.readouterr().out


def test_what_an_optimizer_of_torchtitan_holds_in_its_attributes_resumes(tmp_path):
    def noisy(**options):
        trainer = Titan(tmp_path, **options)
        for optimizer in trainer.optimizers:
            optimizer.drawing = torch.Generator().manual_seed(1)
            optimizer.register_step_post_hook(add_noise)
        return trainer

    @torch.no_grad()
    def add_noise(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p += 0.01 * torch.randn(p.shape, generator=optimizer.drawing)

    (group,), trainer = tw.ThreadGroup.create(1), noisy()
    with attach(trainer, STREAMING, group):
        trainer.train()
    again = noisy(load=SAVED)
    with attach(again, STREAMING, group):
        again.train()
    assert same_bits(*(weights(one.model_parts[0]) for one in (trainer, again)))


def test_initial_weights_are_the_first_anchors(tmp_path):
    """torchtitan's `train` loads them when Thinwire has been attached. They must be no training that is sent."""
    first = Titan(tmp_path / "first")
    first.train()
    (group,), trainer = (
        tw.ThreadGroup.create(1),
        Titan(tmp_path / "next", initial=tmp_path / "first/checkpoint/step-7"),
    )
    (model,), seen = trainer.model_parts, []
    with attach(trainer, STREAMING, group) as replica:

        def before() -> None:
            own = weights(model)
            with replica.anchored():
                seen.append((own, weights(model)))

        trainer.train(before=before)
    own, anchors = seen[0]
    assert same_bits(own, anchors) and not same_bits(own, weights(Titan(tmp_path / "new").model_parts[0]))


def test_a_trainer_that_returns_takes_only_what_has_moved(tmp_path):
    """It resumes from torchtitan's checkpoint before it meets the others: one of two fragments has moved since. It loads it once."""

    def begin(before: Callable[[Titan], None]) -> Titan:
        trainer = Titan(tmp_path)
        with attach(trainer, STREAMING, membership(other.address, "trainer")):
            trainer.train(before=lambda: before(trainer))
        return trainer

    def cut(trainer: Titan) -> None:
        if trainer.step == SAVED:
            raise OSError("the power is cut")

    facts = {"torchtitan's training.steps": str(STEPS)}
    with beside(STREAMING, fill(ToyWithoutEmpty()), facts=facts, steps=STEPS, alone=6, away=9) as (other, trained):
        with pytest.raises(OSError, match="the power is cut"):
            begin(cut)
        other.go.set()
        assert other.moved.wait(LIMIT)
        trainer = begin(lambda _: other.back.set())
        whole = weights(trained.result(LIMIT))
    assert trainer.step == trainer.lr_schedulers.schedulers[0].last_epoch == STEPS
    assert same_bits(weights(trainer.model_parts[0]), whole)
    assert 0 < sum(other.given[1:]) < other.given[0]


def test_pipeline_parallel_models_are_refused():
    trainer = SimpleNamespace(model_parts=[Toy(), Toy()])
    with (
        pytest.raises(tw.ConfigurationError, match=r"2 model parts: .*pipeline_parallel_degree to 1"),
        attach(trainer, STREAMING, tw.ThreadGroup.create(1)[0]),
    ):
        pass


def test_step_and_learning_rates_follow_the_jumps_of_a_member(tmp_path):
    """The replica jumps by 3 and by 2 steps; the schedulers are torchtitan's own."""
    seen = []
    with lone_member(tmp_path / "jumps") as (trainer, replica):

        def jumps() -> None:
            replica.step += {2: 3, 6: 2}.get(replica.step, 0)
            seen.append((trainer.step, trainer.lr_schedulers.schedulers[0].get_last_lr()[0]))

        trainer.train(before=jumps)
    schedule = trainer.lr_schedulers.schedulers[0]
    expected = [schedule.base_lrs[0] * schedule.lr_lambdas[0](step) for step, _ in seen]
    assert [step for step, _ in seen] == [0, 1, 2, 6, 9, 10, 11] and trainer.step == replica.step == STEPS
    assert [rate for _, rate in seen] == pytest.approx(expected)


@contextmanager
def lone_member(folder):
    lighthouse, trainer = Lighthouse("127.0.0.1", 0), Titan(folder)
    try:
        member = Membership(LighthouseRendezvous(lighthouse.address), "a", least=1)
        with attach(trainer, STREAMING, member) as replica:
            yield trainer, replica
    finally:
        lighthouse.close()


class Numbers(BaseDataLoader):
    """A data loader of torchtitan: rank r of n reads r, r + n, ..."""

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
    """torchtitan's override sets the share, for two worlds of two ranks."""
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
