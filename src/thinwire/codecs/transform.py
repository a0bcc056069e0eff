"""Codecs in another basis or order: an orthonormal transform, then any codec.

‖T·x‖ = ‖x‖, so the whole has the claims of the inner codec (contractive, unbiased) and the same number of bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Said, Shapes, chance, check_finite, check_fit, check_inner, check_whole
from thinwire.codecs.exact import cosines, product, saturated
from thinwire.codecs.layout import Part
from thinwire.codecs.shapes import as_tuples, split
from thinwire.errors import ConfigurationError
from thinwire.rng import Key, draw

_CHUNK = 1 << 17  # elements processed at a time, so that intermediates stay in the cache
Run = tuple[int, int, int]  # this many rectangles of rows × columns neighbours


class Rearranged(Codec, ABC):
    """The common part of the classes here: `codec` encodes the values in another basis or order, in the same number of bytes."""

    codec: Codec

    biased: ClassVar[bool] = False

    @abstractmethod
    def back(self, values: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Add `weight` times the `values` of the codec inside, in x's own basis or order, to `out`."""

    def nbytes(self, numel: int) -> int:
        return self.codec.nbytes(numel)

    def layout(self, numel: int) -> tuple[Part, ...]:
        return self.codec.layout(numel)

    @property
    def joint(self) -> bool:
        return self.codec.joint

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        out = torch.zeros(numel)
        self.back(self.codec.decode_joint(packets, numel), out, packets[0][1])
        return out


