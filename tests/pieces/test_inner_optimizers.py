"""Inner optimizers: which one a method accepts, Muon against torch, and sharpness-aware minimisation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import ConfigurationError, ModelError
from thinwire.pieces import inner_optimizers
from thinwire.pieces.inner_optimizers import SAM, SGD, AdamW, Muon, SharpnessAware, UnfusedSGD, at_the_worst_point
from thinwire.testing.toy import batch, fill, inner_step, same_bits, toy

RADIUS, LR = 0.3, 0.1

# ---- sharpness-aware minimisation: two gradients per step, weights and buffers that the perturbation leaves unchanged


class Quadratic(nn.Module):
    """The loss ½·x'Ax with x in two parameters, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        half = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.a = half @ half.T
        start = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.first, self.rest = nn.Parameter(start[:2].clone()), nn.Parameter(start[2:].clone())
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    @property
    def x(self) -> Tensor:
        return torch.cat([self.first, self.rest])

    def forward(self) -> Tensor:
        self.calls += 1
        return self.x @ self.a @ self.x / 2


def by_closure(model: Quadratic, optimizer: SharpnessAware) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return float(loss.detach())

    return optimizer.step(closure) or 0.0


def by_two_calls(model: Quadratic, optimizer: SharpnessAware) -> float:
    def backward() -> float:
        loss = model()
        loss.backward()
        return float(loss.detach())

    loss = at_the_worst_point(optimizer, backward)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("train", [by_closure, by_two_calls])
def test_a_step_follows_the_equation_and_moves_buffers_once(train) -> None:
    """x − η·A·(x + ρ·Ax/‖Ax‖) with the norm over both parameters. The loss is the one at x."""
    model = Quadratic()
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), lr=LR), model, RADIUS)
    for step in range(1, 4):
        x = model.x.detach()
        g = model.a @ x
        due = x - LR * model.a @ (x + RADIUS * g / g.norm())
        assert train(model, optimizer) == pytest.approx(float(x @ g / 2))
        torch.testing.assert_close(model.x.detach(), due, rtol=1e-12, atol=1e-12)
        assert float(model.calls) == step


@pytest.mark.parametrize("inner", [SGD(), Muon()], ids=str)
def test_hooks_of_a_step_run_once(inner) -> None:
    """torch wraps the `step` of each class of which there is an optimizer, so that of the parent class, too."""
    model, steps = toy(), []
    Muon().make(model, 0.01, 0.1)
    optimizer = SAM(inner).make(model, 0.01, 0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    inner_step(model, optimizer, *batch(0, 0, 0))
    assert steps == [1]


def test_settings_of_the_optimizers_that_are_made() -> None:
    """Rates are multiplied by `lr_factor`. SGD's weight decay is divided by what momentum and `lr_factor` add."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made: list[tuple[torch.optim.Optimizer, dict[str, object]]] = [
        (AdamW(0.5, 0.75).make(model, 0.1, 0.2), {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.2, "fused": True}),
        (SGD(0.75, 4.0).make(model, 0.5, 0.25), {"lr": 2.0, "momentum": 0.75, "weight_decay": 0.015625}),
    ]
    for optimizer, due in made:
        assert {name: optimizer.param_groups[0][name] for name in due} == due
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_sgd_with_separate_rounding_is_torchs_within_rounding() -> None:
    """v ← μ·v + g + λ·θ; θ ← θ − η·v. A parameter without a gradient stays."""
    for momentum, decay in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (0.5, 0.25)):
        models = [nn.ParameterList([torch.ones(3), torch.ones(2)]) for _ in range(2)]
        own = UnfusedSGD(models[0].parameters(), lr=0.25, momentum=momentum, weight_decay=decay)
        usual = torch.optim.SGD(models[1].parameters(), lr=0.25, momentum=momentum, weight_decay=decay)
        for scale in (1.0, -2.0, 0.5):
            for model in models:
                model[0].grad = scale * torch.tensor([1.0, 2.0, 4.0])
            assert own.step(lambda scale=scale: scale) == scale
            usual.step()
        torch.testing.assert_close(models[0][0].detach(), models[1][0].detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(models[0][1], torch.ones(2))
        kept, due = (one.state[model[0]].get("momentum_buffer") for one, model in zip((own, usual), models))
        assert (kept is None) == (momentum == 0.0) and (kept is None or torch.equal(kept, due))


def test_radius_zero_and_gradients_that_are_not_finite_perturb_no_weights() -> None:
    plain, sharp = Quadratic(), Quadratic()
    optimizers = SGD(0.9).make(plain, LR, 0.01), SAM(SGD(0.9), 0.0).make(sharp, LR, 0.01)
    assert isinstance(optimizers[1], SharpnessAware)
    for _ in range(5):
        optimizers[0].zero_grad()
        plain().backward()
        optimizers[0].step()
        by_closure(sharp, optimizers[1])
    assert torch.equal(plain.x, sharp.x)
    sharp().backward()
    before = sharp.x.detach().clone()
    for value in (torch.nan, torch.inf):
        sharp.zero_grad()
        sharp().backward()
        sharp.rest.grad.fill_(value)
        with optimizers[1].perturbed():
            assert torch.equal(sharp.x, before)


def test_a_failed_backward_restores_the_weights_and_forbids_the_step() -> None:
    model = Quadratic()
    optimizer = SAM(SGD()).make(model, LR, 0.0)
    assert isinstance(optimizer, SharpnessAware)
    before = model.x.detach().clone()
    model().backward()
    with pytest.raises(ZeroDivisionError), optimizer.perturbed():
        assert not torch.equal(model.x, before)
        raise ZeroDivisionError
    optimizer.step()  # without gradients it skips the update
    assert torch.equal(model.x, before)
    with pytest.raises(ZeroDivisionError), optimizer.perturbed():
        model().backward()
        raise ZeroDivisionError
    with pytest.raises(ModelError, match="no backward inside perturbed"):
        optimizer.step()


@pytest.mark.parametrize("inner", [SGD(0.9), Muon()], ids=str)
def test_a_step_with_no_gradient_skips_the_update(inner) -> None:
    """After a NaN, say, without `perturbed`. With a gradient of which that was not asked the step is still refused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = SAM(inner).make(model, LR, 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.full((1, 2), torch.nan)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before)) and not optimizer.state_dict()["state"]
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ModelError, match="no backward inside perturbed"):
        optimizer.step()


