"""Recipes against the equations of their papers, written in a few lines of fp64, over several steps of several replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.drivers.elastic.driver import check
from thinwire.rng import Key, draw
from thinwire.testing.toy import same_bits

NAN = float("nan")


def given(shapes, replicas=3, steps=8, seed=0):
    """Returns [step, replica, tensor]: a part that all replicas share plus a part of each."""
    chance = torch.Generator().manual_seed(seed)
    common = [torch.randn(shape, generator=chance) for shape in shapes]
    return [
        [[c + torch.randn(c.shape, generator=chance) for c in common] for _ in range(replicas)] for _ in range(steps)
    ]


def exchanged(strategy, gradients):
    """Returns, step by step, what replaces the `gradients`, with equal bits on all replicas; None for a dropped step."""

    class Parameters(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.ParameterList(torch.zeros(g.shape) for g in gradients[0][0])

    def one(group):
        model, seen = Parameters(), []
        optimizer = strategy.inner.make(model, 0.01, 0.0) if strategy.inner else torch.optim.AdamW(model.parameters())
        with tw.Replica(strategy, model, optimizer, group) as replica:
            for own in gradients:
                for parameter, g in zip(model.parameters(), own[group.rank]):
                    parameter.grad = g.clone()
                replica.exchange_gradients()
                dropped = all(p.grad is None for p in model.parameters())
                seen.append(
                    None
                    if dropped
                    else [torch.zeros(p.shape) if p.grad is None else p.grad.clone() for p in model.parameters()]
                )
                optimizer.step()
        return seen

    first, *others = tw.run_threads(len(gradients[0]), one, timeout=600.0)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert (mine is None) == (theirs is None) and all(map(same_bits, mine or [], theirs or []))
    return first


def close(found, due, **tolerance):
    for mine, theirs in zip(found, due, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), **({"rtol": 1e-4, "atol": 1e-4} | tolerance))


# ---- PowerSGD


def power_sgd(gradients: list[list[Tensor]], q: Tensor) -> Iterator[Tensor]:
    """Vogels, Karimireddy, Jaggi, Algorithms 1 and 2, for one matrix [step, replica]; `q` is the initial Q."""
    held = [torch.zeros_like(g).double() for g in gradients[0]]
    for gs in gradients:
        deltas = [g.double() + e for g, e in zip(gs, held)]
        p, _ = torch.linalg.qr(torch.stack([d @ q for d in deltas]).mean(0))
        qs = [d.T @ p for d in deltas]
        q = torch.stack(qs).mean(0)
        held = [d - p @ own.T for d, own in zip(deltas, qs)]
        yield p @ q.T


def start(shapes, rank, number=0):
    """Returns what all replicas draw in round `number`: Q of each matrix."""
    counts = [rank * shape[1] for shape in shapes]
    drawn = draw(Key(round=number).shared("factors"), 0, sum(counts)).sign().double()
    return [part.view(-1, rank) for part in drawn.split(counts)]


MATRICES = ((12, 20), (16, 9))


@pytest.mark.parametrize("replicas", [1, 3])
def test_power_sgd_matches_its_paper(replicas):
    """Q is reused (warm start), feedback is on, and vectors are sent uncompressed."""
    gradients = given((*MATRICES, (7,)), replicas)
    found = exchanged(tw.lab.recipes.power_sgd(rank=2), gradients)
    for number, q in enumerate(start(MATRICES, 2)):
        due = power_sgd([[own[number] for own in step] for step in gradients], q)
        close([step[number] for step in found], list(due))
    close([step[2] for step in found], [torch.stack([own[2] for own in step]).mean(0) for step in gradients])


def test_power_sgd_is_a_power_iteration_over_steps():
    """For a constant matrix, the error at rank 2 falls to what the singular values allow; a new random Q in each step does not reach it."""
    (matrix,) = given(((40, 30),), 1, 1)[0][0]
    strategy = replace(tw.lab.recipes.power_sgd(rank=2), feedback=None)
    found = exchanged(strategy, [[[matrix]]] * 40)
    best = torch.linalg.svdvals(matrix.double())[2:].norm()
    lost = [float((matrix - step[0]).double().norm() / best) for step in found]
    assert lost[0] > 1.05 and lost[-1] < 1.001 and lost == sorted(lost, reverse=True)


@pytest.mark.parametrize("first", ["zeros", "in full", "in full, by another exchange"])
def test_power_sgd_restarts_after_rounds_without_a_signal(first):
    """After three rounds of zeros, or in fp32, Q is drawn again, and nothing of those rounds is held back."""
    gradients = given(MATRICES)
    strategy = tw.lab.recipes.power_sgd(
        rank=2, policy=tw.pieces.policy.Constant() if first == "zeros" else tw.pieces.policies.DenseUntil(3)
    )
    if first == "in full, by another exchange":
        strategy = replace(
            strategy, exchange=tw.lab.fastest.Fastest("20mbit", (tw.exchange.TwoShot(), tw.exchange.AllReduce()))
        )
    if first == "zeros":
        gradients = [[[torch.zeros_like(g) for g in own] for own in step] for step in gradients[:3]] + gradients[3:]
    found = exchanged(strategy, gradients)[3:]
    for number, q in enumerate(start(MATRICES, 2, number=3)):
        close(
            [step[number] for step in found],
            list(power_sgd([[own[number] for own in step] for step in gradients[3:]], q)),
        )


def test_a_dropped_round_changes_nothing_of_power_sgd():
    """Q and what is held back are those of the round before, as if the step had not happened."""
    gradients = given(MATRICES)
    found = exchanged(tw.lab.recipes.power_sgd(rank=2), gradients)
    poisoned = [[torch.full_like(g, NAN) if rank == 1 else g for g in own] for rank, own in enumerate(gradients[4])]
    again = exchanged(tw.lab.recipes.power_sgd(rank=2), [*gradients[:4], poisoned, *gradients[4:]])
    assert again.pop(4) is None and all(all(map(same_bits, a, b)) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("size", [1e-30, 1e18])
def test_power_sgd_keeps_the_scale_of_any_matrix(size):
    """Q has the scale of M. If that scale passed on to P, it would be squared and overflow or vanish."""
    gradients = [[[size * g for g in own] for own in step] for step in given(MATRICES[:1])]
    found = exchanged(tw.lab.recipes.power_sgd(rank=2), gradients)
    (q,) = start(MATRICES[:1], 2)
    due = power_sgd([[own[0] for own in step] for step in gradients], q)
    close([step[0] / size for step in found], [one / size for one in due])


# ---- CGX


def cgx(x: Tensor, bits: int, block: int) -> Tensor:
    """The quantiser of the released code, on a flat tensor, bucket by bucket."""
    out = []
    for bucket in x.double().split(block):
        unit = (bucket.max() - bucket.min()) / (2**bits - 1)
        level = ((bucket - bucket.min()) / unit + 0.5).floor().clamp(max=2**bits - 1)
        out.append(bucket.min() + unit * level)
    return torch.cat(out)


def test_cgx_matches_its_paper():
    """Each matrix is quantised separately, in buckets from their minimum to their maximum; small tensors are in fp32; the mean is plain."""
    shapes = ((40, 30), (7, 300), (20, 20), (50,))
    gradients = given(shapes, steps=3)
    for found, step in zip(
        exchanged(tw.lab.recipes.cgx(codec=tw.lab.codecs.Each(tw.lab.codecs.Levels(4, 512), least=1024)), gradients),
        gradients,
        strict=True,
    ):
        due = [
            [cgx(g.view(-1), 4, 512).view(g.shape) if g.numel() >= 1024 else g.double() for g in own] for own in step
        ]
        close(found, [torch.stack(parts).mean(0) for parts in zip(*due)], rtol=1e-6, atol=1e-6)


# ---- DeMo


def demo(gradients: list[list[Tensor]], decay: float, count: int) -> Iterator[Tensor]:
    """Peng, Quesnelle, Kingma, as released, for one square [step, replica]: the sign of each component's mean over its senders."""
    side = len(gradients[0][0])
    at, place = torch.arange(side).double(), torch.arange(side).double()[:, None]
    basis = (torch.pi / side * (at + 0.5) * place).cos() * (2 / side) ** 0.5
    basis[0] /= 2**0.5
    held = [torch.zeros(side, side).double() for _ in gradients[0]]
    for gs in gradients:
        total, senders = torch.zeros(side * side).double(), torch.zeros(side * side).double()
        for replica, g in enumerate(gs):
            held[replica] = decay * held[replica] + g.double()
            components = (basis @ held[replica] @ basis.T).view(-1)
            index = components.abs().topk(count).indices
            sent = torch.zeros_like(components).index_copy(0, index, components[index].bfloat16().double())
            held[replica] = held[replica] - basis.T @ sent.view(side, side) @ basis
            total, senders = total + sent, senders.index_add(0, index, torch.ones(count).double())
        mean = total / senders.clamp(min=1)
        yield (basis.T @ mean.view(side, side) @ basis).sign()


