"""The transformer: its parameters and FLOPs, causality, seeds, and all modes of training."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from thinwire.app.trainer.model import SIZES, Architecture, Transformer, generate, token_loss
from thinwire.errors import ConfigurationError

SMALL = Architecture(layers=3, width=32, heads=2, vocabulary=40, context=24)
VARIANTS = {
    "plain": SMALL,
    "learned": dataclasses.replace(SMALL, positions="learned"),
    "tied": dataclasses.replace(SMALL, tied=True),
    "one layer, one head": dataclasses.replace(SMALL, layers=1, heads=1),
    "tied, learned": dataclasses.replace(SMALL, tied=True, positions="learned"),
}


@pytest.fixture(params=VARIANTS)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return VARIANTS[request.param]


def batch(architecture: Architecture = SMALL, rows: int = 2, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, architecture.vocabulary, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_parameters_are_counted_exactly(architecture: Architecture) -> None:
    assert sum(p.numel() for p in Transformer(architecture).parameters()) == architecture.parameters()


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_are_the_papers(name: str) -> None:
    size = SIZES[name]
    with torch.device("meta"):  # 4 billion parameters without the memory
        model = Transformer(size)
    assert sum(p.numel() for p in model.parameters()) == size.parameters()
    published = {"35m": (2048, 6, 8), "100m": (3072, 9, 12), "200m": (4096, 12, 16), "300m": (5120, 15, 20)}
    published |= {"500m": (6144, 18, 24), "1b": (8192, 24, 32), "4b": (12288, 36, 48)}
    if name in published:
        assert (4 * size.width, size.layers, size.heads) == published[name]
        assert (size.head_width, size.vocabulary) == (64, 32_000)


def test_flops_match_their_definition() -> None:
    multiplied = sum(p.numel() for n, p in Transformer(SMALL).named_parameters() if n != "embedding.weight")
    assert SMALL.flops_per_token(10) == 6 * multiplied + 12 * 3 * 32 * 10
    assert SMALL.flops_per_token() == SMALL.flops_per_token(24)


@pytest.mark.parametrize(
    ("name", "tokens", "published"),
    [
        ("35m", 0.7e9, 1.5e17),
        ("100m", 1.5e9, 9.4e17),
        ("200m", 3.5e9, 4e18),
        ("300m", 6e9, 1.4e19),
        ("500m", 11e9, 4.7e19),
        ("1b", 25e9, 1.9e20),
        ("4b", 83e9, 2e21),
    ],
)
def test_flops_match_the_papers_budgets(name: str, tokens: float, published: float) -> None:
    """Table 5 of arXiv 2501.18512, at C4's sequence of 1,024; the paper rounds both columns and gives no formula."""
    assert SIZES[name].flops_per_token(1024) * tokens == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"vocabulary": 0},
        {"heads": 3},
        {"heads": 32},
        {"positions": "absolute"},
        {"z_loss": -1.0},
        {"z_loss": math.nan},
    ],
)
def test_an_invalid_architecture_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r".+: .+\. .+|.+: .+; .+"):
        dataclasses.replace(SMALL, **change)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="25 tokens"):
        Transformer(SMALL)(torch.zeros(1, 25, dtype=torch.long))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first = Transformer(SMALL, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(11)
    again, other = Transformer(SMALL, seed=3), Transformer(SMALL, seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert name.endswith("scale") or not torch.equal(a, c)


def test_initial_weights_match_a_recorded_digest() -> None:
    """The sum of all bits is recorded, because replicas on other machines and later versions must start from equal weights."""
    bits = [p.detach().view(torch.int32).long().sum().item() for p in Transformer(SMALL, seed=0).parameters()]
    assert sum(bits) == -1_163_445_067_153


def test_initial_weights_have_the_documented_spread() -> None:
    model = Transformer(Architecture(layers=8, width=256, heads=4))
    block = model.blocks[0]
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert block.attention.qkv.weight.std().item() == pytest.approx(1 / 16, rel=0.02)  # type: ignore[union-attr, operator]
    assert block.mlp.down.weight.std().item() == pytest.approx(1 / 32 / 4, rel=0.02)  # type: ignore[union-attr, operator]


def test_a_model_made_on_the_meta_device_initialises_equally() -> None:
    with torch.device("meta"):
        model = Transformer(SMALL)
    model.to_empty(device="cpu")
    model.initialise(seed=5)
    tokens, _ = batch()
    assert torch.equal(model(tokens).logits, Transformer(SMALL, seed=5)(tokens).logits)


def test_no_position_sees_a_later_token(architecture: Architecture) -> None:
    model = Transformer(architecture).eval()
    tokens, _ = batch(architecture)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % architecture.vocabulary
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_rotary_logits_depend_on_relative_position_only() -> None:
    model = Transformer(dataclasses.replace(SMALL, layers=1)).eval()
    attention = model.blocks[0].attention
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0))
    late = attention(x)[:, -1]  # type: ignore[operator]
    with torch.no_grad():  # every position is shifted by 100
        moved = Transformer(dataclasses.replace(SMALL, layers=1, context=124)).blocks[0].attention
        for table in ("cos_TK", "sin_TK"):
            getattr(attention, table).copy_(getattr(moved, table)[100:])
    torch.testing.assert_close(attention(x)[:, -1], late, rtol=1e-4, atol=1e-5)  # type: ignore[operator]
    shuffled = x[:, [1, 0, *range(2, 24)]]
    assert not torch.allclose(attention(shuffled)[:, -1], late, rtol=1e-4, atol=1e-5)  # type: ignore[operator]


