"""Input for codecs: Gaussians, heavy tails, single outliers, zeros, denormals, huge values, odd sizes. Encodes and decodes a packet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.rng import Key

HUGE = 3.4028234663852886e38  # largest finite fp32
SIZES = [0, 1, 2, 3, 31, 127, 128, 129, 1000, 65_535, 65_536, 65_537, 131_099]
_draw = torch.Generator().manual_seed(0)


def gaussian(n: int) -> Tensor:
    return torch.randn(n, generator=_draw)


def heavy(n: int) -> Tensor:
    """Draws of Student's t with one degree of freedom: some values are millions of times the median."""
    return gaussian(n) / gaussian(n).abs().clamp_min(1e-6)


NORMAL: dict[str, Callable[[int], Tensor]] = {
    "gaussian": gaussian,
    "small gaussian": lambda n: gaussian(n) * 1e-2,
    "all negative": lambda n: -gaussian(n).abs() - 1.0,
    "heavy tails": heavy,
    "one outlier": lambda n: torch.cat([gaussian(n - 1), torch.tensor([-6e4])])[:n] if n else gaussian(0),
    "powers of two": lambda n: torch.ldexp(gaussian(n).sign(), (torch.arange(n) % 9 - 4).int()),
    "constant": lambda n: torch.full((n,), 0.3),
    "ramp": lambda n: torch.linspace(-1, 1, n),
}
EXTREME: dict[str, Callable[[int], Tensor]] = {
    "zeros": torch.zeros,
    "minus zeros": lambda n: -torch.zeros(n),
    "denormals": lambda n: gaussian(n) * 1e-40,
    "least": lambda n: torch.full((n,), 1.4e-45),
    "huge": lambda n: gaussian(n).clamp(-1, 1) * HUGE,
    "largest": lambda n: torch.full((n,), -HUGE),
    "zeros but one": lambda n: torch.nn.functional.pad(torch.tensor([1e-30]), (0, n - 1)) if n else torch.zeros(0),
    "all magnitudes": lambda n: torch.ldexp(gaussian(n), (torch.arange(n) % 250 - 135).int()),
}


def draw(data: str, n: int) -> Tensor:
    x = (NORMAL | EXTREME)[data](n)
    assert x.shape == (n,) and torch.isfinite(x).all()
    return x


def roundtrip(codec: Codec, x: Tensor, key: Key = Key()) -> Tensor:
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, payload, key)
    out = torch.zeros_like(x)
    codec.decode_add(payload, out, key)
    return out


def encoded(codec: Codec, x: Tensor, key: Key = Key()) -> bytes:
    payload = torch.full((codec.nbytes(x.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(x, payload, key)
    return bytes(payload.numpy().tobytes())
