"""A codec with several levels of precision, of which the sender chooses one for each round."""

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
    """Encode in the finest of `codecs` that arrives in time: a round that would land late is sent at a coarser level.

    Each sender chooses for each round: the finest level whose bytes arrive before the round must land (τ inner steps after its
    departure), predicted from the times of earlier rounds (runtime/deadlines.py). Without a deadline (τ = 0, the end of a run, elastic
    runs) and in the first round it takes the first codec. So the bytes of a run depend on its link, and a repeated run may differ.
    The packet contains the level, so all replicas decode alike. The strategy's `Feedback` keeps what a coarser level loses.

    Source: the controller of CacheGen (Liu et al., arXiv 2310.07240, §6). *Differs*: it is for deltas, with feedback instead of recomputing;
    it uses observed times only, no known trace.

    On the wire: a byte with the level's number, then that codec's payload. The size depends on the level; `nbytes` is the largest.

    Args:
        codecs: from the finest to the coarsest, two or more; each makes fewer bytes than the one before.
        level: the number of the codec that encodes, from 0; the replica sets it.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import E3M0, Int, Sign
    >>> codec = Levelled((Int(8), E3M0(), Sign(block=512)))
    >>> codec.nbytes(4096), codec.within(0.6, 4096).level, codec.within(0.0, 4096).level
    (4129, 1, 2)
    """

    codecs: tuple[Codec, ...]
    level: int = field(
        default=0, repr=False, compare=False
    )  # set by the replica; all levels are the same codec to receivers

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
