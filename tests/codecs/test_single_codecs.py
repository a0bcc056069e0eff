"""Properties of single codecs: selection by a sample, codebooks, transforms, low rank, and sums of encoded values."""

from __future__ import annotations

import math

import pytest
import torch
from pieces import CODECS, over

import thinwire as tw
from thinwire.codecs import exact
from thinwire.kernels.cpu_block import select_largest
from thinwire.kernels.cpu_sparse import suggested
from thinwire.rng import Key
from thinwire.testing import codecs as laws
from thinwire.testing.toy import same_bits
from thinwire.testing.values import encoded, roundtrip

random = torch.Generator().manual_seed(0)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=random)


def laplace(n: int) -> torch.Tensor:
    return -torch.rand(n, generator=random).clamp_min(1e-7).log() * gaussian(n).sign()


def student(n: int) -> torch.Tensor:
    return gaussian(n) / gaussian(3, n).square().mean(0).sqrt()


def relative_error(codec: tw.codecs.Codec, x: torch.Tensor, key: Key = Key()) -> float:
    return ((roundtrip(codec, x, key) - x).double().square().sum() / x.double().square().sum()).item()


# ---- the largest values, found by a sample

MANY = 1 << 18
TENSORS = {
    "gaussian": gaussian(MANY),
    "laplace": laplace(MANY),
    "student": student(MANY),
    "constant": torch.full((MANY,), -0.3),
    "zeros": torch.zeros(MANY),
    "few": torch.nn.functional.pad(gaussian(100), (MANY - 200, 100)),
    "ties": gaussian(MANY).mul_(4).round_(),
    "rising": torch.linspace(0, 1, MANY),
    "clustered": torch.cat([gaussian(MANY // 64) * 100, gaussian(MANY - MANY // 64)]),
    "columns": gaussian(MANY // 512, 512).mul_(torch.arange(512) % 51 == 25).view(-1),
    "huge": gaussian(MANY).clamp_(-1, 1) * 3.4e38,
    "denormal": gaussian(MANY) * 1e-40,
}


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    index = torch.empty(count, dtype=torch.int64)
    assert select_largest(x, len(x), count, index)
    return index


def above(x: torch.Tensor, threshold: float) -> int:
    return int((x.abs() > threshold).sum())


@over("name", TENSORS)
@over("count", [1, 100, 2622, MANY // 10, MANY // 4])
def test_selection_by_a_sample_equals_a_stable_sort(name, count):
    """It finds exactly the largest values, and among equal ones the first."""
    x = TENSORS[name]
    assert torch.equal(largest(x, count), x.abs().sort(descending=True, stable=True).indices[:count].sort().values)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "student", "rising", "clustered"])
@pytest.mark.parametrize("count", [262, 2622, MANY // 10])
def test_the_sampled_threshold_leaves_few_candidates(name, count):
    """Enough values reach the threshold, but not many more: one pass over all values and a search among few."""
    found = above(TENSORS[name], suggested(TENSORS[name], count))
    assert count <= found <= count * (1 + 8 / count**0.25) + 50


def test_a_misleading_sample_changes_no_result():
    """The sample sees the largest values only, then almost none of them."""
    x, count = gaussian(MANY) * 1e-3, 2622
    stride = math.isqrt(count) | 1
    x[stride // 2 + 1 :: stride] += 1
    x[stride // 2 :: stride] = 2
    assert above(x, suggested(x, count)) >= count
    x[stride // 2 :: stride] = 0
    x[stride // 2 :: stride][:200] = 5
    assert above(x, suggested(x, count)) < count
    assert torch.equal(largest(x, count), x.abs().sort(descending=True, stable=True).indices[:count].sort().values)


@pytest.mark.parametrize("name", ["gaussian", "laplace", "student"])
def test_top_k_has_the_least_possible_error(name):
    """‖q(x) − x‖² is the energy of the n − k smallest values, and below (1 − k/n)·‖x‖²."""
    x = TENSORS[name]
    for density in (0.001, 0.01, 0.1):
        codec = tw.codecs.TopK(density, tw.codecs.Identity())
        kept = math.ceil(density * MANY)
        best = x.double().square().sort().values[: MANY - kept].sum() / x.double().square().sum()
        assert relative_error(codec, x) == pytest.approx(best.item(), rel=1e-6) and best < 1 - density
        indices = kept * (2 + math.log2(MANY / kept)) / 8  # bytes
        assert len(encoded(codec, x)) == codec.nbytes(MANY) and codec.nbytes(MANY) - 4 * kept == pytest.approx(
            indices, rel=0.05
        )


# ---- the codebook of two bits


def test_the_codebook_follows_its_listing():
    """SparseLoCo's quantiser (specification, j2) in Python floats."""
    x = laplace(1000) + 0.2
    values = x.double().tolist()
    mean = sum(values) / 1000
    step = 6 * (sum((v - mean) ** 2 for v in values) / 999) ** 0.5 / 4
    bins = [min(3, max(0, round((v - mean) / step + 2))) for v in values]
    table = [mean + sum(v - mean for v, b in zip(values, bins) if b == i) / max(1, bins.count(i)) for i in range(4)]
    torch.testing.assert_close(
        roundtrip(tw.codecs.Codebook(), x).double(), torch.tensor(table).double()[bins], rtol=1e-6, atol=0
    )


def test_the_published_codec_has_its_published_size():
    """64 of 4096 values in 2 + 12 bits: 0.219 bits per parameter, 146 times less than fp32."""
    n = 1 << 24
    bits = 8 * tw.codecs.ChunkedTopK(4096, 64, tw.codecs.Codebook()).nbytes(n) / n
    assert bits == pytest.approx(0.21875, rel=1e-4) and 146 < 32 / bits < 147


def test_nearly_all_kept_values_fall_in_two_bins_of_the_codebook():
    """The specification has 0.0, 49.6, 0.2 and 50.1 % on Laplace values. So a sign is as good: both errors are 0.192 of the norm."""
    kept = torch.cat([part[part.abs().topk(64).indices] for part in laplace(1 << 20).split(4096)])
    share = torch.tensor(list(encoded(tw.codecs.Codebook(), kept)[:-16]))
    share = torch.stack([(share >> place & 3 == i).sum() for place in (0, 2, 4, 6) for i in range(4)]).view(4, 4).sum(0)
    assert (share[[0, 2]].sum() / share.sum()).item() < 0.01 and (share[1] / share.sum()).item() == pytest.approx(
        0.5, abs=0.02
    )
    assert relative_error(tw.codecs.Codebook(), kept) ** 0.5 == pytest.approx(0.192, abs=0.004)
    assert relative_error(tw.codecs.Sign(), kept) ** 0.5 == pytest.approx(0.192, abs=0.004)


def test_a_codebook_of_equal_values_is_exact():
    assert same_bits(roundtrip(tw.codecs.Codebook(), torch.full((7,), -0.3)), torch.full((7,), -0.3))
    assert same_bits(roundtrip(tw.codecs.Codebook(), torch.tensor([2.5])), torch.tensor([2.5]))


# ---- transforms


def transformed(codec: tw.codecs.Codec, x: torch.Tensor, key: Key = Key()) -> torch.Tensor:
    """The values that the inner codec, an Identity, encodes."""
    return torch.tensor(list(encoded(codec, x, key)), dtype=torch.uint8).view(torch.float32)


def test_the_dct_matches_its_definition():
    x = gaussian(8)
    due = [
        math.sqrt((2 - (f == 0)) / 8)
        * sum(v * math.cos(math.pi * f * (2 * i + 1) / 16) for i, v in enumerate(x.tolist()))
        for f in range(8)
    ]
    torch.testing.assert_close(
        transformed(tw.codecs.DCT(tw.codecs.Identity(), 8), x), torch.tensor(due), rtol=1e-5, atol=1e-6
    )


def test_the_dct_of_a_square_runs_along_both_sides():
    """The remaining full rows are one rectangle, the remaining values one row."""
    x, c = gaussian(3 * 16 + 2 * 4 + 3), exact.cosines(4).float()
    y = transformed(tw.codecs.DCT(tw.codecs.Identity(), 4, axes=2), x)
    for square, turned in zip(x[:48].view(3, 4, 4), y[:48].view(3, 4, 4)):
        torch.testing.assert_close(turned, c @ square @ c.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        y[48:56].view(2, 4), exact.cosines(2).float() @ x[48:56].view(2, 4) @ c.T, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(y[56:], exact.cosines(3).float() @ x[56:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [2, 8, 64])
def test_hadamard_matches_its_definition(block):
    """Random signs, then (−1)^popcount(i & j) / √block. The shorter rest is cut into powers of two."""
    n = 2 * block + block // 2 + (block > 2)
    x, key = gaussian(n), Key(5, 1, 2, 3)
    y = transformed(tw.codecs.Hadamard(tw.codecs.Identity(), block), x, key)
    signs = transformed(tw.codecs.Hadamard(tw.codecs.Identity(), block), torch.eye(block)[0], key)
    for begin, length in ((0, block), (block, block), (2 * block, block // 2)):
        h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(length)] for i in range(length)]) / length**0.5
        turned = h.T @ y[begin : begin + length]  # D·x
        torch.testing.assert_close(turned.abs(), x[begin : begin + length].abs(), rtol=1e-4, atol=1e-5)
    assert signs.abs().allclose(torch.tensor(block**-0.5)) and y[-1].abs() == x[-1].abs()


def test_hadamard_signs_are_equal_for_all_senders_and_new_each_round():
    """All blocks share them, and about half of them are negative."""
    codec = tw.codecs.Hadamard(tw.codecs.Identity(), 64)
    x = torch.ones(128)
    first = transformed(codec, x, Key(round=1))
    assert same_bits(first, transformed(codec, x, Key(round=1, sender=4))) and same_bits(first[:64], first[64:])
    assert not same_bits(first, transformed(codec, x, Key(round=2)))
    sums = torch.stack([transformed(codec, x, Key(round=r))[0] for r in range(200)])  # the mean sign, times 8
    assert abs(sums.mean()) < 5 * 200**-0.5 and sums.std() == pytest.approx(1.0, abs=0.2)


def test_a_rotation_helps_uniform_grids_on_heavy_tails():
    """It does not help a logarithmic grid (docs/formats.md)."""
    x = student(1 << 16)
    plain, turned = (relative_error(codec, x) for codec in (tw.codecs.Int(4), tw.codecs.Hadamard(tw.codecs.Int(4))))
    assert turned < 0.5 * plain
    plain, turned = (relative_error(codec, x) for codec in (tw.codecs.E3M0(), tw.codecs.Hadamard(tw.codecs.E3M0())))
    assert turned > 0.9 * plain


def test_squares_are_cut_out_of_matrices():
    """Squares of 2 × 2 from a matrix of 3 × 5, then the rest to their right, the rest below them, and the vector."""
    x = torch.arange(17.0)
    order = transformed(tw.codecs.Squares(tw.codecs.Identity(), 2, ((3, 5), (2,))), x)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14, 15, 16]


def test_a_smooth_matrix_has_few_coefficients():
    """DeMo's codec keeps nearly all of it with 32 of 4096 values; chunks of the flat matrix do not."""
    side = torch.linspace(0, 3, 128)
    x = (torch.sin(side)[:, None] * torch.cos(2 * side)[None] + side[:, None]).reshape(-1)
    demo = tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(4096, 32), axes=2)).fitted(((128, 128),))
    assert relative_error(demo, x) < 0.001 < 0.5 < relative_error(tw.codecs.ChunkedTopK(4096, 32), x)
    assert 8 * demo.nbytes(1 << 24) / (1 << 24) == pytest.approx(32 / 4096 * (16 + 12))


# ---- the same bits on every machine


@pytest.mark.parametrize("k", [1, 2, 4, 64, 1000])
def test_products_do_not_depend_on_the_order_of_sums(k):
    a, b = gaussian(50, k) * torch.ldexp(torch.ones(50, 1), torch.arange(50)[:, None] - 25), student(k * 40).view(k, 40)
    due = exact.product(a, b)
    for _ in range(5):
        order = torch.randperm(k, generator=random)
        assert torch.equal(exact.product(a[:, order], b[order]), due)
    by_hand = sum((exact.product(a[:, i : i + 1], b[i : i + 1]) for i in range(k)), torch.zeros(50, 40).double())
    bits = (52 - (k - 1).bit_length()) // 2
    bound = k * 2.0 ** (1 - bits) * a.abs().amax(1, keepdim=True).double() * b.abs().amax(0)
    assert ((due - by_hand).abs() <= bound).all()
    assert torch.equal(exact.product(a[:, :0], b[:0]), torch.zeros(50, 40).double())


def test_the_cosines_are_far_from_rounding_ties():
    """So another last bit of `cos` on another machine does not change the result of `product`."""
    for size in range(2, 65):
        whole, _ = exact._whole(exact.cosines(size), 1, 23)
        scaled = exact.cosines(size) / exact._whole(exact.cosines(size), 1, 23)[1]
        assert ((scaled - whole).abs() - 0.5).abs().min() > 1e-6
        torch.testing.assert_close(exact.cosines(size) @ exact.cosines(size).T, torch.eye(size).double())


def test_decoding_has_the_same_bits_with_any_number_of_threads():
    x, before = gaussian(70_000), torch.get_num_threads()
    shapes = ((200, 300), (10_000,))
    for codec in (
        tw.codecs.DCT(tw.codecs.E3M0()),
        tw.codecs.DCT(tw.codecs.E3M0(), axes=2),
        tw.lab.codecs.LowRank(4, shapes=shapes),
        tw.codecs.Hadamard(tw.codecs.Int(4)),
    ):
        payload = torch.tensor(list(encoded(codec, x)), dtype=torch.uint8)
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = torch.zeros_like(x)
            codec.decode_add(payload, out, Key())
            outs.append(out)
        torch.set_num_threads(before)
        assert all(same_bits(out, outs[0]) for out in outs)


# ---- low rank


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("iterations", [1, 2])
def test_low_rank_is_exact_on_matrices_of_its_rank(rank, iterations):
    x = torch.cat(
        [
            (gaussian(40, rank) @ gaussian(rank, 30)).view(-1),
            gaussian(9),
            (gaussian(5, rank) @ gaussian(rank, 200)).view(-1),
        ]
    )
    codec = tw.lab.codecs.LowRank(rank, iterations, shapes=((40, 30), (9,), (5, 4, 50)))
    torch.testing.assert_close(roundtrip(codec, x), x, rtol=1e-5, atol=1e-5)
    assert codec.nbytes(x.numel()) == 4 * (rank * (40 + 30) + 9 + rank * (5 + 200))


def test_more_iterations_bring_low_rank_close_to_the_best_error():
    """The matrix has a decaying spectrum. The best error is that of the singular values."""
    u, v = torch.linalg.qr(gaussian(100, 60))[0], torch.linalg.qr(gaussian(80, 60))[0]
    x = (u * 0.6 ** torch.arange(60)) @ v.T
    best = (torch.linalg.svdvals(x)[4:].square().sum() / x.square().sum()).item()
    errors = [relative_error(tw.lab.codecs.LowRank(4, i, shapes=((100, 80),)), x.view(-1)) for i in (1, 2, 4)]
    assert best <= errors[2] < errors[1] < errors[0] and errors[2] < 1.3 * best


def test_low_rank_leaves_matrices_that_it_would_not_make_smaller():
    x = gaussian(64 + 21)
    codec = tw.lab.codecs.LowRank(4, shapes=((8, 8), (3, 7)))
    assert codec.nbytes(85) == 4 * 85 and same_bits(roundtrip(codec, x), x)


@pytest.mark.parametrize(
    "x", [torch.zeros(600), torch.full((600,), 1e30), torch.eye(20, 30).view(-1)], ids=["0", "1e30", "eye"]
)
def test_low_rank_of_degenerate_matrices_is_finite_and_no_larger(x):
    q = roundtrip(tw.lab.codecs.LowRank(4, shapes=((20, 30),)), x)
    assert torch.isfinite(q).all() and (q - x).norm() <= x.norm() * (1 + 1e-6)


def test_orthonormal_zeroes_dependent_columns():
    columns = torch.cat([gaussian(50, 3), torch.zeros(50, 1), gaussian(50, 1)], 1)
    columns = columns.double()
    columns = torch.cat([columns, columns[:, :1] * 2 + columns[:, 1:2]], 1)
    p = exact.orthonormal(columns).double()
    due = torch.diag(torch.tensor([1.0, 1, 1, 0, 1, 0]).double())
    torch.testing.assert_close(p.T @ p, due, rtol=0, atol=1e-7)
    torch.testing.assert_close(p @ (p.T @ columns), columns, rtol=1e-5, atol=1e-5)


# ---- sums of encoded values

LINEAR = [row.piece for row in CODECS if row.piece.linear]


def test_random_k_and_low_rank_are_the_linear_codecs():
    assert {type(codec) for codec in LINEAR} == {tw.codecs.RandomK, tw.lab.codecs.LowRank}


@pytest.mark.parametrize("codec", LINEAR, ids=str)
def test_the_sum_of_linear_packets_encodes_the_mean(codec):
    laws.adds_on_the_way(codec)


def test_the_linear_form_of_one_replica_is_its_packet():
    """With one iteration both forms are the same codec."""
    x, codec = gaussian(900), tw.lab.codecs.LowRank(3, 1, shapes=((25, 30), (150,)))
    estimate, _ = laws.summed(codec, [x], Key(1))
    torch.testing.assert_close(estimate, roundtrip(codec, x, Key(1)), rtol=1e-5, atol=1e-6)
    assert 4 * sum(codec.sizes(900)) == codec.nbytes(900)


def test_the_local_residual_stays_bounded():
    """Two replicas have constant, different signals. A residual against a replica's own reconstruction levels off.

    A residual against the estimate grows without bound (specification, j4).
    """
    codec, target = tw.lab.codecs.LowRank(2, shapes=((20, 30),)), [gaussian(600) for _ in range(2)]
    norms = {}
    for form in ("local", "aggregated"):
        held = [torch.zeros(600) for _ in range(2)]
        norms[form] = []
        for step in range(200):
            signals = [t + e for t, e in zip(target, held)]
            estimate, sent = laws.summed(codec, signals, Key(round=step))
            held = [s - (own if form == "local" else estimate) for s, own in zip(signals, sent)]
            norms[form].append(held[0].norm().item())
    assert norms["local"][199] < 1.5 * norms["local"][50] and norms["aggregated"][199] > 2.5 * norms["aggregated"][50]
