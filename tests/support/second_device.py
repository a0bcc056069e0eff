"""A model on two devices, on a machine that has one: `SECOND` is a device of torch whose tensors keep their values in a CPU tensor.

    python tests/support/second_device.py FOLDER

An operation on tensors of both devices fails, as it does between a CPU and a GPU; copies work. torch takes the device for an accelerator
from then on, so a process of its own runs this. Trains with several strategies, and prints as JSON which of them ended with the bits of
the same model on the CPU alone, and which ended so after a save and a resume.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import thinwire as tw
from thinwire import checkpoint
from thinwire.testing.toy import adamw, batch, fill, inner_step, same_bits

_setup_privateuseone_for_python_backend("second")
SECOND = torch.device("second", 0)
STEPS, SAVED = 11, 6
BARE = "none"
STRATEGIES = {
    "streaming_diloco": tw.streaming_diloco(every=4, fragments=2, delay=2),
    "streaming_sign": tw.streaming_sign(every=4),
    "qsgd": tw.lab.recipes.qsgd(),
    "streaming_diloco there": tw.streaming_diloco(every=4, fragments=2, delay=2, anchors="device"),
    "streaming_sign there": tw.streaming_sign(every=4, anchors="device"),
    "streaming_sparse there": tw.recipes.streaming_sparse(every=4, anchors="device"),
    "streaming_sparse": tw.recipes.streaming_sparse(every=4),
}


class OnSecond(torch.Tensor):
    """A tensor on `SECOND` with the values of `values`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        place = {"strides": values.stride(), "storage_offset": values.storage_offset(), "device": SECOND}
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, **place)
        made.values = values
        return made

    def __tensor_flatten__(self):  # a checkpoint holds the parts of such a class
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return OnSecond(parts["values"])

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return perform(operation, args, kwargs or {})


def perform(operation, args, kwargs):
    """Run `operation` on the CPU; its results are on the device of its tensors, or on the one that `kwargs` names."""
    name = operation._schema.name
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    ours = {id(one.values): one for one in tensors if isinstance(one, OnSecond)}
    copies = name in ("aten::_to_copy", "aten::copy_")
    if ours and not copies and any(one.dim() for one in tensors if not isinstance(one, OnSecond)):
        raise RuntimeError(f"{operation}: expected all tensors to be on the same device, found cpu and {SECOND}")
    to = kwargs.get("device")
    there = bool(ours) if to is None else torch.device(to).type == SECOND.type
    if name == "aten::copy_":
        there = isinstance(args[0], OnSecond)
    if to is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = pytree.tree_map(lambda one: one.values if isinstance(one, OnSecond) else one, (args, kwargs))
    found = operation(*args, **kwargs)
    if not there:
        return found
    return pytree.tree_map(lambda one: placed(one, ours), found)


def placed(value, ours):
    """The one of `ours` with this value, a new one for another tensor, and what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return ours[id(value)] if id(value) in ours else OnSecond(value)


@torch.library.impl("aten::empty.memory_format", "privateuseone")
def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return OnSecond(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


@torch.library.impl("aten::empty_strided", "privateuseone")
def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return OnSecond(torch.empty_strided(size, stride, dtype=dtype))


class TwoLayers(nn.Module):
    """The second layer lies on `device`."""

    def __init__(self, device):
        super().__init__()
        self.there, self.here = nn.Linear(5, 1), nn.Linear(3, 5)
        fill(self)
        for name, parameter in list(self.there.named_parameters()):
            setattr(self.there, name, nn.Parameter(parameter.detach().to(device)))

    def forward(self, x):
        return self.there(self.here(x).to(self.there.weight.device)).cpu()


def trained(device, attach, rank, folder=None, first=1):
    """The weights after `STEPS` steps. With `folder`, a checkpoint is saved there after step `SAVED`, or loaded if `first` is past it."""
    model = TwoLayers(device)
    optimizer = adamw(model)
    with attach(model, optimizer) as replica:
        if first > 1:
            checkpoint.load(checkpoint.read(folder / f"step-{first - 1:08d}"), replica)
        for step in range(first, STEPS + 1):
            inner_step(model, optimizer, *batch(0, rank, step))
            if folder and step == SAVED:
                checkpoint.save(folder, replica, {})
    assert model.there.weight.device.type == torch.device(device).type
    return torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])


def ended(device, strategy, folder=None, first=1):
    """The weights of two replicas."""

    def replica(group):
        own = folder and folder / str(group.rank)
        return trained(device, lambda *of: tw.Replica(strategy, *of, group), group.rank, own, first)

    return tw.run_threads(2, replica, timeout=600.0)


def all_same(found, wanted):
    return all(same_bits(one, wanted[0]) for one in [*found, *wanted])


def main(folder):
    told = {"trained": {}, "resumed": {}}
    bare = [trained(device, lambda *of: nullcontext(), 0) for device in ("cpu", SECOND)]
    (alone,) = tw.ThreadGroup.create(1)
    attached = trained(SECOND, lambda *of: tw.Replica(tw.local_sgd(every=3), *of, alone), 0)
    told["trained"][BARE] = all_same([attached], bare)
    for name, strategy in STRATEGIES.items():
        wanted = ended("cpu", strategy)
        told["trained"][name] = all_same(ended(SECOND, strategy, folder=folder / name), wanted)
        told["resumed"][name] = all_same(ended(SECOND, strategy, folder=folder / name, first=SAVED + 1), wanted)
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
