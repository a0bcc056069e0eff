"""FedAvg, SCAFFOLD, SCALLION and SCAFCOM: their equations, the sum of control variates, convergence, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from loops import LOOPS, ToyRun, attach, train_toys, train_until
from torch import Tensor, nn

import thinwire as tw
from thinwire.lab.methods import Controlled, ControlVariates, Gain, fedavg, scafcom, scaffold, scallion
from thinwire.testing.toy import same_bits, toy

N, S, K, D, LR = 20, 4, 5, 20, 0.05


class Problem:
    """N different quadratics ½·(y − bᵢ)·Aᵢ·(y − bᵢ) with Aᵢ diagonal. The minimum of their mean is known."""

    def __init__(self, replicas: int = N, dimensions: int = D) -> None:
        generator = torch.Generator().manual_seed(1)
        self.a = torch.rand(replicas, dimensions, generator=generator) * 2 + 0.1
        self.b = torch.randn(replicas, dimensions, generator=generator) * 3
        self.best = (self.a * self.b).double().sum(0) / self.a.double().sum(0)

    def gradient(self, rank: int, y: Tensor) -> Tensor:
        return self.a[rank] * (y - self.b[rank])

    def distance(self, y: Tensor) -> float:
        return float(((y.double() - self.best) ** 2).sum())


def solve(
    method: ControlVariates, rounds: int, problem: Problem, replicas: int = N, lr: float = LR
) -> list[Controlled]:
    def replica(group: tw.Group) -> Controlled:
        model = nn.Linear(problem.a.shape[1], 1, bias=False)
        nn.init.zeros_(model.weight)
        at = method.attach(model, torch.optim.SGD(model.parameters(), lr=lr), group)
        for _ in range(rounds * method.every):
            if at.idle:
                at.skip()
                continue
            model.weight.grad = problem.gradient(group.rank, model.weight.detach()[0])[None]
            at.optimizer.step()
        return at

    return tw.run_threads(replicas, replica, timeout=600.0)


def test_scaffold_matches_option_2_of_its_paper():
    """The reference in fp64 sends both yᵢ and cᵢ; this implementation sends one vector."""
    problem, method, rounds = Problem(4, 7), scaffold(every=K, sampled=2, outer_lr=0.8), 8
    x, c, own = torch.zeros(7).double(), torch.zeros(7).double(), torch.zeros(4, 7).double()
    names = tuple(map(str, range(4)))
    for round_ in range(rounds):
        chosen = [int(name) for name in method.draw(names, round_)]
        moves, changes = [], []
        for i in chosen:
            y = x.clone()
            for _ in range(K):
                y -= LR * (problem.a[i].double() * (y - problem.b[i].double()) - own[i] + c)
            new = own[i] - c + (x - y) / (K * LR)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
        x = x + method.outer_lr * torch.stack(moves).mean(0)
        c = c + torch.stack(changes).sum(0) / 4
    ended = solve(method, rounds, problem, 4)
    assert torch.allclose(ended[3].x.double(), x, rtol=0, atol=2e-5) and torch.allclose(
        ended[0].c.double(), c, atol=2e-5
    )
    assert all(torch.allclose(at.own.double(), own[i], atol=5e-5) for i, at in enumerate(ended))


def test_scafcom_with_beta_1_and_no_codec_is_scaffold():
    problem = Problem(5, 9)
    one = solve(scaffold(every=K, sampled=3), 10, problem, 5)
    other = solve(scafcom(every=K, sampled=3, beta=1.0, codec=tw.codecs.Identity()), 10, problem, 5)
    assert torch.allclose(one[0].x, other[0].x, atol=1e-5) and torch.allclose(one[0].c, other[0].c, atol=1e-4)


def test_fedavg_of_one_step_is_gradient_descent():
    problem, x = Problem(3, 8), torch.zeros(8)
    for _ in range(20):
        x = x - LR * torch.stack([problem.gradient(rank, x) for rank in range(3)]).mean(0)
    assert torch.allclose(solve(fedavg(every=1), 20, problem, 3)[1].x, x, atol=1e-5)


@pytest.mark.parametrize("name", ["scaffold", "scallion", "scafcom", "scafcom, one"])
def test_c_is_the_mean_of_the_replicas_control_variates(name):
    for steps in (3, 6, 7, 12):
        at = [trained.attached for trained in train_toys(LOOPS[name], 3, steps=steps)]
        assert all(same_bits(one.c, at[0].c) and same_bits(one.x, at[0].x) for one in at)
        mean = torch.stack([one.own.double() for one in at]).mean(0)
        assert at[0].c.abs().max() > 1e-3 and float((at[0].c - mean).abs().max()) < 1e-6


def test_only_sampled_replicas_send_and_update_their_control_variate():
    method = scafcom(every=2, sampled=1, codec=tw.codecs.TopK(0.5))
    replicas, names = train_toys(method, 3, steps=8), ("0", "1", "2")
    drawn = [method.draw(names, round_) for round_ in range(4)]
    assert len(set(drawn)) > 1 and all(len(chosen) == 1 for chosen in drawn)
    for trained in replicas:
        sent = [event["nbytes"] > 0 for event in trained.heard("depart")]
        assert sent == [(trained.attached.name,) == chosen for chosen in drawn]
        assert bool(trained.attached.own.any()) == any(sent)


def test_replicas_are_sampled_uniformly():
    method, names = fedavg(sampled=3), tuple("abcdefghij")
    counts = dict.fromkeys(names, 0)
    for round_ in range(2000):
        for name in method.draw(names, round_):
            counts[name] += 1
    assert sum(counts.values()) == 6000 and all(abs(count - 600) < 5 * math.sqrt(600) for count in counts.values())


def test_steps_without_gradients_and_changing_rates_are_counted():
    """aᵢ is the mean gradient over the steps with a gradient. It is 1 in each of them, so x is −Ση."""
    rates = (0.1, 0.2, 0.4)

    def replica(group: tw.Group) -> Controlled:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        at = fedavg(every=3).attach(model, torch.optim.SGD(model.parameters(), lr=1.0), group)
        for step, rate in enumerate(rates):
            at.optimizer.param_groups[0]["lr"] = rate
            model.weight.grad = None if step == 1 and group.rank else torch.ones(1, 1)
            at.optimizer.step()
        return at

    assert all(at.x.item() == pytest.approx(-sum(rates)) for at in tw.run_threads(2, replica))


def test_a_gradient_is_corrected_once():
    at = train_toys(LOOPS["scaffold"], 2, steps=3)[0].attached
    seen = (at.c - at.own).abs().max()
    assert seen > 0
    (group,) = tw.ThreadGroup.create(1)
    model = toy()
    trained = attach(ToyRun(scaffold(every=9)), group, model).attached
    trained.own = torch.ones_like(trained.own)
    for parameter in trained.parameters:
        parameter.grad = torch.zeros_like(parameter)
    trained.exchange_gradients()
    trained.exchange_gradients()
    assert all(bool((parameter.grad == -1).all()) for parameter in trained.parameters)


def test_invalid_settings_are_refused():
    for codec in (
        tw.codecs.TopK(),
        tw.codecs.Sign(),
        tw.codecs.E3M0(),
        tw.codecs.RandomK(0.5, tw.codecs.E3M0()),
        tw.codecs.DCT(tw.codecs.ChunkedTopK()),
    ):
        with pytest.raises(tw.ConfigurationError, match="unbiased codec is needed"):
            scallion(codec=codec)
    with pytest.raises(tw.ConfigurationError, match="contractive codec is needed"):
        scafcom(codec=tw.codecs.RandomK())
    for wrong in ({"every": 0}, {"sampled": 0}, {"outer_lr": math.nan}, {"codec": tw.codecs.TopK}):
        with pytest.raises(tw.ConfigurationError):
            fedavg(**wrong)
    for wrong in (0.0, 1.5, math.nan):
        with pytest.raises(tw.ConfigurationError):
            Gain(wrong)
    with pytest.raises(tw.ConfigurationError, match="sampled=3 of 2"):
        train_toys(fedavg(sampled=3), 2)
    (group,) = tw.ThreadGroup.create(1)
    own = [p for p in toy().parameters() if p.requires_grad]
    model = toy()
    with pytest.raises(tw.ModelError):
        fedavg().attach(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), group)
    assert own


def test_a_replica_with_an_older_control_variate_is_refused():
    """It comes back from a checkpoint older than its last counted round, so the others count with a newer cᵢ."""
    run, groups = ToyRun(LOOPS["scaffold"], names=("a", "b")), [tw.ThreadGroup.create(2, 20.0) for _ in range(2)]

    def replica(group: tw.Group) -> str:
        trained = attach(run, groups[0][group.rank])
        train_until(run, trained, group, 3)
        tensors, facts = trained.attached.state()
        train_until(run, trained, group, 6)
        if group.rank:
            at, (old, behind) = trained.attached, (tensors, facts)
            at.x, at.c, at.own, at.v = (old[name] for name in ("x", "c", "own", "v"))
            at.step, at.rounds, at._counted = behind["step"], behind["rounds"], behind["counted"]
        with pytest.raises(tw.DisagreementError) as caught:
            trained.attached.meet(groups[1][group.rank], ("a", "b"))
        return str(caught.value)

    first, second = tw.run_threads(2, replica)
    assert "continued separately" in first and "differs from the one that the others count with" in second


def test_a_round_that_reached_only_one_replica_is_taken_over():
    """Replica a has all packets of the round and counted b's dᵢ. When they meet, b takes over x and c."""
    run, first, second = (
        ToyRun(LOOPS["scafcom"], names=("a", "b")),
        tw.ThreadGroup.create(2, 1.0),
        tw.ThreadGroup.create(2, 20.0),
    )

    class LosesSecondRound:
        """A group that receives no packet of the second round."""

        def __init__(self, group: tw.Group) -> None:
            self.group, self.rank, self.size, self.packets = group, group.rank, group.size, 0

        def post(self, tag, send, recv, purpose="packet", sized=None):
            self.packets += purpose == "packet"
            if self.packets == 2 and purpose == "packet":
                self.group.post(tag, send, {}, purpose).wait()
                raise tw.LinkError("cut")
            return self.group.post(tag, send, recv, purpose, sized)

        def close(self):
            self.group.close()

    def replica(group: tw.Group) -> Controlled:
        own = LosesSecondRound(first[group.rank]) if group.rank else first[group.rank]
        trained = attach(run, own)
        try:
            train_until(run, trained, own, 6)
        except tw.LinkError:
            assert group.rank and trained.attached.rounds == 1
        trained.attached.meet(second[group.rank], ("a", "b"))
        train_until(run, trained, second[group.rank], 12)
        return trained.attached

    a, b = tw.run_threads(2, replica)
    assert same_bits(a.x, b.x) and same_bits(a.c, b.c) and a.rounds == 4
    assert float((a.c - (a.own + b.own) / 2).abs().max()) < 1e-6


