"""The interface of a codec, and checks that all codecs share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.bits import packed_nbytes
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.kernels import Kernels
from thinwire.packet import HEADER_NBYTES
from thinwire.rng import Key

Shapes = tuple[tuple[int, ...], ...]
Said = tuple[Tensor, Key, float]  # a packet's payload, its key, and how much it counts


@dataclass(frozen=True)
class Symbols:
    """`nbytes` bytes of a payload that hold numbers of `stride` bytes each (1: codes of 8 bits or fewer)."""

    nbytes: int
    stride: int = 1


@dataclass(frozen=True)
class Places:
    """Ascending places, packed in `width` bits each: `count` in each `chunk` of `numel` neighbours, and a share, rounded up, of the last chunk."""

    numel: int
    chunk: int
    count: int

    @property
    def kept(self) -> int:
        """The number of places."""
        whole, rest = divmod(self.numel, self.chunk)
        return whole * self.count - (-self.count * rest // self.chunk)

    @property
    def width(self) -> int:
        """Bits of a place in a chunk, 1 at least."""
        return max(1, (self.chunk - 1).bit_length())

    @property
    def nbytes(self) -> int:
        return packed_nbytes(self.kept, self.width)


Part = Symbols | Places


@runtime_checkable
class Codec(Protocol):
    """Turns a flat fp32 tensor into a predictable number of bytes on its device, and back.

    A codec is a frozen dataclass; its text is its identity on the wire. What it draws by chance is a pure function of
    the packet's `key`, which both sides know. A subclass writes `nbytes`, `encode` and `decode_add`, and **declares**
    what else it can do: the defaults of the declarations below are those of a codec that can do nothing special. No caller
    asks for a codec's type. Laws (`thinwire.testing.check` runs them): the payload has exactly `nbytes(numel)` bytes, all of them
    written; decoding depends on bytes and key only; what is claimed holds. Of one that `varies`, fewer bytes may travel.
    """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the payload for `numel` elements (`packet_nbytes` adds the header); the largest number for a codec that `varies`."""

    @abstractmethod
    def encode(self, x: Tensor, payload: Tensor, key: Key) -> int | None:
        """Write flat fp32 `x` into `payload` (uint8, `nbytes(x.numel())`). Raises `NonFiniteError` if `x` holds NaN or infinity.

        Returns None, or for a codec that `varies` how many bytes at the front of `payload` count; zeros follow them.
        """

    @abstractmethod
    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Add `weight` times the decoded values to flat fp32 `out`; the same bits on every machine.

        The bytes are a peer's and may be any. `PacketError` where they cannot be decoded, with `out` as it was. Else
        they decode to something, in time and memory that depend on `out.numel()` only; a hostile scale may make it
        NaN or infinite. All replicas see the same, so all of them drop the round when the anchor comes out not
        finite (`flight`), and nothing has changed.
        """

    # ---- claims

    @property
    def claims(self) -> frozenset[str]:
        """What the codec promises of its values, to be tried by `thinwire.testing.check`: see `thinwire.testing.CLAIMS`."""
        return frozenset()

    @property
    def grain(self) -> int | None:
        """A delta may be cut at multiples of this many elements and its parts coded one by one, with the same values
        and in as many bytes. None: only as a whole.
        """
        return None

    @property
    def any_device(self) -> bool:
        """Whether the codec, without those inside it, makes the same bytes on every device; else a delta crosses to the host first."""
        return False

    @property
    def biased(self) -> bool:
        """Whether the codec's error, beyond the rounding of a float, does not average out over the rounds. The codecs inside
        it declare their own."""
        return True

    @property
    def samples(self) -> bool:
        """Whether it sends values that are drawn by chance and scaled up: the error may exceed the values, and a mean cannot
        be coded again."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round, as the end of a sentence that begins with the codec; empty: they
        may come and go."""
        how = (
            "divides by those who sent a value, where a delta may count more than another; the codec inside it does not"
        )
        return how if self.joint else ""

    # ---- sizes

    @property
    def varies(self) -> bool:
        """Whether the number of bytes depends on the values: `nbytes` is the most, which is predicted and allocated. Only the
        outermost codec may vary; its `decode_add` takes a payload with anything behind the bytes that count.
        """
        return False

    def layout(self, numel: int) -> tuple[Part, ...]:
        """The parts of the payload for `numel` elements, in order, for a codec that codes it once more."""
        return (Symbols(self.nbytes(numel)),)

    # ---- shapes

    @property
    def needs_shapes(self) -> bool:
        """Whether it uses the shapes of the tensors that lie one after another in x. Without shapes it takes x as one vector; a
        replica calls `fitted` for each of its fragments."""
        return False

    def fitted(self, shapes: Shapes) -> Codec:
        """This codec for tensors of these `shapes`; it takes what they do not cover of x as vectors."""
        return self

    def spans_of_rest(self, numel: int) -> tuple[tuple[int, int], ...]:
        """Where parts of x begin and end that are too small for this codec and travel in another."""
        return ()

    # ---- how finely it codes, for policies

    @property
    def sparse(self) -> bool:
        """Whether it sends few of the values, and `denser` makes it send more."""
        return False

    def denser(self, density: float) -> Codec:
        """For a `sparse` codec: this codec, sending at least the share `density` of the values."""
        return self

    def forms(self) -> tuple[Codec, ...]:
        """Finer and coarser forms of this codec, to choose from; none if they are not known."""
        return ()

    def within(self, share: float, numel: int) -> Codec:
        """For a codec with levels: this codec, at the finest level that makes at most `share` of its `nbytes(numel)`, or at the coarsest. On the
        wire, and to whom it is sent, they are one codec.
        """
        return self

    # ---- packets together

    @property
    def joint(self) -> bool:
        """Whether the estimate is not the mean of the packets' values: then `decode_joint` decodes all packets of a round together."""
        return False

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        """The estimate of `numel` values from all `packets`, in their order; the same bits on every machine."""
        raise unwritten(self, "joint", "decode_joint")

    # ---- sums on the way

    @property
    def linear(self) -> bool:
        """Whether its codes may be added on the way, by any all-reduce, instead of being gathered.

        It goes in phases, as many as `sizes` are long. In each, every replica makes a code of its own x, given the means of
        the phases before, and the codes are averaged: `codes = [mean over replicas of project(x, tuple(codes), key)]`.
        Laws: `project` is linear in x for given means; `expand(codes)` is linear in the last of them. So with the mean
        code last it is the estimate of the mean delta; with the replica's own code last it is what this replica has
        sent, and its feedback keeps the rest (the *local* form of PowerSGD's residual: held against the estimate it would
        grow without bound where replicas differ for good). Chance is the round's `shared` one only.
        """
        return False

    @property
    def all_reduced(self) -> bool:
        """Whether an all-reduce may carry it: it is `linear`, or a float whose mean is rounded once more at little loss."""
        return self.linear

    def sizes(self, numel: int) -> tuple[int, ...]:
        """How many fp32 values each phase adds."""
        raise unwritten(self, "linear", "sizes")

    def project(self, x: Tensor, means: tuple[Tensor, ...], key: Key) -> Tensor:
        """The flat fp32 code of x for the phase after `means`. Raises `NonFiniteError` if `x` holds NaN or infinity."""
        raise unwritten(self, "linear", "project")

    def expand(self, codes: tuple[Tensor, ...], numel: int, key: Key) -> Tensor:
        """Flat fp32 values from a code of each phase; the same bits on every machine."""
        raise unwritten(self, "linear", "expand")

    def remembered(self, numel: int) -> int | None:
        """For a `linear` codec that starts from its last round (PowerSGD's Q): how many values it starts from, the first part of
        the last phase's mean code. `AllReduce` remembers them, alike on all replicas. None: it starts anew each round."""
        return None

    def warmed(self, last: Tensor) -> Codec:
        """This codec, starting from the `last` values remembered; from random ones where they are zero, as at first."""
        return self