def test_demo_matches_its_paper():
    gradients = given(((64, 64),), steps=6)
    found = exchanged(tw.lab.recipes.demo(), gradients)
    due = list(demo([[own[0] for own in step] for step in gradients], 0.999, 32))
    assert all(bool((mine[0] == sign).all()) for mine, sign in zip(found, due, strict=True))


def test_demo_is_not_the_sign_of_the_mean_over_all():
    """The mean is taken per component before the cosines are added, so the share of senders does not cancel, and some signs differ."""
    gradients = given(((64, 64),), steps=1)
    plain = tw.lab.recipes.demo(codec=tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(4096, 32), axes=2)))
    ((over_all,),) = exchanged(plain, gradients)
    ((over_senders,),) = exchanged(tw.lab.recipes.demo(), gradients)
    assert 0.01 < (over_all != over_senders).double().mean() < 0.5


def test_over_senders_matches_the_released_reduction():
    """The reference is torch's `scatter_reduce("mean", include_self=False)` on the picks of three replicas. A site weighs as its replicas."""
    codec, (gradients,) = tw.codecs.TopK(0.3, tw.codecs.Identity()), given(((50,),), steps=1)
    picked = [(own[0].abs().topk(15).indices, own[0]) for own in gradients]
    index, values = torch.cat([i for i, _ in picked]), torch.cat([g[i] for i, g in picked])
    due = torch.zeros(50).scatter_reduce_(0, index, values, "mean", include_self=False)
    ((found,),) = exchanged(
        tw.Strategy(signal=tw.strategy.Gradients(), codec=tw.lab.codecs.OverSenders(codec)), [gradients]
    )
    assert torch.equal(found != 0, due != 0) and (index.bincount(minlength=50) == 2).any()
    close([found], [due], rtol=1e-6, atol=1e-6)

    sites = tw.Strategy(
        signal=tw.strategy.Gradients(), codec=tw.lab.codecs.OverSenders(codec), exchange=tw.exchange.Hierarchy((2, 1))
    )
    ((found,),) = exchanged(sites, [gradients])
    total, weight = torch.zeros(50), torch.zeros(50)
    for g, w in (((gradients[0][0] + gradients[1][0]) / 2, 2.0), (gradients[2][0], 1.0)):
        chosen = g.abs().topk(15).indices
        total[chosen] += w * g[chosen]
        weight[chosen] += w
    close([found], [total / weight.clamp(min=1)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "exchange", [tw.exchange.Direct(), tw.exchange.TwoShot(tw.pieces.feedback.Feedback())], ids=str
)
def test_over_senders_of_equal_values_is_its_codec(exchange):
    """If all senders send the same value, the mean over those senders is that value."""
    gradients = [[own[:1] * 1 for own in [step[0]] * 3] for step in given(((50,),), 1, steps=4)]
    strategy = tw.Strategy(
        signal=tw.strategy.Gradients(),
        codec=tw.codecs.TopK(0.3),
        feedback=tw.pieces.feedback.Feedback(),
        exchange=exchange,
    )
    over = replace(strategy, codec=tw.lab.codecs.OverSenders(tw.codecs.TopK(0.3)))
    for a, b in zip(exchanged(strategy, gradients), exchanged(over, gradients), strict=True):
        close(a, b, rtol=1e-6, atol=1e-6)


def test_over_senders_is_refused_where_deltas_count_differently():
    with pytest.raises(tw.ConfigurationError, match=r"run elastically: OverSenders.*the codec inside it does not"):
        check(tw.Strategy(codec=tw.lab.codecs.OverSenders(tw.codecs.TopK())))