@pytest.mark.slow
def test_control_variates_converge_below_the_floor_of_fedavg():
    """Twenty replicas, four per round, five steps. SCALLION with alpha 1 and a tenth of the values diverges."""
    problem = Problem()
    start = problem.distance(torch.zeros(D))

    def reached(method: ControlVariates, rounds: int = 400) -> float:
        return problem.distance(solve(method, rounds, problem)[0].x) / start

    exact = tw.codecs.RandomK(0.1, tw.codecs.Identity())
    floor = reached(fedavg(every=K, sampled=S))
    ends = {
        "scaffold": reached(scaffold(every=K, sampled=S)),
        "scallion": reached(scallion(every=K, sampled=S, codec=exact), 1200),
        "scafcom": reached(scafcom(every=K, sampled=S, codec=tw.codecs.TopK(0.1, tw.codecs.Identity())), 1200),
        "scafcom, beta 1": reached(scafcom(every=K, sampled=S, beta=1.0, codec=tw.codecs.Identity())),
    }
    assert floor > 1e-3
    assert ends["scaffold"] < 1e-10 and ends["scafcom, beta 1"] < 1e-10
    assert ends["scallion"] < floor / 50 and ends["scafcom"] < floor / 50
    wild = solve(scallion(every=K, sampled=S, alpha=1.0, codec=exact), 150, problem)[0].x
    assert not problem.distance(wild) < start
