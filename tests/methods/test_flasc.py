"""FLASC: dense it is FedAdam; sparse, what is masked is what travels and not what is trained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError
from thinwire.group import CountedGroup, Ledger
from thinwire.lm.adapters import averaging_gap
from thinwire.methods.flasc import DOWN, FINAL, HUB, UP, Federation, Flasc
from thinwire.seeds import derive


class Factors(nn.Module):
    """y = (W + B·A)·x with W frozen, A drawn and B zero: LoRA by hand."""

    def __init__(self, inputs: int = 6, outputs: int = 5, rank: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.W = nn.Parameter(torch.randn(outputs, inputs, generator=generator), requires_grad=False)
        self.A = nn.Parameter(torch.randn(rank, inputs, generator=generator))
        self.B = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.W + self.B @ self.A).T


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters() if p.requires_grad])


def load(model: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        for p, part in zip([p for p in model.parameters() if p.requires_grad], values.split([12, 10])):
            p.copy_(part.view(p.shape))


def local_training(model: nn.Module, rank: int, round_: int, steps: int = 3) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(derive(0, "batch", rank, round_, step))
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :5].cumsum(1) * (1 + 0.1 * rank)).square().mean().backward()
        optimizer.step()


def run(
    method: Flasc, size: int = 3, rounds: int = 5, saved: Any = None, at: int | None = None
) -> list[dict[str, Any]]:
    def rank_of(group):
        ledger = Ledger()
        model = Factors()
        federation = Federation(method, model, CountedGroup(group, ledger))
        seen: dict[str, Any] = {"starts": [], "moved": [], "took part": [], "p": []}
        if saved is not None:
            federation.load_state(*saved[group.rank])
        while federation.rounds < rounds:
            number = federation.rounds

            def train(number=number):
                seen["starts"].append(flat(model))
                local_training(model, group.rank, number)
                seen["moved"].append(flat(model) != seen["starts"][-1])

            before = federation.p.detach().clone()
            seen["took part"].append(federation.round(train))
            seen["p"].append((before, federation.p.detach().clone(), dict(federation.heard)))
            if federation.rounds == at:
                seen["state"] = federation.state()
        federation.finish()
        seen |= {"final": flat(model), "sent": {w: ledger.sent(w) for w in (DOWN, UP, FINAL)}, "model": model}
        return seen

    return tw.run_threads(size, rank_of)


def fed_adam(size: int, rounds: int, lr: float) -> Tensor:
    """Straight from the paper: the replicas' mean movement is AdamW's gradient."""
    p = nn.Parameter(flat(Factors()))
    optimizer = torch.optim.AdamW([p], lr=lr, weight_decay=0.0)
    for number in range(rounds):
        deltas = []
        for rank in range(size):
            model = Factors()
            load(model, p.detach())
            local_training(model, rank, number)
            deltas.append(p.detach() - flat(model))
        p.grad = torch.stack(deltas).mean(0)
        optimizer.step()
    return p.detach()


def test_dense_it_is_fed_adam_to_the_last_bit():
    for seen in run(Flasc(up=1, down=1, lr=0.02)):
        assert torch.equal(seen["final"], fed_adam(3, 5, 0.02))


def test_what_is_masked_travels_not_and_is_trained_all_the_same():
    """Replicas start at the largest of |p| over the whole vector; all entries move, the masked ones too; and what comes up is relative to
    that start, so that a masked entry of p is not pulled back."""
    method = Flasc(up=0.25, down=0.5, lr=0.02)
    hub, *others = run(method)
    kept = math.ceil(0.5 * 22)
    for number, (before, after, heard) in enumerate(hub["p"]):
        start = hub["starts"][number]
        largest = before.abs().sort(descending=True, stable=True).indices[:kept]
        due = torch.zeros(22).index_copy(0, largest, before[largest])
        assert torch.equal(start, due)
        assert all(torch.equal(one["starts"][number], due) for one in others)
        masked = start == 0
        assert masked.sum() >= 22 - kept and hub["moved"][number][masked].any()
        assert not torch.equal(before, after)
        for delta in heard.values():
            assert (delta != 0).sum() <= math.ceil(0.25 * 22)
        quiet = torch.stack(list(heard.values())).eq(0).all(0)
        if number == 0:  # Adam has no momentum yet: what nobody sent has not moved, masked or not
            assert torch.equal(after[quiet], before[quiet])


def test_the_first_download_is_of_a_alone():
    """B is zero: of the largest none is B's while A has any left; then, of equal ones, the first."""
    first = run(Flasc(up=0.5, down=0.5), rounds=1)[1]["starts"][0]
    assert (first[:12] != 0).sum() == 11 and not first[12:].any()
    more = run(Flasc(up=0.5, down=0.9), rounds=1)[1]["starts"][0]
    assert torch.equal(more, flat(Factors()))


