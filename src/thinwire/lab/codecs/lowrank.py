"""Sends matrices as products of low rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import VALUES, Codec, Shapes, chance, check_finite, check_fit, check_inner, check_whole
from thinwire.codecs.cast import Identity
from thinwire.codecs.exact import orthonormal, product, saturated
from thinwire.codecs.layout import Part
from thinwire.codecs.shapes import as_tuples, split
from thinwire.errors import ConfigurationError
from thinwire.rng import Key, draw


@dataclass(frozen=True)
class LowRank(Codec):
    """Send each n × m matrix M as P·Qᵀ, with P [n, rank] orthonormal and Q [m, rank] = Mᵀ·P. Vectors, and matrices that
    would not get smaller, are sent unchanged.

    Encoding, with Q₀ of ±1 drawn from the round's shared stream:

        P ← orthonormal(M·Q),  Q ← Mᵀ·P      `iterations` times (subspace iteration)

    P·Qᵀ = P·Pᵀ·M is a projection of M, so it is contractive, and exact if M's rank is at most `rank`. If `values` round P,
    Q is the best fit for the rounded P, Mᵀ·P·(Pᵀ·P)⁻¹. Few bits for the factors and a higher rank use bytes
    better: `LowRank(16, values=E2M1())` is as long as `LowRank(2)` (docs/formats.md).

    In an all-reduce it is PowerSGD: P = mean of Mᵢ·Q, orthonormalised alike on all replicas, then Q = mean of Mᵢᵀ·P. So
    the replicas together compute what one would compute for the mean of their M. `AllReduce` keeps Q, with the same bits on all, and
    the next round starts from it: one iteration per round, which converges to the slowly changing part of M. A zero column of Q
    is replaced by random values; each column is scaled to about 1 by a power of two, which changes no direction.

    *Source*: PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727, Algorithm 1). *Differs*: if packets are gathered,
    replicas share no Q, and each round starts from random values. More `iterations` compensate for this at no cost on the wire; an
    all-reduce does not use them. Use it with `Feedback`.

    *Wire*: P of all matrices, Q of all matrices, then the rest, each in its own payload of `values`: rank·(n + m) values per
    matrix. A replica sets `shapes` to those of the fragment's tensors; without them all is one vector. Cost:
    2·iterations·rank multiplications per value, and rank to decode it; memory of 8 bytes per value of the largest matrix.

    Args:
        rank: columns of P and Q.
        iterations: number of subspace iterations.
        values: the codec of the factors.
        shapes: those of the fragment's tensors; the replica sets them.
        last: flat fp32, Q of the previous round, if the exchange starts from it.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> LowRank(rank=4).fitted(((1024, 256), (256,))).nbytes(1024 * 256 + 256) == 4 * (4 * (1024 + 256) + 256)
    True
    """

    rank: int = 4
    iterations: int = 2
    values: Codec = Identity()
    shapes: Shapes = ()
    last: Tensor | None = field(default=None, repr=False, compare=False)  # set by the exchange

    needs_shapes: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self)
        if self.rank < 1 or self.iterations < 1:
            raise ConfigurationError(
                f"LowRank(rank={self.rank}, iterations={self.iterations}): at least 1 is needed of both; 4 and 2 are usual."
            )
        check_inner(self, "values", self.values)
        object.__setattr__(self, "shapes", as_tuples(self.shapes))

    @property
    def claims(self) -> frozenset[str]:
        small = self._counts(sum(map(math.prod, self.shapes)))[0]
        if not small:
            return (self.values.claims & VALUES) | chance([self.values])
        return (self.values.claims & {"odd", "contractive"}) | chance([self.values], own="drawn", fair=False)

    def fitted(self, shapes: Shapes) -> LowRank:
        return replace(self, shapes=shapes)

    def nbytes(self, numel: int) -> int:
        return sum(self.values.nbytes(count) for count in self._counts(numel))

    def layout(self, numel: int) -> tuple[Part, ...]:
        return tuple(part for count in self._counts(numel) for part in self.values.layout(count))

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        matrices, rest = self._parts(x)
        counts = self._counts(x.numel())
        room = list(payload.split_with_sizes([self.values.nbytes(count) for count in counts]))
        if matrices:
            p = [self._left(m, q).reshape(-1) for m, q in zip(matrices, self._started(matrices, key))]
            self.values.encode(torch.cat(p), room[0], key)
            sent = torch.zeros(counts[0])
            self.values.decode_add(room[0], sent, key)
            q = [_fitting(m, p_sent).reshape(-1) for m, p_sent in zip(matrices, self._factors(sent, matrices, 0))]
            self.values.encode(torch.cat(q), room[1], key)
        self.values.encode(torch.cat(rest), room[2], key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        counts = self._counts(out.numel())
        codes = [torch.zeros(count) for count in counts]
        for code, room in zip(codes, payload.split_with_sizes([self.values.nbytes(count) for count in counts])):
            self.values.decode_add(room, code, key)
        out.add_(self._expanded(codes[0], codes[1], codes[2], out.numel()).mul_(weight))

    # ---- in an all-reduce, with the last round's Q

    def remembered(self, numel: int) -> int:
        return self._counts(numel)[1]

    def warmed(self, last: Tensor) -> LowRank:
        return replace(self, last=last)

    def sizes(self, numel: int) -> tuple[int, ...]:
        left, right, rest = self._counts(numel)
        return left, right + rest

    def project(self, x: Tensor, means: tuple[Tensor, ...], key: Key) -> Tensor:
        check_finite(x)
        matrices, rest = self._parts(x)
        if not means:
            made = [saturated(m.double() @ q) for m, q in zip(matrices, self._started(matrices, key))]
        else:
            left = [orthonormal(p) for p in self._factors(means[0], matrices, 0)]
            made = [saturated(m.double().T @ p.double()) for m, p in zip(matrices, left)]
            made += rest
        return torch.cat([part.reshape(-1) for part in made]) if made else torch.zeros(0)

    def expand(self, codes: tuple[Tensor, ...], numel: int, key: Key) -> Tensor:
        matrices, _ = self._parts(torch.empty(numel, device="meta"))
        left = [orthonormal(p).reshape(-1) for p in self._factors(codes[0], matrices, 0)]
        right, rest = codes[1].split_with_sizes(self._counts(numel)[1:])
        return self._expanded(torch.cat([*left, torch.zeros(0)]), right, rest, numel)

    def forms(self) -> tuple[LowRank, ...]:
        ranks = range(max(1, self.rank // 2), 2 * self.rank + 1)
        return tuple(replace(self, rank=rank) for rank in ranks if rank != self.rank)

    # ---- the order of the values

    def _parts(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The matrices that get smaller, and the rest as flat tensors."""
        matrices, rest = split(x, self.shapes)
        small = [m for m in matrices if self.rank * sum(m.shape) < m.numel()]
        return small, [m.reshape(-1) for m in matrices if self.rank * sum(m.shape) >= m.numel()] + rest

    def _counts(self, numel: int) -> tuple[int, int, int]:
        """Values in P of all matrices, in Q of all, and in the rest."""
        matrices, rest = self._parts(torch.empty(numel, device="meta"))
        left, right = (sum(self.rank * m.shape[side] for m in matrices) for side in (0, 1))
        return left, right, sum(part.numel() for part in rest)

    def _factors(self, flat: Tensor, matrices: list[Tensor], side: int) -> list[Tensor]:
        """P (side 0) or Q (side 1) of each matrix, as views of `flat`."""
        sizes = [self.rank * m.shape[side] for m in matrices]
        return [part.view(-1, self.rank) for part in flat.split_with_sizes(sizes)] if sizes else []

    def _started(self, matrices: list[Tensor], key: Key) -> list[Tensor]:
        """Q₀: that of the last round, or signs from the round's shared stream if there is none."""
        sizes = [self.rank * matrix.shape[1] for matrix in matrices]
        drawn = draw(key.shared("factors"), 0, sum(sizes)).sign().double()
        q = self._factors(drawn, matrices, 1)
        if self.last is None:
            return q
        return [_scaled(last, other) for last, other in zip(self._factors(self.last, matrices, 1), q)]

    def _left(self, matrix: Tensor, q: Tensor) -> Tensor:
        """P, after `iterations` from Q₀."""
        m, p = matrix.double(), torch.empty(0)
        for _ in range(self.iterations):
            p = orthonormal(m @ q)
            q = m.T @ p.double()
        return p

    def _expanded(self, left: Tensor, right: Tensor, rest: Tensor, numel: int) -> Tensor:
        out = torch.empty(numel)
        matrices, vectors = self._parts(out)
        for into, p, q in zip(matrices, self._factors(left, matrices, 0), self._factors(right, matrices, 1)):
            into.copy_(saturated(product(p, q.T)))
        for into, values in zip(vectors, rest.split_with_sizes([v.numel() for v in vectors])):
            into.copy_(values)
        return out


def _scaled(q: Tensor, drawn: Tensor) -> Tensor:
    """The columns of `q`, scaled so that their largest values are between ½ and 1; zero columns are replaced by those of `drawn`."""
    most = q.abs().amax(0)
    return torch.where(most > 0, torch.ldexp(q.double(), -torch.frexp(most).exponent), drawn)


def _fitting(matrix: Tensor, p: Tensor) -> Tensor:
    """The Q that minimises ‖M − P·Qᵀ‖; its columns are zero where those of P are."""
    p = p.double()
    return saturated(matrix.double().T @ p @ torch.linalg.pinv(p.T @ p, hermitian=True))
