"""Compresses a codec's payload without loss, to as many bytes as its values need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Said, Shapes, check_fit
from thinwire.codecs.layout import Part, Places
from thinwire.errors import ConfigurationError, PacketError
from thinwire.lab.codecs.streams import (
    REPEAT,
    Bytes,
    PayloadReader,
    places_coded,
    places_decoded,
    symbols_coded,
    symbols_decoded,
)
from thinwire.rng import Key

_PLAIN, _CODED = 0, 1  # the first byte
_Stream = tuple[int, int]  # a stream of symbols: bytes per number, and the index of the byte in it


@dataclass(frozen=True)
class Entropy(Codec):
    """Compress `codec`'s payload without loss: symbols by zstd, ascending indices by the gaps between them.

        bits(g) = ⌊g / 2^k⌋ + 1 + k      of a gap g between two indices; k is chosen for each list

    The values are those of `codec`, bit for bit. *The size depends on the values*: `nbytes` is a bound, one byte more than `codec`'s, and
    packets are shorter if the values allow it (docs/pieces.md has measured sizes). Plans, simulations and timeouts use the bound.

    *Source*: zstd (RFC 8878), and Rice's form of Golomb's code for run lengths (Golomb 1966). *Differs*: zstd frames have no magic number;
    gaps that repeat are a zstd frame instead, if that is shorter.

    *Wire*: a byte that tells whether the payload is compressed; then the lists of indices, and all symbols as zstd frames of level 1. Numbers
    of 2 or 4 bytes have one frame for their first bytes, one for their second bytes, and so on. If the result is not shorter, `codec`'s payload
    is sent unchanged. Codes of 4 bits shrink to their entropy, 7 to 17 % less for `E3M0`; an index costs about log₂(e/density) bits, not log₂ n.

    Needs the extra: pip install thinwire[zstd]. Cost: see docs/pieces.md. A delta on a GPU is copied to the host before it is encoded.

    Args:
        codec: the codec whose payload is compressed; any codec of known size.

    Raises:
        ConfigurationError: the codec's size varies already, or zstandard is not installed.

    >>> import torch
    >>> from thinwire.codecs import ChunkedTopK
    >>> codec = Entropy(ChunkedTopK())
    >>> x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    >>> codec.nbytes(len(x)), codec.encode(x, torch.empty(codec.nbytes(len(x)), dtype=torch.uint8), Key())
    (3585, 2028)
    """

    codec: Codec

    varies: ClassVar[bool] = True
    any_device: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or isinstance(self.codec, type) or self.codec.varies:
            raise ConfigurationError(
                f"Entropy(codec={self.codec!r}): a codec of known size is needed, such as E3M0() or ChunkedTopK()."
            )
        if find_spec("zstandard") is None:
            raise ConfigurationError(f"{self}: the package zstandard is needed; pip install 'thinwire[zstd]'.")

    # ---- bytes

    def nbytes(self, numel: int) -> int:
        plain = self.codec.nbytes(numel)
        return plain + (1 if plain else 0)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> int:
        check_fit(self, x, payload)
        plain = payload[1:]
        self.codec.encode(x, plain, key)
        if not len(plain):
            return 0
        coded = torch.from_numpy(_coded(plain.contiguous().numpy(), self.codec.layout(x.numel())))
        if len(coded) >= len(plain):
            payload[0] = _PLAIN
            return len(payload)
        payload[0], used = _CODED, 1 + len(coded)
        payload[1:used] = coded
        payload[used:] = 0
        return used

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload, shorter=True)
        self.codec.decode_add(self._plain(payload, out.numel()), out, key, weight)

    def few(self, numel: int) -> int | None:
        return self.codec.few(numel)

    def sent(self, payload: Tensor, numel: int, index: Tensor, values: Tensor, key: Key, weight: float = 1.0) -> None:
        self.codec.sent(self._plain(payload, numel), numel, index, values, key, weight)

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        plain = [(self._plain(payload, numel), key, weight) for payload, key, weight in packets]
        return self.codec.decode_joint(plain, numel)

    def _plain(self, payload: Tensor, numel: int) -> Tensor:
        """The payload of `codec`. Raises `PacketError`."""
        nbytes = self.codec.nbytes(numel)
        if not nbytes:
            return payload[:0]
        reader = PayloadReader(payload.contiguous().numpy())
        kind = int(reader.take(1)[0])
        if kind not in (_PLAIN, _CODED):
            raise PacketError(f"a coded payload begins with the byte {kind}, which no encoder writes. {REPEAT}")
        plain = reader.take(nbytes) if kind == _PLAIN else _decoded(reader.data, self.codec.layout(numel))
        return torch.from_numpy(plain)

    # ---- declarations of the codec inside

    @property
    def claims(self) -> frozenset[str]:
        return (self.codec.claims - {"local"}) | {"refuses"}

    @property
    def grain(self) -> int | None:
        return self.codec.grain

    @property
    def biased(self) -> bool:
        return self.codec.biased

    @property
    def samples(self) -> bool:
        return self.codec.samples

    @property
    def needs_fixed_group(self) -> str:
        return self.codec.needs_fixed_group

    @property
    def needs_shapes(self) -> bool:
        return self.codec.needs_shapes

    def fitted(self, shapes: Shapes) -> Entropy:
        return replace(self, codec=self.codec.fitted(shapes))

    def spans_of_rest(self, numel: int) -> tuple[tuple[int, int], ...]:
        return self.codec.spans_of_rest(numel)

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    def denser(self, density: float) -> Entropy:
        return replace(self, codec=self.codec.denser(density))

    def forms(self) -> tuple[Entropy, ...]:
        return tuple(replace(self, codec=form) for form in self.codec.forms())

    @property
    def joint(self) -> bool:
        return self.codec.joint


def _coded(plain: Bytes, layout: tuple[Part, ...]) -> Bytes:
    """The compressed form of `plain`: its lists of indices, then its symbols."""
    symbols: dict[_Stream, list[Bytes]] = {}
    coded = []
    for part, of in zip(layout, _split(plain, layout)):
        if isinstance(part, Places):
            coded.append(places_coded(of, part))
            continue
        for plane, own in enumerate(of.reshape(-1, part.stride).T):
            symbols.setdefault((part.stride, plane), []).append(own)
    return np.concatenate([*coded, *(symbols_coded(np.concatenate(symbols[each])) for each in sorted(symbols))])


def _decoded(coded: Bytes, layout: tuple[Part, ...]) -> Bytes:
    """The reverse of `_coded`. Raises `PacketError`; the allocated memory depends on `layout` only."""
    reader, plain = PayloadReader(coded), np.empty(sum(part.nbytes for part in layout), np.uint8)
    due: dict[_Stream, list[Bytes]] = {}
    for part, of in zip(layout, _split(plain, layout)):
        if isinstance(part, Places):
            of[:] = places_decoded(reader, part)
            continue
        for plane, own in enumerate(of.reshape(-1, part.stride).T):
            due.setdefault((part.stride, plane), []).append(own)
    for each in sorted(due):
        symbols = PayloadReader(symbols_decoded(reader, sum(map(len, due[each]))))
        for own in due[each]:
            own[:] = symbols.take(len(own))
    return plain


def _split(plain: Bytes, layout: tuple[Part, ...]) -> list[Bytes]:
    return np.split(plain, np.cumsum([part.nbytes for part in layout])[:-1])
