"""FLASC: the bits of the paper's recursion, masks for communication only, predicted bytes, resumes and refusals."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire import checkpoint
from thinwire.comm import CountedGroup, Ledger
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError, ModelError
from thinwire.lab.methods import Federated, Flasc, flasc
from thinwire.packet import HEADER_NBYTES
from thinwire.rng import derive

NUMEL = 22


class Factors(nn.Module):
    """LoRA by hand: y = (W + B·A)·x with W frozen, A random and B zero."""

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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(derive(0, "batch", rank, step))
    x = torch.randn(8, 6, generator=generator)
    model.zero_grad()
    (model(x) - x[:, :5].cumsum(1) * (1 + 0.1 * rank)).square().mean().backward()


def go_on(at: Federated, steps: int, poison: Any = None) -> None:
    while at.step < steps and not at.stopping:
        if at.idle:
            at.skip()
            continue
        backward(at.model, at.group.rank, at.step)
        at.optimizer.step()
        if poison:
            poison(at)


def run(method: Flasc, size: int = 3, steps: int = 15, **how: Any) -> list[dict[str, Any]]:
    """For each replica: the first weights of its rounds, its final weights, its ledger and its events."""

    def replica(group: tw.Group) -> dict[str, Any]:
        model, ledger, events, starts = Factors(), Ledger(), [], []

        def observer(event: str, step: int, **fields: Any) -> None:
            events.append((event, fields))

        at = method.attach(model, sgd(model), CountedGroup(group, ledger), observer=observer)
        while at.step < steps:
            starts.append((at.start, not at.idle))
            go_on(at, min(steps, at.step + method.every), **how)
        at.finish()
        return {"starts": starts, "final": flat(model), "ledger": ledger, "events": events}

    return tw.run_threads(size, replica, timeout=600.0)


def masked(values: Tensor, density: float) -> Tensor:
    kept = values.abs().sort(descending=True, stable=True).indices[: math.ceil(density * len(values))]
    return torch.zeros_like(values).index_copy(0, kept, values[kept])


def paper_recursion(
    method: Flasc, size: int = 3, steps: int = 15, left_out: int | None = None, against: str = "s"
) -> Any:
    """The paper's recursion: the first weights of each round, and p at the end.

    The hub does not count replica `left_out`. `against="p"` is a common mistake that pulls masked entries back.
    """
    p = nn.Parameter(flat(Factors()))
    adam = torch.optim.AdamW([p], lr=method.outer_lr, weight_decay=0.0)
    starts = []
    for round_ in range(-(-steps // method.every)):
        starts.append(masked(p.detach(), method.down) if round_ else p.detach().clone())
        total, drawn = torch.zeros(NUMEL), [int(name) for name in method.draw([str(r) for r in range(size)], round_)]
        heard = [rank for rank in drawn if rank != left_out]
        for rank in heard:
            model = Factors()
            load(model, starts[-1])
            optimizer = sgd(model)
            for step in range(round_ * method.every, min(steps, (round_ + 1) * method.every)):
                backward(model, rank, step)
                optimizer.step()
            total += masked((starts[-1] if against == "s" else p.detach()) - flat(model), method.up)
        p.grad = total / len(heard)
        adam.step()
    return starts, p.detach()


METHODS = {
    "dense": flasc(every=3, up=1, down=1, outer_lr=0.02),  # FedAdam
    "sparse": flasc(every=3, up=0.25, down=0.5, outer_lr=0.02),
    "some": flasc(every=3, up=0.25, down=0.5, outer_lr=0.02, sampled=2),
    "one, the last round short": flasc(every=4, up=0.5, down=0.7, outer_lr=0.02, sampled=1),
}


@pytest.mark.parametrize("name", METHODS)
def test_runs_have_the_bits_of_the_papers_recursion(name):
    method = METHODS[name]
    starts, p = paper_recursion(method)
    found = run(method)
    assert all(torch.equal(seen["final"], p) for seen in found)
    for round_, due in enumerate(starts):
        trained = [seen["starts"][round_][0] for seen in found if seen["starts"][round_][1]]
        assert len(trained) == (method.sampled or 3) and all(torch.equal(start, due) for start in trained)


def test_masked_entries_are_trained_and_not_pulled_back():
    method = METHODS["sparse"]
    moved = run(method, steps=6)[1]
    start, end = moved["starts"][1][0], paper_recursion(method, steps=6)[1]
    assert (start == 0).sum() >= NUMEL // 2 and ((start == 0) & (end != paper_recursion(method, steps=3)[1])).any()
    assert not torch.equal(end, paper_recursion(method, steps=6, against="p")[1])
    assert start[:12].any() and not start[12:].any()  # B is still small: the largest half holds none of it


@pytest.mark.parametrize(
    "method",
    [
        *METHODS.values(),
        flasc(every=5, up=1, down=0.1, codec=tw.codecs.Cast("fp16")),
        flasc(every=5, codec=tw.codecs.Cast("bf16")),
    ],
    ids=repr,
)
def test_predicted_bytes_equal_sent_and_received_bytes(method):
    found, rounds = run(method), -(-15 // method.every)
    sent = [sum(method.nbytes_per_period(NUMEL, 3, rank, round_) for round_ in range(rounds)) for rank in range(3)]
    ledgers = [seen["ledger"] for seen in found]
    assert [ledger.sent("packet") for ledger in ledgers] == sent
    assert ledgers[0].received("packet") == sum(sent[1:]) and sum(each.received("packet") for each in ledgers) == sum(
        sent
    )
    final = HEADER_NBYTES + 4 * NUMEL
    assert [ledger.sent("final") for ledger in ledgers] == [2 * final, 0, 0]
    assert all(torch.equal(seen["final"], found[0]["final"]) for seen in found)


def test_draws_reach_all_replicas_and_differ_between_rounds():
    drawn = [flasc(sampled=2).draw("abcde", round_) for round_ in range(40)]
    assert all(len(names) == 2 for names in drawn) and set().union(*drawn) == set("abcde") and len(set(drawn)) > 5


def test_a_run_resumed_within_a_round_has_the_bits_of_an_uninterrupted_one(tmp_path: Path):
    """One replica is not drawn for this round; it saves a checkpoint, too."""
    method = METHODS["some"]

    def replica(group: tw.Group, again: bool) -> tuple[Tensor, bool]:
        model = Factors()
        at = method.attach(model, sgd(model), group)
        folder = tmp_path / str(group.rank)
        if again:
            checkpoint.load(checkpoint.newest_common(folder, group)[0], at)
        go_on(at, 10)
        idle = at.idle
        if not again:
            checkpoint.save(folder, at, {})
        go_on(at, 15)
        at.finish()
        return flat(model), idle

    whole, again = (tw.run_threads(3, lambda group, again=again: replica(group, again)) for again in (False, True))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(whole, again)) and sum(idle for _, idle in whole) == 1


def method_of(model: nn.Module, group: tw.Group) -> Federated:
    return flasc(every=3, up=0.25, down=0.5, outer_lr=0.02).attach(model, sgd(model), group)


def test_a_delta_that_is_not_finite_is_left_out_of_the_mean():
    def poison(at: Federated) -> None:
        if at.group.rank == 2:
            at.model.B.data[0, 0] = math.nan

    method = METHODS["sparse"]
    found = run(method, poison=poison)
    assert all(torch.equal(seen["final"], paper_recursion(method, left_out=2)[1]) for seen in found)
    assert [fields["by"] for event, fields in found[0]["events"] if event == "refused"] == [[2]] * 5


def test_deltas_whose_squares_overflow_are_refused():
    """Adam's moments would stay infinite and the parameter would not move again."""

    def poison(at: Federated) -> None:
        at.optimizer.param_groups[0]["lr"] = 1e30

    method = flasc(every=1, up=0.25, down=0.5)
    found = run(method, steps=3, poison=poison)
    assert all(torch.equal(seen["final"], paper_recursion(method, steps=1)[1]) for seen in found)
    assert ["too large" in fields["reason"] for event, fields in found[0]["events"] if event == "refused"] == [True] * 2