def test_training_loss_has_the_z_term_and_evaluation_has_not() -> None:
    model = Transformer(dataclasses.replace(SMALL, z_loss=0.1))
    tokens, targets = batch()
    logits, training = model(tokens, targets)
    evaluation = model.eval()(tokens, targets).loss
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(evaluation, entropy)
    torch.testing.assert_close(training, entropy + 0.1 * logits.logsumexp(-1).square().mean())
    assert model(tokens).loss is None


def test_token_loss_gradient_is_that_of_cross_entropy() -> None:
    logits = torch.randn(2, 5, 11, dtype=torch.float32, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5))
    (ours,) = torch.autograd.grad(token_loss(logits, targets), logits)
    (theirs,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)
    torch.testing.assert_close(ours, theirs)


def test_every_parameter_gets_a_gradient(architecture: Architecture) -> None:
    model = Transformer(architecture)
    tokens, targets = batch(architecture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(tokens, targets).loss
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(40), abs=1.5)
    assert losses[-1] < 0.2


def test_bf16_autocast_keeps_norms_and_loss_in_fp32() -> None:
    model = Transformer(SMALL)
    tokens, targets = batch()
    seen: dict[str, torch.dtype] = {}
    for name in ("norm", "blocks.1.mlp_norm", "blocks.1.mlp.up"):
        model.get_submodule(name).register_forward_hook(lambda _, __, y, name=name: seen.__setitem__(name, y.dtype))
    reference = model(tokens, targets).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets).loss
    assert loss is not None and reference is not None
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(reference.item(), rel=0.02)
    assert seen == {"norm": torch.float32, "blocks.1.mlp_norm": torch.float32, "blocks.1.mlp.up": torch.bfloat16}
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_state_dict_holds_parameters_only() -> None:
    model = Transformer(SMALL)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_the_model_compiles_without_a_graph_break() -> None:
    """The backend `aot_eager` traces the whole graph and needs no compiler."""
    model = Transformer(SMALL)
    tokens, targets = batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, targets).loss, model(tokens, targets).loss)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.leaves(
    files=("pipe:", "socket:", "anon_inode:"), why="torch keeps the gloo device of a process's first mesh"
)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_computes_the_same(tied: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    architecture = dataclasses.replace(SMALL, tied=tied)
    tokens, targets = batch()
    whole = Transformer(architecture, seed=2)
    for precision, tolerance in ((MixedPrecisionPolicy(), 1e-6), (MixedPrecisionPolicy(torch.bfloat16), 0.02)):
        sharded = Transformer(architecture, seed=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for block in sharded.blocks:
                fully_shard(block, mesh=mesh, mp_policy=precision)
            fully_shard(sharded, mesh=mesh, mp_policy=precision)
        ours, theirs = sharded(tokens, targets).loss, whole(tokens, targets).loss
        assert ours is not None and theirs is not None
        ours.backward()
        assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
        assert sharded.blocks[0].attention.cos_TK.dtype == torch.float32  # type: ignore[union-attr]


def test_generation_is_seeded_and_greedy_at_zero_temperature() -> None:
    model = Transformer(SMALL)
    assert generate(model, [1, 2], 30, seed=1) == generate(model, [1, 2], 30, seed=1)  # also beyond the context
    assert generate(model, [1, 2], 30, seed=1) != generate(model, [1, 2], 30, seed=2)
    greedy = generate(model, [1, 2], 1, temperature=0)
    assert greedy == [int(model.eval()(torch.tensor([[1, 2]])).logits[0, -1].argmax())]
    model.train()
    generate(model, [1], 1)
    assert model.training
    with pytest.raises(ConfigurationError, match="at least one token"):
        generate(model, [], 1)
    for temperature in (-1.0, 1e-40, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="a finite temperature, 0 or from 1e-6 on"):
            generate(model, [1], 1, temperature)