def test_invalid_settings_and_optimizers_are_refused() -> None:
    model = nn.Linear(2, 1)
    for wrong in (lambda: SAM(radius=-0.1), lambda: SAM(radius=float("inf")), lambda: SAM(SAM())):
        with pytest.raises(ConfigurationError, match=r"is needed|are usual"):
            wrong()
    with pytest.raises(ConfigurationError, match="SharpnessAware"):
        SAM().check(AdamW().make(model, LR, 0.0))
    with pytest.raises(ConfigurationError, match=r"radius=0\.02"):
        SAM(radius=0.02).check(SAM(radius=0.01).make(model, LR, 0.0))
    with pytest.raises(ConfigurationError, match="momentum"):
        SAM(SGD(0.9)).check(SAM(SGD()).make(model, LR, 0.0))


# ---- the inner optimizer of a method, and Muon


def attach(strategy, optimizer, model=None):
    model = model or torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    (group,) = tw.ThreadGroup.create(1)
    tw.Replica(strategy, model, optimizer(model), group).close()


def sgd(momentum):
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def adamw(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("strategy", "optimizer", "message"),
    [
        (
            tw.lab.recipes.dgc(),
            adamw,
            r"inner optimizer is SGD\(momentum=0.0, .*AdamW was given; give torch.optim.SGD, or leave inner=None",
        ),
        (tw.lab.recipes.dgc(), sgd(0.9), r"has momentum 0.9; give torch.optim.SGD\(..., momentum=0.0\)"),
        (tw.lab.recipes.one_bit_adam(), adamw, "AdamW was given"),
        (tw.lab.recipes.demo(), adamw, "AdamW was given"),
        (
            tw.recipes.muloco(),
            adamw,
            r"inner optimizer is Muon\(.*AdamW was given; give what thinwire.pieces.inner_optimizers.Muon\(\).make",
        ),
        (
            tw.Strategy(signal=tw.strategy.Gradients(), filters=(tw.pieces.transforms.Momentum(),)),
            sgd(0.9),
            r"keeps momentum before the exchange and SGD after it, one owner is needed",
        ),
        (
            tw.Strategy(signal=tw.strategy.Gradients(), filters=(tw.pieces.transforms.Moments(),)),
            adamw,
            "and AdamW after it, one owner is needed",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_by_name(strategy, optimizer, message):
    with pytest.raises(tw.ConfigurationError, match=message):
        attach(strategy, optimizer)


def test_fitting_optimizers_are_accepted():
    attach(tw.lab.recipes.dgc(), sgd(0.0))
    attach(tw.lab.recipes.outer_dgc(), adamw)  # deltas are sent, so the inner optimizer may keep momentum
    attach(tw.Strategy(signal=tw.strategy.Gradients(), filters=(tw.pieces.transforms.Momentum(),)), sgd(0.0))
    filtered = tw.Strategy(signal=tw.strategy.Gradients(), filters=(tw.pieces.transforms.Moments(),))
    attach(filtered, lambda model: torch.optim.AdamW(model.parameters(), betas=(0.0, 0.9)))
    attach(tw.recipes.muloco(), lambda model: tw.pieces.inner_optimizers.Muon().make(model, 0.1, 0.0))


def test_a_sharded_replica_refuses_clipping():
    with pytest.raises(tw.ConfigurationError, match="needs the norm of a whole replica's signal"):
        tw.lab.recipes.dgc().check_inner(sgd(0.0)(torch.nn.Linear(2, 2)), sharded=True)
    tw.lab.recipes.dgc(clip=0.0).check_inner(sgd(0.0)(torch.nn.Linear(2, 2)), sharded=True)


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest():
    """Also if the model consists of layers only, or of matrices only. A matrix that is sharded is refused."""
    mixed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(3, 3))
    for model, matrices in (
        (mixed, [mixed[1].weight]),
        (nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in "ab")), []),
    ):
        matrices = matrices or list(model.parameters())
        muon, *rest = Muon(0.5).make(model, 0.25, 0.125).parts
        due = [p for p in model.parameters() if not any(p is m for m in matrices)]
        for part, parameters in ((muon, matrices), *((one, due) for one in rest)):
            (group,) = part.param_groups
            assert list(map(id, group["params"])) == list(map(id, parameters))
            assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
        assert len(rest) == bool(due) and muon.param_groups[0]["momentum"] == 0.5
    for fits in (muon, Muon().make(model, 0.1, 0.0)):
        Muon().check(fits)
    with pytest.raises(ConfigurationError, match="AdamW was given"):
        Muon().check(adamw(model))


