"""Sets of ascending numbers as bits, in numba: one bit a number, lowest bit of a byte first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thinwire.kernels.numba_support import ONE, ZERO, compiled, u8, u64


def set_bits(numbers: Tensor, packed: Tensor) -> None:
    _set_bits(numbers.numpy(), packed.numpy())


def find_bits(packed: Tensor, numbers: Tensor) -> int:
    return int(_find_bits(packed.numpy(), numbers.numpy()))


@compiled
def _set_bits(numbers: Any, packed: Any) -> Any:
    packed[:] = u8(0)
    for i in range(numbers.size):
        number = u64(numbers[i])
        packed[number >> u64(3)] |= u8(ONE << (number & u64(7)))


@compiled
def _find_bits(packed: Any, numbers: Any) -> Any:
    found, most = ZERO, u64(numbers.size)
    for at in range(packed.size):
        byte = u64(packed[at])
        number = u64(at) << u64(3)
        while byte:
            if byte & ONE:
                if found < most:
                    numbers[found] = number
                found += ONE
            byte, number = byte >> ONE, number + ONE
    return found