def test_replicas_take_over_the_state_of_the_hub():
    """The hub returns with an old state and the others take it over. A group without the hub is refused."""
    groups = {which: tw.ThreadGroup.create(n, 20.0) for which, n in (("first", 3), ("again", 3), ("without", 2))}

    def replica(group: tw.Group) -> Tensor:
        rank, model = group.rank, Factors()
        at = method_of(model, groups["first"][rank])
        go_on(at, 4)
        old = at.state()
        go_on(at, 8)
        if rank == 0:
            at.group = groups["again"][rank]
            at.load_state(*old)
        else:
            at.meet(groups["again"][rank])
        assert (at.step, at.rounds) == (4, 1) and torch.equal(at.start, old[0]["start"])
        if rank:
            with pytest.raises(ConfigurationError, match="the hub '0' is not among them"):
                at.meet(groups["without"][rank - 1], ("1", "2"))
        return at.start

    starts = tw.run_threads(3, replica)
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: flasc(up=0), "up=0, down=0.5: above 0 and at most 1"),
        (lambda: flasc(down=1.5), "down=1.5"),
        (lambda: flasc(down=math.nan), "down=nan"),
        (lambda: flasc(sampled=0), "whole numbers above 0"),
        (lambda: flasc(every=2.5), "whole numbers above 0"),
        (lambda: flasc(outer_lr=0), "whole numbers above 0"),
        (lambda: flasc(outer_lr=math.nan), "whole numbers above 0"),
        (lambda: flasc(codec=tw.codecs.E3M0), "a Codec is needed"),
        (lambda: run(flasc(sampled=4)), "at most all"),
    ],
)
def test_invalid_settings_are_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_first_weights_that_are_not_finite_are_refused():
    model = Factors()
    model.A.data[0, 0] = math.inf
    with pytest.raises(ModelError, match="first weights"):
        tw.run_threads(1, lambda group: method_of(model, group))


