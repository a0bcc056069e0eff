"""Replicas on different processors hold the same bits. The processor is real; environment variables tell torch, MKL, glibc and numba
to use the loops of another generation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from core_processes import FOUR, NEW, OLD, UNLIKE, run_world
from strategies import METHODS

import thinwire as tw
from thinwire.codecs.exact import root
from thinwire.comm import CountedGroup, Ledger
from thinwire.drivers.module_state import clip_alike
from thinwire.testing.toy import Journey, Plan, adamw, batch, fill, inner_step, same_bits, toy, travel, weights

FEW = {
    "moments": tw.Strategy(
        schedule=tw.pieces.schedule.Every(2),
        filters=(tw.pieces.transforms.Moments(beta2=0.5, freeze=tw.pieces.transforms.Settled(0.5, 3)),),
        codec=tw.codecs.Sign("l2"),
        feedback=tw.pieces.feedback.Feedback(),
        exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()),
    ),
    "one_bit_adam": METHODS["one_bit_adam"],
    "data_parallel": METHODS["data_parallel"],
}


def few(rank: int) -> dict[str, Journey]:
    group = tw.TorchGroup.from_world(replicas=2, timeout=600.0)
    return {name: travel(Plan(strategy), group) for name, strategy in FEW.items()}


def all_of_them(rank: int) -> dict[str, Journey]:
    group = tw.TorchGroup.from_world(replicas=4, timeout=600.0)
    return {name: travel(Plan(strategy), group) for name, strategy in FOUR.items()}


def check_agreed(strategy: tw.Strategy, journeys: list[Journey]) -> None:
    """Checks the anchors after every step, and the weights at the end. If a torch optimizer steps from gradients, weights may drift
    between two comparisons, which are further apart than these runs are long.
    """
    drifts = isinstance(strategy.signal, tw.strategy.Gradients) and strategy.inner is None
    for one in journeys:
        for step, (a, b) in enumerate(zip(one.agreed, journeys[0].agreed, strict=True), 1):
            assert a.keys() == b.keys()
            apart = [key for key in a if not same_bits(a[key], b[key])]
            assert not [key for key in apart if not (drifts and key.endswith(".now"))], f"after step {step}"
        assert bool(torch.isfinite(one.final).all()), "trained"
        assert drifts or same_bits(one.final, journeys[0].final), "at the end"
        torch.testing.assert_close(one.final, journeys[0].final)


def test_two_unlike_processors_agree(tmp_path):
    world = run_world(few, tmp_path, machines=(OLD, NEW))
    for name, strategy in FEW.items():
        check_agreed(strategy, [results[name] for results in world])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return run_world(all_of_them, tmp_path_factory.mktemp("unlike"), machines=UNLIKE)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_every_recipe_runs_on_unlike_processors(world, name):
    check_agreed(FOUR[name], [results[name] for results in world])


# ---- replicas that take their steps separately


def nudge(model: torch.nn.Module) -> None:
    """Changes weights as another processor would, but by more, so that the change stays."""
    next(iter(model.parameters())).detach().add_(1e-4)


def test_drift_is_reported_once_and_corrected():
    """The comparison is every hundred steps, and every byte of it is predicted."""
    ledgers = [Ledger(), Ledger()]

    def replica(group):
        model, told, seen = fill(torch.nn.Linear(3, 1)), [], []
        optimizer, counted = adamw(model), CountedGroup(group, ledgers[group.rank])

        def observer(event, step, **fields):
            if event == "warning":
                told.append((step, fields["message"]))

        with tw.Replica(tw.data_parallel(), model, optimizer, counted, observer=observer):
            for step in range(1, 201):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                if group.rank == 1 and step in (7, 107):
                    nudge(model)
                seen.append(weights(model))
        return told, seen, weights(model)

    (told, first, final), (also, second, other) = tw.run_threads(2, replica, timeout=600.0)
    assert told == also and [step for step, _ in told] == [100] and "have drifted apart" in told[0][1]
    alike = [step for step, pair in enumerate(zip(first, second), 1) if same_bits(*pair)]
    assert alike == [*range(1, 7), *range(100, 107), 200]
    assert same_bits(final, other) and same_bits(final, first[-1]), "replica 0's"
    whole = 4 * final.numel()
    assert [ledger.sent("comparison") for ledger in ledgers] == [2 * (24 + whole) + 24, 3 * 24]  # and at the end


def test_a_resume_keeps_drifted_weights():
    """The resumed run equals an uninterrupted one: weights that differ by a bit still do. Weights other than the saved ones are detected."""

    def steps(group, replica, upto):
        seen = []
        while replica.step < upto:
            inner_step(replica.model, replica.optimizer, *batch(0, group.rank, replica.step + 1))
            seen.append(weights(replica.model))
        return seen

    def replica(group):
        model, again = toy(), toy()
        with tw.Replica(tw.data_parallel(), model, adamw(model), group) as whole:
            steps(group, whole, 3)
            if group.rank == 1:
                nudge(model)
            saved = copy.deepcopy((model.state_dict(), whole.optimizer.state_dict(), *whole.state()))
            due = steps(group, whole, 6)
        resumed = tw.Replica(tw.data_parallel(), again, adamw(again), group)
        again.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        resumed.load_state(*saved[2:])
        got = steps(group, resumed, 6)
        if group.rank == 1:
            nudge(again)
        with pytest.raises(tw.DisagreementError, match="replica 1 resumes at step 3, with other"):
            resumed.load_state(*saved[2:])
        resumed.close()
        return due, got

    (due, got), (other_due, other_got) = tw.run_threads(2, replica, timeout=600.0)
    assert all(map(same_bits, due, got)) and all(map(same_bits, other_due, other_got))
    assert not any(map(same_bits, due, other_due))


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_sgd_rounds_each_operation_separately(momentum, decay):
    """The reference is numpy's fp32, which fuses no operations. torch's SGD is close to it, and loads its state."""
    model, plain = torch.nn.Linear(40, 25), torch.nn.Linear(40, 25)
    plain.load_state_dict(model.state_dict())
    own = tw.pieces.inner_optimizers.SGD(momentum).make(model, 0.05, decay)
    torchs = torch.optim.SGD(plain.parameters(), 0.05, momentum=momentum, weight_decay=decay * (1 - momentum))
    weight, velocity, f32 = model.weight.detach().numpy().copy(), None, np.float32
    for step in range(4):
        for p, q in zip(model.parameters(), plain.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        g = model.weight.grad.numpy()
        g = g + weight * f32(decay * (1 - momentum)) if decay else g
        velocity = g if velocity is None else velocity * f32(momentum) + g
        weight = weight - (velocity if momentum else g) * f32(0.05)
        own.step()
        torchs.step()
        assert model.weight.detach().numpy().tobytes() == weight.tobytes()
        torch.testing.assert_close(model.weight, plain.weight)
    torchs.load_state_dict(own.state_dict())


def test_moments_round_each_operation_separately():
    moments, f32 = tw.pieces.transforms.Moments(beta1=0.9, beta2=0.99, freeze=9), np.float32
    state, m, v = moments.init(1000), np.zeros(1000, f32), np.zeros(1000, f32)
    for mean in torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)):
        estimate, state = moments.settle(mean, mean, mean, state, {})
        m = m * f32(0.9) + mean.numpy() * f32(1 - 0.9)
        v = v * f32(0.99) + mean.numpy() * mean.numpy() * f32(1 - 0.99)
        assert (m.tobytes(), v.tobytes()) == tuple(state[name].numpy().tobytes() for name in ("average", "square"))
        assert estimate.numpy().tobytes() == (m / (np.sqrt(v) + f32(1e-8))).tobytes()


def test_square_roots_are_rounded_as_in_ieee_754():
    """It tests every eighth number of two binades, and the ends."""
    binades = torch.arange(127 << 23, 129 << 23, 8, dtype=torch.int32).view(torch.float32)
    x = torch.cat([binades, torch.tensor([0.0, 1e-45, 1e-38, 3.4e38, torch.inf])])
    assert root(x).numpy().tobytes() == np.sqrt(x.numpy()).tobytes()


def test_clipping_matches_torch():
    model = torch.nn.Linear(30, 20)
    for most in (0.5, 1e9, torch.inf):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert clip_alike(model.parameters(), most) == pytest.approx(620**0.5)
        assert torch.cat([p.grad.view(-1) for p in model.parameters()]).norm().item() == pytest.approx(
            min(most, 620**0.5)
        )
