"""Law 4: every parameter is exchanged exactly once per cycle, for any size, shape, dtype and layout."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import PARTITIONS
from torch import nn

import thinwire as tw
from thinwire.testing.toy import Toy

SHAPES = [(), (0,), (1,), (2,), (7,), (3, 5), (0, 4), (2, 3, 2), (2, 3, 4, 3), (1, 1, 1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", "channels last", "transposed"]
Specification = list[list[tuple[tuple[int, ...], torch.dtype, str, bool]]]


class Layer(nn.Module):
    pass


class ModelOfParameters(nn.Module):
    """A model of parameters in layers, with one outside the layers and tied ones."""

    def __init__(self, specification: Specification, tied: list[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList()
        for number, layer in enumerate(specification):
            module = Layer()
            for index, (shape, dtype, layout, trained) in enumerate(layer):
                parameter = nn.Parameter(
                    laid_out(torch.randn(shape, generator=generator), layout).to(dtype), requires_grad=trained
                )
                module.register_parameter(f"p{index}", parameter)
            self.layers.append(module)
            if number == 0:
                self.outside = nn.Parameter(torch.ones(3))
        everything = list(self.parameters())
        for index in tied:  # the same object under a second name
            self.register_parameter(f"tied{index}", everything[index % len(everything)])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.mT.contiguous().mT if layout == "transposed" and x.dim() >= 2 else x


parameter = st.tuples(
    st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.booleans() | st.just(True)
)
models = st.builds(
    ModelOfParameters,
    st.lists(st.lists(parameter, max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 20), max_size=3, unique=True),
)
partitions = st.one_of(
    st.just(tw.pieces.partition.Whole()),
    st.builds(tw.pieces.partition.Strided, st.none() | st.integers(1, 4)),
    st.builds(tw.pieces.partition.Sequential, st.none() | st.integers(1, 4)),
    st.builds(tw.pieces.partition.BySize, st.integers(1, 6)),
)


@given(models, partitions)
@settings(max_examples=300)
def test_law_4_each_parameter_is_in_one_fragment(model, partition):
    try:
        fragments = partition.fragments(model)
    except tw.ConfigurationError as error:
        assert "choose fewer" in str(error) or "is needed" in str(error)
        return
    travelling = [p for fragment in fragments for _, p in fragment.parameters]
    assert sorted(map(id, travelling)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(fragment.parameters for fragment in fragments), "a fragment of no parameters"
    assert sum(fragment.numel for fragment in fragments) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    assert len({fragment.name for fragment in fragments}) == len(fragments)
    for name, p in (named for fragment in fragments for named in fragment.parameters):
        assert model.get_parameter(name) is p
    for fragment in fragments:
        assert fragment.shapes == tuple(tuple(p.shape) for _, p in fragment.parameters)
    assert [f.name for f in partition.fragments(model)] == [f.name for f in fragments]


@given(models, partitions, st.sampled_from([tw.codecs.Identity(), tw.codecs.E3M0(2)]))
@settings(max_examples=40)
def test_law_4_each_parameter_is_averaged_once(model, partition, codec):
    """Replica m moves every element by m + 1 quarters. After a cycle all hold the mean of the moves, each in its own dtype."""
    try:
        partition.fragments(model)
    except tw.ConfigurationError:
        return
    start = [p.detach().clone() for p in model.parameters()]
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Staggered(3), partition=partition, codec=codec)
    copies = [model, copy.deepcopy(model)]

    def replica(group):
        own = copies[group.rank]
        parameters = [p for p in own.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        with tw.Replica(strategy, own, optimizer, group):
            for p in parameters:
                p.grad = torch.full_like(p, -0.25 * (group.rank + 1))
            optimizer.step()

    tw.run_threads(2, replica, timeout=600.0)
    for own in copies:
        for before, p in zip(start, own.parameters()):
            moved = p.detach().double() - before.double()
            due = 0.375 if p.requires_grad else 0.0
            slack = (
                0.0 if not p.requires_grad else 1e-5 + 2 ** {torch.bfloat16: -6, torch.float16: -9}.get(p.dtype, -21)
            )
            assert p.dtype == before.dtype and p.stride() == before.stride()
            assert (moved - due).abs().le(slack * (1 + before.double().abs())).all()
    for a, b in zip(*(c.parameters() for c in copies)):
        assert torch.equal(a, b)


def names(partition: tw.pieces.partition.Partition, model: nn.Module) -> list[str]:
    return [fragment.name for fragment in partition.fragments(model)]


def stack(layers: int, extra: bool = True) -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
    if extra:
        model.embed, model.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
    return model


def test_strided_and_sequential_assign_layers_as_documented():
    """Fragment i holds layers i, i+P, … or neighbouring layers; parameters outside the layers come first. The default is three layers (§2.2)."""
    assert names(tw.pieces.partition.Strided(), stack(9)) == [
        "outside the layers",
        "layers 0,3,6",
        "layers 1,4,7",
        "layers 2,5,8",
    ]
    assert names(tw.pieces.partition.Sequential(), stack(9)) == [
        "outside the layers",
        "layers 0,1,2",
        "layers 3,4,5",
        "layers 6,7,8",
    ]
    assert names(tw.pieces.partition.Strided(3), stack(7, extra=False)) == ["layers 0,3,6", "layers 1,4", "layers 2,5"]
    assert names(tw.pieces.partition.Sequential(3), stack(7, extra=False)) == [
        "layers 0,1",
        "layers 2,3",
        "layers 4,5,6",
    ]
    for layers, fragments in ((1, 1), (3, 1), (4, 2), (24, 8), (48, 16), (108, 36)):  # §1.4: 1B 8, 10B 16, 100B 36
        assert len(names(tw.pieces.partition.Strided(), stack(layers, extra=False))) == fragments
    for kind in (tw.pieces.partition.Strided, tw.pieces.partition.Sequential):
        assert names(kind(1), stack(4)) == ["outside the layers", "layers 0,1,2,3"]
        for share, layers, fragments in ((0.25, 3, 3), (0.25, 4, 4), (0.5, 4, 2), (0.5, 7, 3), (0.01, 2, 2)):
            assert len(names(kind(share=share), stack(layers, extra=False))) == fragments


def test_the_list_of_layers_is_the_one_with_most_parameters():
    """A list of one module is none."""
    model = stack(2)
    model.head, model.small = nn.Sequential(nn.Linear(4, 40)), nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    outside, inside = tw.pieces.partition.Strided().fragments(model)
    assert (outside.name, inside.name) == ("outside the layers", "layers 0,1")
    assert [name for name, _ in inside.parameters] == [
        f"blocks.{i}.{one}" for i in (0, 1) for one in ("weight", "bias")
    ]


def test_layers_may_be_named_by_their_path():
    model = nn.ModuleDict({"small": stack(2, False).blocks, "large": stack(5, False).blocks})
    assert names(tw.pieces.partition.Strided(2), model) == ["outside the layers", "layers 0,2,4", "layers 1,3"]
    assert names(tw.pieces.partition.Strided(2, layers="small"), model) == [
        "outside the layers",
        "layers 0",
        "layers 1",
    ]
    with pytest.raises(
        tw.ConfigurationError, match=r"layers='tiny' is not a list of modules of this model; it has: small, large\."
    ):
        tw.pieces.partition.Strided(2, layers="tiny").fragments(model)


def test_a_model_without_a_module_list_is_cut_at_its_leaf_modules():
    """A model that is itself a leaf is one fragment."""
    assert len(names(tw.pieces.partition.Strided(2), Toy())) == 3
    model = nn.Module()
    model.a, model.b, model.c = (nn.Linear(2, 2) for _ in range(3))
    assert names(tw.pieces.partition.Strided(3), model) == ["layers 0", "layers 1", "layers 2"]
    assert names(tw.pieces.partition.Strided(), nn.Linear(2, 2)) == ["outside the layers"]
    model = nn.Module()
    model.first, model.empty, model.last = nn.Module(), nn.Identity(), nn.Linear(2, 2)
    model.first.inner, model.first.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    parts = tw.pieces.partition.Sequential(3).fragments(model)
    assert [[name for name, _ in part.parameters] for part in parts] == [
        ["first.gain"],
        ["first.inner.weight", "first.inner.bias"],
        ["last.weight", "last.bias"],
    ]
    assert names(tw.pieces.partition.Strided(2), nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))) == [
        "layers 0,2,4,6,8,10",
        "layers 1,3,5,7,9",
    ]


def test_frozen_layers_do_not_count_as_layers():
    model = stack(6, extra=False)
    model.blocks[1].requires_grad_(False)
    assert names(tw.pieces.partition.Sequential(5), model) == [f"layers {i}" for i in range(5)]
    with pytest.raises(tw.ConfigurationError, match="for a model of 5 layers"):
        tw.pieces.partition.Strided(6).fragments(model)


@pytest.mark.parametrize("partition", [row.piece for row in PARTITIONS], ids=str)
def test_compiled_models_have_the_same_fragments(partition):
    """`torch.compile` of a model or of its layers changes no name, number or order."""
    plain = [(f.name, [n for n, _ in f.parameters]) for f in partition.fragments(Toy())]
    inside = Toy()
    inside.layers[1] = torch.compile(inside.layers[1], backend="eager")
    for compiled in (torch.compile(Toy(), backend="eager"), inside):
        assert [(f.name, [n for n, _ in f.parameters]) for f in partition.fragments(compiled)] == plain


class Shard(nn.Parameter):
    """A parameter of which this rank holds one row."""

    ranks = 2

    @property
    def device_mesh(self):
        return SimpleNamespace(size=lambda: self.ranks)

    def to_local(self):
        return self.detach()[:1]


def test_shards_on_several_ranks_need_a_site(monkeypatch):
    """A fragment counts this rank's part of them."""
    model = stack(2)
    model.embed.weight, model.norm.weight = Shard(torch.zeros(9, 4)), Shard(torch.zeros(4))
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=Shard))
    model.embed.weight.ranks = 1
    with pytest.raises(tw.ModelError, match=r"^norm\.weight is sharded and no site was given"):
        tw.pieces.partition.check_sharding(model, whole_replica=False)
    tw.pieces.partition.check_sharding(model, whole_replica=True)
    model.norm.weight.ranks = 1
    tw.pieces.partition.check_sharding(model, whole_replica=False)
    outside = tw.pieces.partition.Strided().fragments(model)[0]
    assert (outside.numel, outside.shapes) == (4 + 1 + 4, ((1, 4), (1,), (4,)))
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    assert not tw.pieces.partition.is_sharded(model.norm.weight), "without the module there is none"


