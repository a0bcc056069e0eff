"""The communication hook for DDP in two processes over gloo."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from hook_processes import POISONED, STEPS, STRATEGIES, run

import thinwire as tw
from thinwire.testing.toy import same_bits


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hooked(model, group, of=None):
    """`model` in DDP, and the hook of `of`, or of the model."""
    hook = tw.GradientHook(tw.data_parallel(), of or model, group)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    return ddp, hook, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return run(tmp_path_factory.mktemp("hook"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_stay_equal(world, name):
    """They have equal bits after every step with any codec."""
    for a, b in zip(world[0][name], world[1][name], strict=True):
        assert same_bits(a, b) and torch.isfinite(a).all()
    assert not same_bits(world[0][name][0], world[0][name][-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["identity", "identity, all-reduced"])
def test_the_hook_without_a_codec_has_the_bits_of_plain_ddp(world, name):
    """The sum of two replicas has only one order."""
    assert world[0]["buckets"] > 2
    for got, due in zip(world[0][name], world[0]["plain"], strict=True):
        assert same_bits(got, due)


@pytest.mark.slow
def test_lossy_codecs_change_the_weights(world):
    """So the equality above is not that of a hook which never runs."""
    for name in STRATEGIES:
        assert "identity" in name or not torch.allclose(world[0][name][-1], world[0]["plain"][-1], rtol=1e-3)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped(world):
    """The weights stay, and the next step trains on."""
    for one, other in zip(world[0][POISONED], world[1][POISONED], strict=True):
        assert same_bits(one, other) and torch.isfinite(one).all()
    assert same_bits(world[0][POISONED][5], world[0][POISONED][4])
    assert not same_bits(world[0][POISONED][6], world[0][POISONED][5])


@pytest.mark.slow
def test_a_resumed_hook_trains_equal_weights(world):
    """The first step after a resume is sent in fp32, because DDP rebuilds its buckets."""
    for rank in (0, 1):
        assert len(world[rank]["resumed"]) == STEPS - 5
        assert all(same_bits(a, b) for a, b in zip(world[0]["resumed"], world[rank]["resumed"]))
        names = {name.partition("/")[2] for name in world[rank]["dgc state"]}
        assert names == {"feedback.residual", "filter.1.velocity"}
    assert torch.isfinite(world[0]["resumed"][-1]).all()


@pytest.mark.slow
def test_diverged_weights_are_repaired_with_one_warning(world):
    """The check runs every hundred steps on both replicas."""
    alike = [step for step, pair in enumerate(zip(world[0]["drifted"], world[1]["drifted"]), 1) if same_bits(*pair)]
    assert alike == [*range(1, 6), *range(100, 103)]
    assert all(len(results["told"]) == 1 and "have drifted apart" in results["told"][0] for results in world)


@pytest.mark.slow
def test_a_rank_that_joins_early_is_refused(world):
    """At the next comparison of weights, which only ranks that step take part in, the others would wait for it."""
    assert world[1]["joined"].startswith("ModelError: DDP calls its hook outside of backward, as ddp.join() does")
    assert world[0]["joined"].startswith("LinkError: ")


def test_a_second_hook_on_a_group_is_refused_until_the_first_is_closed(one_rank):
    """Their packets would mix, and the replicas drift apart."""
    (group,) = tw.ThreadGroup.create(1)
    ddp, first, optimizer = hooked(torch.nn.Linear(2, 2), group)
    other, second, others = hooked(torch.nn.Linear(2, 2), group)
    first.register(ddp, optimizer)
    with pytest.raises(tw.ConfigurationError, match="has a Replica or a GradientHook that has not finished"):
        second.register(other, others)
    first.close()
    second.register(other, others)
    second.close()


def test_a_group_of_other_replicas_than_ddp_has_ranks_is_refused(one_rank):
    def register(group):
        ddp, hook, optimizer = hooked(torch.nn.Linear(2, 2), group)
        with pytest.raises(tw.ConfigurationError, match="the hook's group has 2 replicas and DDP 1 ranks"):
            hook.register(ddp, optimizer)
        hook.close()

    tw.run_threads(2, register)


def test_the_model_of_another_ddp_is_refused(one_rank):
    (group,) = tw.ThreadGroup.create(1)
    ddp, hook, optimizer = hooked(torch.nn.Linear(2, 2), group, of=torch.nn.Linear(2, 2))
    with pytest.raises(tw.ModelError, match="DDP trains 'weight' and the hook's model has no such tensor"):
        hook.register(ddp, optimizer)
    hook.close()


def test_arguments_of_other_types_are_refused_by_name(one_rank):
    (group,) = tw.ThreadGroup.create(1)
    model = torch.nn.Linear(2, 2)
    ddp, hook, optimizer = hooked(model, group)
    for made, said in (
        (
            lambda: tw.GradientHook("data_parallel", model, group),
            "GradientHook: strategy is of type str; Strategy is needed",
        ),
        (lambda: tw.GradientHook(tw.data_parallel, model, group), "strategy is of type function; Strategy is needed"),
        (lambda: tw.GradientHook(tw.data_parallel(), [model], group), "model is of type list; Module is needed"),
        (lambda: tw.GradientHook(tw.data_parallel(), model, dist.group.WORLD), "; Group is needed"),
        (lambda: hook.register(model, optimizer), "ddp is of type Linear; DistributedDataParallel is needed"),
        (lambda: hook.register(ddp, None), "optimizer is of type NoneType; Optimizer is needed"),
    ):
        with pytest.raises(tw.ConfigurationError, match=re.escape(said)):
            made()
    hook.register(ddp, optimizer)  # the refused attempts have left nothing
    hook.close()


def test_a_closed_hook_says_so(one_rank):
    (group,) = tw.ThreadGroup.create(1)
    ddp, hook, optimizer = hooked(torch.nn.Linear(2, 2), group)
    hook.register(ddp, optimizer)
    hook.close()
    hook.close()
    for use in (lambda: hook.register(ddp, optimizer), lambda: ddp(torch.ones(1, 2)).sum().backward()):
        with pytest.raises(tw.ConfigurationError, match="this GradientHook is closed, and its DDP cannot exchange"):
            use()


def test_sparse_gradients_are_refused(one_rank):
    (group,) = tw.ThreadGroup.create(1)
    ddp, hook, optimizer = hooked(torch.nn.Embedding(4, 2, sparse=True), group)
    hook.register(ddp, optimizer)
    with pytest.raises(tw.ModelError, match="the gradient of weight is sparse, and DDP's hooks take dense ones"):
        ddp(torch.tensor([1])).sum().backward()
    hook.close()


def test_backward_raises_the_link_error_of_a_lost_replica(one_rank):
    def train(group):
        ddp, hook, _ = hooked(torch.nn.Linear(2, 2), group)
        if group.rank == 1:
            hook.close()
            group.close()
            return ""
        ddp.register_comm_hook(hook, tw.GradientHook.exchange)  # `register` would refuse one rank for two replicas
        with pytest.raises(tw.LinkError) as told:
            ddp(torch.ones(1, 2)).sum().backward()
        hook.close()
        return str(told.value)

    assert tw.run_threads(2, train)[0].startswith("replica 1 closed its group")


@pytest.mark.parametrize(
    "strategy",
    [tw.diloco(), tw.Strategy(signal=tw.strategy.Gradients(), partition=tw.pieces.partition.BySize(2))],
    ids=str,
)
def test_strategies_that_ddp_cannot_run_are_refused(strategy):
    (group,) = tw.ThreadGroup.create(1)
    with pytest.raises(tw.ConfigurationError, match=r"DDP exchanges Gradients\(\), in its own buckets"):
        tw.GradientHook(strategy, torch.nn.Linear(2, 2), group)


def test_clipping_of_a_bucket_is_refused():
    (group,) = tw.ThreadGroup.create(1)
    with pytest.raises(tw.ConfigurationError, match="Clip would see a bucket"):
        tw.GradientHook(tw.lab.recipes.dgc(), torch.nn.Linear(2, 2), group)


def test_the_state_of_another_model_is_refused():
    (group,) = tw.ThreadGroup.create(1)
    hook = tw.GradientHook(tw.lab.recipes.ef14(), torch.nn.Linear(2, 2), group)
    with pytest.raises(tw.CheckpointError, match="belongs to another model"):
        hook.load_state({"head.weight/feedback.residual": torch.zeros(4)}, {"steps": 3})
    hook.close()
