"""What a checkpoint holds of a model and of its inner optimizer, as trees: their own state dicts, so whatever these hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.pieces.partition import is_sharded
from thinwire.types import compact


def model_state(model: nn.Module, frozen: bool = True) -> dict[str, Any]:
    """The state dict of `model`, without `torch.compile`'s prefix: parameters, persistent buffers, extra state; not copied. Without `frozen`
    its parameters that do not train are left out.
    """
    named = {name.replace("_orig_mod.", ""): value for name, value in _live(model).items()}
    if frozen:
        return named
    still = {id(p) for p in model.parameters() if not p.requires_grad}
    out = {name for name, value in named.items() if id(value) in still}
    # a quantized parameter has more entries, under its name: weight.absmax, weight.quant_map
    return {
        name: value
        for name, value in named.items()
        if name not in out and not any(name.startswith(f"{parameter}.") for parameter in out)
    }


def names_in_state(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter in `model_state`, by its id; a tied one has several. They are not always those of `named_parameters`:
    torch's `checkpoint_wrapper` takes its prefix out of one and leaves it in the other.
    """
    names: dict[int, list[str]] = {}
    for name, value in model_state(model).items():
        names.setdefault(id(value), []).append(name)
    return names


def _live(model: nn.Module) -> dict[str, Any]:
    try:
        state: dict[str, Any] = model.state_dict(keep_vars=True)
    except TypeError:  # a state_dict of the model's own, without options
        state = model.state_dict()
    return state


def check_model(model: nn.Module, saved: Mapping[str, Any], frozen: bool) -> None:
    """Raise `CheckpointError` unless `saved` has the names and shapes of the model's own state."""
    due = model_state(model, frozen)
    differing = sorted(saved.keys() ^ due.keys()) or [n for n in due if _shape(saved[n]) != _shape(due[n])]
    if differing:
        raise CheckpointError(f"it was made for another model: {', '.join(differing[:3])} do not fit.")


def _shape(value: object) -> object:
    return value.shape if isinstance(value, Tensor) else None


@torch.no_grad()
def restore_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the values of `model_state` into the tensors of `model`. Raises `CheckpointError`."""
    live = _live(model)
    given: OrderedDict[str, Any] = OrderedDict()
    given._metadata = getattr(live, "_metadata", {})  # type: ignore[attr-defined]
    for name, now in live.items():
        value = saved.get(name.replace("_orig_mod.", ""), given)
        if value is given:
            continue
        own = compact(now) if isinstance(now, Tensor) else now
        if own is not now:  # expanded: `copy_` refuses it, because its elements share memory
            for dim, (size, here) in enumerate(zip(now.shape, own.shape)):
                value = value.narrow(dim, 0, here) if here != size else value
            own.copy_(value)
        else:
            given[name] = value
    try:
        model.load_state_dict(given, strict=False)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{type(model).__name__} does not load its own state: {error}") from error
    # what is neither parameter nor buffer, such as the scales of quantized weights, no module may have loaded
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, now in live.items():
        if isinstance(now, Tensor) and id(now) not in known and isinstance(given.get(name), Tensor):
            now.detach().copy_(given[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own state dict, and its classes. Raises `CheckpointError` if the state dict loses an entry. What it holds in its attributes
    is `optimizer_attributes.held_by`.
    """
    count = len(parameters_of(optimizer))
    keys: Iterable[Any] = optimizer.state
    for key in keys:
        if type(key) is int and 0 <= key < count:
            raise CheckpointError(
                f"optimizer.state[{key}] belongs to no parameter, and its key stands for parameter {key} in a state dict, so one of them would be "
                "lost; take a key that is no number."
            )
    return {"classes": _classes(optimizer), "state": optimizer.state_dict()}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizer_class(optimizer: torch.optim.Optimizer, classes: Sequence[Sequence[str]]) -> None:
    """Raise `CheckpointError` unless the saved `classes` are related to those of `optimizer`."""
    own = _classes(optimizer)
    if not (len(classes) == len(own) and all(set(one) & set(other) for one, other in zip(classes, own))):
        raise CheckpointError(
            f"the checkpoint has the state of {_names(classes)}, and {_names(own)} was given as inner optimizer; resume with the one that was "
            "saved."
        )


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load `optimizer_state`. Raises `CheckpointError`, and changes nothing, if an optimizer of an unrelated class was saved, or one with other
    parameter groups.
    """
    check_optimizer_class(optimizer, saved["classes"])
    try:
        optimizer.load_state_dict(_covered_state(saved["state"]))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of {_names(_classes(optimizer))} in the checkpoint does not fit the given one ({type(error).__name__}: {error}); resume "
            "with the inner optimizer and the parameter groups that were saved."
        ) from error
    _keep_values(optimizer, saved["state"])


class _Covered:
    """Stands for a value that torch's `load_state_dict` would make anew from its elements, and so change or fail to make."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _covered_state(saved: Any) -> Any:
    """The state dict `saved` with a `_Covered` for each such value in its entries of parameters."""
    if not isinstance(saved, dict):
        return saved
    if isinstance(parts := saved.get("parts"), list):
        return {**saved, "parts": [_covered_state(part) for part in parts]}
    entries = saved.get("state")
    if not isinstance(entries, dict):
        return saved
    # entries without a number belong to no parameter, and torch leaves them as they are
    state = {
        key: {name: _covered(value) for name, value in entry.items()}
        if type(key) is int and isinstance(entry, dict)
        else entry
        for key, entry in entries.items()
    }
    return {**saved, "state": state}


