"""A model spread over the ranks of a site trains as plain data-parallel training does, and sends what the formulas say."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from sites import Odd, adamw, less, loss_of, plainly, sent, sgd, train, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.codecs import Cast, Identity, Int, TopK
from thinwire.comm import CountedGroup, Ledger, ThreadGroup, run_threads
from thinwire.errors import CheckpointError, ConfigurationError, DisagreementError, LinkError, ModelError
from thinwire.lm.model import Architecture, Transformer
from thinwire.plan.sharding import traffic
from thinwire.sharding import FP32, Layout, Precision, Sharded, Sharding, Shards, by_level, zero_plus_plus

FEW_BITS = zero_plus_plus(4, 2, Int(8, 64, "fp32"), Int(4, 32, "fp32"))
SHARDINGS = {
    "DDP": (3, Sharding()),
    "ZeRO-1": (4, Sharding(shards=Shards(1, 1, 4))),
    "ZeRO-2": (4, Sharding(shards=Shards(1, 4, 4))),
    "ZeRO-3": (4, Sharding(shards=Shards(4, 4, 4))),
    "ZeRO-3 of three": (3, Sharding(shards=Shards(3, 3, 3))),
    "weights over pairs": (4, Sharding(shards=Shards(2, 4, 4))),
    "secondary": (4, Sharding(shards=Shards(4, 4, 4), secondary=2)),
    "three levels": (8, Sharding(shards=Shards(2, 4, 8))),
    "two hops": (4, Sharding(shards=Shards(4, 4, 4), first_hop=2, secondary=2)),
    "replicated": (8, Sharding(shards=Shards(1, 2, 4))),
    "pairs": (6, Sharding(shards=Shards(2, 2, 2))),
    "three levels, few bits": (8, Sharding(shards=Shards(2, 4, 8), weights=Int(8, 64), gradients=Int(4, 32))),
    "ZeRO++": (4, FEW_BITS),
    "DDP, few bits": (3, Sharding(gradients=Int(4, 32))),
    "alone": (1, Sharding()),
}
ONE_HOP = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 of three", "weights over pairs", "secondary", "alone"]
EXACT = [*ONE_HOP, "three levels", "two hops", "replicated", "pairs"]


@pytest.fixture(scope="module")
def trained():
    """Each sharding with two micro-batches and clipping, and plainly."""
    seen = {
        name: run_threads(ranks, lambda group, s=sharding: train(group, s, 3, micro=2, clip=1.0))
        for name, (ranks, sharding) in SHARDINGS.items()
    }
    return seen, {ranks: plainly(ranks, 3, micro=2, clip=1.0) for ranks in (1, 3, 4, 6, 8)}


@pytest.mark.parametrize("name", ONE_HOP)
def test_one_hop_is_plain_data_parallel_to_the_last_bit(name):
    """All sums are in the order of ranks, as plainly."""
    ranks, sharding = SHARDINGS[name]
    for make in (adamw, sgd):
        for seen in run_threads(ranks, lambda group, m=make: train(group, sharding, make=m)):
            assert torch.equal(seen.final, plainly(ranks, 4, make))


@pytest.mark.parametrize("name", EXACT)
def test_any_sharding_is_plain_data_parallel(trained, name):
    """Hops, micro-batches and the norm add in another order: equal up to that."""
    seen, plain = trained
    ranks, _ = SHARDINGS[name]
    assert len(seen[name]) == ranks
    for one in seen[name]:
        torch.testing.assert_close(one.final, plain[ranks], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SHARDINGS)
def test_all_ranks_end_with_the_same_model(trained, name):
    first, *rest = trained[0][name]
    assert torch.isfinite(first.final).all()
    assert all(torch.equal(one.final, first.final) for one in rest)


@pytest.mark.parametrize("name", SHARDINGS)
def test_every_byte_was_predicted(trained, name):
    """By purpose and peer, on each rank, in each step; the norm's eight bytes to each of s_o ranks are the caller's wish."""
    ranks, sharding = SHARDINGS[name]
    for rank, seen in enumerate(trained[0][name]):
        due = Layout(sharding, ranks).sent(rank, seen.numels, micro_batches=2)
        for counts in seen.counts:
            norm = counts.pop("norm", {})
            assert counts == {purpose: peers for purpose, peers in due.items() if any(peers.values())}
            assert sum(norm.values()) == 8 * (sharding.shards.optimizer - 1)


class Whole(nn.Module):
    """Sizes that eight ranks divide, and gradients that are whole numbers, so that no order of sums matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        for place, parameter in enumerate(self.parameters()):
            parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape).add(place)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[0]).sum() + (self.second(x[1]) * x[0]).sum()


