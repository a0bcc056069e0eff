"""The equations of pairwise averaging (AD-PSGD, A2CiD2): the constants and numbers of the papers, and conserved sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pairwise_reference import ReferenceRun, coded_by
from replicas_by_row import normal, spread_of

from thinwire.codecs import E3M0
from thinwire.lab.pairs.composition import Mixing
from thinwire.lab.pairs.method import a2cid2, ad_psgd
from thinwire.lab.topology import Clocks, Complete, Listed, Ring, meeting_rates, resistances
from thinwire.rng import Key

# ---- constants


def test_mixing_constants_match_the_paper():
    """§a.2: rings of 16 and 64 with one meeting per replica and step. On the complete graph χ₁ = χ₂: momentum gains nothing."""
    for size, due in ((16, (13.137, 0.9375, 0.1425, 1.872)), (64, (207.67, 0.984, 0.0350, 7.262))):
        chi1, chi2 = resistances(meeting_rates(Ring(), size, 1.0))
        mixing = a2cid2().mixing(size)
        assert (chi1, chi2, mixing.eta, mixing.pull) == tuple(pytest.approx(one, rel=2e-3) for one in due)
    chi1, chi2 = resistances(meeting_rates(Complete(), 8, 1.0))
    assert chi1 == pytest.approx(7 / 8) and chi2 == pytest.approx(chi1)
    assert a2cid2(topology=Complete()).mixing(8).pull == pytest.approx(0.5)
    assert ad_psgd().mixing(8) == Mixing(eta=0.0, pull=0.5)
    barbell = Listed(((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3)))
    even, fitted = (a2cid2(topology=barbell, rates=rates) for rates in ("even", "fitted"))
    assert fitted.clocks(6).rates.sum() == pytest.approx(even.clocks(6).rates.sum())
    assert fitted.mixing(6).eta > 1.2 * even.mixing(6).eta
    # Half as many meetings halve η and leave α̃ as it is.
    assert a2cid2(every=2).mixing(16) == Mixing(pytest.approx(0.14247 / 2, rel=1e-3), pytest.approx(1.8717, rel=1e-3))


def test_meeting_times_are_poisson_and_the_same_for_every_reader():
    """Counts have the mean and the variance of a Poisson law. Equal seeds give equal meetings; another seed gives others."""
    clocks = Clocks(meeting_rates(Listed(((0, 1), (1, 2), (2, 3), (3, 0), (0, 2))), 4, 1.0), fragments=2, seed=3)
    units = [clocks.within(unit) for unit in range(2000)]
    counts = np.array([len(unit) for unit in units])
    assert counts.mean() == pytest.approx(4.0, rel=0.05) and counts.var() == pytest.approx(4.0, rel=0.1)
    edges = [(one.one, one.other) for unit in units for one in unit]
    assert {edge: round(edges.count(edge) / len(edges), 1) for edge in set(edges)} == dict.fromkeys(
        [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)], 0.2
    )
    for number, unit in enumerate(units):
        assert [one.at for one in unit] == sorted(one.at for one in unit)
        assert all(number <= one.at < number + 1 for one in unit)
    assert Clocks(clocks.rates, 2, 3).within(7) == units[7] != Clocks(clocks.rates, 2, 4).within(7)
    assert {one.fragment for unit in units for one in unit} == {0, 1}


# ---- numbers


@pytest.mark.parametrize(
    ("size", "until", "plain", "accelerated"), [(16, 200, 2.6e-6, 2.2e-16), (64, 400, 0.22, 1.4e-9)]
)
def test_a_ring_reaches_the_published_consensus_distance(size, until, plain, accelerated):
    """§a.2: gossip without training from a variance of 45, within a factor of 30 (one draw).

    Every event conserves Σx, or Σ(x + x̃)/2 with momentum.
    """
    x = normal(size, 8) * math.sqrt(45 / 8)
    ends = []
    for method in (ad_psgd(), a2cid2()):
        clocks, reference = method.clocks(size), ReferenceRun(method.mixing(size), x)
        begun = reference.kept
        for unit in range(until):
            for meeting in clocks.within(unit):
                reference.meet(meeting.one, meeting.other, meeting.at)
                assert float((reference.kept - begun).abs().max()) < 1e-11
        for one in range(size):
            reference.flow(one, float(until))
        ends.append(spread_of(reference.x))
    assert plain / 30 < ends[0] < plain * 30
    assert ends[1] < accelerated * 30


def test_momentum_reduces_the_distance_as_much_as_twice_the_meetings():
    """§a.2, quadratics with different optima on a ring of 16, lr 0.01.

    The distance is 0.146 without momentum, 0.0427 with it and 0.0462 with twice the meetings. The sum of all gradient steps
    is conserved to rounding.
    """
    size, lr = 16, 0.01
    centers = normal(size, 10, seed=1) * 3

    def stationary(mixing, rate, until=800):
        clocks, reference, seen = (
            Clocks(meeting_rates(Ring(), size, rate)),
            ReferenceRun(mixing, torch.zeros_like(centers)),
            [],
        )
        total = torch.zeros(10, dtype=torch.float64)
        for unit in range(until):
            for meeting in clocks.within(unit):
                reference.meet(meeting.one, meeting.other, meeting.at)
            for one in range(size):
                reference.flow(one, unit + 1.0)
                update = -lr * (reference.x[one] - centers[one])
                reference.step(one, unit + 1.0, update)
                total += update
            if unit > until // 2:
                seen.append(spread_of(reference.x))
        assert float((reference.kept - total).abs().max()) < 1e-10
        assert float((reference.x.mean(0) - centers.mean(0)).norm()) < 0.05
        return float(np.mean(seen))

    plain, accelerated, twice = (
        stationary(ad_psgd().mixing(size), 1.0),
        stationary(a2cid2().mixing(size), 1.0),
        stationary(ad_psgd().mixing(size), 2.0),
    )
    assert accelerated / plain == pytest.approx(0.0427 / 0.146, rel=0.2)
    assert twice / plain == pytest.approx(0.0462 / 0.146, rel=0.2)


@pytest.mark.parametrize("method", [ad_psgd(), a2cid2()], ids=["ad_psgd", "a2cid2"])
def test_differences_in_four_bits_converge_like_uncoded_weights(method):
    """Differences to the pair's common value converge in 4 bits; x itself in 4 bits stalls. Each way conserves Σx."""
    size, until, codec = 8, 60, E3M0()
    meetings = [one for unit in range(until) for one in method.clocks(size).within(unit)]

    def gossip(how):
        reference = ReferenceRun(method.mixing(size), normal(size, 32).float())
        begun = reference.kept
        for number, at in enumerate(meetings):
            if how == "itself":
                reference.start, reference.common = torch.zeros(32), {}
            reference.meet(at.one, at.other, at.at, None if how == "whole" else coded_by(codec, Key(round=number)))
        torch.testing.assert_close(reference.kept, begun, atol=2e-5, rtol=0)
        return spread_of(reference.x)

    whole, difference, itself = (gossip(how) for how in ("whole", "difference", "itself"))
    assert difference < max(10 * whole, 1e-9) and itself > 1e-2 > 100 * difference
