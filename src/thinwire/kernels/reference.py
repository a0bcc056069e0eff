"""`Kernels` in plain torch, on any device and for any strides. The other kernels must agree with it bit for bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.kernels import Float, Grid, Norm, Scale
from thinwire.rng import draw

_CHUNK = 1 << 16  # elements that are processed at a time, so that intermediates stay in the cache
_SCALES = {"exponent": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RUN = 4096  # elements that are summed before their sums are summed


# ---- formats with a scale per block


def encode_blocks(x: Tensor, payload: Tensor, grid: Grid, block: int, scale: Scale, stream: int | None) -> bool:
    count = -(-x.numel() * grid.bits // 8)
    scales = torch.empty(-(-x.numel() // block), dtype=_SCALES[scale], device=x.device)
    for begin, end in ranges(x.numel(), block):
        blocks = _padded(x[begin:end], block)
        kept = scales[begin // block :][: len(blocks)]
        kept.copy_(_scales(blocks.abs().amax(dim=1), grid, scale))
        codes = _codes(blocks / _factors(kept)[:, None], grid, stream, begin)
        packed = packed_bits(codes.view(-1)[: end - begin], grid.bits)
        payload[begin * grid.bits // 8 :][: len(packed)] = packed
    payload[count:] = scales.view(torch.uint8)
    return all_finite(x)


def add_blocks(payload: Tensor, out: Tensor, grid: Grid, block: int, scale: Scale, weight: float) -> None:
    count = -(-out.numel() * grid.bits // 8)
    factors = _factors(payload[count:].clone().view(_SCALES[scale])) * weight
    values = grid.values.to(out.device)
    for begin, end in ranges(out.numel(), block):
        codes = unpacked_bits(payload[begin * grid.bits // 8 : -(-end * grid.bits // 8)], end - begin, grid.bits)
        blocks = _padded(values[codes], block)
        factor = factors[begin // block :][: len(blocks)]
        out[begin:end].add_((blocks * factor[:, None]).view(-1)[: end - begin])


def _codes(scaled: Tensor, grid: Grid, stream: int | None, begin: int) -> Tensor:
    """Round to the grid: to the nearest, ties to the even code, or with a `stream` to a random one of the two neighbours. Int32.

    Above the least normal number a code consists of fp32's upper bits after rounding.
    """
    signed, dropped = scaled.view(torch.int32), 23 - grid.mantissa
    bits = signed & 0x7FFFFFFF
    normal = int(torch.tensor(grid.normal).view(torch.int32))
    low = bits.view(torch.float32) * ((1 << grid.mantissa) / grid.normal)
    if stream is None:
        low.round_()
        high = (bits >> dropped).bitwise_and_(1).add_(bits).add_((1 << (dropped - 1)) - 1)
    else:
        words = draw(stream, begin // 2, scaled.numel() // 2 + 1).view(torch.int32)[begin % 2 :][: scaled.numel()]
        noise = words.to(scaled.device).bitwise_and(0xFFFFFF).view(scaled.shape)
        low = low.floor().add_(low.frac() > noise * 2.0**-24)
        high = bits + noise.bitwise_and_((1 << dropped) - 1)
    high.bitwise_right_shift_(dropped).sub_((normal >> dropped) - (1 << grid.mantissa))
    code = torch.where(bits < normal, low.int(), high).clamp_(max=grid.top)
    return code.bitwise_or_((signed < 0).logical_and_(code > 0).int().mul_(1 << (grid.bits - 1)))


def _scales(most: Tensor, grid: Grid, scale: Scale) -> Tensor:
    """The scale for each block's max|x|, such that the scale and the largest value are normal fp32 numbers."""
    if scale == "exponent":
        # max|x| = mantissa · 2^exponent with mantissa in [½, 1): no logarithm, no rounding
        part, binade = math.frexp(grid.largest)
        mantissa, exponent = torch.frexp(most)
        fits = (mantissa >= 0.5) & (mantissa <= part)
        return (exponent - fits.int() - (binade - 1)).clamp_(-126, grid.highest)
    factor = (most / grid.largest).clamp_(2.0**-126, 2.0**grid.highest)
    if scale == "bf16":
        factor = (factor.view(torch.int32) + 0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)
    return factor


def _factors(scales: Tensor) -> Tensor:
    """The factors of the blocks' codes, in fp32."""
    if scales.dtype != torch.int8:
        return scales.float()
    return scales.int().add_(127).bitwise_left_shift_(23).view(torch.float32)


def ranges(numel: int, block: int) -> list[tuple[int, int]]:
    """Ranges of whole blocks, and so of whole bytes (the last may be cut)."""
    step = max(1, _CHUNK // block) * block
    return [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]


def _padded(x: Tensor, block: int) -> Tensor:
    """`x` as [blocks, block], filled up with zeros; [1, x.numel()] if it is less than a block."""
    block = min(block, x.numel())
    missing = -x.numel() % block
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).reshape(-1, block)


# ---- floats