def whole_numbers(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(-8, 9, (2, 16), generator=generator).float()


@pytest.mark.parametrize("name", ["three levels", "two hops", "replicated", "ZeRO-3 of eight in two hops"])
def test_every_element_comes_to_its_owner(name):
    """Whole numbers: the sum has the same bits in any order, so hops too must give exactly the plain step. A slice that goes
    to a wrong owner shows."""
    sharding = SHARDINGS[name][1] if name in SHARDINGS else Sharding(shards=Shards(8, 8, 8), first_hop=4, secondary=2)
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        (sum(model(whole_numbers(rank, step)) for rank in range(8)) / 8).backward()
        optimizer.step()
    plain = model.state_dict()

    def rank_of(group):
        model = Whole()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with Sharded(sharding, model, optimizer, group, units=[model.first, model.second]):
            for step in range(3):
                model(whole_numbers(group.rank, step)).backward()
                optimizer.step()
        return model.state_dict()

    for state in run_threads(8, rank_of):
        assert all(torch.equal(state[name], plain[name]) for name in plain)


# ---- bytes and memory, beside the closed forms

PHASES = {
    "gather weights, forward and backward": ["weights"],
    "reduce-scatter gradients": ["gradients within"],
    "reduce-scatter gradients across": ["gradients across"],
    "all-reduce gradients over the rest": ["gradients over the rest"],
    "gather updated weights": ["updated weights"],
}


@pytest.mark.parametrize(
    "degrees", [(1, 1, 1), (1, 1, 8), (1, 8, 8), (8, 8, 8), (2, 4, 8), (1, 2, 4), (2, 2, 4), (4, 4, 8)]
)
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_bytes_are_those_of_the_planner(degrees, bits):
    """Phase by phase what `plan.sharding.traffic` says, to the byte, where sizes divide."""
    codec = {32: Identity(), 16: Cast("bf16"), 8: Int(8, 1 << 30, "bf16")}[bits]
    layout = Layout(Sharding(shards=Shards(*degrees), weights=codec, gradients=codec), 8)
    numels = [256, 512, 64]
    precision = Precision(bits // 8, bits // 8, 8)
    due = {p.phase: p.nbytes for p in traffic(Shards(*degrees), sum(numels), 8, [2, 4, 8], precision, micro_batches=3)}
    scales = 2 if bits == 8 else 0  # bytes of a message's one scale
    for rank in range(8):
        counted = layout.sent(rank, numels, micro_batches=3)
        for phase, purposes in PHASES.items():
            nbytes = sum(n for p in purposes for n in counted.get(p, {}).values())
            messages = sum(len(counted.get(p, {})) for p in purposes) * len(numels)
            times = {"weights": 6, "gradients within": 3, "gradients over the rest": 2}.get(purposes[0], 1)
            assert nbytes == due.get(phase, 0) + scales * messages * times


def test_three_levels_keep_the_slow_level_for_once_a_step():
    """Frontier's degrees on 2 × 2 × 2 ranks: weights on the pair, gradients in the machine, the rest once a step."""
    numel, micro = 1 << 13, 4
    layout = Layout(Sharding(shards=Shards(2, 4, 8)), 8)
    for rank in range(8):
        counts = layout.sent(rank, [numel], micro)
        counts.pop("vote")
        pair, machine, network = by_level(counts, rank, (2, 4, 8))
        within = micro * 4 * numel * 3 // 4  # in the machine: a third of it to the own pair, two to the other
        updated = 4 * numel * 3 // 8  # to those with the same half of the weights: one in the machine, two beyond
        assert pair == micro * 2 * 4 * numel // 2 + within // 3
        assert machine == within * 2 // 3 + updated // 3
        assert network == 4 * numel // 8 + updated * 2 // 3


def test_zero_plus_plus_sends_a_quarter_between_machines():
    """Against ZeRO-3 in 16 bits (3M between machines): the forward gather halves, the backward one stays in the machine, gradients go
    in 4 bits after a sum within (arXiv 2306.10209, table 1). Scales are apart: one of four bytes a message."""
    numel, ranks, machine = 1 << 16, 8, 4
    codecs = Int(8, 1 << 30, "fp32"), Int(4, 1 << 30, "fp32")
    layout = Layout(zero_plus_plus(ranks, machine, *codecs), ranks)
    plain = Layout(Sharding(shards=Shards(8, 8, 8), weights=Cast(), gradients=Cast()), ranks)

    def across(layout, purpose):
        return sum(
            nbytes
            for rank in range(ranks)
            for peer, nbytes in layout.sent(rank, [numel], itemsize=2).get(purpose, {}).items()
            if peer // machine != rank // machine
        )

    pairs = ranks * (ranks - machine)  # of ranks in different machines
    assert across(plain, "weights") == 2 * pairs * 2 * numel // ranks
    assert across(layout, "weights") == pairs * (numel // ranks + 4) and across(layout, "secondary weights") == 0
    assert across(layout, "gradients within") == ranks * (ranks // machine - 1) * (numel // 2 // ranks + 4)


def test_memory_is_what_the_degrees_say():
    """Between steps, after a backward pass: weights, reduced gradients, masters; whole vectors have no storage."""

    def rank_of(group, sharding, dtype):
        model = Whole().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        sharded = Sharded(sharding, model, optimizer, group, units=[model.first, model.second])
        for _ in range(2):
            model(whole_numbers(group.rank, 0).to(dtype)).backward()
        kept = [(u.weights, u.reduced, u.master, u.flat, u.secondary) for u in sharded.units]
        optimizer.step()
        moments = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
        nbytes = [sum(t.numel() * t.element_size() for t in of if t is not None) for of in zip(*kept)]
        flat = sum(u.flat.untyped_storage().nbytes() for u in sharded.units)
        aliased = all(
            u.master.untyped_storage().data_ptr() == u.weights.untyped_storage().data_ptr() for u in sharded.units
        )
        return nbytes, sum(t.numel() * 4 for t in moments), flat, aliased

    numel = 256 + 256 + 16
    for degrees in ((8, 8, 8), (2, 4, 8), (1, 1, 8)):
        w, g, o = degrees
        sharding = Sharding(shards=Shards(*degrees))
        for nbytes, moments, flat, aliased in run_threads(
            8, lambda group, s=sharding: rank_of(group, s, torch.float32)
        ):
            assert nbytes[:3] == [4 * numel // w, 4 * numel // g, 4 * numel // o] and moments == 8 * numel // o
            assert aliased and flat == (4 * numel if w == 1 else 0)
            assert nbytes[0] + nbytes[1] + moments == Shards(*degrees).nbytes(numel, FP32)
    few = Sharding(shards=Shards(8, 8, 8), weights=Cast(), secondary=2)
    for nbytes, moments, flat, aliased in run_threads(8, lambda group: rank_of(group, few, torch.bfloat16)):
        assert nbytes[0] == 2 * numel // 8 and nbytes[4] == 2 * numel // 2 and not aliased and flat == 0
        assert nbytes[2] + moments == 12 * numel // 8  # an fp32 master and two moments


# ---- few bits


def test_the_error_of_two_hops_does_not_grow_with_ranks():
    """Two roundings, whatever the number of ranks: the error of the mean, relative to one rounding of one gradient."""

    def error(ranks, hop):
        layout = Layout(Sharding(shards=Shards(1, ranks, ranks), first_hop=hop), ranks)
        codec = Int(4, 32, "fp32")

        def rank_of(group):
            from thinwire.sharding.carry import Carrier

            x = torch.randn(1 << 12, generator=torch.Generator().manual_seed(group.rank))
            whole, carrier = x, Carrier(group, 0)
            for number, stage in enumerate(layout.within):
                begin, _ = layout.span(group.rank, stage.low, 1 << 12)
                spans = {
                    p: tuple(e - begin for e in layout.span(p, stage.high, 1 << 12))
                    for p in layout.peers(group.rank, stage.low, stage.high)
                }
                weight = 1 / ranks if stage.high == ranks else 1.0
                whole = carrier.reduce(codec, whole, spans, weight, number, 0, "gradients")
            return x, whole, layout.span(group.rank, ranks, 1 << 12)

        found = run_threads(ranks, rank_of)
        mean = sum(x for x, _, _ in found) / ranks
        return math.sqrt(
            sum(float((mean[a:b] - part).square().sum()) for _, part, (a, b) in found) / float(mean.square().sum())
        )

    two, four, eight = error(2, 1), error(4, 2), error(8, 4)
    assert 0.02 < two < 0.2 and max(four, eight) < 1.6 * two


@pytest.mark.parametrize("name", ["ZeRO++", "three levels, few bits", "DDP, few bits"])
def test_few_bits_train_nearly_as_well(trained, name):
    ranks, _ = SHARDINGS[name]
    exact = {3: "DDP", 4: "ZeRO-3", 8: "three levels"}[ranks]
    few, all_ = (sum(one.losses[-1] for one in trained[0][of]) / ranks for of in (name, exact))
    assert few != all_ and abs(few - all_) < 0.1 * all_


@pytest.mark.parametrize("weights_codec", [Identity(), Int(8, 64), Int(8, 64, "fp32", "stochastic")])
def test_a_secondary_shard_changes_no_bit(weights_codec):
    """And so it is never stale: after a step it is made anew."""

    def final(secondary):
        sharding = Sharding(shards=Shards(4, 4, 4), weights=weights_codec, secondary=secondary)
        return run_threads(4, lambda group: train(group, sharding, micro=2))[0].final

    without = final(None)
    assert all(torch.equal(final(degree), without) for degree in (1, 2, 4))


def test_evaluation_uses_the_secondary_shard_and_leaves_nothing_behind():
    sharding = Sharding(shards=Shards(4, 4, 4), weights=Int(8, 64), secondary=2)

    def rank_of(group):
        ledger = Ledger()
        model = Odd()
        optimizer = adamw(model)
        with Sharded(sharding, model, optimizer, CountedGroup(group, ledger)) as sharded:
            loss_of(model, group.rank, 0).backward()
            before = sent(ledger)
            model.eval()
            with torch.no_grad():
                one = float(loss_of(model, 0, 1))
            during = less(sent(ledger), before)
            model.train()
            optimizer.step()
            before = sent(ledger)
            with torch.no_grad():
                two = float(loss_of(model, 0, 1))
            after = less(sent(ledger), before)
            empty = sum(u.flat.untyped_storage().nbytes() for u in sharded.units)
        return one, two, set(during), set(after), empty

    for one, two, during, after, empty in run_threads(4, rank_of):
        assert during == {"secondary weights"} and after == {"weights"} and one != two and empty == 0


# ---- what a loop may do


@pytest.mark.parametrize("name", ["three levels, few bits", "ZeRO++", "ZeRO-1", "replicated"])
def test_save_and_go_on(name):
    """Bit for bit, in fresh objects."""
    ranks, sharding = SHARDINGS[name]

    def loop(group, steps, saved=None, stop=None):
        model = Odd()
        optimizer = adamw(model)
        with Sharded(sharding, model, optimizer, group) as sharded:
            if saved is not None:
                tensors, facts, inner = saved
                optimizer.load_state_dict(inner)
                sharded.load_state(tensors, json.loads(json.dumps(facts)))
            kept = None
            for step in range(sharded.step, steps):
                loss_of(model, group.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if sharded.step == stop:
                    kept = (*sharded.state(), copy.deepcopy(optimizer.state_dict()))
        return weights(model.state_dict()), kept

    whole = run_threads(ranks, lambda group: loop(group, 6, stop=3))
    again = run_threads(ranks, lambda group: loop(group, 6, saved=whole[group.rank][1]))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, again))
    if ranks > 1:
        with pytest.raises(CheckpointError, match="the same are needed"):
            run_threads(ranks, lambda group: loop(group, 6, saved=whole[group.rank - 1][1]))


def test_export_is_whole_and_names_are_the_models_own():
    def rank_of(group):
        model = Odd()
        optimizer = adamw(model)
        with Sharded(Sharding(shards=Shards(2, 2, 4)), model, optimizer, group) as sharded:
            loss_of(model, group.rank, 0).backward()
            optimizer.step()
            exported = sharded.export()
            between = sharded.units[1].parameters[0].numel()
        return exported, model.state_dict(), between

    for exported, after, between in run_threads(4, rank_of):
        assert exported.keys() == Odd().state_dict().keys() and between == 0
        assert all(torch.equal(exported[name], after[name]) for name in after)


def test_a_gradient_that_is_not_finite_stops_no_one():
    """One rank's NaN: nobody steps, all go on alike."""

    def rank_of(group, poisoned):
        model = Odd()
        optimizer = adamw(model)
        with Sharded(FEW_BITS, model, optimizer, group) as sharded:
            norms = []
            for step in range(3):
                loss = loss_of(model, group.rank, step)
                (loss * float("nan") if poisoned and step == 1 and group.rank == 3 else loss).backward()
                norms.append(sharded.clip_grad_norm(1.0))
                if not poisoned and step == 1:
                    optimizer.zero_grad()  # the step that nobody takes
                optimizer.step()
                optimizer.zero_grad()
        return weights(model.state_dict()), sharded.skipped, norms

    bad = run_threads(4, lambda group: rank_of(group, True))
    good = run_threads(4, lambda group: rank_of(group, False))
    for (got, skipped, norms), (due, none, _) in zip(bad, good):
        assert torch.equal(got, due) and (skipped, none) == (1, 0)
        assert (
            math.isnan(norms[1])
            and math.isfinite(norms[0] + norms[2])
            and norms == pytest.approx(bad[0][2], nan_ok=True)
        )


def test_a_step_without_a_backward_pass_changes_nothing():
    def rank_of(group):
        model = Odd()
        before = weights(model.state_dict())
        optimizer = adamw(model)
        with Sharded(Sharding(shards=Shards(2, 2, 2)), model, optimizer, group):
            optimizer.step()
        return torch.equal(before, weights(model.state_dict()))

    assert all(run_threads(2, rank_of))


def test_unused_parameters_have_gradients_of_zero():
    class Some(Odd):
        def forward(self, x):
            return self.head(self.layers[0](self.embed(x)))

    def rank_of(group):
        model = Some()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.layers[1][0].weight.clone()
        with Sharded(Sharding(shards=Shards(4, 4, 4)), model, optimizer, group):
            for step in range(2):
                loss_of(model, group.rank, step).backward()
                optimizer.step()
        return torch.equal(before, model.layers[1][0].weight), weights(model.state_dict())

    found = run_threads(4, rank_of)
    assert all(same and torch.equal(final, found[0][1]) for same, final in found)


def test_a_checkpointed_layer_and_our_own_transformer():
    shape = Architecture(layers=3, width=32, heads=2, vocabulary=64, context=16, tied=True)
    tokens = torch.randint(0, 64, (8, 2, 9), generator=torch.Generator().manual_seed(0))

    def loss(model, rank):
        return model(tokens[rank, :, :-1], tokens[rank, :, 1:]).loss

    def steps(model, optimizer, ranks):
        for _ in range(2):
            optimizer.zero_grad()
            (sum(loss(model, rank) for rank in ranks) / len(ranks)).backward()
            optimizer.step()

    plain = Transformer(shape, seed=1)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(4))

    def rank_of(group, recomputed):
        model = Transformer(shape, seed=1)
        if recomputed:
            for block in model.blocks:
                inner = block.forward
                block.forward = lambda *a, inner=inner: checkpoint(inner, *a, use_reentrant=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Sharded(Sharding(shards=Shards(4, 4, 4)), model, optimizer, group) as sharded:
            steps(model, optimizer, [group.rank])
        return {n: v.clone() for n, v in model.state_dict().items()}, len(sharded.units)

    for recomputed in (False, True):
        for state, units in run_threads(4, lambda group, r=recomputed: rank_of(group, r)):
            assert units == 4
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_parameters_of_two_types_and_parameter_groups():
    def rank_of(group):
        model = Odd()
        model.head.to(torch.bfloat16)
        model.head.register_forward_pre_hook(lambda _, x: x[0].to(torch.bfloat16))
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.0}], lr=0.01
        )
        before = {n: v.clone() for n, v in model.state_dict().items()}
        with Sharded(Sharding(shards=Shards(2, 4, 4)), model, optimizer, group):
            for step in range(2):
                loss_of(model, group.rank, step).backward()
                optimizer.step()
        moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
        return (
            moved,
            {n for n, p in model.named_parameters() if p.dim() > 1},
            {str(p.dtype) for p in model.parameters()},
        )

    for moved, matrices, types in run_threads(4, rank_of):
        assert matrices <= moved and not any("bias" in name for name in moved)
        assert types == {"torch.float32", "torch.bfloat16"}


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sharding(weights=TopK(0.1)), "leaves values out"),
        (lambda: Sharding(weights=tw.Hadamard(tw.RandomK(0.5))), "leaves values out"),
        (lambda: Sharding(weights="Int"), "a Codec is needed"),
        (lambda: Sharding(gradients=Int), "a Codec is needed"),
        (lambda: Sharding(shards=Shards(4, 4, 4), secondary=3), "a divisor of s_w"),
        (lambda: Sharding(shards=Shards(1, 4, 4), secondary=2), "a divisor of s_w"),
        (lambda: Sharding(shards=Shards(1, 4, 8), first_hop=8), "a divisor of s_g"),
        (lambda: Sharding(shards=Shards(1, 4, 4), first_hop=0), "a divisor of s_g"),
        (lambda: Sharding(shards=Shards(2, 6, 6), first_hop=3), "a multiple of the one before"),
        (lambda: Layout(Sharding(shards=Shards(2, 4, 4)), 6), "a multiple of the one before"),
        (lambda: Layout(Sharding(shards=Shards(8, 8, 8)), 4), "on 4 ranks"),
    ],
)
def test_what_cannot_work_is_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def alone() -> ThreadGroup:
    return ThreadGroup.create(1)[0]