def test_sharded_matrices_are_refused_and_whole_gradients_needed(monkeypatch):
    model, sharded = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    monkeypatch.setattr(inner_optimizers, "is_sharded", lambda p: any(p is one for one in sharded))
    SAM().make(model, 0.1, 0.0)
    sharded.append(model[1].bias)
    Muon().make(model, 0.1, 0.0)
    with pytest.raises(ConfigurationError, match="the norm of all its gradients is needed"):
        SAM().make(model, 0.1, 0.0)
    sharded.append(model[0].weight)
    with pytest.raises(ConfigurationError, match="whole matrices are needed"):
        Muon().make(model, 0.1, 0.0)


@pytest.mark.parametrize("inner", [SGD(), Muon(), SAM(SGD())], ids=str)
def test_a_step_with_a_closure_computes_gradients_and_returns_the_first_loss(inner):
    """Also where the caller has turned gradients off."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))
    unused = nn.Parameter(torch.ones(1))
    model.register_parameter("unused", unused)
    optimizer, losses = inner.make(model, 0.01, 0.1), []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        return losses[-1]

    with torch.no_grad():
        returned = [optimizer.step(closure) for _ in range(3)]
    each = 2 if isinstance(inner, SAM) else 1
    assert returned == losses[::each] and len(losses) == 3 * each and returned[2] < returned[0]
    assert unused.item() == 1.0, "a parameter without a gradient stays"
    if isinstance(inner, SAM):
        with pytest.raises(ModelError, match=r"no backward inside perturbed"):
            optimizer.step()  # once more, along the gradient of the step before


@pytest.mark.parametrize("inner", [SGD(0.9), AdamW(), Muon(), *map(SAM, (SGD(0.9), AdamW(), Muon()))], ids=str)
def test_a_loaded_state_continues_with_the_same_bits(inner):
    """Also after a scheduler has changed the learning rate of the loaded one."""
    models = [fill(nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))) for _ in range(2)]
    first, second = (inner.make(model, 0.01, 0.1) for model in models)

    def train(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        loss = at_the_worst_point(optimizer, lambda: backward(model, optimizer))
        optimizer.step()
        return loss

    def backward(model, optimizer):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        train(models[0], first)
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [train(models[0], first) for _ in range(3)] == [train(models[1], second) for _ in range(3)]


def test_muon_without_matrices_is_refused():
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4))
    with pytest.raises(tw.ModelError, match="matrices inside a list of layers are needed"):
        tw.pieces.inner_optimizers.Muon().make(model, 0.1, 0.0)


def test_muon_has_the_bits_of_torchs_muon_and_adamw_and_resumes():
    """Muon trains the matrices of the layers, AdamW all other parameters. A loaded state continues with the same bits."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def filled():
        torch.manual_seed(0)
        return Model()

    def train(model, *optimizers):
        for seed in range(3):
            torch.manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            for optimizer in optimizers:
                optimizer.step()

    one, apart = filled(), filled()
    both = tw.pieces.inner_optimizers.Muon().make(one, 0.02, 0.1)
    matrices = [layer.weight for layer in apart.layers]
    rest = [p for p in apart.parameters() if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, 0.02, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    train(one, both)
    train(apart, muon, adam)
    again = filled()
    again.load_state_dict(one.state_dict())
    loaded = tw.pieces.inner_optimizers.Muon().make(again, 1.0, 0.0)
    loaded.load_state_dict(copy.deepcopy(both.state_dict()))
    for group in loaded.param_groups + both.param_groups + muon.param_groups + adam.param_groups:
        group["lr"] = 0.01
    train(one, both)
    train(apart, muon, adam)
    train(again, loaded)
    for a, b, c in zip(one.parameters(), apart.parameters(), again.parameters()):
        assert same_bits(a.detach(), b.detach()) and same_bits(a.detach(), c.detach())