@pytest.mark.parametrize(
    "method", [Flasc(), Flasc(up=1, down=0.1, values=tw.Cast("fp16")), Flasc(up=1, down=1), Flasc(sampled=2)]
)
def test_bytes_are_those_predicted(method):
    size, rounds = 3, 5
    found = run(method, size, rounds)
    down, up = method.nbytes(22)
    drawn = [method.drawn(number, size) for number in range(rounds)]
    assert found[HUB]["sent"][DOWN] == down * sum(rank != HUB for ranks in drawn for rank in ranks)
    for rank, seen in enumerate(found):
        assert seen["sent"][UP] == (0 if rank == HUB else up * sum(rank in ranks for ranks in drawn))
        assert seen["took part"] == [rank in ranks for ranks in drawn]
        assert torch.equal(seen["final"], found[HUB]["final"])


def test_draws_are_the_same_everywhere_and_reach_all():
    method = Flasc(sampled=2)
    drawn = [method.drawn(number, 5) for number in range(40)]
    assert all(len(set(ranks)) == 2 for ranks in drawn) and set().union(*drawn) == set(range(5))
    assert drawn == [Flasc(sampled=2).drawn(number, 5) for number in range(40)]


def test_save_and_go_on():
    method = Flasc(up=0.25, down=0.5, sampled=2, lr=0.02)
    whole = run(method, 3, 6, at=3)
    again = run(method, 3, 6, saved=[seen["state"] for seen in whole])
    assert all(torch.equal(a["final"], b["final"]) for a, b in zip(whole, again))
    with pytest.raises(CheckpointError, match="take the run's own model"):
        run(Flasc(), 1, 6, saved=[({"p": torch.zeros(3)}, {"rounds": 1})])


def test_a_delta_that_is_not_finite_is_left_out():
    def rank_of(group, poisoned):
        model = Factors()
        federation = Federation(Flasc(up=0.5, down=1, lr=0.02), model, group)

        def train():
            local_training(model, group.rank, 0)
            if poisoned and group.rank == 2:
                model.B.data[0, 0] = math.nan

        federation.round(train)
        heard = sorted(federation.heard)
        federation.finish()
        return heard, flat(model)

    found = tw.run_threads(3, lambda group: rank_of(group, True))
    assert found[HUB][0] == [0, 1] and all(torch.isfinite(final).all() for _, final in found)
    assert tw.run_threads(3, lambda group: rank_of(group, False))[HUB][0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Flasc(up=0), "density=0"),
        (lambda: Flasc(down=1.5), "density=1.5"),
        (lambda: Flasc(sampled=0), "at least one replica"),
        (lambda: Flasc(lr=0), "lr > 0"),
        (lambda: run(Flasc(sampled=4)), "at most all"),
    ],
)
def test_what_cannot_work_is_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_replicas_of_another_method_are_refused():
    with pytest.raises(DisagreementError, match="method"):
        tw.run_threads(2, lambda group: Federation(Flasc(up=0.5 if group.rank else 0.25), Factors(), group))


def test_the_gap_between_averaged_factors_and_averaged_products():
    """mean(B)·mean(A) is not mean(B·A), but where one factor is shared."""
    generator = torch.Generator().manual_seed(0)
    names = "x.lora_A.default.weight", "x.lora_B.default.weight"

    def drawn(shape: tuple[int, int]) -> Tensor:
        return torch.randn(shape, generator=generator)

    a, b = drawn((2, 6)), drawn((5, 2))
    apart = [{names[0]: drawn((2, 6)), names[1]: drawn((5, 2))} for _ in range(2)]
    by_hand = (apart[0][names[1]] + apart[1][names[1]]) @ (apart[0][names[0]] + apart[1][names[0]]) / 4
    product = sum(one[names[1]] @ one[names[0]] for one in apart) / 2
    assert averaging_gap(apart) == pytest.approx(float((by_hand - product).norm() / product.norm()), rel=1e-5)
    assert averaging_gap([one | {names[0]: a} for one in apart]) < 1e-12
    assert averaging_gap([one | {names[1]: b} for one in apart]) < 1e-12
    assert averaging_gap([{names[0]: a, names[1]: torch.zeros(5, 2)}] * 2) == 0
