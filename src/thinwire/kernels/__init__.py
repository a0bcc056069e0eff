"""Kernels: loops that run at the speed of memory, for each kind of device, with the same functions and the same bytes.

`Kernels` is the interface. `reference` implements it in plain torch: it is the definition, the oracle of the tests, and the fallback.
`cpu_block` (numba) and `gpu` (Triton) have the same functions for contiguous tensors of one kind of device. `of` chooses.

All implementations give the same bits. An element is decoded as its code's value times fp32(factor · weight), rounded to fp32, and
then added in fp32; nothing is fused into a multiply-add.

`x` and `out` are flat fp32. `payload` is flat uint8 of exactly its codec's size, and may begin at any address. Encoding reads `x` once,
writes every byte of the payload, and returns whether all of `x` was finite; if not, the bytes must not be used.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal, Protocol

from torch import Tensor

from thinwire.kernels.grid import Grid, Scale

__all__ = ["Float", "Grid", "Kernels", "Norm", "Scale", "of"]

Float = Literal["fp32", "bf16", "fp16"]
Norm = Literal["mean", "l2"]


class Kernels(Protocol):
    """A module with these functions. All tensors of a call are on one device."""

    def encode_blocks(
        self, x: Tensor, payload: Tensor, grid: Grid, block: int, scale: Scale, stream: int | None
    ) -> bool:
        """⌈n·bits/8⌉ bytes of codes, lowest bits first, then ⌈n/block⌉ scales (codecs/block.py). With a `stream`
        element i is rounded by the lower (i even) or upper half of draw ⌊i/2⌋ (rng.py).
        """

    def add_blocks(self, payload: Tensor, out: Tensor, grid: Grid, block: int, scale: Scale, weight: float) -> None:
        """Add `weight` times the decoded `payload` of `encode_blocks` to `out`; any bytes of that size decode."""

    def encode_floats(self, x: Tensor, payload: Tensor, form: Float) -> bool:
        """Round to the nearest, ties to even, and saturate instead of becoming infinite."""

    def add_floats(self, payload: Tensor, out: Tensor, form: Float, weight: float) -> None: ...

    def encode_signs(self, x: Tensor, payload: Tensor, block: int, norm: Norm) -> bool:
        """⌈n/8⌉ bytes of x < 0, lowest bit first, then ⌈n/block⌉ fp32 scales: each block's mean |x| or √(mean x²).

        Sums are in fp64 and in this order on all devices: for each 4096 elements of a block (the last filled up with zeros to a power
        of two) the upper half is added to the lower half until one value is left; then the same with these sums.
        """

    def add_signs(self, payload: Tensor, out: Tensor, block: int, weight: float) -> None: ...

    def pack(self, numbers: Tensor, packed: Tensor, width: int) -> None:
        """Flat int64 below 2^width as bytes without gaps, lowest bit first; the rest of the last byte is zero."""

    def unpack(self, packed: Tensor, numbers: Tensor, width: int) -> None:
        """The inverse: fill flat int64 `numbers`."""

    def pack_ascending(self, index: Tensor, packed: Tensor, low: int) -> None:
        """The `low` lowest bits of each ascending int64 index, packed as by `pack`, then from the next byte on a bit set at (index >> low) + i
        for the i-th index; the other bits are zero."""

    def unpack_ascending(self, packed: Tensor, index: Tensor, low: int, numel: int) -> bool:
        """The inverse: fill flat int64 `index`. Returns whether `packed` is the code of that many ascending indices below `numel`; if not,
        `index` must not be used."""

    def select_largest(self, x: Tensor, chunk: int, count: int, index: Tensor) -> bool:
        """Select the `count` largest magnitudes of each `chunk` (⌈count·rest/chunk⌉ of a shorter last one). Write their indices within
        the chunk, ascending, to flat int64 `index`; in a tie the first counts. Returns whether all of `x` is finite.
        """

    def select_drawn(self, stream: int, numel: int, index: Tensor) -> None:
        """Write the indices of the least draws (as int64) of draws 0 … numel − 1 of a stream (rng.py), ascending, as many as fit in flat
        int64 `index`.
        """

    def add_at(self, index: Tensor, values: Tensor, out: Tensor, first: int = 0) -> None:
        """`out`[index − first] += values, for int64 `index` without repetition and, less `first`, inside `out`."""

    def add_sent(self, values: Tensor, total: Tensor, counted: Tensor, weight: float) -> None:
        """For each value that is not zero: `total` += value·weight and `counted` += weight, each product and sum rounded to fp32. Sets all
        `values` to +0. `total` must start at +0.
        """

    def divide_sent(self, total: Tensor, counted: Tensor) -> None:
        """`total` /= `counted` where `counted` is not zero."""

    def mean_sent(self, index: Tensor, values: Tensor, weights: Tensor, out: Tensor) -> None:
        """What `add_sent` of all packets and `divide_sent` leave in `total`, into `out`. `index` (int64) has the ascending indices of one
        packet's `values` after another's, equally many of each; `weights` has one for each packet.
        """

    def nesterov(
        self,
        anchor: Tensor,
        delta: Tensor,
        momentum: Tensor,
        lr: float,
        mu: float,
        out_anchor: Tensor,
        out_momentum: Tensor,
    ) -> bool:
        """v ← μ·v + Δ; anchor ← anchor − η·(Δ + μ·v), every product and sum rounded to fp32. Returns whether the new anchor
        is finite. An output may be its own input.
        """

    def carry(self, x: Tensor, before: Tensor, change: Tensor, after: Tensor) -> None:
        """x ← x + (after − (before − change)), every difference and the sum rounded to fp32."""


def of(*tensors: Tensor) -> Kernels:
    """The kernels for `tensors`: those of their device if all are contiguous, otherwise the reference.

    Args:
        tensors: on one device, of any shape and dtype.

    >>> import torch
    >>> of(torch.zeros(4)).__name__
    'thinwire.kernels.cpu_block'
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        return _of("")
    return _of(tensors[0].device.type)


@cache
def _of(device: str) -> Kernels:
    """The kernels of a device, imported at the first use, because compiling is slow. Without numba the CPU has the reference: slower, same bits."""
    if device == "cpu" and find_spec("numba"):
        from thinwire.kernels import cpu_block as cpu

        return cpu
    if device == "cuda" and find_spec("triton"):
        from thinwire.kernels import gpu

        return gpu
    from thinwire.kernels import reference

    return reference