VALUES = frozenset({"exact", "odd", "contractive", "idempotent"})  # claims that a codec inside another may lend it


def chance(parts: Sequence[Codec], own: Literal["", "unbiased", "drawn"] = "", fair: bool = True) -> frozenset[str]:
    """What a codec around `parts` claims about randomness. `own`: it draws by itself, alike for all senders; `fair`: it is linear in
    what they decode to.
    """
    drawing = [part for part in parts if part.claims & {"unbiased", "drawn"}]
    if not drawing and not own:
        return frozenset()
    unbiased = fair and all(part.claims & {"exact", "unbiased"} for part in parts) and (drawing or own == "unbiased")
    shared = all("shared" in part.claims for part in drawing)
    return frozenset(["unbiased" if unbiased else "drawn", *(["shared"] if shared else [])])


def unwritten(piece: object, declared: str, member: str) -> ConfigurationError:
    """The error for a piece that declares something and lacks the member for it.

    Args:
        piece: a codec, or another piece.
        declared: the declaration.
        member: the method that is missing.

    >>> from thinwire.codecs import Sign
    >>> print(unwritten(Sign(), "linear", "project"))
    Sign(scale='mean', block=None) declares linear, and has no project; write it, or do not declare that.
    """
    return ConfigurationError(f"{piece} declares {declared}, and has no {member}; write it, or do not declare that.")


def packet_nbytes(codec: Codec, numel: int) -> int:
    """Bytes of a packet: 48 of header, and the payload. For a codec that `varies` it is the largest number.

    Args:
        codec: what the packet is encoded with.
        numel: number of elements.

    >>> from thinwire.codecs import Cast
    >>> packet_nbytes(Cast("bf16"), numel=1000)
    2048
    """
    return HEADER_NBYTES + codec.nbytes(numel)