def test_optimizers_that_look_at_whole_tensors_are_refused():
    model = Odd()
    with pytest.raises(ModelError, match="LBFGS looks at whole tensors"):
        Sharded(Sharding(), model, torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad]), alone())
    with pytest.raises(ModelError, match="does not hold"):
        Sharded(Sharding(), model, torch.optim.SGD(model.head.parameters(), lr=0.1), alone())
    optimizer = adamw(model)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    with pytest.raises(ModelError, match="has stepped already"):
        Sharded(Sharding(), model, optimizer, alone())


def test_ranks_that_differ_are_refused():
    def rank_of(group, settings, seed=0):
        model = Odd()
        Sharded(settings, model, adamw(model), group, seed=seed)

    with pytest.raises(DisagreementError, match="sharding"):
        run_threads(2, lambda g: rank_of(g, Sharding(gradients=Int(4) if g.rank else Identity())))
    with pytest.raises(DisagreementError, match="seed"):
        run_threads(2, lambda g: rank_of(g, Sharding(), g.rank))


def test_all_start_from_the_weights_of_rank_0():
    def rank_of(group):
        model = Odd(group.rank)
        with Sharded(Sharding(shards=Shards(2, 2, 2)), model, adamw(model), group):
            pass
        return weights(model.state_dict())

    assert all(torch.equal(final, weights(Odd(0).state_dict())) for final in run_threads(2, rank_of))


def test_a_rank_that_leaves_is_named():
    def rank_of(group):
        model = Odd()
        sharded = Sharded(Sharding(shards=Shards(2, 2, 2)), model, adamw(model), group)
        if group.rank == 0:
            loss_of(model, 0, 0).backward()
        sharded.close()

    with pytest.raises(LinkError, match="replica 1 closed its group"):
        run_threads(2, rank_of, timeout=600.0)