def test_by_size_takes_the_largest_first():
    """Each goes to the smallest fragment, the first of these; in it parameters keep their order."""
    model = nn.ParameterList([nn.Parameter(torch.empty(n)) for n in (1, 2, 2, 3, 0, 4)])
    parts = tw.pieces.partition.BySize(3).fragments(model)
    assert [[int(name) for name, _ in part.parameters] for part in parts] == [[4, 5], [0, 3], [1, 2]]
    assert [(part.name, part.numel) for part in parts] == [("part 0", 4), ("part 1", 4), ("part 2", 4)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_by_size_is_balanced(sizes, data):
    """The largest tensor goes to the smallest fragment: within 4/3 of the best (Graham), and each fragment has a tensor."""
    model = nn.ParameterList([nn.Parameter(torch.empty(n)) for n in sizes])
    count = data.draw(st.integers(1, len(sizes)))
    fragments = tw.pieces.partition.BySize(count).fragments(model)
    assert len(fragments) == count and all(fragment.parameters for fragment in fragments)
    ordered = sorted(sizes, reverse=True)
    pair = ordered[count - 1] + ordered[count] if len(sizes) > count else 0
    least = max(sum(sizes) / count, ordered[0], pair)  # a lower bound of every partition
    assert max(fragment.numel for fragment in fragments) <= 4 / 3 * least + 1


def test_another_default_device_is_refused() -> None:
    """Messages would be made on it."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with (
        torch.device("meta"),
        pytest.raises(tw.ModelError, match=r"default device is meta;.*set_default_device\(None\)"),
    ):
        tw.Replica(tw.diloco(), model, optimizer, tw.ThreadGroup.create(1)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_is_refused(dtype: torch.dtype) -> None:
    """Rounds compute in fp32, in tensors of the default dtype."""
    torch.set_default_dtype(dtype)
    try:
        model = nn.Linear(2, 1)
        with pytest.raises(tw.ModelError, match=rf"default dtype is {dtype};.*set_default_dtype\(torch.float32\)"):
            tw.Replica(tw.diloco(), model, torch.optim.SGD(model.parameters()), tw.ThreadGroup.create(1)[0])
    finally:
        torch.set_default_dtype(torch.float32)
