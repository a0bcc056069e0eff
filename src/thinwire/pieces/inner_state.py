"""The state of an inner optimizer in a checkpoint: tensors by name, and numbers and text for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.pieces.partition import is_sharded, local


def save_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by "parameter.key", and the rest, which JSON can hold. A setting that is a tensor of one value, or a number of numpy's, becomes
    a plain number. Raises `CheckpointError` for what is neither tensor, number nor text.
    """
    classes = _classes(optimizer)
    names, state_dict = _names(classes), optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = local(value)
            else:
                rest[f"{index}.{key}"] = _plain(value, None, f"the state {key!r} of {names}")
    groups = [
        {key: _plain(value, _number, f"the setting {key!r} of {names}") for key, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return tensors, {"param_groups": groups, "state": rest, "classes": classes}


def restore(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Restore `save_state`. Numbers get the type that the optimizer has for them: its tensor of one value stays a tensor.

    Raises `CheckpointError`, and changes nothing, if an optimizer of an unrelated class was saved, or one with other parameter groups.
    """
    classes, own = rest.get("classes"), _classes(optimizer)
    if classes and not (len(classes) == len(own) and all(set(one) & set(other) for one, other in zip(classes, own))):
        raise CheckpointError(
            f"the checkpoint has the state of {_names(classes)}, and {_names(own)} was given as inner optimizer; resume with the one that was "
            "saved."
        )
    try:
        _restore(optimizer, tensors, rest)
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the state of {_names(own)} in the checkpoint does not fit the given one ({type(error).__name__}: {error}); resume with the inner "
            "optimizer and the parameter groups that were saved."
        ) from error


def _restore(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*tensors.items(), *rest["state"].items()):
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = _sharded_like(value, parameters[int(index)])
    groups = [
        {key: value if key == "params" else _typed(value, now.get(key)) for key, value in group.items()}
        for group, now in zip(rest["param_groups"], chain(optimizer.param_groups, repeat({})))
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _classes(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The class of each optimizer in it, with those of which it is a subclass."""
    if parts := getattr(optimizer, "parts", ()):
        return [classes for part in parts for classes in _classes(part)]
    beyond = torch.optim.Optimizer.__mro__
    return [[one.__name__ for one in type(optimizer).__mro__ if one not in beyond]]


def _names(classes: Sequence[Sequence[str]]) -> str:
    return " and ".join(own[0] for own in classes)


def _plain(value: object, default: Callable[[object], object] | None, what: str) -> Any:
    try:
        return json.loads(json.dumps(value, default=default))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}, a value of type {type(value).__name__}, cannot be saved in a checkpoint ({error}): a tensor, numbers or text are needed. "
            "Train without checkpoints, or with another optimizer, such as torch.optim.AdamW."
        ) from error


def _number(value: object) -> object:
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    raise TypeError(f"a value of type {type(value).__name__} is no number")


def _typed(value: Any, now: object) -> Any:
    if isinstance(value, list):
        several = now if isinstance(now, tuple | list) and len(now) == len(value) else repeat(None)
        return tuple(_typed(one, other) for one, other in zip(value, several))
    if isinstance(now, Tensor):
        return torch.full_like(now, value)
    return type(now)(value) if isinstance(now, np.generic) else value


def _sharded_like(value: Any, parameter: Tensor) -> Any:
    if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.to_local().shape:
        return type(parameter).from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    return value
