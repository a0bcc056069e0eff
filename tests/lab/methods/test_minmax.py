"""MASHA1, MASHA2 and extragradient on saddle-point problems with known solutions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.lab.methods import Extragradient, Free, Masha1, Masha2, Saddle, Simplexes, nbytes_sent, saddle
from thinwire.lab.methods.minmax import Saddling, coin
from thinwire.lab.methods.saddle_points import Prox
from thinwire.testing.toy import Shuffled, same_bits

N, RHO = 8, 0.2
FIFTH = tw.codecs.RandomK(0.25, tw.codecs.Identity())


class Bilinear:
    """(1/M) Σ x·B_m·y + a_m·x + b_m·y + ρ/2·(|x|² − |y|²), its saddle point `best`, and the Lipschitz constant of F."""

    def __init__(self, replicas: int, n: int = N, alike: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.coupling = torch.randn(replicas, n, n, generator=generator) / math.sqrt(n)
        self.linear = torch.randn(replicas, 2, n, generator=generator)
        if alike:
            self.coupling[:], self.linear[:] = self.coupling[0].clone(), self.linear[0].clone()
        mean, own = self.coupling.double().mean(0), RHO * torch.eye(n).double()
        jacobian = torch.cat([torch.cat([own, mean], 1), torch.cat([-mean.T, own], 1)])
        a, b = self.linear.double().mean(0)
        self.best = torch.linalg.solve(jacobian, torch.cat([-a, b]))
        self.lipschitz = float(torch.linalg.matrix_norm(jacobian, 2))
        self.n = n

    def operator(self, rank: int) -> Callable[[Tensor], Tensor]:
        b, (a, c), n = self.coupling[rank], self.linear[rank], self.n
        return lambda z: torch.cat([b @ z[n:] + a + RHO * z[:n], -(b.T @ z[:n] + c) + RHO * z[n:]])

    def distance(self, z: Tensor) -> float:
        return float((z.double() - self.best).norm() / self.best.norm())


def solve(method: Saddling, iterations: int, problem: Bilinear, replicas: int, **how: Any) -> list[Saddle]:
    wrap, spoil = how.get("wrap", lambda group: group), how.get("spoil", lambda rank, step, value: value)

    def replica(group: tw.Group) -> Saddle:
        events: list[dict[str, Any]] = []
        own = problem.operator(group.rank)

        def operator(z: Tensor) -> Tensor:
            return spoil(group.rank, at.step if at else -1, own(z))

        def observer(event: str, step: int, **fields: Any) -> None:
            events.append({"event": event, "step": step, **fields})

        at: Saddle | None = None
        at = Saddle(method, operator, torch.zeros(2 * problem.n), wrap(group), observer=observer)
        at.events = events
        for _ in range(iterations):
            at.iterate()
        return at

    return tw.run_threads(replicas, replica, timeout=600.0)


METHODS: dict[str, Saddling] = {
    "Masha1": Masha1(step=0.2, codec=FIFTH),
    "Masha2": Masha2(step=0.05, codec=tw.codecs.TopK(0.25)),
    "Extragradient": Extragradient(step=0.4),
    "Masha1 on simplexes": Masha1(step=0.2, codec=FIFTH, prox=Simplexes((N, N))),
}
every_method = pytest.mark.parametrize("name", METHODS)

# ---- laws of every method


def test_every_method_is_in_the_table():
    from thinwire.lab.methods import minmax

    made = {kind for kind in vars(minmax).values() if isinstance(kind, type) and hasattr(kind, "advance")} - {Saddling}
    assert made == {type(method) for method in METHODS.values()}
    assert all(isinstance(method, Saddling) and hash(method) for method in METHODS.values())
    assert isinstance(Free(), Prox) and isinstance(Simplexes((1,)), Prox)


@every_method
def test_replicas_agree_in_any_arrival_order(name):
    problem = Bilinear(3)
    straight = solve(METHODS[name], 12, problem, 3)
    shuffled = solve(METHODS[name], 12, problem, 3, wrap=lambda group: Shuffled(group, 1))
    assert all(
        same_bits(at.z, straight[0].z) and same_bits(at.mean_at_w, straight[0].mean_at_w) for at in straight + shuffled
    )
    assert straight[0].z.any()


@every_method
@pytest.mark.parametrize("replicas", [1, 3])
def test_predicted_bytes_equal_sent_bytes(name, replicas):
    ledgers = [Ledger() for _ in range(replicas)]
    solve(METHODS[name], 12, Bilinear(3), replicas, wrap=lambda group: CountedGroup(group, ledgers[group.rank]))
    assert {ledger.sent("packet") for ledger in ledgers} == {nbytes_sent(METHODS[name], 2 * N, replicas, 12)}


@every_method
def test_identical_replicas_have_the_bits_of_one(name):
    """This holds without a codec, because the mean of equal values is that value."""
    method = dataclasses.replace(METHODS[name], codec=tw.codecs.Identity())
    problem = Bilinear(4, alike=True)
    assert same_bits(solve(method, 20, problem, 4)[2].z, solve(method, 20, problem, 1)[0].z)


@every_method
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name):
    problem, method = Bilinear(2), METHODS[name]
    whole = solve(method, 15, problem, 2)
    begun = [at.state() for at in solve(method, 7, problem, 2)]
    # Tensors of a state share no storage.
    assert all(len({t.data_ptr() for t in tensors.values()}) == len(tensors) for tensors, _ in begun)

    def replica(group: tw.Group) -> Saddle:
        at = Saddle(method, problem.operator(group.rank), torch.ones(2 * N), group)
        at.load_state(*begun[group.rank])
        for _ in range(8):
            at.iterate()
        return at

    resumed = tw.run_threads(2, replica)
    assert all(same_bits(a.z, b.z) and same_bits(a.residual, b.residual) for a, b in zip(resumed, whole))


@every_method
def test_a_returned_replica_takes_over_z_and_w(name):
    """Meanwhile the other two iterate on their own problems."""
    problem, method, names = Bilinear(3), METHODS[name], ("a", "b", "c")
    first, second, third = (tw.ThreadGroup.create(n, 20.0) for n in (3, 2, 3))

    def replica(group: tw.Group) -> Saddle:
        rank = group.rank
        at = Saddle(method, problem.operator(rank), torch.zeros(2 * N), first[rank], names=names)
        for _ in range(4):
            at.iterate()
        if rank < 2:
            at.meet(second[rank], names[:2])
            for _ in range(4):
                at.iterate()
        at.meet(third[rank], names)
        for _ in range(4):
            at.iterate()
        return at

    ended = tw.run_threads(3, replica)
    assert all(same_bits(at.z, ended[0].z) and at.step == 12 for at in ended)


@every_method
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused_by_all(name, bad):
    def spoil(rank: int, step: int, value: Tensor) -> Tensor:
        return value * bad if rank == 1 and step in (3, 4) else value

    problem = Bilinear(3)
    ended = solve(METHODS[name], 9, problem, 3, spoil=spoil)
    assert all(
        same_bits(at.z, ended[0].z) and same_bits(at.w, ended[0].w) and bool(torch.isfinite(at.z).all()) for at in ended
    )
    refused = {(e["step"], tuple(e["by"])) for e in ended[2].events if e["event"] == "refused"}
    assert refused == {(3, (1,)), (4, (1,))}


@every_method
def test_an_operator_of_zero_moves_nothing(name):
    ended = solve(METHODS[name], 5, Bilinear(2), 2, spoil=lambda rank, step, value: value * 0)
    start = METHODS[name].prox(torch.zeros(2 * N)) if "simplexes" in name else torch.zeros(2 * N)
    assert torch.equal(ended[0].z, start)


# ---- claims of the methods


def test_masha1_without_a_codec_and_with_refresh_1_is_extragradient():
    problem = Bilinear(3)
    same = solve(Masha1(step=0.4, codec=tw.codecs.Identity(), refresh=1.0), 30, problem, 3)
    assert torch.allclose(same[0].z, solve(Extragradient(step=0.4), 30, problem, 3)[0].z, atol=1e-5)


def test_the_refresh_coin_has_its_probability():
    method = Masha1(step=1.0, refresh=0.2, seed=4)
    assert abs(sum(coin(method, t) for t in range(5000)) - 1000) < 5 * math.sqrt(800)
    assert all(coin(Masha2(step=1.0, refresh=1.0), t) for t in range(100))


def test_differences_vanish_at_the_solution():
    """MASHA1 sends differences to the reference, which go to zero. The operator of a replica itself does not."""
    problem = Bilinear(3)
    method = Masha1(step=0.3 / problem.lipschitz, codec=FIFTH)
    early, late = solve(method, 3, problem, 3)[0], solve(method, 400, problem, 3)[0]

    def said(at: Saddle) -> float:
        return float((at.operator(at.z) - at.operator(at.w)).norm())

    assert said(late) < 1e-3 * max(said(early), 0.1) and float(late.operator(late.z).norm()) > 0.1


def test_sent_values_and_residual_of_masha2_sum_to_the_signals():
    """Σ sent + residual = Σ signals on every replica."""
    problem, sent, signals = Bilinear(2), [torch.zeros(2 * N) for _ in range(2)], [torch.zeros(2 * N) for _ in range(2)]

    class Watched(Saddle):
        def mean_of(self, values: Tensor, part: int = 0) -> Any:
            told = super().mean_of(values, part)
            signals[self.group.rank] += values - self.residual
            sent[self.group.rank] += told.own
            return told

    def replica(group: tw.Group) -> Saddle:
        at = Watched(
            Masha2(step=0.05, codec=tw.codecs.TopK(0.25)), problem.operator(group.rank), torch.zeros(2 * N), group
        )
        for _ in range(40):
            at.iterate()
        return at

    for rank, at in enumerate(tw.run_threads(2, replica)):
        assert torch.allclose(sent[rank] + at.residual, signals[rank], atol=1e-5) and at.residual.any()


def test_compressed_differences_converge_and_compressed_values_do_not():
    """A quarter of the values is sent. Smaller steps do not help the compressed values."""
    problem, top = Bilinear(3), tw.codecs.TopK(0.25, tw.codecs.Identity())
    step = 1 / problem.lipschitz
    methods = {
        "exact": (Extragradient(step=0.5 * step), 100),
        "masha1": (Masha1(step=0.3 * step, codec=FIFTH), 250),
        "masha2": (Masha2(step=0.1 * step, codec=top), 250),
        "naive": (Extragradient(step=0.1 * step, codec=top), 250),
        "naive, long steps": (Extragradient(step=0.5 * step, codec=FIFTH), 100),
    }
    reached = {name: problem.distance(solve(*method, problem, 3)[0].z) for name, method in methods.items()}
    assert reached["exact"] < 1e-3 and reached["masha1"] < 1e-3 and reached["masha2"] < 0.1, reached
    assert not reached["naive"] < 0.15 and not reached["naive, long steps"] < 0.15, reached


def test_replicas_find_the_equilibrium_of_rock_paper_scissors():
    """Each replica knows a part of the game. At the equilibrium each move has the probability 1/3."""
    game = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    parts = [game * 3 * torch.eye(3)[m][:, None] for m in range(3)]

    def replica(group: tw.Group) -> Saddle:
        own = saddle(lambda x, y: x @ parts[group.rank] @ y, 3)
        start = torch.tensor([1.0, 0, 0, 0, 1.0, 0])
        at = Saddle(
            Masha1(step=0.15, codec=tw.codecs.RandomK(0.5, tw.codecs.Identity()), prox=Simplexes((3, 3))),
            own,
            start,
            group,
        )
        for _ in range(250):
            at.iterate()
            assert float(at.z.min()) >= 0 and abs(float(at.z.sum()) - 2) < 1e-5
        return at

    z = tw.run_threads(3, replica)[0].z
    assert float((z - 1 / 3).abs().max()) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_the_projection_on_a_simplex_is_the_nearest_point(seed):
    """Each move from it towards a corner increases the distance to z."""
    z = torch.randn(6, generator=torch.Generator().manual_seed(seed)) * 3
    near = Simplexes((6,))(z)
    assert float(near.min()) >= 0 and float(near.sum()) == pytest.approx(1, abs=1e-6)
    for corner in torch.eye(6):
        assert float((z - near) @ (corner - near)) < 1e-5


def test_invalid_settings_are_refused():
    with pytest.raises(tw.ConfigurationError, match="use Masha2"):
        Masha1(step=0.1, codec=tw.codecs.TopK())
    with pytest.raises(tw.ConfigurationError, match="use Masha1"):
        Masha2(step=0.1, codec=tw.codecs.RandomK())
    for wrong in ({"step": 0.0}, {"step": math.nan}, {"step": 1.0, "refresh": 0.0}, {"step": 1.0, "refresh": 1.5}):
        with pytest.raises(tw.ConfigurationError):
            Masha1(**wrong)
    with pytest.raises(TypeError):
        Masha2(step=1.0, prox=Simplexes((2,)))
    with pytest.raises(tw.ConfigurationError, match="positive sizes"):
        Simplexes((2, 2))(torch.zeros(5))
    (group,) = tw.ThreadGroup.create(1)
    with pytest.raises(tw.ModelError, match="flat fp32"):
        Saddle(Masha1(step=0.1), lambda z: z, torch.zeros(2, 2), group)
    with pytest.raises(tw.ModelError, match="must have z's"):
        Saddle(Masha1(step=0.1), lambda z: z[:1], torch.zeros(4), group)
    with pytest.raises(tw.NonFiniteError, match="start at another point"):
        Saddle(Masha1(step=0.1), lambda z: z / 0, torch.zeros(4), group)


def test_replicas_with_other_settings_are_refused():
    with pytest.raises(tw.DisagreementError, match="method"):
        tw.run_threads(2, lambda g: Saddle(Masha1(step=0.1 + g.rank), lambda z: z, torch.zeros(4), g))