def _covered(value: Any) -> Any:
    if type(value) is dict:
        return {key: _covered(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_covered, value))
    return _Covered(value) if isinstance(value, Iterable) and not isinstance(value, Tensor) else value


def _uncovered(value: Any) -> Any:
    if type(value) is dict:
        return {key: _uncovered(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_uncovered, value))
    return value.value if isinstance(value, _Covered) else value


def _keep_values(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo what torch's `load_state_dict` does beyond placing values: fp32 moments of bf16 weights would be rounded, what stands in several
    places of the state would become several, and dicts of other types plain ones.
    """
    if "parts" in saved:
        for part, own in zip(getattr(optimizer, "parts", ()), saved["parts"]):
            _keep_values(part, own)
        return
    entries, groups = saved.get("state"), saved.get("param_groups")
    for entry in optimizer.state.values():
        if isinstance(entry, dict):
            entry.update({key: _uncovered(value) for key, value in entry.items()})
    held_of: Mapping[Any, Any] = entries if isinstance(entries, Mapping) else {}
    for number, parameter in enumerate(parameters_of(optimizer) if held_of else ()):
        state, held = optimizer.state.get(parameter), held_of.get(number)
        _keep_entries(state, held)
        if type(state) is dict and isinstance(held, dict) and type(held) is not dict:
            held.clear()
            held.update(state)
            optimizer.state[parameter] = held
    for group, held in zip(optimizer.param_groups, groups) if isinstance(groups, list) else ():
        _keep_entries(group, held)


def _keep_entries(now: Any, saved: Any) -> None:
    if isinstance(now, dict) and isinstance(saved, Mapping):
        now.update({key: _value(now[key], saved[key]) for key in now.keys() & saved.keys() - {"params"}})


def _value(now: Any, saved: Any) -> Any:
    """`saved`, if `now` differs from it in dtypes and devices at most; otherwise `now`, which its optimizer has made of it."""
    if type(now) is Tensor and type(saved) is Tensor and now.shape == saved.shape:
        return saved.to(now.device)
    return saved if isinstance(now, list | dict) and _alike(now, saved) else now


def _alike(now: Any, saved: Any) -> bool:
    """Whether both are trees of one shape, whose tensors are on the same devices."""
    if type(now) is not type(saved):
        return False
    if isinstance(now, Tensor):
        return bool(now.shape == saved.shape and now.device == saved.device)
    if isinstance(now, list | tuple):
        return len(now) == len(saved) and all(map(_alike, now, saved))
    if isinstance(now, dict):
        if now.keys() == saved.keys():
            return all(_alike(now[key], saved[key]) for key in now)
        # torch copies the groups, with parameters that are keys in them
        return len(now) == len(saved) and all(
            isinstance(one, Tensor) and _alike(one, other) and _alike(now[one], saved[other])
            for one, other in zip(now, saved)
        )
    return True


def _classes(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The class of each optimizer in it, with those of which it is a subclass."""
    if parts := [part for part in getattr(optimizer, "parts", ()) if isinstance(part, torch.optim.Optimizer)]:
        return [classes for part in parts for classes in _classes(part)]
    beyond = torch.optim.Optimizer.__mro__
    return [[one.__name__ for one in type(optimizer).__mro__ if one not in beyond]]


def _names(classes: Sequence[Sequence[str]]) -> str:
    return " and ".join(own[0] for own in classes)


def meshes_of(tensors: Sequence[Tensor]) -> list[Any]:
    """The device meshes over which they are sharded."""
    meshes: list[Any] = []
    for tensor in tensors:
        if is_sharded(tensor) and tensor.device_mesh not in meshes:
            meshes.append(tensor.device_mesh)
    return meshes
