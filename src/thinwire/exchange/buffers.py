"""A pool of buffers, so that rounds after the first ones allocate no memory of a fragment's size."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Buffers:
    """Lends flat CPU tensors, which are not cleared. Thread-safe.

    A size is rounded up to one of eight in each power of two, so that nearly equal fragments share their buffers.

    >>> buffers = Buffers()
    >>> first = buffers.floats(1000)
    >>> buffers.give(first)
    >>> buffers.floats(1001).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}  # by number of bytes
        self._lent: dict[int, Tensor] = {}  # by address

    def bytes(self, count: int) -> Tensor:
        """A buffer of `count` bytes."""
        step = max(64, 1 << max(0, (count - 1).bit_length() - 4))
        room = -(-max(1, count) // step) * step
        with self._lock:
            free = self._free.get(room)
            whole = free.pop() if free else torch.empty(room, dtype=torch.uint8)
            self._lent[whole.data_ptr()] = whole
        return whole[:count]

    def floats(self, count: int, device: torch.device = CPU) -> Tensor:
        """A buffer of `count` fp32 values; only CPU buffers are reused, because torch has a pool for each other device."""
        return self.bytes(4 * count).view(torch.float32) if device.type == "cpu" else torch.empty(count, device=device)

    def longs(self, count: int) -> Tensor:
        """A buffer of `count` int64 values."""
        return self.bytes(8 * count).view(torch.int64)

    def like(self, tensor: Tensor) -> Tensor:
        """A flat buffer with the number of values, the type and the device of `tensor`; see `floats`."""
        return self.bytes(tensor.nbytes).view(tensor.dtype) if tensor.device.type == "cpu" else torch.empty_like(tensor)

    def give(self, *tensors: Tensor | None) -> None:
        """Return buffers, which must not be used afterwards; other tensors and None are ignored."""
        with self._lock:
            for tensor in tensors:
                whole = None if tensor is None else self._lent.pop(_place(tensor), None)
                if whole is not None:
                    self._free.setdefault(whole.numel(), []).append(whole)

    def clear(self) -> None:
        """Free the buffers that are not lent."""
        with self._lock:
            self._free.clear()

    def swap(self, old: Iterable[Tensor | None], new: Iterable[Tensor]) -> None:
        """Take back the buffers in `old` that are not in `new`."""
        kept = {_place(tensor) for tensor in new}
        self.give(*(tensor for tensor in old if tensor is not None and _place(tensor) not in kept))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0
