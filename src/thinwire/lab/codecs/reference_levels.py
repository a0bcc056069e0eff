"""Even levels in plain torch: the definition of `Levels`, its oracle, and its loops where numba is absent."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference import all_finite, packed_bits, ranges, unpacked_bits


def encode_levels(x: Tensor, payload: Tensor, bits: int, block: int) -> bool:
    ends, top = [torch.zeros(0, 2, device=x.device)], (1 << bits) - 1
    for begin, end in ranges(x.numel(), block):
        blocks = _extended(x[begin:end], block)
        least, largest = (most(1, keepdim=True).add(0.0) for most in (blocks.amin, blocks.amax))  # -0 becomes +0
        unit = (largest.double() - least) / top
        level = blocks.double().sub_(least).div_(unit.masked_fill_(unit == 0, torch.inf)).add_(0.5)
        codes = packed_bits(level.clamp_(max=top).nan_to_num_().long().view(-1)[: end - begin], bits)
        payload[begin * bits // 8 :][: len(codes)] = codes
        ends.append(torch.cat([least, largest], 1))
    payload[-(-x.numel() * bits // 8) :] = torch.cat(ends).view(-1).view(torch.uint8)
    return all_finite(x)


def add_levels(payload: Tensor, out: Tensor, bits: int, block: int, weight: float) -> None:
    ends = payload[-(-out.numel() * bits // 8) :].clone().view(torch.float32).view(-1, 2).double()
    top = (1 << bits) - 1
    share = torch.arange(top + 1, device=out.device) / torch.tensor(top, dtype=torch.float64, device=out.device)
    for begin, end in ranges(out.numel(), block):
        codes = unpacked_bits(payload[begin * bits // 8 : -(-end * bits // 8)], end - begin, bits)
        level = _extended(codes, block)
        least, largest = torch.split(ends[begin // block :][: len(level)], 1, 1)
        values = least * (1 - share) + largest * share  # of each level; exact at both ends
        out[begin:end].add_(values.float().mul_(weight).gather(1, level).view(-1)[: end - begin])


def _extended(x: Tensor, block: int) -> Tensor:
    """Flat `x` as [blocks, block], the last block filled up with its last value; [1, x.numel()] if it is less than a block."""
    block = min(block, x.numel())
    missing = -x.numel() % block
    return (torch.cat([x, x[-1:].expand(missing)]) if missing else x).view(-1, block)