def check_finite(x: Tensor) -> None:
    """Raise `NonFiniteError` if `x` holds NaN or infinity.

    One pass over `x`: a sum of squares in fp32 can overflow for finite input, so only where that sum is not finite each element is looked at.

    Args:
        x: fp32, of any shape.

    Raises:
        NonFiniteError: `x` holds NaN or infinity.

    >>> check_finite(torch.tensor([1.0, 3e38]))
    """
    if not torch.isfinite(torch.dot(x, x)) and not bool(torch.isfinite(x).all()):
        raise not_finite(x)


def not_finite(x: Tensor) -> NonFiniteError:
    """The error for an `x` in which a kernel has found NaN or infinity."""
    count = int((~torch.isfinite(x)).sum())
    return NonFiniteError(f"the delta has {count} of {x.numel()} values that are NaN or infinite; it was not sent.")


def check_fit(codec: Codec, values: Tensor, payload: Tensor, shorter: bool = False) -> None:
    """Raise `ConfigurationError` unless `payload` has the size that `codec` needs for flat fp32 `values`, or may be `shorter`. Kernels
    check nothing more.
    """
    due = codec.nbytes(values.numel())
    fits = payload.shape == (due,) or (shorter and payload.dim() == 1 and len(payload) < due)
    if values.dtype != torch.float32 or values.dim() != 1 or payload.dtype != torch.uint8 or not fits:
        raise ConfigurationError(
            f"{codec}: values {values.dtype} {list(values.shape)} with a payload {payload.dtype} {list(payload.shape)} "
            f"were given, flat fp32 and flat uint8 of {due} bytes are needed."
        )
    if values.device != payload.device:
        raise ConfigurationError(
            f"{codec}: values on {values.device} with a payload on {payload.device} were given, one device is needed; "
            "`encode_from` copies the bytes between devices."
        )


def kernels_for(codec: Codec, values: Tensor, payload: Tensor) -> Kernels:
    """The kernels for the device of `values` and `payload`, after `check_fit`."""
    check_fit(codec, values, payload)
    return kernels.of(values, payload)


def nested(codec: Codec) -> Iterator[Codec]:
    """Yield a codec and all codecs inside it.

    Args:
        codec: the outermost one.

    >>> from thinwire.codecs import Cast, TopK
    >>> [type(one).__name__ for one in nested(TopK(0.01, Cast("bf16")))]
    ['TopK', 'Cast']
    """
    yield codec
    for value in vars(codec).values():
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Codec):
                yield from nested(inner)


def rebuilt(codec: Any, change: Callable[[Any], Codec]) -> Codec:
    """A codec with `change` applied to all codecs inside it, then to itself.

    Args:
        codec: the outermost one, a dataclass.
        change: gives another codec for a codec, or the same.

    >>> from thinwire.codecs import Cast, Identity, TopK
    >>> rebuilt(TopK(0.01, Cast("bf16")), lambda one: Identity() if isinstance(one, Cast) else one)
    TopK(density=0.01, values=Identity())
    """
    inside = {field.name: getattr(codec, field.name) for field in fields(codec)}
    changed = {name: rebuilt(inner, change) for name, inner in inside.items() if isinstance(inner, Codec)}
    return change(replace(codec, **changed))


def check_inner(codec: object, name: str, inner: object, joint: bool = False) -> None:
    """Raise `ConfigurationError` unless field `name` of `codec` is a codec that takes any vector and, without `joint`, none whose
    packets are decoded together.
    """
    given = f"{type(codec).__name__}({name}={inner!r})"
    if not isinstance(inner, Codec) or isinstance(inner, type):
        raise ConfigurationError(f"{given}: a Codec is needed, such as Cast('bf16') or Sign().")
    if inner.needs_shapes:
        raise ConfigurationError(
            f"{given}: it needs the shapes of a model's tensors, which are not known here; make it the outermost codec."
        )
    if inner.varies:
        raise ConfigurationError(f"{given}: its size would have to be known here; make it the outermost codec.")
    if not joint:
        check_alone(given, inner)


def check_alone(given: str, inner: Codec) -> None:
    """Raise `ConfigurationError` if `inner` holds a codec that is `joint`: nested in `given`, its `decode_joint` is never called."""
    if any(one.joint for one in nested(inner)):
        raise ConfigurationError(
            f"{given}: `joint` would never be called inside this codec; make it the outermost one, or put it inside Squares, "
            "DCT or Hadamard only."
        )


def warm_up(codec: Codec) -> None:
    """Encode and decode once, so that compiled code is ready before a first round waits for it: seconds once on a machine, then milliseconds.

    Args:
        codec: the codec of the coming rounds.

    >>> from thinwire.codecs import Identity
    >>> warm_up(Identity())
    """
    codec = codec.fitted(((1 << 8, 1 << 8),))
    x = torch.ones(1 << 16)  # so many that all ways are taken
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    for eighths in range(9):
        form = codec.within(eighths / 8, x.numel())
        if eighths == 8 or form is not codec:
            form.encode(x, payload, Key())
            form.decode_add(payload, x, Key())
