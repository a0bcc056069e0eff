"""Gradient codes decode the sum over all chunks without the late replicas."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from thinwire.errors import ConfigurationError
from thinwire.lab.methods.gradient_codes import Cyclic, Repetition, gradient_code, load

CODES = [
    Repetition(6, 2), Repetition(8, 1), Repetition(4, 0), Repetition(4, 3), Cyclic(5, 0), Cyclic(5, 1), Cyclic(5, 2), Cyclic(5, 4),
    Cyclic(6, 3), Cyclic(7, 3), Cyclic(8, 2), Cyclic(8, 5),
]  # fmt: skip


def encoded(code, gradients):
    return {
        replica: sum(gradients.dtype.type(factor) * gradients[chunk] for chunk, factor in code.factors(replica).items())
        for replica in range(code.replicas)
    }


def error(code, gradients, heard):
    """The relative error of the sum decoded from the vectors of the replicas `heard`, in the dtype of the gradients."""
    sent, exact = encoded(code, gradients), gradients.astype(np.float64).sum(axis=0)
    decoded = sum(gradients.dtype.type(a) * sent[replica] for replica, a in code.weights(heard).items())
    return float(np.linalg.norm(decoded - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_all_but_any_s_replicas_decode(code):
    gradients = np.random.default_rng(0).standard_normal((code.replicas, 50))
    assert load(code) == Fraction(code.stragglers + 1, code.replicas)
    assert all(len(code.factors(replica)) == code.stragglers + 1 for replica in range(code.replicas))
    for late in combinations(range(code.replicas), code.stragglers):
        heard = set(range(code.replicas)) - set(late)
        assert code.decodes(heard) and error(code, gradients, heard) < 1e-6, late


@pytest.mark.parametrize("code", CODES, ids=str)
def test_too_few_replicas_are_refused(code):
    if isinstance(code, Cyclic):
        heard = set(range(code.replicas - code.stragglers - 1))
    else:
        heard = set(range(code.replicas)) - set(code.factors(0))  # a whole group is late
    assert not code.decodes(heard)
    with pytest.raises(ConfigurationError):
        code.weights(heard)


def test_large_codes_have_the_documented_errors_in_fp64_and_fp32():
    """The sizes of the papers: fp64 decodes to 1e-6. docs/methods/gradient_coding.md has the errors in fp32."""
    draws = np.random.default_rng(1)
    lost = {}
    for code in (Cyclic(24, 12), Cyclic(40, 16), Cyclic(24, 11), Cyclic(128, 15), Repetition(128, 15)):
        gradients = draws.standard_normal((code.replicas, 50))
        for _ in range(200 // code.replicas + 1):
            heard = draws.permutation(code.replicas)[code.stragglers :].tolist()
            assert error(code, gradients, heard) < 1e-6
            fp32 = error(code, gradients.astype(np.float32), heard)
            lost[code] = max(fp32, lost.get(code, 0.0))
    assert lost[Repetition(128, 15)] < 1e-6 and lost[Cyclic(128, 15)] < 1e-3
    assert lost[Cyclic(24, 11)] < lost[Cyclic(24, 12)]  # roots of unity against random factors


def test_repetition_gives_the_same_bits_for_any_late_replicas():
    code = Repetition(8, 1)
    gradients = np.random.default_rng(2).standard_normal((8, 50)).astype(np.float32)
    sent = encoded(code, gradients)
    sums = [
        sum(sent[replica] for replica in code.weights(set(range(8)) - late)) for late in ({0}, {5}, {1, 2, 4, 7}, set())
    ]
    assert all(np.array_equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize(
    "make", [lambda: Repetition(5, 1), lambda: Cyclic(4, 4), lambda: Cyclic(0, 0), lambda: gradient_code(4, -1), lambda: Cyclic(4, 1.5)],
)  # fmt: skip
def test_invalid_codes_are_refused(make):
    with pytest.raises(ConfigurationError, match="needed"):
        make()
