"""`Kernels` in Triton, for contiguous tensors of a CUDA device.

A program works on a tile of about `_TILE` elements: `ROWS` whole blocks, or a part of one. Scales and floats are read and written as
bytes, because payloads and scales may begin at any address. Rounding must equal that of the reference: quotients and roots are IEEE's
(`div_rn`), nothing is flushed to zero, and kernels are launched without `enable_fp_fusion`, so a product and a sum round separately.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from thinwire.kernels import Float, Grid, Norm, Scale
from thinwire.kernels import triton_programs as programs
from thinwire.kernels.reference import RUN
from thinwire.kernels.reference import add_at as add_at
from thinwire.kernels.reference import add_sent as add_sent
from thinwire.kernels.reference import carry as carry
from thinwire.kernels.reference import divide_sent as divide_sent
from thinwire.kernels.reference import mean_sent as mean_sent
from thinwire.kernels.reference import pack_ascending as pack_ascending
from thinwire.kernels.reference import select_drawn as select_drawn
from thinwire.kernels.reference import unpack_ascending as unpack_ascending

_TILE = 2048  # elements of a program
OPTIONS = {"enable_fp_fusion": False}  # a product and a sum round separately
_INFINITE = 0x7F800000  # the bits of infinity; those of NaN are above
_NBYTES = {"exponent": 1, "bf16": 2, "fp16": 2, "fp32": 4}


def encode_blocks(x: Tensor, payload: Tensor, grid: Grid, block: int, scale: Scale, stream: int | None) -> bool:
    worst, tile = _worst(x), _Tile.of(block, x.numel(), 8 // grid.bits)
    part, binade = math.frexp(grid.largest)
    bounds = {"TOP": grid.top, "LARGEST": grid.largest, "PART": _bits(part) & 0x7FFFFF, "BINADE": binade}
    codes = -(-x.numel() * grid.bits // 8)
    _run(
        programs.encode_blocks, tile.programs(x.numel()), x, payload, worst, x.numel(), codes, stream or 0, tile.block,
        **_form(grid), **bounds, HIGHEST=grid.highest, SCALE=scale, NBYTES=_NBYTES[scale], DRAWN=stream is not None, **tile.shape,
    )  # fmt: skip
    return int(worst) < _INFINITE


def add_blocks(payload: Tensor, out: Tensor, grid: Grid, block: int, scale: Scale, weight: float) -> None:
    numel, tile = out.numel(), _Tile.of(block, out.numel(), 8 // grid.bits)
    _run(
        programs.add_blocks, tile.programs(numel) * tile.pieces, payload, out, numel, -(-numel * grid.bits // 8),
        tile.block, tile.pieces, weight, **_form(grid), SCALE=scale, NBYTES=_NBYTES[scale], **tile.shape,
    )  # fmt: skip


def encode_floats(x: Tensor, payload: Tensor, form: Float) -> bool:
    worst = _worst(x)
    _flat(programs.encode_floats, x.numel(), x, payload, worst, x.numel(), FORM=form, NBYTES=_NBYTES[form])
    return int(worst) < _INFINITE


def add_floats(payload: Tensor, out: Tensor, form: Float, weight: float) -> None:
    _flat(programs.add_floats, out.numel(), payload, out, out.numel(), weight, FORM=form, NBYTES=_NBYTES[form])


def encode_signs(x: Tensor, payload: Tensor, block: int, norm: Norm) -> bool:
    worst, numel = _worst(x), x.numel()
    _flat(programs.encode_signs, numel, x, payload, worst, numel)
    block = min(block, max(1, numel))
    blocks = -(-numel // block)
    # divide by tensors, because for a number torch multiplies by its reciprocal on CUDA
    means = _sums(x, block, norm) / _sizes(x, block)
    scales = (means if norm == "mean" else means.sqrt()).float()
    payload[len(payload) - 4 * blocks :] = scales.view(torch.uint8)
    return int(worst) < _INFINITE


def _sums(x: Tensor, block: int, norm: Norm) -> Tensor:
    """Sums of each block's |x| or x², in fp64, in the order of `Kernels.encode_signs`."""
    blocks, sums = -(-x.numel() // block), x
    term: Norm | Literal["sum"] = norm
    while blocks and (sums is x or block > 1):
        tile = _Tile.of(block, sums.numel(), 1, RUN)
        parts = torch.empty(blocks * tile.pieces, dtype=torch.float64, device=x.device)
        _run(
            programs.sums, tile.programs(sums.numel()) * tile.pieces, sums, parts, sums.numel(), block, tile.pieces, blocks,
            TERM=term, HALVINGS=tile.cols.bit_length() - 1, **tile.shape,
        )  # fmt: skip
        sums, block, term = parts, tile.pieces, "sum"
    return sums


def _sizes(x: Tensor, block: int) -> Tensor:
    sizes = torch.full((-(-x.numel() // block),), block, dtype=torch.float64, device=x.device)
    sizes[-1:] -= -x.numel() % block
    return sizes


def add_signs(payload: Tensor, out: Tensor, block: int, weight: float) -> None:
    numel, tile = out.numel(), _Tile.of(block, out.numel(), 1)
    _run(
        programs.add_signs, tile.programs(numel) * tile.pieces, payload, out, numel, -(-numel // 8), tile.block,
        tile.pieces, weight, **tile.shape,
    )  # fmt: skip


def pack(numbers: Tensor, packed: Tensor, width: int) -> None:
    _flat(programs.pack, packed.numel(), numbers, packed, numbers.numel(), packed.numel(), WIDTH=width)


def unpack(packed: Tensor, numbers: Tensor, width: int) -> None:
    _flat(programs.unpack, numbers.numel(), packed, numbers, numbers.numel(), WIDTH=width)


def select_largest(x: Tensor, chunk: int, count: int, index: Tensor) -> bool:
    if not bool(torch.isfinite(x).all()):
        return False
    whole = x.numel() // chunk * chunk
    body = _largest(x[:whole].view(-1, chunk), count)
    index[: len(body)] = body
    index[len(body) :] = _largest(x[None, whole:], len(index) - len(body))
    return True


def _largest(rows: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest magnitudes of each row, ascending: all above the least of them, and the first that equal it. This
    reads `rows` a few times; the reference sorts them."""
    if not rows.numel() or not count:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    sizes = rows.abs()
    least = sizes.topk(count, 1, sorted=False).values.amin(1, keepdim=True)
    above, equal = sizes > least, sizes == least
    room = count - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1]


def nesterov(
    anchor: Tensor, delta: Tensor, momentum: Tensor, lr: float, mu: float, out_anchor: Tensor, out_momentum: Tensor
) -> bool:
    worst, numel = _worst(anchor), anchor.numel()
    _flat(programs.nesterov, numel, anchor, delta, momentum, out_anchor, out_momentum, worst, lr, mu, numel)
    return int(worst) < _INFINITE


# ---- launches


class _Tile(NamedTuple):
    """A tile: `cols` elements of each of `rows` blocks, both powers of two."""

    block: int
    rows: int
    cols: int

    @classmethod
    def of(cls, block: int, numel: int, share: int, size: int = _TILE) -> _Tile:
        """The tile for blocks of whole bytes, of `share` elements each; at most as long as the data."""
        block = min(block, -(-max(1, numel) // share) * share)
        cols = min(size, max(share, 1 << (block - 1).bit_length()))
        return cls(block, size // cols, cols)

    @property
    def shape(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLS": self.cols}

    @property
    def pieces(self) -> int:
        """Number of tiles that cover a block."""
        return -(-self.block // self.cols)

    def programs(self, numel: int) -> int:
        """Number of programs that work on `rows` blocks each."""
        return -(-numel // (self.block * self.rows))


def _flat(kernel: Any, elements: int, *arguments: Any, **constants: Any) -> None:
    """Without blocks."""
    _run(kernel, -(-elements // _TILE), *arguments, **constants, TILE=_TILE)


def _run(kernel: Any, programs: int, first: Tensor, *rest: Any, **constants: Any) -> None:
    """Launch on the tensors' device, whatever the thread's current device is."""
    if programs:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            kernel[(programs,)](first, *rest, **constants, **OPTIONS)


def _worst(x: Tensor) -> Tensor:
    """The tensor to which a kernel writes the largest magnitude's bits if a value is not finite."""
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def _form(grid: Grid) -> dict[str, Any]:
    step = grid.normal / (1 << grid.mantissa)
    return {"BITS": grid.bits, "MANTISSA": grid.mantissa, "NORMAL": _bits(grid.normal), "STEP": step}


def _bits(value: float) -> int:
    """The bits of an fp32 number."""
    return int(torch.tensor(value).view(torch.int32))
