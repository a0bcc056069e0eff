"""A codec with several levels of precision, of which the sender chooses one for each round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from thinwire.codecs.base import VALUES, Codec, Pacer, chance, check_finite, check_fit, check_inner, check_whole
from thinwire.codecs.layout import Part, Symbols
from thinwire.errors import ConfigurationError, PacketError
from thinwire.rng import Key

MOST_LEVELS = 256  # that a byte can name
MOST_SKIPS = 255  # rounds in a row


@dataclass(frozen=True)
class Levelled(Codec):
    """Encode in the finest of `codecs` that arrives in time: a round that would land late is sent at a coarser level.

    Each sender chooses for each round: the finest level whose bytes arrive before the round must land (τ inner steps after its
    departure), predicted from the times of earlier rounds (lab/codecs/deadlines.py). Without a deadline (τ = 0, the end of a run, elastic
    runs) it takes the first codec, and the last one in the first round of a fragment. So the bytes of a run depend on its link, and a
    repeated run may differ. The packet contains the level, so all replicas decode alike. The strategy's `Feedback` keeps what a
    coarser level loses.

    *Skip and carry*: with `skips` above 0, a round for which even the coarsest codec is too large sends no values. They count
    as zero in the mean over all M replicas, and its feedback keeps the whole delta:

        estimate = 1/M · Σ_(m that sent) c_m,     e_m ← e_m + Δ_m − c_m,     c_m = 0 if m skipped

    So every delta arrives later in full with the weight 1/M. A mean over the senders alone would give theirs a larger weight.

    After `skips` such rounds in a row, a fragment's next round is sent at the coarsest level, however late, which also probes the link.

    *Source*: the controller of CacheGen (Liu et al., arXiv 2310.07240, §6). *Differs*: it is for deltas, with feedback instead of recomputing;
    it uses observed times only, no known trace; it may skip a round.

    *Wire*: a byte with the level's number, then that codec's payload; that byte alone for a skipped round. The size depends on the level;
    `nbytes` is the largest.

    Args:
        codecs: from the finest to the coarsest, two or more; each makes fewer bytes than the one before.
        level: the number of the codec that encodes, from 0; the replica sets it. The number of codecs: the round is skipped.
        skips: the most rounds of a fragment in a row that may be skipped, 0 to 255; 0: none is.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import E3M0, Int, Sign
    >>> codec = Levelled((Int(8), E3M0(), Sign(block=512)))
    >>> codec.nbytes(4096), codec.within(0.6, 4096).level, codec.within(0.0, 4096).level
    (4129, 1, 2)
    >>> Levelled((Int(8), Sign(block=512)), skips=1).within(0.0, 4096).layout(4096)  # skipped
    (Symbols(nbytes=1, stride=1),)
    """

    codecs: tuple[Codec, ...]
    # set by the replica; all levels are the same codec to receivers
    level: int = field(default=0, repr=False, compare=False)
    skips: int = 0

    varies: ClassVar[bool] = True
    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole(self)
        if not isinstance(self.codecs, tuple) or not 2 <= len(self.codecs) <= MOST_LEVELS:
            raise ConfigurationError(
                f"Levelled(codecs={self.codecs!r}): from 2 to {MOST_LEVELS} codecs are needed, such as (Int(8), E3M0(), Sign(block=512))."
            )
        for codec in self.codecs:
            check_inner(self, "codecs", codec)
        sizes = [codec.nbytes(1 << 20) for codec in self.codecs]
        if not 0 <= self.skips <= MOST_SKIPS:
            raise ConfigurationError(
                f"Levelled(skips={self.skips!r}): a whole number from 0 to {MOST_SKIPS} is needed, such as 2."
            )
        if self.skips and len(sizes) == MOST_LEVELS:
            raise ConfigurationError(
                f"Levelled of {len(sizes)} codecs with skips={self.skips}: one fewer is needed; a byte names the level."
            )
        if sorted(set(sizes), reverse=True) != sizes or not 0 <= self.level < len(sizes) + (self.skips > 0):
            raise ConfigurationError(
                f"{self}: {sizes} bytes for {1 << 20:,} values; from the finest to the coarsest each level must have fewer."
            )

    @property
    def claims(self) -> frozenset[str]:
        every = frozenset.intersection(VALUES, *(codec.claims for codec in self.codecs))
        if self.skips:
            every -= {"exact"}
        return every | {"refuses"} | chance(self.codecs[self.level : self.level + 1], fair=not self.skips)

    @property
    def grain(self) -> int | None:
        grains = [codec.grain for codec in self.codecs]
        return None if None in grains else math.lcm(*(grain or 1 for grain in grains))

    def pacer(self) -> Pacer:
        from thinwire.lab.codecs.pacer import DeadlinePacer

        return DeadlinePacer()

    def within(self, share: float, numel: int, skipped: int = 0) -> Levelled:
        most, coarsest = share * self.nbytes(numel), len(self.codecs) - (skipped >= self.skips)
        fits = (level for level, codec in enumerate(self.codecs) if 1 + codec.nbytes(numel) <= most)
        return replace(self, level=next(fits, coarsest))

    def nbytes(self, numel: int) -> int:
        return 1 + max(codec.nbytes(numel) for codec in self.codecs) if numel else 0

    def layout(self, numel: int) -> tuple[Part, ...]:
        return (Symbols(1 + self._inner_nbytes(self.level, numel) if numel else 0),)

    def _inner_nbytes(self, level: int, numel: int) -> int:
        return self.codecs[level].nbytes(numel) if level < len(self.codecs) else 0

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> int:
        check_fit(self, x, payload)
        if not x.numel():
            return 0
        used = 1 + self._inner_nbytes(self.level, x.numel())
        if self.level < len(self.codecs):
            self.codecs[self.level].encode(x, payload[1:used], key)
        else:
            check_finite(x)
        payload[0], payload[used:] = self.level, 0
        return used

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload, shorter=True)
        if not out.numel():
            return
        levels = len(self.codecs) + (self.skips > 0)
        level = int(payload[0]) if len(payload) else levels
        used = 1 + self._inner_nbytes(level, out.numel()) if level < levels else math.inf
        if used > len(payload):
            raise PacketError(
                f"a coded payload of {len(payload)} bytes is of level {level}: there are {levels} levels, each of a known size. "
                "Run the same strategy and version of Thinwire on every replica."
            )
        if level < len(self.codecs):
            self.codecs[level].decode_add(payload[1 : int(used)], out, key, weight)
