"""Applies a tensor-parallel plan to a model, through torch.distributed.tensor.parallel.

    mesh = init_device_mesh("cuda", (replicas, ranks), mesh_dim_names=("replica", "shard"))["shard"]
    plan = split(model, mesh)                 # then the optimizer, then the Replica with site=group.site

All ranks of the mesh must start from the same weights (one seed, or one checkpoint), read the same batches, and use the same torch
seed. Split parameters become DTensors; `full_tensor()` returns a whole parameter in the model's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from thinwire.lab.plan.tensor_parallel import Layer, LayersAlike, TensorParallel, derive

_HEAD_WIDTHS = ("head_dim", "head_width", "key_value_proj_dim", "attention_head_size")
_COUNTED = (  # attributes that count heads, and shrink with the heads of a rank
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "num_key_value_heads",
    "split_size",
    "inner_dim",
    "all_head_size",
)


def split(model: nn.Module, mesh: DeviceMesh) -> TensorParallel:
    """Split `model` over the ranks of `mesh` by a plan derived from its layers.

    Args:
        model: with the same weights on every rank; its large parameters are DTensors afterwards.
        mesh: one dimension, inside a site.

    Returns:
        The plan that was followed.

    Raises:
        ConfigurationError: no plan can be derived.
    """
    plan = derive(layers_of(model), mesh.size())
    styles: dict[str, ParallelStyle] = {
        name: _style(model.get_submodule(name), row)
        for name, (layer, row) in plan.choices().items()
        if row.split not in ("whole", "summed")
    }
    for path, members in plan.groups.items():
        rows = {name: plan.choices()[name][1] for name in members}
        _share_inputs(model, rows, mesh)
        _count_own_heads(model, path, rows, mesh.size())
        for name, row in rows.items():
            if row.split == "summed":
                model.get_parameter(name).register_hook(partial(_summed, mesh))  # type: ignore[no-untyped-call]
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for name, (layer, _) in plan.choices().items():
        if layer.tied and layer.kind != "other":
            model.get_submodule(name).weight = model.get_submodule(layer.tied).weight
    return plan


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model, as `derive` takes them.

    Args:
        model: with or without storage.

    >>> [layer.name for layer in layers_of(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))]
    ['0', '2']
    """
    return list(_layers(model))


def _layers(model: nn.Module) -> Iterator[Layer]:
    first: dict[int, str] = {}  # by weight: the first layer with it
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if (kind := _kind(module)) is None:
            for name, parameter in own.items():
                yield Layer(f"{path}.{name}".lstrip("."), "other", tuple(parameter.shape))
            continue
        weight = own["weight"]
        shape = tuple(weight.shape)[::-1] if kind == "linear" else tuple(weight.shape)
        before = first.setdefault(id(weight), path)
        tied = before if before != path else ""
        yield Layer(path, kind, shape, own.get("bias") is not None, tied, _head_width(model, path))  # type: ignore[arg-type]


def _kind(module: nn.Module) -> str | None:
    """The kind of a module by its forward pass, so that a subclass that only initializes its weights differently counts too."""
    forward: Any = type(module).forward
    if forward is nn.Linear.forward:
        return "linear"
    if forward is nn.Embedding.forward:
        return "embedding"
    return "transposed" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _head_width(model: nn.Module, path: str) -> int:
    """Head width from the nearest enclosing module that declares it; 0 if none does."""
    while path:
        path = path.rpartition(".")[0]
        for name in _HEAD_WIDTHS:
            value = getattr(model.get_submodule(path), name, None)
            if isinstance(value, int):
                return value
    return 0


def _style(module: nn.Module, row: LayersAlike) -> ParallelStyle:
    if row.parts > 1 or row.layers[0].kind == "transposed":
        return _Local(row)
    if row.split in ("outputs", "heads"):
        return ColwiseParallel()
    if row.split == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel(input_layouts=Replicate() if row.split == "rows" else Shard(-1))


class _Local(ParallelStyle):
    """A style for layers that torch's styles do not support: transposed weights, and fused ones, whose parts are split separately."""

    def __init__(self, row: LayersAlike) -> None:
        super().__init__()
        self.transposed, self.parts = row.layers[0].kind == "transposed", row.parts
        self.by_outputs = row.split == "outputs"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = int(self.by_outputs == self.transposed)
        self._put(module, "weight", self._shard(dim), device_mesh)
        if module.bias is not None:
            self._put(module, "bias", self._shard(0) if self.by_outputs else Replicate(), device_mesh)
        module.forward = partial(self._forward, module, device_mesh)
        return module

    def _shard(self, dim: int) -> Placement:
        return _StridedShard(dim, split_factor=self.parts) if self.parts > 1 else Shard(dim)

    @staticmethod
    def _put(module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
        value = module.get_parameter(name)
        spread = distribute_tensor(value.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=value.requires_grad))

    def _forward(self, module: nn.Module, mesh: DeviceMesh, x: Tensor | DTensor) -> Tensor:
        here = x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x
        own: dict[str, Any] = {name: one.to_local() for name, one in module.named_parameters()}  # type: ignore[attr-defined]
        y: Tensor = here @ (own["weight"] if self.transposed else own["weight"].T)
        if not self.by_outputs:
            y = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
            y = y.to_local()
        return y + own["bias"] if "bias" in own else y


class _Inputs:
    """Shares one DTensor among parallel layers that read the same tensor, so that its gradient is summed over ranks only once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.known = mesh, list[tuple[Tensor, DTensor]]()

    def spread(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        found = next((spread for plain, spread in self.known if plain is given[0]), None)
        if found is None:
            found = DTensor.from_local(given[0], self.mesh, [Replicate()], run_check=False)
            self.known.append((given[0], found))
        return (found, *given[1:])

    def forget(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self.known.clear()


def _share_inputs(model: nn.Module, rows: Mapping[str, LayersAlike], mesh: DeviceMesh) -> None:
    inputs = _Inputs(mesh)
    for name, row in rows.items():
        if row.split == "outputs":
            model.get_submodule(name).register_forward_pre_hook(inputs.spread)
        elif row.split == "inputs":
            model.get_submodule(name).register_forward_pre_hook(inputs.forget)


def _count_own_heads(model: nn.Module, path: str, rows: Mapping[str, LayersAlike], ranks: int) -> None:
    """Set the head counts of an attention to the heads of this rank."""
    parents = {name.rpartition(".")[0] for name, row in rows.items() if row.why.startswith("attention")}
    for parent in parents:
        module = model.get_submodule(parent)
        for name in _COUNTED:
            if isinstance(value := getattr(module, name, None), int):
                setattr(module, name, value // ranks)


def _summed(mesh: DeviceMesh, gradient: Tensor) -> Tensor:
    return DTensor.from_local(gradient, mesh, [Partial()], run_check=False).full_tensor()
