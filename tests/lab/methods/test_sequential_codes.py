"""Sequential codes decode every job exactly and in time under every allowed pattern of late replicas."""

from fractions import Fraction
from itertools import chain, combinations, product

import numpy as np
import pytest

from thinwire.errors import ConfigurationError
from thinwire.lab.methods.bursty import Bursty
from thinwire.lab.methods.gradient_codes import Cyclic, Repetition, gradient_code
from thinwire.lab.methods.sequential_codes import Coded, Master, Multiplexed, SelectiveRepeat

SCHEMES = [
    Multiplexed(8, 1, 2, 3), Multiplexed(8, 1, 2, 8), Multiplexed(12, 2, 3, 4), Multiplexed(12, 1, 3, 5), Multiplexed(12, 2, 4, 12),
    SelectiveRepeat(12, 1, 2, 4), SelectiveRepeat(12, 2, 3, 4), SelectiveRepeat(20, 2, 5, 6), SelectiveRepeat(24, 3, 4, 8),
    Coded(Cyclic(8, 2)), Coded(Repetition(8, 1)),
]  # fmt: skip
JOBS = 24


def run_rounds(scheme, jobs, pattern, vectors=None):
    """Run all rounds and check that each job is decoded in time; return the number of late replicas and the decoded sums.

    `pattern` [round, replica] marks late replicas. The master waits for those whose lateness the scheme does not allow.
    With `vectors` [job, chunk, d] each job is decoded to its sum.
    """
    master, late_in_all, results, sums = Master(scheme, jobs), 0, {}, {}
    while master.round < master.rounds:
        at, tasks = master.round, master.tasks()
        late = set()
        for replica in np.flatnonzero(pattern[at]).tolist():
            late |= {replica} if master.allows(frozenset(late | {replica})) else set()
        late_in_all += len(late)
        if vectors is not None:
            for task in chain.from_iterable(tasks):
                results[task] = sum(f * vectors[task.job, chunk] for chunk, f in scheme.factors(task.part).items())
        master.finish(frozenset(late))
        due = at - scheme.delay
        if due >= 0:
            assert scheme.decodes(master.delivered[due]), f"job {due} is not there after round {at}"
            if vectors is not None:
                sums[due] = sum(a * results[due, part] for part, a in scheme.weights(master.delivered[due]).items())
    return late_in_all, sums


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_job_is_exact_and_in_time(scheme):
    """§h of the specification: Bernoulli stragglers, of which the scheme allows some."""
    seen = 0
    for seed, p in enumerate((0.02, 0.1, 0.3, 0.3)):
        draws = np.random.default_rng(seed)
        vectors = draws.standard_normal((JOBS, len(scheme.shares), 6)) if seed < 2 else None
        late, sums = run_rounds(scheme, JOBS, draws.random((JOBS + scheme.delay, scheme.replicas)) < p, vectors)
        seen += late
        for job, decoded in sums.items():
            exact = vectors[job].sum(axis=0)
            assert np.abs(decoded - exact).max() <= 1e-6 * max(1.0, np.abs(exact).max())
    assert seen > 0


@pytest.mark.parametrize("scheme", [Multiplexed(3, 1, 2, 2), Multiplexed(3, 2, 3, 3), SelectiveRepeat(3, 1, 2, 2)], ids=str)  # fmt: skip
def test_every_pattern_of_three_replicas_is_decoded_in_time(scheme):
    """All patterns of late replicas in four rounds, with no late replica afterwards."""
    several = [frozenset(one) for size in range(4) for one in combinations(range(3), size)]
    for pattern in product(several, repeat=4):
        run_rounds(scheme, 4, [[replica in late for replica in range(3)] for late in (*pattern, *[()] * scheme.delay)])


@pytest.mark.parametrize("scheme", SCHEMES[:9], ids=str)
def test_no_replica_computes_more_than_its_load(scheme):
    """The load counts first attempts and repeats as shares of the batch. The shares cover the whole batch."""
    assert sum(scheme.shares) == 1
    draws, master = np.random.default_rng(3), Master(scheme, JOBS)
    while master.round < master.rounds:
        for tasks in master.tasks():
            assert sum(scheme.shares[chunk] for _, part in tasks for chunk in scheme.factors(part)) <= scheme.load
        late = frozenset(np.flatnonzero(draws.random(scheme.replicas) < 0.2).tolist())
        master.finish(late if master.allows(late) else frozenset())


def test_a_pattern_that_is_not_allowed_is_refused_and_loses_a_job():
    scheme = Multiplexed(8, 1, 2, 3)
    master = Master(scheme, 1)
    assert not master.allows(frozenset({0, 1, 2, 3}))
    with pytest.raises(ConfigurationError, match="wait for more"):
        master.finish(frozenset({0, 1, 2, 3}))
    parts = {task.part for replica in range(4, 8) for task in master.tasks()[replica]}
    assert not scheme.decodes(parts)
    with pytest.raises(ConfigurationError, match="do not suffice"):
        scheme.weights(parts)


def test_loads_match_the_paper():
    assert float(Coded(gradient_code(256, 15)).load) == 0.0625
    repeat, multiplexed = SelectiveRepeat(256, 2, 3, 23), Multiplexed(256, 1, 2, 27)
    assert repeat.code.stragglers == 12 and round(float(repeat.load), 4) == 0.0508 and repeat.delay == 2
    assert round(float(multiplexed.load), 5) == 0.00754 and multiplexed.delay == 1
    assert round(float(Coded(gradient_code(256, 0)).load), 4) == 0.0039
    assert round(float(Multiplexed(12, 2, 3, 4).load), 4) == 0.1389
    assert round(float(Coded(gradient_code(12, 4)).load), 4) == 0.4167
    assert Multiplexed(12, 2, 4, 12).load == Fraction(3 + 2, 12 * 3)


def test_bursty_patterns_match_the_definition():
    a, none = frozenset({1}), frozenset()
    pattern = Bursty(burst=2, window=4, stragglers=2)
    assert pattern.allows([a, a]) and not pattern.allows([a, a, a]) and not pattern.allows([a, none, a])
    assert not pattern.allows([a, none, none, a]) and pattern.allows([a, none, none, none, a])
    assert not pattern.allows([a, frozenset({2}), frozenset({3})])
    assert pattern.allows([a, none, none, none, frozenset({2, 3})])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SelectiveRepeat(12, 2, 4, 3), lambda: SelectiveRepeat(12, 2, 2, 3), lambda: Multiplexed(12, 0, 3, 3),
        lambda: Multiplexed(12, 2, 3, 13), lambda: Multiplexed(12, 2.0, 3, 3),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused(make):
    with pytest.raises(ConfigurationError, match=r"\d"):
        make()
