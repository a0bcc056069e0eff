"""The state of a data loader as JSON, with tensors and bytes spelled out. Reading it executes no code."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import CheckpointError, JobError

_BYTES, _TENSOR, _PAIRS = "bytes in base64", "tensor", "pairs"


def encode(value: object) -> Any:
    """`value` as JSON. Raises `JobError` for a value that is neither JSON nor tensor, bytes, tuple or dict."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {_TENSOR: str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape), **encode(data)}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {_PAIRS: [[encode(key), encode(item)] for key, item in value.items()]}
    raise JobError(
        f"state_dict() of the iterable from batches(share) holds a {type(value).__name__}; numbers, text, bytes, tensors, lists and "
        "dicts can be saved. Leave it out of the state, or leave state_dict out: then a resume reads all batches again."
    )


def decode(value: Any) -> Any:
    """Read a value from `encode`; a tuple becomes a list. Raises `CheckpointError` for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        if _PAIRS in value:
            return {decode(key): decode(item) for key, item in value[_PAIRS]}
        data = base64.b64decode(value[_BYTES], validate=True)
        if _TENSOR not in value:
            return data
        dtype = getattr(torch, value[_TENSOR])
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"]).clone()
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the state of the data cannot be read ({type(error).__name__}: {error}).") from error
