"""Codes once more what a codec makes, without loss, in as many bytes as its values need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.base import Codec, Part, Places, Said, Shapes, Symbols, check_fit
from thinwire.codecs.bits import pack, unpack
from thinwire.errors import ConfigurationError, PacketError
from thinwire.rng import Key

Bytes = NDArray[np.uint8]
LEVEL = 1  # of zstd: higher ones take longer, and find no more in codes of a few bits
_PLAIN, _SYMBOLS, _FRAME = 0, 1, 2  # the first byte: nothing is coded, all but the symbols, all
_LEAST_WINDOW = 1 << 10  # of a zstd frame
_REPEAT = "Run the same strategy and version of Thinwire on every replica."


@dataclass(frozen=True)
class Entropy(Codec):
    """`codec`'s payload, coded once more without loss: symbols by zstd, ascending places by a Rice code of their gaps.

    Values are those of `codec`, bit for bit. *The size depends on the values*: `nbytes` is a bound, one byte more than `codec`'s, and what
    travels is less where the values allow it (docs/pieces.md has measured sizes). Plan, simulation and timeouts go by the bound.

    On the wire: a byte that says how; for each list of places k and its Rice code, gaps of 2^k, k chosen for the message; then all
    symbols as one zstd frame of level 1 (RFC 8878), of numbers of 2 or 4 bytes all first bytes, then all second ones. Where that is
    not less than `codec`'s payload, this is sent as it is. Without places and with codes of 4 bits the gain is that of the codes'
    entropy, 7 to 12 % of `E3M0`'s; places cost log₂(e/density) bits, not log₂ n.

    Needs the extra: pip install thinwire[zstd]. Cost: see docs/pieces.md. A delta on a GPU crosses to the host before it is encoded.

    Args:
        codec: any; the outermost one is inside this one.

    Raises:
        ConfigurationError: the codec's size varies already, or zstandard is not installed.

    >>> import torch
    >>> from thinwire.codecs import ChunkedTopK
    >>> codec = Entropy(ChunkedTopK())
    >>> x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    >>> codec.nbytes(len(x)), codec.encode(x, torch.empty(codec.nbytes(len(x)), dtype=torch.uint8), Key())
    (3585, 2055)
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
            raise ConfigurationError(f"{self}: the package zstandard is needed; pip install thinwire[zstd].")

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
        coded = torch.from_numpy(_coded(plain.contiguous(), self.codec.layout(x.numel())))
        if len(coded) >= len(payload):
            payload[0] = _PLAIN
            return len(payload)
        payload[: len(coded)] = coded
        payload[len(coded) :] = 0
        return len(coded)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload, shorter=True)
        self.codec.decode_add(self._plain(payload, out.numel()), out, key, weight)

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        plain = [(self._plain(payload, numel), key, weight) for payload, key, weight in packets]
        return self.codec.decode_joint(plain, numel)

    def _plain(self, payload: Tensor, numel: int) -> Tensor:
        """What `codec` has made. Raises `PacketError`."""
        nbytes = self.codec.nbytes(numel)
        if not nbytes:
            return payload[:0]
        said = payload.contiguous().numpy()
        _first(said, 1)
        plain = _first(said[1:], nbytes) if said[0] == _PLAIN else _decoded(said, self.codec.layout(numel))
        return torch.from_numpy(plain)

    # ---- what the codec inside declares

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


def _coded(plain: Tensor, layout: tuple[Part, ...]) -> Bytes:
    """The payload that says `plain`, with its first byte."""
    from thinwire.kernels import rice  # a compiler takes its time

    streams, symbols = [], []
    for part, of in zip(layout, _split(plain.numpy(), layout)):
        if isinstance(part, Symbols):
            symbols.append(of.reshape(-1, part.stride).T.reshape(-1))
            continue
        places = unpack(torch.from_numpy(of), part.kept, part.width)
        k = rice.parameter(places, part.count)
        streams.append(np.empty(1 + rice.nbytes(places, part.count, k), np.uint8))
        streams[-1][0] = k
        rice.encode(places, part.count, k, streams[-1][1:])
    together = symbols[0] if len(symbols) == 1 else np.concatenate(symbols)
    frame = np.frombuffer(_zstandard().ZstdCompressor(level=LEVEL).compress(together.data), np.uint8)
    kind = _FRAME if len(frame) < len(together) else _SYMBOLS
    return np.concatenate([np.array([kind], np.uint8), *streams, frame if kind == _FRAME else together])


def _decoded(payload: Bytes, layout: tuple[Part, ...]) -> Bytes:
    """The reverse. Raises `PacketError`; what is allocated depends on `layout` only."""
    from thinwire.kernels import rice

    plain = np.empty(sum(part.nbytes for part in layout), np.uint8)
    kind, at = int(payload[0]), 1
    if kind not in (_SYMBOLS, _FRAME):
        raise PacketError(f"a coded payload begins with {kind}, which no encoding makes. {_REPEAT}")
    for part, of in zip(layout, _split(plain, layout)):
        if isinstance(part, Places):
            k, places = int(_first(payload[at:], 1)[0]), torch.empty(part.kept, dtype=torch.int64)
            used = rice.decode(payload[at + 1 :], part.chunk, part.count, part.numel, k, places)
            if used < 0:
                raise PacketError(f"coded places are not ascending below {part.numel}, or end too early. {_REPEAT}")
            of[:] = pack(places, part.width).numpy()
            at += 1 + used
    due = sum(part.nbytes for part in layout if isinstance(part, Symbols))
    symbols = _unframed(payload[at:], due) if kind == _FRAME else _first(payload[at:], due)
    for part, of in zip(layout, _split(plain, layout)):
        if isinstance(part, Symbols):
            own, symbols = symbols[: part.nbytes], symbols[part.nbytes :]
            of.reshape(-1, part.stride)[:] = own.reshape(part.stride, -1).T
    return plain


def _split(plain: Bytes, layout: tuple[Part, ...]) -> list[Bytes]:
    return np.split(plain, np.cumsum([part.nbytes for part in layout])[:-1])


def _unframed(frame: Bytes, due: int) -> Bytes:
    """The `due` bytes that a zstd frame at the front of `frame` says. Raises `PacketError`."""
    zstandard = _zstandard()
    try:
        said = zstandard.get_frame_parameters(frame.data)
        if said.content_size == due and said.window_size <= max(due, _LEAST_WINDOW):
            return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.data), np.uint8)
    except zstandard.ZstdError as error:
        raise PacketError(f"a coded payload is damaged ({error}). {_REPEAT}") from None
    raise PacketError(f"a coded payload says that it has {said.content_size} bytes, {due} were due. {_REPEAT}")


def _first(payload: Bytes, count: int) -> Bytes:
    if len(payload) < count:
        raise PacketError(f"a coded payload ends after {len(payload)} bytes, {count} more were due. {_REPEAT}")
    return payload[:count]


def _zstandard() -> Any:
    import zstandard  # the extra zstd

    return zstandard
