"""DADAO against §a.1: its constants, equal convergence on every graph, the conserved sum, and divergence at half the rate."""

from __future__ import annotations

import numpy as np
import pytest

from thinwire.errors import ConfigurationError
from thinwire.lab.methods.dadao import _Z, _ZT, Constants, Dadao, play
from thinwire.lab.topology import Clocks, Complete, Exponential, Listed, Ring, resistances

SIZE, DIMENSION = 8, 5
PATH = Listed(tuple((i, i + 1) for i in range(SIZE - 1)))
STAR = Listed(tuple((0, i) for i in range(1, SIZE)))


def quadratics(seed=0):
    """Different quadratics with L = 10 and μ = 1: their gradients, and the minimum of the sum."""
    rng, gradients, total, right = np.random.default_rng(seed), [], np.zeros((5, 5)), np.zeros(5)
    for _ in range(SIZE):
        turned, _ = np.linalg.qr(rng.normal(size=(DIMENSION, DIMENSION)))
        matrix, center = turned @ np.diag(np.linspace(1, 10, DIMENSION)) @ turned.T, rng.normal(size=DIMENSION)
        gradients.append(lambda x, matrix=matrix, center=center: matrix @ (x - center))
        total, right = total + matrix, right + matrix @ center
    return gradients, np.linalg.solve(total, right)


def error_of(replicas, best):
    return float(((replicas.x - best) ** 2).sum(1).mean())


@pytest.mark.parametrize(
    ("topology", "chi1", "chi2", "rate"),
    [(Complete(), 3.5, 3.5, 4.95), (Ring(), 13.657, 3.5, 9.777), (STAR, 7, 3.5, 7.0), (PATH, 45.98, 3.5, 17.94)],
    ids=["complete", "cycle", "star", "path"],
)
def test_graph_constants_match_the_paper(topology, chi1, chi2, rate):
    method = Dadao(smooth=10, convex=1, topology=topology)
    unit = method._rates(SIZE, 1.0)
    assert np.triu(unit).sum() == pytest.approx(1)
    assert resistances(unit) == (pytest.approx(chi1, rel=1e-3), pytest.approx(chi2, rel=1e-3))
    assert method.least_rate(SIZE) == pytest.approx(rate, rel=1e-3)
    assert np.prod(resistances(method.clocks(SIZE).rates)) == pytest.approx(0.5)


def test_the_error_falls_equally_fast_on_every_graph():
    """exp(−0.2·√(ν/L)·t), about exp(−0.045·t) after t gradients per replica, with 4.95 to 17.94 meetings per unit of time."""
    gradients, best = quadratics()
    errors, counts = {}, {}
    for topology in (Complete(), PATH):
        method = Dadao(smooth=10, convex=1, topology=topology)
        replicas = [method.minimise(gradients, np.zeros(DIMENSION), until) for until in (200, 400)]
        errors[topology] = [error_of(one, best) for one in replicas]
        counts[topology] = replicas[1].meetings / 400
        assert np.log(errors[topology][0] / errors[topology][1]) / 200 == pytest.approx(0.045, rel=0.1)
        assert replicas[1].gradients == pytest.approx(400 * SIZE, rel=0.1)
    assert max(errors[PATH][1], errors[Complete()][1]) < 5 * min(errors[PATH][1], errors[Complete()][1]) < 1e-7
    assert counts == {Complete(): pytest.approx(4.95, rel=0.1), PATH: pytest.approx(17.94, rel=0.1)}


def test_fitted_rates_need_fewer_meetings():
    """§a.1, two complete graphs of four and a bridge: 13.2 meetings suffice instead of 21.84, and all replicas converge."""
    halves = [(a + first, b + first) for first in (0, 4) for a in range(4) for b in range(a)]
    even, fitted = (
        Dadao(smooth=1, convex=1, topology=Listed((*halves, (0, 4))), rates=one) for one in ("even", "fitted")
    )
    assert even.least_rate(8) == pytest.approx(21.84, rel=1e-3) and fitted.least_rate(8) == pytest.approx(
        13.205, rel=1e-3
    )
    ends = fitted.minimise([lambda x, i=i: x - i for i in range(8)], np.zeros(1), until=300)
    np.testing.assert_allclose(ends.x, 3.5, atol=1e-3)


def test_every_event_conserves_the_sum_of_duals():
    """Σ (α̃·z + α·z̃) = 0, although the replicas are at different times."""
    gradients, _ = quadratics()
    method = Dadao(smooth=10, convex=1)
    clocks = method.clocks(SIZE)
    constants, worst = Constants(10, 1, resistances(clocks.rates)[0]), []

    def look(replicas):
        kept = constants.alpha[1] * replicas.held[:, _Z] + constants.alpha[0] * replicas.held[:, _ZT]
        worst.append(float(np.abs(kept.sum(0)).max()))

    replicas = play(constants, clocks, gradients, np.zeros(DIMENSION), 60, look)
    assert len(worst) == replicas.gradients + replicas.meetings > 800
    assert max(worst) < 1e-11 and float(np.abs(replicas.held[:, _Z]).max()) > 1e-3


def test_half_the_meetings_diverge_and_are_refused():
    """§a.1: at half the rate, with the constants of that graph, the error grows by many orders within 50 units of time."""
    gradients, best = quadratics()
    method = Dadao(smooth=10, convex=1, topology=PATH)
    half = Clocks(method.clocks(SIZE).rates / 2)
    replicas = play(Constants(10, 1, resistances(half.rates)[0]), half, gradients, np.zeros(DIMENSION), 50)
    assert error_of(replicas, best) > 1e6
    with pytest.raises(ConfigurationError, match=r"χ₁·χ₂ is 2, at most 1/2 is needed.* at least 17\.940"):
        Dadao(smooth=10, convex=1, topology=PATH, rate=method.least_rate(SIZE) / 2).clocks(SIZE)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda: Dadao(smooth=1, convex=2), "0 < convex <= smooth"),
        (lambda: Dadao(smooth=1, convex=1, topology=Listed(((0, 1), (2, 3)))).clocks(4), "in 2 parts"),
        (lambda: Dadao(smooth=1, convex=1, topology=Exponential()).clocks(8), "does not send to 0"),
        (lambda: Dadao(smooth=1, convex=1, rate=0.0).clocks(8), "rate=0 on"),
    ],
    ids=range(4),
)
def test_invalid_settings_are_refused(method, said):
    with pytest.raises(ConfigurationError, match=said):
        method()
