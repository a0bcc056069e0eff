"""The loops that must run at the speed of memory, for each kind of device: the same functions, the same bytes.

`Kernels` says what there is. `reference` is all of it in plain torch: the definition, the oracle of the tests, and what
runs where nothing faster is at hand. `cpu` (numba) and `gpu` (Triton) have the same functions for contiguous tensors of
one device each. `of` picks.

Whoever runs it, a result is the same bit for bit: what is decoded for an element is its code's value times
fp32(factor · weight), rounded to fp32, and then one fp32 addition; nothing is fused into a multiply-add.

Legend: `x` and `out` are flat fp32. `payload` is flat uint8 of exactly the size that its codec names, and may begin at
any address. Encoding reads `x` once, writes every byte of the payload, and says whether all of `x` was finite; where it
says False the bytes are of no use, but written.
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
        element i is rounded by the lower (i even) or upper half of draw ⌊i/2⌋ (seeds.py).
        """

    def add_blocks(self, payload: Tensor, out: Tensor, grid: Grid, block: int, scale: Scale, weight: float) -> None:
        """Add `weight` times what `encode_blocks` wrote, or any other bytes of that size, to `out`."""

    def encode_floats(self, x: Tensor, payload: Tensor, form: Float) -> bool:
        """Round to the nearest, ties to even, and saturate: never infinite."""

    def add_floats(self, payload: Tensor, out: Tensor, form: Float, weight: float) -> None: ...

    def encode_signs(self, x: Tensor, payload: Tensor, block: int, norm: Norm) -> bool:
        """⌈n/8⌉ bytes of x < 0, lowest bit first, then ⌈n/block⌉ fp32 scales: each block's mean |x| or √(mean x²).

        Sums are in fp64 and in this order, on all devices: of each 4096 of a block (the last filled up with zeros to
        a power of two) the upper half is added to the lower until one is left; then the same with these sums.
        """

    def add_signs(self, payload: Tensor, out: Tensor, block: int, weight: float) -> None: ...

    def pack(self, numbers: Tensor, packed: Tensor, width: int) -> None:
        """Flat int64 below 2^width as bytes without gaps, lowest bit first; what is left of the last byte is zero."""

    def unpack(self, packed: Tensor, numbers: Tensor, width: int) -> None:
        """The reverse: fill flat int64 `numbers`."""

    def select_above(self, x: Tensor, threshold: float, index: Tensor) -> int:
        """How many |x| > threshold there are; where, ascending, goes to flat int64 `index` for as many as it has room.

        What is left of `index` is undefined. With an empty `index` it only counts. NaN is above nothing.
        """

    def select_largest(self, x: Tensor, chunk: int, count: int, index: Tensor) -> bool:
        """Of each `chunk` neighbours the `count` largest by magnitude (of a last, shorter chunk ⌈count·rest/chunk⌉):
        their places within their chunk, ascending, into flat int64 `index`. Of equal ones the first. True: all finite.
        """

    def select_drawn(self, stream: int, numel: int, index: Tensor) -> None:
        """The places of the least draws (as int64) among draws 0 … numel − 1 of a stream (seeds.py), as many as flat int64
        `index` has room for, ascending.
        """

    def add_sent(self, values: Tensor, total: Tensor, counted: Tensor, weight: float) -> None:
        """Where a value is not zero: `total` += value·weight and `counted` += weight, each product and sum rounded to fp32; then all
        of `values` are +0. `total` begins at +0.
        """

    def divide_sent(self, total: Tensor, counted: Tensor) -> None:
        """`total` /= `counted` where that is not zero."""

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
        """v ← μ·v + Δ; anchor ← anchor − η·(Δ + μ·v), every product and sum rounded to fp32. True: the moved anchor is
        finite. An out may be its own input.
        """


def of(*tensors: Tensor) -> Kernels:
    """The kernels for `tensors`: those of their device if all are contiguous, else the reference.

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
    """Imported when first needed: a compiler takes its time."""
    if device == "cpu":
        from thinwire.kernels import cpu_block as cpu

        return cpu
    if device == "cuda" and find_spec("triton"):
        from thinwire.kernels import gpu

        return gpu
    from thinwire.kernels import reference

    return reference
