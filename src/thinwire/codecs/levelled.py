"""A codec in several finenesses, of which the sender takes one for each round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from thinwire.codecs.base import VALUES, Codec, Part, Symbols, chance, check_fit, check_inner
from thinwire.errors import ConfigurationError, PacketError
from thinwire.rng import Key


@dataclass(frozen=True)
class Levelled(Codec):
    """Encode in one of `codecs`, the finest that arrives in time: a round that would land late travels at a coarser level.

    The sender chooses, for each round by itself: the finest whose bytes arrive before the round is to land (τ inner steps after its
    departure), by what the rounds before have taken (runtime/deadlines.py). Where there is no deadline (τ = 0, the end of a run,
    replicas that come and go) or nothing is known yet (the first round), that is the first codec. So what a run sends depends on its link, and a
    run that is done again is another one. The level stands in the packet, so all
    replicas decode alike. What a coarser level loses is the strategy's `Feedback` to keep, without which it is lost.

    Source: the controller of CacheGen (Liu et al., arXiv 2310.07240, §6). *Differs*: for deltas, with feedback in place of recomputing; by
    what was observed, never by what a trace will be.

    On the wire: a byte with the level's number, then that codec's payload. The size depends on the level: `nbytes` is the largest.

    Args:
        codecs: from the finest to the coarsest, two or more; each makes fewer bytes than the one before.
        level: the number of the one that encodes, from 0; the replica sets it.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import E3M0, Int, Sign
    >>> codec = Levelled((Int(8), E3M0(), Sign(block=512)))
    >>> codec.nbytes(4096), codec.within(0.6, 4096).level, codec.within(0.0, 4096).level
    (4129, 1, 2)
    """

    codecs: tuple[Codec, ...]
    level: int = field(default=0, repr=False, compare=False)  # filled in; to whom it is sent, all levels are one codec

    varies: ClassVar[bool] = True
    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.codecs, tuple) or not 2 <= len(self.codecs) <= 256:
            raise ConfigurationError(
                f"Levelled(codecs={self.codecs!r}): from 2 to 256 codecs are needed, such as (Int(8), E3M0(), Sign(block=512))."
            )
        for codec in self.codecs:
            check_inner(self, "codecs", codec)
        sizes = [codec.nbytes(1 << 20) for codec in self.codecs]
        if sorted(set(sizes), reverse=True) != sizes or not 0 <= self.level < len(sizes):
            raise ConfigurationError(
                f"{self}: {sizes} bytes for {1 << 20:,} values; from the finest to the coarsest each level must have fewer."
            )

    @property
    def claims(self) -> frozenset[str]:
        every = frozenset.intersection(VALUES, *(codec.claims for codec in self.codecs))
        return every | {"refuses"} | chance([self.codecs[self.level]])

    @property
    def grain(self) -> int | None:
        grains = [codec.grain for codec in self.codecs]
        return None if None in grains else math.lcm(*(grain or 1 for grain in grains))

    def within(self, share: float, numel: int) -> Levelled:
        most = share * self.nbytes(numel)
        fits = (level for level, codec in enumerate(self.codecs) if 1 + codec.nbytes(numel) <= most)
        return replace(self, level=next(fits, len(self.codecs) - 1))

    def nbytes(self, numel: int) -> int:
        return 1 + max(codec.nbytes(numel) for codec in self.codecs) if numel else 0

    def layout(self, numel: int) -> tuple[Part, ...]:
        return (Symbols(1 + self.codecs[self.level].nbytes(numel) if numel else 0),)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> int:
        check_fit(self, x, payload)
        if not x.numel():
            return 0
        codec = self.codecs[self.level]
        used = 1 + codec.nbytes(x.numel())
        codec.encode(x, payload[1:used], key)
        payload[0], payload[used:] = self.level, 0
        return used

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload, shorter=True)
        if not out.numel():
            return
        level = int(payload[0]) if len(payload) else len(self.codecs)
        used = 1 + self.codecs[level].nbytes(out.numel()) if level < len(self.codecs) else math.inf
        if used > len(payload):
            raise PacketError(
                f"a coded payload of {len(payload)} bytes is of level {level}: there are {len(self.codecs)} levels, each of a known size. "
                "Run the same strategy and version of Thinwire on every replica."
            )
        self.codecs[level].decode_add(payload[1 : int(used)], out, key, weight)
