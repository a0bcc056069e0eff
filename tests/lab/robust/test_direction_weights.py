"""The Flag Aggregator and FoolsGold: their numbers and their limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from thinwire.exchange.products import inner_products
from thinwire.lab.robust.direction_weights import FlagAggregator, FoolsGold, eigen, foolsgold
from thinwire.rng import Key


def random_vectors(seed: int, size: int, numel: int) -> Tensor:
    return torch.randn(size, numel, generator=torch.Generator().manual_seed(seed))


def flag(x: Tensor) -> Tensor:
    return (FlagAggregator().mixing(inner_products(x), Key())[0] @ x.double()).float()


def test_eigenvalues_and_vectors_match_torch():
    for size in (1, 2, 5, 9):
        x = random_vectors(size, size, size + 2).double()
        matrix = x @ x.T
        if size == 5:
            matrix[0, 1] = matrix[1, 0] = 1e-200
        values, vectors = eigen(matrix)
        torch.testing.assert_close(
            torch.tensor(values, dtype=torch.float64), torch.linalg.eigvalsh(matrix).flip(0), rtol=1e-10, atol=1e-10
        )
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(size, dtype=torch.float64), rtol=0.0, atol=1e-12)
        torch.testing.assert_close(
            matrix @ vectors, vectors * torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )

    small, _ = eigen(matrix * 2.0**-80)
    assert small == pytest.approx([value * 2.0**-80 for value in values], rel=1e-9, abs=0.0)
    apart, _ = eigen(torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 4.0]], dtype=torch.float64))
    assert apart == pytest.approx([4.0, 3.0, 1.0])


def flag_by_vectors(x: Tensor, columns: int) -> tuple[Tensor, list[float]]:
    """The paper's algorithm on whole vectors: its estimate and the objective of each iteration."""
    unit = (x.double() / x.double().norm(dim=1, keepdim=True)).T
    weights, objectives = torch.ones(len(x), dtype=torch.float64), [float("inf")]
    while True:
        basis = torch.linalg.svd(unit * weights, full_matrices=False).U[:, :columns]
        missing = (1 - (basis.T @ unit).square().sum(0)).clamp(min=0.0)
        objectives.append(float(missing.sqrt().sum()))
        if objectives[-2] - objectives[-1] < 1e-10 or len(objectives) > 20:
            scale = x.double().norm(dim=1).sort().values[(len(x) - 1) // 2]
            return (scale * basis @ basis.T @ unit.mean(1)).float(), objectives
        weights = (missing + 1e-7) ** -0.25


def test_flag_by_inner_products_matches_the_algorithm_on_vectors():
    for seed in range(4):
        x = random_vectors(seed, 7, 50) + random_vectors(99, 1, 50)
        due, objectives = flag_by_vectors(x, 4)
        torch.testing.assert_close(flag(x), due, rtol=1e-5, atol=1e-6)
        assert all(after <= before + 1e-9 for before, after in pairwise(objectives))


def test_flag_follows_rotations_and_suppresses_noisy_liars():
    common = random_vectors(0, 1, 200)
    x = common + random_vectors(1, 15, 200)
    x[12:] = random_vectors(2, 3, 200) * 10
    honest = x[:12].mean(0)
    assert (
        float(torch.cosine_similarity(flag(x), honest, 0)) > 0.9 > float(torch.cosine_similarity(x.mean(0), honest, 0))
    )
    turn = torch.linalg.qr(random_vectors(3, 200, 200)).Q
    torch.testing.assert_close(flag(x @ turn), flag(x) @ turn, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(flag(common.repeat(5, 1)), common[0], rtol=1e-5, atol=1e-5)
    assert [FlagAggregator().tolerates(size) for size in (1, 2, 3, 7, 8)] == [0, 0, 1, 3, 3]


def test_flag_is_blind_to_signs():
    """A limit: negated vectors lie in the same subspace and count as in the mean."""
    x = random_vectors(0, 1, 50) + 0.1 * random_vectors(1, 7, 50)
    x[5:] = -x[:5].mean(0)
    unit = x / x.norm(dim=1, keepdim=True)
    assert float(flag(x).norm()) == pytest.approx(float(x.norm(dim=1).median() * unit.mean(0).norm()), rel=0.02)


def test_foolsgold_matches_values_by_hand():
    histories = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, -1.0]])
    assert foolsgold(inner_products(histories)) == [1.0, 0.0, 0.0]
    apart = torch.cat([torch.eye(8, 40), torch.eye(40)[39].expand(3, 40)]) + 0.01 * random_vectors(0, 11, 40)
    assert foolsgold(inner_products(apart)) == [1.0] * 8 + [0.0] * 3  # three Sybils of one liar
    assert FoolsGold().mixing(inner_products(apart), Key()).tolist() == [[1 / 8] * 8 + [0.0] * 3]
    assert foolsgold(inner_products(torch.eye(4, 9)))[3] == 1.0  # a liar alone keeps its weight


def test_few_or_equal_replicas_have_equal_weights():
    zeros, ones = (of(3, 3, dtype=torch.float64) for of in (torch.zeros, torch.ones))
    assert foolsgold(zeros) == [1.0] * 3 and foolsgold(ones) == [0.0] * 3 and foolsgold(ones[:1, :1]) == [1.0]
    assert foolsgold(torch.eye(3), 2) == [1.0] * 2, "the third is only compared with"
    for products in (zeros, ones):
        assert FoolsGold().mixing(products, Key()).tolist() == [[1 / 3] * 3]
    assert FlagAggregator().mixing(zeros, Key()).tolist() == [[0.0] * 3]
    assert FlagAggregator().mixing(ones[:1, :1] * 4, Key())[0].tolist() == pytest.approx([1.0])
    assert FoolsGold().tolerates(9) == 0


def test_weights_do_not_depend_on_the_unit():
    products = inner_products(random_vectors(0, 1, 40) + random_vectors(1, 5, 40))
    for rule in (FlagAggregator(), FoolsGold()):
        found = [rule.mixing(products * 4.0**power, Key()) for power in (0, 10, -20)]
        assert torch.allclose(found[0], found[1]) and torch.allclose(found[0], found[2])
        assert len(set(found[0][0].tolist())) > 2


def test_foolsgold_gives_the_liar_all_weight_where_data_are_alike():
    """A limit: honest replicas with alike data resemble each other and lose all weight to the liar."""
    x = random_vectors(0, 1, 400) + 0.3 * random_vectors(1, 9, 400)
    x[8] = random_vectors(2, 1, 400)[0]
    assert float(torch.cosine_similarity(x[0], x[1], 0)) > 0.85
    assert foolsgold(inner_products(x)) == [0.0] * 8 + [1.0]


def test_foolsgold_weighs_the_sum_of_all_rounds():
    """It compares the sums of all packets of a replica, and writes the new histories into the next state only."""
    rule, before = FoolsGold(), FoolsGold().init(6, 2)
    first, second = random_vectors(0, 2, 6), random_vectors(1, 2, 6)
    after = {name: torch.empty_like(kept) for name, kept in before.items()}
    assert torch.equal(rule.measured(first, before, after), first) and not before["history0"].any()
    last = {name: torch.empty_like(kept) for name, kept in before.items()}
    assert torch.equal(rule.measured(second, after, last), first + second) and torch.equal(
        last["history1"], (first + second)[1]
    )
