"""Random streams by name: every draw in a run is a pure function of the run's seed and of what it is for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

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
    """Names one packet, and so the random streams of its encoding: the run's seed, fragment, round and sender.

    `own(purpose)` is a stream of this sender, `shared(purpose)` one that all senders of the round have alike. Where a
    round codes several vectors, each by itself, `part` tells them apart.

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


def draw(stream: int, begin: int, count: int) -> Tensor:
    """The draws `begin` … `begin + count` of a stream: 64 random bits each, as int64.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) by its counter: draw i is a bijection of stream + (i + 1)·φ, so draws
    of one stream are distinct, any range can be had by itself, and they are equal on every device.
    """
    z = torch.arange(begin + 1, begin + count + 1).mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(stream))
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shifted(z, 31))


def _signed(word: int) -> int:
    """64 bits as Python's number for the int64 that holds them."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(z: Tensor, by: int) -> Tensor:
    """To the right, filling up with zeros (int64's own shift copies the sign)."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
