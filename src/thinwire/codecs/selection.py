"""Which values are the largest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MANY = 1 << 16  # elements; of fewer a sample saves nothing


def largest(x: Tensor, count: int) -> Tensor:
    """Where the `count` largest by magnitude are, along the last dimension, ascending; of equal ones the first.

    Of many values those are sorted out first that are above a threshold which a sample suggests, as Deep Gradient Compression
    does (arXiv 1712.01887, §3; its code takes every so-manieth, too). *Differs*: the threshold is set so low that enough of
    them are, and the largest of those are kept; so a sample changes the time that it takes and never the result. Where
    too few are (values with a period that the sample meets), all are looked at.
    """
    if x.ndim > 1 or x.numel() < _MANY or not 0 < count <= x.numel() // 4:
        return _largest(x, count)
    above = select_above(x, sampled_threshold(x, count))
    return above[_largest(x[above], count)] if len(above) >= count else _largest(x, count)


def sampled_threshold(x: Tensor, count: int) -> float:
    """A magnitude that `count` of `x` are above, and few more, almost surely: from every √count-th value.

    Of the `count` about h = √count are in the sample. Of the sample h + 4·√h, 4 standard deviations more, are above the threshold: in all
    20 % more than `count` where h = 400 (1 % of 16 million), and once in 30,000 times too few.
    """
    stride = math.isqrt(count) | 1  # odd, so that it meets every column of a matrix
    sample = x[stride // 2 :: stride].abs()
    hits = count / stride
    rank = math.ceil(hits + 4 * math.sqrt(hits)) + 1
    least = sample.topk(min(rank, sample.numel())).values.min()
    return torch.nextafter(least, torch.tensor(-1.0)).item()  # those of equal size are above it too


def select_above(x: Tensor, threshold: float) -> Tensor:
    """Where |x| > `threshold`, ascending. One pass."""
    return (x.abs() > threshold).nonzero().view(-1)


def _largest(x: Tensor, count: int) -> Tensor:
    magnitude = x.abs()
    if not count:
        return torch.empty(*x.shape[:-1], 0, dtype=torch.int64)
    least = magnitude.topk(count, sorted=False).values.amin(-1, keepdim=True)
    more, tied = magnitude > least, magnitude == least
    taken = more | (tied & (tied.cumsum(-1) <= count - more.sum(-1, keepdim=True)))
    return taken.nonzero()[:, -1].view(*x.shape[:-1], count)
