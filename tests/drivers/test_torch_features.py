"""Features of torch in the loop around a Replica: each works, or is refused by name. docs/torch-features.md has the same table."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire as tw
from thinwire.drivers.inner_steps import as_one, optimizers_of
from thinwire.testing.toy import Toy, adamw, batch, fill, inner_step, same_bits, sgd, toy, weights

STEPS = 9


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def plain(attach, rank, make=toy, optimizer=adamw):
    model = make()
    made = optimizer(model)
    with attach(model, made):
        for step in range(1, STEPS + 1):
            inner_step(model, made, *batch(0, rank, step))
    return weights(model)


def scaled(attach, rank, optimizer=adamw, unscale=False):
    """Each replica overflows at a different step. A skipped step is no inner step, so all replicas continue to the same number."""
    model, scaler, taken, number = toy(), torch.amp.GradScaler("cpu", growth_interval=1000), 0, 0
    made = optimizer(model)
    with attach(model, made) as replica:
        while (taken if replica is None else replica.step) < STEPS:
            number += 1
            x, y = batch(0, rank, number)
            made.zero_grad()
            scaler.scale(loss_of(model, x * (float("inf") if number == 3 + rank else 1.0), y)).backward()
            if unscale:
                scaler.unscale_(made)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(made)
            scaler.update()
            taken += scaler.get_scale() == before
    assert taken < number
    return weights(model)


def accumulated(attach, rank):
    model = toy()
    optimizer = adamw(model)
    with attach(model, optimizer):
        for step in range(1, STEPS + 1):
            for micro in range(3):
                (loss_of(model, *batch(0, rank, 3 * step + micro)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def several(attach, rank):
    """Each optimizer has its own scheduler. They step one after the other, sometimes in another order."""
    model = toy()
    first, second = trained(model)[:4], trained(model)[4:]
    optimizers = [torch.optim.AdamW(first, lr=0.01), torch.optim.SGD(second, lr=0.05, momentum=0.9)]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9)
    with attach(model, optimizers) as replica:
        for step in range(1, STEPS + 1):
            loss_of(model, *batch(0, rank, step)).backward()
            for optimizer in optimizers[:: 1 if step % 2 else -1]:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            assert replica is None or replica.step == step
    return weights(model)


def closures(attach, rank):
    model = toy()
    optimizer = torch.optim.LBFGS(trained(model), lr=0.1, max_iter=3, history_size=2)

    def closure(step):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(0, rank, step))
        loss.backward()
        return loss

    with attach(model, optimizer) as replica:
        for step in range(1, STEPS + 1):
            optimizer.step(lambda step=step: closure(step))
        assert replica is None or replica.step == STEPS
    return weights(model)


def moving_average(attach, rank, agreed=True):
    """An average of the agreed weights every third step, or of the replica's own weights at every step."""
    model = toy()
    optimizer, ema = adamw(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with attach(model, optimizer) as replica:
        for step in range(1, STEPS + 1):
            inner_step(model, optimizer, *batch(0, rank, step))
            with replica.anchored() if agreed and replica else nullcontext():
                if not agreed or step % 3 == 0:
                    ema.update_parameters(model)
    return torch.cat([weights(model), weights(ema.module)])


def swapped(attach, rank, inside):
    """Averages of its own weights, swapped in for an evaluation and back out: inside `anchored`, or around it."""
    model = toy()
    optimizer, average = adamw(model), None
    with attach(model, optimizer) as replica:
        for step in range(1, STEPS + 1):
            inner_step(model, optimizer, *batch(0, rank, step))
            own = {name: value.clone() for name, value in model.state_dict().items()}
            average = {n: 0.9 * average[n] + 0.1 * v for n, v in own.items()} if average else own
            with replica.anchored() if replica and inside else nullcontext():
                before = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(average)
                with replica.anchored() if replica and not inside else nullcontext(), torch.no_grad():
                    loss_of(model, *batch(0, rank, step))
                model.load_state_dict(before)
    return weights(model)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization in the form that projects copy: an optimizer around another, whose `step` the loop never calls."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def held(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.held()]).norm()
        for p in self.held():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad, alpha=self.param_groups[0]["rho"] / float(norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.held():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


def sharpness_aware(attach, rank, given=lambda sam: sam):
    model = toy()
    sam = Sam(trained(model), torch.optim.AdamW, lr=0.01)
    with attach(model, given(sam)) as replica:
        for step in range(1, STEPS + 1):
            for update in (sam.first_step, sam.second_step):
                loss_of(model, *batch(0, rank, step)).backward()
                update()
        assert replica is None or replica.step == STEPS
    return weights(model)


class Tied(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


def parametrized():
    model = Toy()
    for layer in model.layers:
        parametrizations.weight_norm(layer)
    return fill(model)


def frozen_later(attach, rank):
    model = toy()
    optimizer = adamw(model)
    with attach(model, optimizer):
        for step in range(1, STEPS + 1):
            model.embed.requires_grad_(step < 4)
            inner_step(model, optimizer, *batch(0, rank, step))
    model.embed.requires_grad_(True)
    return weights(model)


def unfrozen_in_phases(attach, rank):
    """Makes a Replica for each phase. Between the phases, the parameters of the second are added to the optimizer."""
    model = toy()
    model.embed.requires_grad_(False)
    optimizer = adamw(model)
    for phase in (1, 2):
        with attach(model, optimizer):
            for step in range(1, STEPS + 1):
                inner_step(model, optimizer, *batch(phase, rank, step))
        if phase == 1:
            model.embed.requires_grad_(True)
            optimizer.add_param_group({"params": model.embed.parameters(), "lr": 0.02})
    return weights(model)


def with_options(kind=torch.optim.AdamW, **options):
    return lambda model: kind(trained(model), lr=0.01, **options)


class Placed(nn.Module):
    """A model with one layer on each of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.there(self.here(x).to(self.there.weight.device)).cpu()


def on_two_devices(attach, rank):
    model = fill(Placed())
    model.there.cuda()
    optimizer = adamw(model)
    with attach(model, optimizer):
        for step in range(1, STEPS + 1):
            inner_step(model, optimizer, *batch(0, rank, step))
    return weights(model.cpu())


# each replica has its own average; one compiler serves two threads
OWN, COMPILED = (
    "EMA of own weights",
    "torch.compile",
)
FEATURES = {
    "nothing": plain,
    COMPILED: lambda attach, rank: plain(attach, rank, lambda: torch.compile(toy(), backend="eager")),
    "GradScaler": scaled,
    "GradScaler, clipped": lambda attach, rank: scaled(attach, rank, unscale=True),
    "GradScaler, fused": lambda attach, rank: scaled(attach, rank, with_options(fused=True)),
    "accumulation": accumulated,
    "several optimizers": several,
    "LBFGS": closures,
    "EMA of the agreed weights": moving_average,
    OWN: lambda attach, rank: moving_average(attach, rank, agreed=False),
    "averages swapped within anchored": lambda attach, rank: swapped(attach, rank, inside=True),
    "averages swapped around anchored": lambda attach, rank: swapped(attach, rank, inside=False),
    "SAM": sharpness_aware,
    "the optimizer in SAM": lambda attach, rank: sharpness_aware(attach, rank, given=lambda sam: sam.base_optimizer),
    "tied weights": lambda attach, rank: plain(attach, rank, lambda: fill(Tied())),
    "parametrize": lambda attach, rank: plain(attach, rank, parametrized),
    "foreach": lambda attach, rank: plain(attach, rank, optimizer=with_options(foreach=True)),
    "fused": lambda attach, rank: plain(attach, rank, optimizer=with_options(fused=True)),
    "frozen later": frozen_later,
    "unfrozen in phases": unfrozen_in_phases,
}
if torch.cuda.is_available():
    FEATURES["several devices"] = on_two_devices


@pytest.mark.parametrize("name", FEATURES)
def test_law_11_one_replica_with_average_is_the_bare_loop(name):
    """The weights equal those of the bare loop, bit for bit."""
    bare = FEATURES[name](lambda model, optimizer: nullcontext(), 0)
    (group,) = tw.ThreadGroup.create(1)
    attached = FEATURES[name](lambda model, optimizer: tw.Replica(tw.local_sgd(every=3), model, optimizer, group), 0)
    assert torch.isfinite(bare).all() and same_bits(attached, bare)


@pytest.mark.parametrize("name", sorted(FEATURES.keys() - {OWN, COMPILED}))
def test_each_feature_leaves_two_replicas_equal(name):
    strategy = tw.streaming_diloco(every=4, fragments=2, delay=1)

    def replica(group):
        return FEATURES[name](lambda model, optimizer: tw.Replica(strategy, model, optimizer, group), group.rank)

    first, second = tw.run_threads(2, replica, timeout=600.0)
    assert same_bits(first, second) and torch.isfinite(first).all()


def test_weights_that_only_another_optimizer_has_trained_are_left_alone():
    """The Replica has the plain optimizer, the loop steps the SAM around another."""
    held = {}

    def replica(group):
        model, rank = toy(), group.rank

        def attach(model, sam):
            return tw.Replica(tw.local_sgd(every=3), model, adamw(model), group, observer=lambda *_, **__: None)

        sam = Sam(trained(model), torch.optim.AdamW, lr=0.01)
        with pytest.raises(tw.ModelError, match="seen no step of its optimizer"), attach(model, sam):
            for step in (1, 2, 3):
                for update in (sam.first_step, sam.second_step):
                    loss_of(model, *batch(0, rank, step)).backward()
                    update()
            held[rank] = weights(model).clone()
        assert same_bits(weights(model), held[rank]) and not same_bits(held[rank], weights(toy()))

    tw.run_threads(2, replica)


@pytest.mark.parametrize("fused", [False, True])
def test_exchanged_gradients_work_with_a_grad_scaler(fused):
    """A replica that skips a step takes it at its next batch, from the same weights. A fused unscaled step is refused on all replicas."""

    def replica(group):
        optimizer = with_options(fused=True) if fused else sgd
        return scaled(
            lambda *given: tw.Replica(tw.data_parallel(), *given, group), group.rank, optimizer, unscale=fused
        )

    assert same_bits(*tw.run_threads(2, replica, timeout=600.0))


def test_an_error_of_unequal_steps_names_the_scaler():
    """The loop runs over batches, of which one replica skips one."""

    def replica(group):
        model, scaler = toy(), torch.amp.GradScaler("cpu")
        optimizer = adamw(model)
        with tw.Replica(tw.local_sgd(every=4), model, optimizer, group):
            for step in range(1, STEPS):
                x, y = batch(0, group.rank, step)
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x * (float("inf") if step == 3 * group.rank else 1.0), y)).backward()
                scaler.step(optimizer)
                scaler.update()

    with pytest.raises(tw.DisagreementError, match=r"with a GradScaler.*go on until `replica.step`"):
        tw.run_threads(2, replica, timeout=600.0)


def test_several_optimizers_are_saved_and_loaded_as_one(tmp_path):
    """The resumed run equals an uninterrupted one, bit for bit."""
    from thinwire import checkpoint

    def train(group, folder, first, last):
        model = toy()
        optimizers = [with_options()(model.embed), with_options(torch.optim.RMSprop)(model.layers), adamw(model.head)]
        optimizers.append(torch.optim.SGD([model.gain, model.nothing], lr=0.1, momentum=0.5))
        replica = tw.Replica(tw.streaming_diloco(every=4, fragments=2, delay=2), model, optimizers, group)
        if first > 1:
            checkpoint.load(checkpoint.read(folder / str(group.rank) / f"step-{first - 1:08d}"), replica)
        for step in range(first, last + 1):
            loss_of(model, *batch(0, group.rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step == 5:
                assert replica.in_flight
                assert all(one.state_dict()["state"] for one in optimizers[:3]), "each can be saved by itself, too"
                checkpoint.save(folder / str(group.rank), replica, {})
        replica.finish()
        return weights(model)

    through = tw.run_threads(2, lambda group: train(group, tmp_path, 1, 11), timeout=600.0)
    resumed = tw.run_threads(2, lambda group: train(group, tmp_path, 6, 11), timeout=600.0)
    assert all(same_bits(a, b) for a, b in zip(through, resumed))


def test_several_optimizers_step_and_clear_gradients_as_one():
    x, y = (nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0))
    parts = [torch.optim.SGD([x], lr=1.0), torch.optim.SGD([y], lr=0.5, momentum=0.5)]
    one = as_one(parts)
    assert as_one(parts[:1]) is parts[0] and optimizers_of(one) == parts
    assert [part["param_groups"][0]["params"] for part in one.state_dict()["parts"]] == [[0], [0]]
    x.grad, y.grad = torch.ones(2), torch.ones(2)
    one.step()
    assert x.tolist() == [0.0, 0.0] and y.tolist() == [1.5, 1.5]
    assert list(one.state) == [y] and one.state[y] is parts[1].state[y]
    one.zero_grad(set_to_none=False)
    assert x.grad.tolist() == y.grad.tolist() == [0.0, 0.0]
    one.zero_grad()
    assert x.grad is None and y.grad is None


# ---- refused features


def attached(strategy=tw.local_sgd(every=3), model=None, optimizer=adamw):
    (group,) = tw.ThreadGroup.create(1)
    model = model or toy()
    made = optimizer(model)
    return model, made, tw.Replica(strategy, model, made, group)


@pytest.mark.parametrize(
    "strategy", [tw.data_parallel(), replace(tw.lab.recipes.gradient_tracking(), inner=None)], ids=["mean", "tracked"]
)
def test_gradients_that_have_a_graph_are_exchanged(strategy):
    """As after `backward(create_graph=True)`."""
    model, optimizer, replica = attached(strategy, optimizer=sgd)
    alone = toy()
    for one, steps in ((model, optimizer), (alone, sgd(alone))):
        used = [p for name, p in one.named_parameters() if p.requires_grad and name != "nothing"]
        for p, grad in zip(used, torch.autograd.grad(loss_of(one, *batch(0, 0, 1)), used, create_graph=True)):
            p.grad = grad
        steps.step()
    assert same_bits(weights(model), weights(alone))
    replica.close()


def test_a_parameter_group_added_later_is_refused():
    model, optimizer, replica = attached()
    inner_step(model, optimizer, *batch(0, 0, 1))
    before = weights(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(tw.ModelError, match=r"held 11 tensors when .* holds 12 now.*finish\(\) on all replicas"):
        inner_step(model, optimizer, *batch(0, 0, 2))
    assert same_bits(weights(model), before) and replica.step == 1, "before anything has changed"
    replica.close()


def test_parameters_unfrozen_later_are_refused():
    model, optimizer, replica = attached(optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    inner_step(model, optimizer, *batch(0, 0, 1))
    model.frozen.requires_grad_(True)
    with pytest.raises(tw.ModelError, match=r"shape \(5,\) was frozen .* is trained now.*attach a new Replica"):
        inner_step(model, optimizer, *batch(0, 0, 2))
    replica.close()


def test_parameters_outside_the_model_are_refused():
    def beside(model):
        return torch.optim.AdamW([*trained(model), nn.Parameter(torch.ones(3, 2))])

    with pytest.raises(
        tw.ModelError, match=r"1 tensors that are not the model's .*\(3, 2\).*a module around the model"
    ):
        attached(optimizer=beside)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skipped", ["a", "b"])
def test_a_scaler_may_skip_the_step_of_one_of_two_optimizers(skipped, fused):
    """On one replica only, and more than once: the others' inner steps still count, and all end with the same weights."""

    def trained(group: tw.Group) -> nn.Module:
        data = torch.Generator().manual_seed(group.rank)
        model = nn.ModuleDict({name: nn.Linear(8, 1) for name in "ab"})
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
        both = [torch.optim.AdamW(model[name].parameters(), lr=0.01, fused=fused) for name in "ab"]
        scaler, batches = torch.amp.GradScaler("cpu", init_scale=8.0), 0
        with tw.Replica(tw.local_sgd(every=4), model, both, group) as replica:
            while replica.step < 12:
                batches += 1
                x = torch.randn(16, 8, generator=data)
                for name in "ab":
                    bad = name == skipped and group.rank == 0 and batches in (3, 5, 8)
                    scaler.scale(model[name](x).square().mean() * (float("inf") if bad else 1.0)).backward()
                for optimizer in both:
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in both:
                    optimizer.zero_grad()
        return model

    one, other = tw.run_threads(2, trained, timeout=60)
    assert all(torch.equal(p, q) and bool(p.isfinite().all()) for p, q in zip(one.parameters(), other.parameters()))


def test_optimizers_that_step_unequally_are_refused():
    """For example, in a GAN whose discriminator steps more often."""

    def two(model):
        return [
            sgd(model.embed),
            torch.optim.SGD([p for p in trained(model) if p not in set(model.embed.parameters())]),
        ]

    _, optimizers, replica = attached(optimizer=two)
    optimizers[0].step()
    with pytest.raises(tw.ModelError, match=r"stepped twice while another has not.*equally often"):
        optimizers[0].step()
    replica.close()
    model, optimizers, replica = attached(tw.data_parallel(), optimizer=two)
    loss_of(model, *batch(0, 0, 1)).backward()
    with pytest.raises(tw.ModelError, match=r"2 optimizers with Gradients\(\).*replica.exchange_gradients\(\)"):
        optimizers[1].step()
    replica.exchange_gradients()
    for optimizer in optimizers:
        optimizer.step()
    assert replica.step == 1
    with pytest.raises(tw.ModelError, match=r"2 optimizers with Gradients\(\)"):
        optimizers[0].step()
    replica.close()
    with pytest.raises(tw.ModelError, match=r"does not hold 2 of the model's .*embed\.weight"):
        attached(optimizer=lambda model: two(model)[1])
    with pytest.raises(tw.ModelError, match="empty list of optimizers"):
        attached(optimizer=lambda model: [])


def test_scaled_gradients_are_refused():
    """A fused optimizer unscales inside its step, which is after the exchange."""
    model, optimizer, replica = attached(tw.data_parallel(), optimizer=with_options(fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, *batch(0, 0, 1))).backward()
    with pytest.raises(tw.ModelError, match=r"unlike scales; call scaler.unscale_\(optimizer\) before"):
        scaler.step(optimizer)
    replica.close()
