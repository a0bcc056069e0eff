"""The state of an inner optimizer in a checkpoint: tensors by name, and numbers and text for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import CheckpointError
from thinwire.pieces.partition import is_sharded, local


def saved(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by "parameter.key", and the rest, which JSON can hold. A setting that is a tensor of one value, or a number of numpy's, becomes
    a plain number. Raises `CheckpointError` for what is neither tensor, number nor text.
    """
    names = " and ".join(type(part).__name__ for part in getattr(optimizer, "parts", [optimizer]))
    state_dict = optimizer.state_dict()
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
    return tensors, {"param_groups": groups, "state": rest}


def restore(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Restore `saved`. Numbers get the type that the optimizer has for them: its tensor of one value stays a tensor."""
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