def encode_floats(x: Tensor, payload: Tensor, form: Float) -> bool:
    dtype = _FLOATS[form]
    limit = torch.finfo(dtype).max
    payload.copy_(x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    return all_finite(x)


def add_floats(payload: Tensor, out: Tensor, form: Float, weight: float) -> None:
    out.add_(payload.clone().view(_FLOATS[form]).float() * weight)


# ---- signs


def encode_signs(x: Tensor, payload: Tensor, block: int, norm: Norm) -> bool:
    count = -(-x.numel() // 8)
    payload[:count] = packed_bits(x < 0, 1)
    sizes = x.double().abs() if norm == "mean" else x.double().square()
    whole = x.numel() // block * block
    means = torch.cat(
        [_sums(sizes[:whole].view(-1, block)) / block, _sums(sizes[None, whole:]) / max(1, x.numel() - whole)]
    )
    means = means[: -(-x.numel() // block)]
    payload[count:] = (means if norm == "mean" else means.sqrt()).float().view(torch.uint8)
    return all_finite(x)


def add_signs(payload: Tensor, out: Tensor, block: int, weight: float) -> None:
    count = -(-out.numel() // 8)
    signs = unpacked_bits(payload[:count], out.numel(), 1) * -2.0 + 1
    scales = payload[count:].clone().view(torch.float32) * weight
    out.add_(signs * scales.repeat_interleave(block)[: out.numel()])


def _sums(rows: Tensor) -> Tensor:
    """The sum of each row, in the order of `Kernels.encode_signs`."""
    while rows.shape[1] > 1:
        half = min(RUN, 1 << max(0, rows.shape[1] - 1).bit_length())
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % half)).unfold(1, half, half)
        while half > 1:
            half //= 2
            rows = rows[..., :half] + rows[..., half:]
        rows = rows[..., 0]
    return rows.sum(1)


# ---- integers, and selection


def pack(numbers: Tensor, packed: Tensor, width: int) -> None:
    packed.copy_(packed_bits(numbers, width))


def unpack(packed: Tensor, numbers: Tensor, width: int) -> None:
    numbers.copy_(unpacked_bits(packed, numbers.numel(), width))


def pack_ascending(index: Tensor, packed: Tensor, low: int) -> None:
    begin = -(-len(index) * low // 8)
    packed[:begin] = packed_bits(index & ((1 << low) - 1), low)
    bits = torch.zeros(8 * (len(packed) - begin), dtype=torch.int64, device=packed.device)
    bits[(index >> low) + torch.arange(len(index), device=index.device)] = 1
    packed[begin:] = packed_bits(bits, 1)


def unpack_ascending(packed: Tensor, index: Tensor, low: int, numel: int) -> bool:
    begin = -(-len(index) * low // 8)
    found = unpacked_bits(packed[begin:], 8 * (len(packed) - begin), 1).nonzero().view(-1)
    if len(found) != len(index):
        return False
    index.copy_(found - torch.arange(len(found), device=found.device) << low)
    index |= unpacked_bits(packed[:begin], len(index), low)
    return not len(index) or (int(index[-1]) < numel and bool((index[1:] > index[:-1]).all()))


def select_largest(x: Tensor, chunk: int, count: int, index: Tensor) -> bool:
    whole = x.numel() // chunk * chunk
    body = _largest(x[:whole].reshape(-1, chunk), count)
    index[: len(body)] = body
    index[len(body) :] = _largest(x[None, whole:], len(index) - len(body))
    return all_finite(x)


def select_drawn(stream: int, numel: int, index: Tensor) -> None:
    index.copy_(draw(stream, 0, numel).topk(len(index), largest=False).indices.sort().values)


def add_at(index: Tensor, values: Tensor, out: Tensor, first: int = 0) -> None:
    out.index_add_(0, index - first, values)


def add_sent(values: Tensor, total: Tensor, counted: Tensor, weight: float) -> None:
    counted.add_((values != 0).float().mul_(weight))
    total.add_(values.mul_(weight))
    values.zero_()


def divide_sent(total: Tensor, counted: Tensor) -> None:
    total.div_(counted.masked_fill(counted == 0, 1.0))


def mean_sent(index: Tensor, values: Tensor, weights: Tensor, out: Tensor) -> None:
    out.zero_()
    counted = torch.zeros_like(out)
    parts = zip(index.view(len(weights), -1), values.view(len(weights), -1), weights)
    for places, some, weight in parts:
        out.index_add_(0, places, some * weight)
        counted.index_add_(0, places, (some != 0).float().mul_(weight))
    divide_sent(out, counted)


def _largest(rows: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest magnitudes of each row, ascending."""
    return rows.abs().sort(descending=True, stable=True).indices[:, :count].sort().values.reshape(-1)


def packed_bits(numbers: Tensor, width: int) -> Tensor:
    """Flat integers below 2^width as bytes; the rest of the last byte is zero."""
    if not width or 8 % width:  # such as 12: bit by bit
        numbers = (numbers[:, None] >> torch.arange(width, device=numbers.device)).bitwise_and_(1).view(-1)
        width = 1
    share = 8 // width
    missing = -numbers.numel() % share
    columns = (torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers).to(torch.uint8).view(-1, share)
    packed = columns[:, 0].clone()
    for place in range(1, share):
        packed |= columns[:, place] << (width * place)
    return packed


def unpacked_bits(packed: Tensor, count: int, width: int) -> Tensor:
    """The first `count` numbers in `packed`, as int64."""
    if not width or 8 % width:
        bits = unpacked_bits(packed, count * width, 1).view(count, width)
        return (bits << torch.arange(width, device=packed.device)).sum(dim=1)
    places = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places).bitwise_and_((1 << width) - 1).view(-1)[:count].long()


# ---- the outer step


def nesterov(
    anchor: Tensor, delta: Tensor, momentum: Tensor, lr: float, mu: float, out_anchor: Tensor, out_momentum: Tensor
) -> bool:
    velocity = (momentum * mu).add_(delta)
    moved = anchor - (velocity * mu).add_(delta).mul_(lr)
    out_momentum.copy_(velocity)
    out_anchor.copy_(moved)
    return all_finite(moved)


def carry(x: Tensor, before: Tensor, change: Tensor, after: Tensor) -> None:
    x.add_(after - (before - change))


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
