"""Random streams by name: every draw in a run is a pure function of the run's seed and of its purpose."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor


def derive(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for `purpose` (a word) at `indices` (replica, round, ...), independent of every other.

    BLAKE2b of the text `seed/purpose/i/j/...`: the same on every machine and in every version of Python.

    >>> derive(0, "data", 1) == derive(0, "data", 1)
    True
    >>> derive(0, "data", 1) == derive(0, "data", 2)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Key:
    """Names one packet, and so the random streams of its encoding.

    `own(purpose)` is a stream of this sender, `shared(purpose)` one that all senders of the round have alike.

    Args:
        seed: of the run; an integer number.
        fragment, round: number of the fragment and of its round.
        sender: number of the replica that encodes, 0 to M − 1.
        part: number that tells several vectors of a round apart, where each is coded by itself.

    >>> Key(seed=1, sender=0).shared("which") == Key(seed=1, sender=5).shared("which")
    True
    """

    seed: int = 0
    fragment: int = 0
    round: int = 0
    sender: int = 0
    part: int = 0

    def own(self, purpose: str) -> int:
        return derive(self.seed, purpose, self.fragment, self.round, self.sender, *self._part)

    def shared(self, purpose: str) -> int:
        return derive(self.seed, purpose, self.fragment, self.round, *self._part)

    @property
    def _part(self) -> tuple[int, ...]:
        return (-self.part,) if self.part else ()  # no sender is negative: never the stream of another key


def draw(stream: int, begin: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The draws `begin` … `begin + count` of a stream: 64 random bits each, as int64.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) by its counter: draw i is a bijection of stream + (i + 1)·φ, so draws
    of one stream are distinct, any range can be had by itself, and they are equal on every device.
    """
    z = (
        torch.arange(begin + 1, begin + count + 1, device=device)
        .mul_(_signed(0x9E3779B97F4A7C15))
        .add_(_signed(stream))
    )
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shifted(z, 31))


def normals(stream: int, begin: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The standard normals `begin` … `begin + count` of a stream, fp32, the same bits on every device.

    16 bits of a draw choose among 65,536 quantiles of equal weight, so nothing is computed that devices could round in
    their own ways: mean 0 and variance 1 to 1e-6, |z| < 4.33, kurtosis 2.999.

    >>> torch.equal(normals(7, 0, 100)[37:41], normals(7, 37, 4))
    True
    """
    first = begin // 4
    words = draw(stream, first, -(-(begin + count) // 4) - first, device)
    index = words.view(torch.int16)[begin - 4 * first :][:count].to(torch.int32).add_(1 << 15)
    return quantiles(str(device)).index_select(0, index)


@lru_cache(maxsize=8)
def quantiles(device: str = "cpu") -> Tensor:
    """65,536 quantiles of the standard normal with equal weights, scaled to variance 1, in multiples of 2⁻¹⁸, which is far coarser than the
    differences between mathematical libraries.
    """
    half = [NormalDist().inv_cdf((2 * i + 1) / (1 << 17)) for i in range(1 << 15, 1 << 16)]
    scale = (sum(x * x for x in half) / len(half)) ** -0.5
    above = torch.tensor([round(x * scale * (1 << 18)) / (1 << 18) for x in half], dtype=torch.float32)
    return torch.cat([-above.flip(0), above]).to(device)


def _signed(word: int) -> int:
    """64 bits as Python's number for the int64 that holds them."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Shift to the right with zeros (int64's shift copies the sign)."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
