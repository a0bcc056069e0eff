"""Partitions: which parameters are exchanged together.

Every trainable parameter is in exactly one fragment: tied weights once (where they first appear), frozen ones never.
Buffers are never exchanged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thinwire.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Fragment:
    """Parameters that travel together. For sharded parameters (DTensor) `numel` counts this rank's own shard.

    Args:
        name: in events and messages.
        parameters: pairs of name in the model and parameter.

    >>> Fragment('all', tuple(torch.nn.Linear(3, 2).named_parameters())).numel
    8
    """

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def numel(self) -> int:
        return sum(local(parameter).numel() for _, parameter in self.parameters)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters' local parts, in their order in a delta."""
        return tuple(tuple(local(parameter).shape) for _, parameter in self.parameters)


@runtime_checkable
class Partition(Protocol):
    """How a model's parameters are divided into fragments."""

    def fragments(self, model: nn.Module) -> list[Fragment]:
        """The model's trainable parameters, each in one fragment. Raises `ModelError`, `ConfigurationError`."""


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor. Does not import DTensor's module, which takes over a second; if it was not imported, no DTensor exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds: the shard of a DTensor, otherwise the parameter itself."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def held_by(part: Tensor, values: Tensor) -> Tensor:
    """`values` as `part` holds them. The bf16 rounding error is not sent: the anchor keeps it."""
    return values.to(part.dtype).to(values.dtype) if part.dtype.itemsize < values.dtype.itemsize else values


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that are trained, tied ones once; `torch.compile`'s prefix is removed from the names."""
    named = [(name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ModelError(
            f"{type(model).__name__} has no trainable parameters; at least one with requires_grad=True is needed."
        )
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise ModelError(
                f"{name} is {parameter.dtype}; only real floating-point parameters can be exchanged, freeze it."
            )
    return named


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ModelError` unless `optimizer` trains exactly the trainable parameters of `model`, all of it has shapes and
    values, and torch makes tensors on the CPU and in fp32 by default."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model: a {type(model).__name__} was given; an nn.Module is needed; put several into an nn.ModuleList."
        )
    if torch.get_default_dtype() != torch.float32:
        raise ModelError(
            f"torch's default dtype is {torch.get_default_dtype()}; a Replica computes its rounds in fp32, and needs torch.float32 as the default "
            "while it trains. Call torch.set_default_dtype(torch.float32), and give the model its own dtype, as in model.double()."
        )
    if torch.get_default_device().type != "cpu":
        raise ModelError(
            f"torch's default device is {torch.get_default_device()}; a Replica makes its messages in host memory, and needs the CPU as the default "
            "while it trains. Call torch.set_default_device(None), and move the model instead, as in model.cuda()."
        )
    if lazy := [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]:
        raise ModelError(
            f"{lazy[0]} has no shape yet, because its module is lazy; call the model once with a batch, then make the optimizer and the Replica."
        )
    if empty := [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]:
        raise ModelError(
            f"{empty[0]} is on the meta device, which holds no values; call model.to_empty(device=...) and give it its weights, then make the "
            "optimizer and the Replica."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, parameter in trainable(model) if id(parameter) not in held]
    if missing:
        raise ModelError(
            f"the optimizer does not hold {len(missing)} of the model's trainable parameters ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}); make it from this model's parameters, or freeze them "
            "(requires_grad_(False))."
        )
    own = {id(p) for p in model.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in own]
    if foreign:
        raise ModelError(
            f"the optimizer trains {len(foreign)} tensors that are not the model's (the first of shape {tuple(foreign[0].shape)}), which "
            "would not be exchanged; make them parameters of a module around the model, and give that to the Replica."
        )


def check_sharding(model: nn.Module, whole_replica: bool) -> None:
    """Raise `ModelError` if parameters are sharded and the ranks of the replica are not known (`whole_replica`)."""
    sharded = [name for name, p in trainable(model) if is_sharded(p) and p.device_mesh.size() > 1]
    if sharded and not whole_replica:
        raise ModelError(
            f"{sharded[0]} is sharded and no site was given: the ranks of a replica must accept or refuse a round together; "
            "make the group with TorchGroup.from_world and pass site=group.site."
        )


@dataclass(frozen=True)
class Whole(Partition):
    """One fragment: the whole model (DiLoCo, Local SGD, data-parallel).

        fragment 0 = all trainable parameters

    *Source*: none; the model is not partitioned.

    >>> [fragment.numel for fragment in Whole().fragments(torch.nn.Linear(3, 2))]
    [8]
    """

    def fragments(self, model: nn.Module) -> list[Fragment]:
        return [Fragment("model", tuple(trainable(model)))]


@dataclass(frozen=True)
class Strided(Partition):
    """Fragment i holds layers i, i+P, i+2P, … (arXiv 2501.18512, §2.2: the default of the paper).

        P = `count`, or ⌈L / min(3, max(1, ⌊share·L⌋))⌉          L: the number of layers

    `layers` is the path of the model's list of layers; without it, the `ModuleList` or `Sequential` with most trainable parameters is
    taken, otherwise the leaf modules in order.

    *Differs*: all that is not in a layer (embeddings, final norm, head) is one more fragment, the first; the paper names the embeddings only.
    A fragment has three layers, as in the paper, or fewer, so that none has more than `share` of them.

    Args:
        count: P, the fragments of layers; None: see `Strided`.
        layers: the path of the model's list of layers; None: Thinwire searches for it.
        share: without `count`, the largest share of the layers that one fragment may hold, in (0, 1].

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [[name for name, _ in fragment.parameters] for fragment in Strided(2).fragments(model)]
    [['0.weight', '0.bias', '2.weight', '2.bias'], ['1.weight', '1.bias']]
    """

    count: int | None = None
    layers: str | None = None
    share: float = 1.0

    def fragments(self, model: nn.Module) -> list[Fragment]:
        rest, layers = _layers(model, self.layers)
        count = _checked_count(self.count, len(layers), self.share)
        return _layer_fragments(rest, layers, [range(i, len(layers), count) for i in range(count)])


@dataclass(frozen=True)
class Sequential(Partition):
    """Fragment i holds neighbouring layers, as evenly as they divide (arXiv 2501.18512, §2.2). Otherwise as `Strided`.

        layers of fragment i: ⌊i·L/P⌋ ≤ l < ⌊(i + 1)·L/P⌋          P and L as in `Strided`

    *Differs*: the paper's fragments have three layers each; here they differ by one if P does not divide L. The rest as in `Strided`.

    Args:
        count: P, the fragments of layers; None: see `Strided`.
        layers: the path of the model's list of layers; None: Thinwire searches for it.
        share: without `count`, the largest share of the layers that one fragment may hold, in (0, 1].

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    >>> [[name for name, _ in fragment.parameters] for fragment in Sequential(2).fragments(model)]
    [['0.weight', '0.bias'], ['1.weight', '1.bias', '2.weight', '2.bias']]
    """

    count: int | None = None
    layers: str | None = None
    share: float = 1.0

    def fragments(self, model: nn.Module) -> list[Fragment]:
        rest, layers = _layers(model, self.layers)
        count = _checked_count(self.count, len(layers), self.share)
        cuts = [i * len(layers) // max(1, count) for i in range(count + 1)]
        return _layer_fragments(rest, layers, [range(a, b) for a, b in pairwise(cuts)])


@dataclass(frozen=True)
class BySize(Partition):
    """`count` fragments of nearly equal bytes, whatever the layers: each tensor, largest first, goes to the smallest
    fragment.

        bytes of the largest fragment ≤ (4/3 − 1/(3·count)) · those of the best possible partition

    *Source*: Graham (1969, doi: 10.1137/0117039). *Differs*: nothing. It needs no list of layers.

    Args:
        count: number of fragments, at least 1.

    >>> [fragment.numel for fragment in BySize(2).fragments(torch.nn.Linear(3, 2))]
    [6, 2]
    """

    count: int

    def fragments(self, model: nn.Module) -> list[Fragment]:
        named = trainable(model)
        if not 1 <= self.count <= len(named):
            raise ConfigurationError(
                f"fragments={self.count}: between 1 and {len(named)} (the model's tensors) is needed."
            )
        bins: list[list[int]] = [[] for _ in range(self.count)]
        sizes = [0] * self.count
        for index in sorted(range(len(named)), key=lambda i: -named[i][1].numel()):
            smallest = min(range(self.count), key=lambda b: (sizes[b], len(bins[b])))  # empty tensors fill empty bins
            bins[smallest].append(index)
            sizes[smallest] += named[index][1].numel()
        return [Fragment(f"part {i}", tuple(named[j] for j in sorted(b))) for i, b in enumerate(bins)]


Named = tuple[str, nn.Parameter]


def _checked_count(count: int | None, layers: int, share: float) -> int:
    if count is None:
        return -(-layers // min(3, max(1, int(share * layers))))
    if not 1 <= count <= layers:
        raise ConfigurationError(
            f"fragments={count} for a model of {layers} layers: between 1 and {layers} is needed "
            f"(what is outside the layers is a fragment of its own); choose {'fewer' if count > layers else 'more'}, or BySize."
        )
    return count


def _layer_fragments(rest: Sequence[Named], layers: list[list[Named]], groups: list[range]) -> list[Fragment]:
    outside = [Fragment("outside the layers", tuple(rest))] if rest else []
    inside = [
        Fragment("layers " + ",".join(map(str, group)), tuple(named for layer in group for named in layers[layer]))
        for group in groups
    ]
    return outside + inside


def _layers(model: nn.Module, path: str | None) -> tuple[list[Named], list[list[Named]]]:
    """The parameters outside the layers, and those of each layer; layers without trainable parameters are left out."""
    named = trainable(model)
    place = {prefix: index for index, prefix in enumerate(_layer_prefixes(model, path))}
    rest: list[Named] = []
    layers: dict[int, list[Named]] = {}
    for name, parameter in named:
        around = (name[: dot.end()] for dot in re.finditer(r"\.", name))
        inside = max((place[prefix] for prefix in around if prefix in place), default=None)
        (rest if inside is None else layers.setdefault(inside, [])).append((name, parameter))
    return rest, [layers[index] for index in sorted(layers)]


def _layer_prefixes(model: nn.Module, path: str | None) -> list[str]:
    modules = {re.sub(r"_orig_mod\.?", "", name).rstrip("."): module for name, module in model.named_modules()}
    if path is not None:
        if path not in modules or not list(modules[path].children()):
            lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList | nn.Sequential)]
            raise ConfigurationError(
                f"layers={path!r} is not a list of modules of this model; it has: {', '.join(lists) or 'none'}."
            )
        return [f"{path}.{name}." if path else f"{name}." for name, _ in modules[path].named_children()]

    def size(name: str) -> int:
        return sum(p.numel() for p in modules[name].parameters() if p.requires_grad)

    lists = [n for n, m in modules.items() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1 and size(n)]
    if lists:
        best = max(lists, key=size)
        return [f"{best}.{name}." if best else f"{name}." for name, _ in modules[best].named_children()]
    return [f"{name}." for name in modules if name]  # a module without parameters of its own is no layer