def test_a_checkpoint_of_another_run_is_refused():
    def replica(group: tw.Group) -> None:
        model = Factors()
        at = method_of(model, group)
        at.load_state({"start": torch.zeros(3), "p": torch.zeros(3)}, {"hub": "0", "rounds": 1, "step": 3})

    with pytest.raises(CheckpointError, match="3 trained parameters with the hub '0', this run has 22"):
        tw.run_threads(1, replica)


def test_replicas_of_another_method_are_refused():
    def replica(group: tw.Group) -> None:
        model = Factors()
        flasc(up=0.5 if group.rank else 0.25).attach(model, sgd(model), group)

    with pytest.raises(DisagreementError, match="strategy"):
        tw.run_threads(2, replica)


def test_what_a_type_cannot_hold_counts_as_no_training() -> None:
    """In bf16, a round without training leaves Adam to its momentum."""
    model = Factors().to(torch.bfloat16)
    at = flasc(every=1, up=1.0, down=1.0).attach(model, sgd(model), tw.ThreadGroup.create(1)[0])
    for pull in (1e-3, 0.0, 0.0):
        due = nn.Parameter(at.p.detach().clone())
        adam = torch.optim.AdamW([due], lr=at.strategy.outer_lr, weight_decay=0.0)
        adam.load_state_dict(deepcopy(at._adam.state_dict()))
        for parameter in at.parameters:
            parameter.grad = torch.full_like(parameter, pull)
        at.optimizer.step()
        due.grad = torch.zeros_like(due)
        adam.step()
        assert torch.equal(at.p, due) == (pull == 0)
    assert not torch.equal(at.p, at.p.bfloat16().float())