class Turned(Rearranged):
    """The common part of DCT and Hadamard: x is cut into runs, each is transformed separately in fp64, and `codec` encodes the result.

    A shorter last run is cut further and transformed in its own length, so nothing is padded.
    """

    @property
    def claims(self) -> frozenset[str]:
        return (self.codec.claims & {"odd", "contractive", "refuses"}) | chance([self.codec])

    @property
    @abstractmethod
    def size(self) -> int:
        """Elements of a whole run."""

    @abstractmethod
    def runs(self, numel: int) -> Iterator[Run]:
        """The runs of `numel` elements, in order."""

    @abstractmethod
    def turn(self, x: Tensor, inverse: bool, key: Key) -> Tensor:
        """Transform each run of `x` [runs, rows, columns], or undo it (`inverse`), in fp64 with the same bits on every machine."""

    @property
    def grain(self) -> int | None:
        return self.codec.grain and math.lcm(self.codec.grain, self.size)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        turned = torch.empty_like(x)
        for into, part in zip(self._parts(turned), self._parts(x)):
            into.copy_(saturated(self.turn(part.double(), False, key)))
        self.codec.encode(turned, payload, key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        turned = torch.zeros_like(out)
        self.codec.decode_add(payload, turned, key)
        self.back(turned, out, key, weight)

    def back(self, values: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        for into, part in zip(self._parts(out), self._parts(values)):
            into.add_(saturated(self.turn(part.double(), True, key)).mul_(weight))

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        begin = 0
        for count, rows, columns in self.runs(x.numel()):
            whole = x[begin : begin + count * rows * columns].view(count, rows, columns)
            if whole.numel():
                yield from torch.split(whole, max(1, _CHUNK // (rows * columns)))
            begin += whole.numel()


@dataclass(frozen=True)
class DCT(Turned):
    """Apply the cosine transform to each run of `side` neighbours, before any codec; with `axes=2` to each run of side², as a square.

        y_f = √((2 − [f = 0]) / side) · Σ_i x_i · cos(π·f·(2i + 1) / (2·side))

    Values that vary slowly along a run have few large coefficients. In a shorter last square the whole rows are transformed as
    a rectangle, and the remaining elements as a row.

    *Source*: DeMo (Peng, Quesnelle, Kingma, arXiv 2411.19870), whose form is
    `Squares(DCT(OverSenders(ChunkedTopK(4096, 32)), axes=2))` with `Feedback(eta=0.999, beta=0.999)`. *Differs*: there
    the squares are the largest that divide a matrix.

    *Wire*: the codec's bytes. Cost: axes·side multiplications per value. Exact to 2⁻²³ of the largest value of a run.

    Args:
        codec: the codec of the coefficients.
        side: neighbours of a run, 2 to 1024.
        axes: number of dimensions that are transformed: 1 for runs, 2 for squares.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import E3M0
    >>> DCT(E3M0()).nbytes(1024) == E3M0().nbytes(1024)
    True
    """

    codec: Codec
    side: int = 64
    axes: int = 1

    def __post_init__(self) -> None:
        check_whole(self)
        check_inner(self, "codec", self.codec, joint=True)
        if not 2 <= self.side <= 1024 or self.axes not in (1, 2):
            raise ConfigurationError(
                f"DCT(side={self.side}, axes={self.axes}): a side of 2 to 1024 and 1 or 2 axes are needed; 64 and 1 are usual."
            )

    @property
    def size(self) -> int:
        return self.side if self.axes == 1 else self.side * self.side

    def runs(self, numel: int) -> Iterator[Run]:
        whole, rest = divmod(numel, self.size)
        rows, left = divmod(rest, self.side)
        yield whole, self.size // self.side, self.side
        yield 1, rows, self.side
        yield 1, 1, left

    def turn(self, x: Tensor, inverse: bool, key: Key) -> Tensor:
        for _ in range(2):  # along columns, then along rows
            length = x.shape[2]
            if length > 1:
                basis = cosines(length) if inverse else cosines(length).T
                x = product(x.reshape(-1, length), basis).view(x.shape)
            x = x.transpose(1, 2)
        return x


@dataclass(frozen=True)
class Hadamard(Turned):
    """Apply random signs and the Walsh-Hadamard transform to each run of `block` neighbours, before any codec: a random rotation.

        y = H·D·x,   D = diag(±1),   H_ij = (−1)^popcount(i & j) / √block

    It spreads an outlier over its whole run, so that the result is nearly Gaussian for any values. This is good before formats
    with even steps (`Int`) and coarse blocks, has no effect on logarithmic grids, and is bad before sparse codecs.
    The round's shared random stream gives D, which is the same for all runs.

    *Source*: randomised rotation as in Suresh, Yu, Kumar, McMahan (arXiv 1611.00429, §3). *Differs*: each block is rotated, not the whole
    vector. A shorter last run is cut into powers of two, and nothing is padded. Any codec may follow.

    *Wire*: the codec's bytes. Cost: log₂ block additions per value.

    Args:
        codec: the codec of the rotated values.
        block: number of neighbours that are rotated together, a power of two.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import Int
    >>> Hadamard(Int(4, 128), block=128).nbytes(1024)
    520
    """

    codec: Codec
    block: int = 128

    def __post_init__(self) -> None:
        check_whole(self)
        check_inner(self, "codec", self.codec, joint=True)
        if self.block < 2 or self.block & (self.block - 1):
            raise ConfigurationError(f"Hadamard(block={self.block}): a power of two is needed; 128 is usual.")

    @property
    def claims(self) -> frozenset[str]:
        return (self.codec.claims & {"odd", "contractive", "refuses"}) | chance([self.codec], own="drawn")

    @property
    def size(self) -> int:
        return self.block

    def runs(self, numel: int) -> Iterator[Run]:
        whole, rest = divmod(numel, self.block)
        yield whole, 1, self.block
        for power in range(self.block.bit_length() - 2, -1, -1):
            yield rest >> power & 1, 1, 1 << power

    def turn(self, x: Tensor, inverse: bool, key: Key) -> Tensor:
        length = x.shape[2]
        signs = draw(key.shared("signs"), 0, length).bitwise_and_(1).mul_(2).sub_(1)
        turned = (x if inverse else x * signs).reshape(-1, length)
        half = length
        while half > 1:
            half //= 2
            first, second = turned.view(-1, 2, half).unbind(1)
            turned = torch.stack([first + second, first - second], 1)
        turned = turned.reshape(x.shape) * (1 / math.sqrt(length))
        return turned * signs if inverse else turned


@dataclass(frozen=True)
class Squares(Rearranged):
    """Cut matrices into squares of side × side, each a run of side² values for `codec`; the rest comes last.

        run (I, J) = (M[I·side + r, J·side + c] for r, c = 0 … side − 1)      of matrix M, for all whole squares

    With it a chunk holds neighbours in both directions of a matrix.

    *Source*: SparseLoCo (Sarfi et al., arXiv 2508.15706), as `Squares(ChunkedTopK(4096, 64, Codebook()))`, and DeMo (arXiv 2411.19870).
    *Differs*: edges that make no whole square, and vectors, come last in their own order; in these papers the squares get smaller
    until they divide the matrix.

    *Wire*: the codec's bytes in another order. A replica sets `shapes` to those of the fragment's tensors; without
    them nothing is a matrix. Cost: a copy.

    Args:
        codec: the codec of runs of side² values.
        side: rows and columns of a square, a number of at least 2.
        shapes: those of the fragment's tensors; the replica sets them.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import Identity
    >>> Squares(Identity(), side=2).fitted(((2, 4),)).nbytes(8)
    32
    """

    codec: Codec
    side: int = 64
    shapes: Shapes = ()

    needs_shapes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self)
        check_inner(self, "codec", self.codec, joint=True)
        if self.side < 2:
            raise ConfigurationError(f"Squares(side={self.side}): at least 2 is needed; 64 is usual.")
        object.__setattr__(self, "shapes", as_tuples(self.shapes))

    @property
    def claims(self) -> frozenset[str]:
        return self.codec.claims - {"local"}

    def fitted(self, shapes: Shapes) -> Squares:
        return replace(self, shapes=shapes)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        self.codec.encode(torch.cat([part.reshape(-1) for part in self._parts(x)]), payload, key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        values = torch.zeros_like(out)
        self.codec.decode_add(payload, values, key, weight)
        self.back(values, out, key)

    def back(self, values: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        begin = 0
        for part in self._parts(out):
            part.add_(values[begin : begin + part.numel()].view(part.shape), alpha=weight)
            begin += part.numel()

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Views of `x` in the order in which `codec` encodes them."""
        squares, edges = [], []
        matrices, rest = split(x, self.shapes)
        for matrix in matrices:
            down, across = (length // self.side for length in matrix.shape)
            height, width = down * self.side, across * self.side
            squares.append(matrix[:height, :width].view(down, self.side, across, self.side).transpose(1, 2))
            edges += [matrix[:height, width:], matrix[height:]]
        return [*squares, *edges, *rest]
