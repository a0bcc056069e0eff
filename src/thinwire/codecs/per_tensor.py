"""Each tensor by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Shapes, check_finite, check_fit, check_inner
from thinwire.codecs.cast import Identity
from thinwire.codecs.shapes import checked
from thinwire.errors import ConfigurationError
from thinwire.seeds import Key


@dataclass(frozen=True)
class PerTensor:
    """Each tensor of two or more dimensions and at least `least` values in `codec`, by itself; all the rest in `rest`.

    As Deep Gradient Compression (arXiv 1712.01887) and CGX have it: the largest are each tensor's own, and biases and norms, which
    are few and matter, travel in full. `shapes` are those of the fragment's tensors; a replica fills them in (without any, all
    is rest).

    On the wire: the tensors' payloads in their order, then that of the rest.

    >>> from thinwire.codecs import TopK
    >>> PerTensor(TopK(0.01), shapes=((100, 100), (100,))).nbytes(10_100) == TopK(0.01).nbytes(10_000) + 400
    True
    """

    codec: Codec
    rest: Codec = Identity()
    least: int = 1024
    shapes: Shapes = ()

    grain: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_inner(self, "codec", self.codec)
        check_inner(self, "rest", self.rest)
        if self.least < 0:
            raise ConfigurationError(f"PerTensor(least={self.least}): 0 or more is needed; 1024 is usual.")
        object.__setattr__(self, "shapes", checked(self.shapes))

    def fitted(self, shapes: Shapes) -> PerTensor:
        return replace(self, shapes=shapes)

    def in_full(self, numel: int) -> tuple[tuple[int, int], ...]:
        """Where that begins and ends which travels in `rest`."""
        return tuple((begin, end) for begin, end, alone in self._spans(numel) if not alone)

    def nbytes(self, numel: int) -> int:
        alone = sum(self.codec.nbytes(end - begin) for begin, end, alone in self._spans(numel) if alone)
        return alone + self.rest.nbytes(sum(end - begin for begin, end in self.in_full(numel)))

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        at = 0
        for number, (begin, end) in enumerate(self._alone(x.numel()), 1):
            room = self.codec.nbytes(end - begin)
            self.codec.encode(x[begin:end], payload[at : at + room], _of(key, number))
            at += room
        rest = torch.cat([x[begin:end] for begin, end in self.in_full(x.numel())])
        self.rest.encode(rest, payload[at:], key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        values, at = out.new_zeros(out.numel()), 0  # a packet that is refused half-way leaves `out` as it was
        for number, (begin, end) in enumerate(self._alone(out.numel()), 1):
            room = self.codec.nbytes(end - begin)
            self.codec.decode_add(payload[at : at + room], values[begin:end], _of(key, number), weight)
            at += room
        spans = self.in_full(out.numel())
        rest = out.new_zeros(sum(end - begin for begin, end in spans))
        self.rest.decode_add(payload[at:], rest, key, weight)
        for part, (begin, end) in zip(rest.split_with_sizes([end - begin for begin, end in spans]), spans):
            values[begin:end] = part
        out.add_(values)

    def _spans(self, numel: int) -> Iterator[tuple[int, int, bool]]:
        """Where the tensors lie, and whether each is coded by itself; last what `shapes` do not cover."""
        begin = 0
        for shape in self.shapes:
            end = begin + math.prod(shape)
            if end > numel:
                break
            yield begin, end, len(shape) > 1 and end > begin and end - begin >= self.least
            begin = end
        yield begin, numel, False

    def _alone(self, numel: int) -> list[tuple[int, int]]:
        return [(begin, end) for begin, end, alone in self._spans(numel) if alone]


def _of(key: Key, number: int) -> Key:
    """The key of one tensor: each draws its own chance."""
    return replace(key, part=(key.part << 20) + number)
