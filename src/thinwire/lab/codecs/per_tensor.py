"""One codec for each tensor, instead of one for a whole fragment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import (
    VALUES,
    Codec,
    Shapes,
    chance,
    check_alone,
    check_finite,
    check_fit,
    check_inner,
    check_whole,
)
from thinwire.codecs.cast import Identity
from thinwire.codecs.layout import Part
from thinwire.codecs.shapes import as_tuples, split
from thinwire.errors import ConfigurationError
from thinwire.rng import Key


@dataclass(frozen=True)
class Each(Codec):
    """Encode every matrix separately in `codec`, or in its own codec of `chosen`. Encode vectors, and matrices of fewer than `least`
    elements, together in `rest`.

        q(x) = (q₁(M₁), …, q_n(M_n), q_rest(v))      M: the matrices of the fragment x, v: all the rest of it

    So TopK keeps its share of every matrix, and Sign has one scale per matrix. The codec may need shapes (LowRank); it is fitted to
    each matrix. Each matrix has its own random numbers. Contractive if all its codecs are.

    *Source*: compression tensor by tensor as in DGC (Lin et al., arXiv 1712.01887), PowerSGD (arXiv 1905.13727) and CGX (arXiv 2111.08617),
    which send biases and norms dense. *Differs*: `rest` may be any codec; `least` is 0 by default, where CGX's code has 1,024.

    *Wire*: the bytes of one matrix after another, then those of the rest. A replica sets `shapes` to those of the fragment's tensors;
    without them all is rest.

    Args:
        codec: for every matrix.
        rest: the codec for vectors and small matrices, together.
        least: elements below which a matrix is small.
        shapes: those of the fragment's tensors; the replica sets them.
        chosen: a codec for each matrix; a policy sets them.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import TopK
    >>> Each(TopK(0.01), least=1024).fitted(((64, 64), (64,), (8, 8))).nbytes(64 * 64 + 64 + 8 * 8) - 4 * (64 + 8 * 8)
    126
    """

    codec: Codec
    rest: Codec = Identity()
    least: int = 0
    shapes: Shapes = ()
    chosen: tuple[Codec, ...] = ()

    needs_shapes: ClassVar[bool] = True
    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_whole(self)
        for codec in (self.codec, *self.chosen):
            if not isinstance(codec, Codec) or isinstance(codec, type | Each):
                raise ConfigurationError(
                    f"Each(codec={codec!r}): a codec for one matrix is needed, such as TopK(0.01)."
                )
            if codec.varies:
                raise ConfigurationError(
                    f"Each(codec={codec!r}): its size would have to be known here; make it the outermost codec."
                )
            check_alone(f"Each(codec={codec!r})", codec)
        check_inner(self, "rest", self.rest)
        if self.least < 0:
            raise ConfigurationError(f"Each(least={self.least}): 0 or more elements are needed.")
        object.__setattr__(self, "shapes", as_tuples(self.shapes))
        if self.chosen and len(self.chosen) != len(self.matrices):
            raise ConfigurationError(
                f"Each with {len(self.chosen)} chosen codecs for {len(self.matrices)} matrices: one for each is needed, or none."
            )

    @property
    def claims(self) -> frozenset[str]:
        own = self.chosen or [self.codec] * len(self.matrices)
        used = [self.rest, *(codec.fitted((shape,)) for codec, shape in zip(own, self.matrices))]
        return frozenset.intersection(VALUES, *(codec.claims for codec in used)) | chance(used)

    @property
    def matrices(self) -> Shapes:
        """The shapes of the separately encoded matrices, as rows and columns."""
        parts, _ = self._parts(torch.empty(sum(map(math.prod, self.shapes)), device="meta"))
        return tuple((part.shape[0], part.shape[1]) for part in parts)

    def fitted(self, shapes: Shapes) -> Each:
        return self if as_tuples(shapes) == self.shapes else replace(self, shapes=shapes, chosen=())

    def nbytes(self, numel: int) -> int:
        return _nbytes(self, numel)

    def layout(self, numel: int) -> tuple[Part, ...]:
        coded = self._coded(torch.empty(numel, device="meta"))
        return tuple(one for codec, part in coded for one in codec.layout(part.numel()))

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        begin = 0
        for number, (codec, part) in enumerate(self._coded(x)):
            end = begin + codec.nbytes(part.numel())
            codec.encode(part, payload[begin:end], _keyed(key, number))
            begin = end

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        decoded, begin = [], 0
        # decode all before `out` changes, because one may raise
        for number, (codec, part) in enumerate(self._coded(out)):
            end = begin + codec.nbytes(part.numel())
            decoded.append(torch.zeros_like(part))
            codec.decode_add(payload[begin:end], decoded[-1], _keyed(key, number), weight)
            begin = end
        matrices, rest = self._parts(out)
        for matrix, values in zip(matrices, decoded):
            matrix.add_(values.view(matrix.shape))
        for vector, values in zip(rest, torch.split(decoded[-1], [vector.numel() for vector in rest])):
            vector.add_(values)

    def split(self, x: Tensor) -> list[Tensor]:
        """Views of flat `x`: the separately encoded matrices."""
        return self._parts(x)[0]

    def spans_of_rest(self, numel: int) -> tuple[tuple[int, int], ...]:
        _, rest = self._parts(torch.empty(numel, device="meta"))
        return tuple((int(part.storage_offset()), int(part.storage_offset()) + part.numel()) for part in rest)

    def _coded(self, x: Tensor) -> Iterator[tuple[Codec, Tensor]]:
        """Yield each matrix of `x`, flat, with its codec; then the rest with its codec."""
        matrices, rest = self._parts(x)
        for codec, matrix in zip(self.chosen or [self.codec] * len(matrices), matrices):
            yield codec.fitted((tuple(matrix.shape),)), matrix.reshape(-1)
        yield self.rest, torch.cat(rest)

    def _parts(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        matrices, rest = split(x, self.shapes)
        small = [matrix.view(-1) for matrix in matrices if matrix.numel() < self.least]
        return [matrix for matrix in matrices if matrix.numel() >= self.least], small + rest


@lru_cache(maxsize=4096)
def _nbytes(codec: Each, numel: int) -> int:
    return sum(one.nbytes(part.numel()) for one, part in codec._coded(torch.empty(numel, device="meta")))


def _keyed(key: Key, number: int) -> Key:
    """A key with separate streams for each part; part 0 has the packet's streams."""
    return replace(key, part=key.part + (number << 20))
