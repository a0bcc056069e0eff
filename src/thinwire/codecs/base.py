"""The interface of a codec, and the checks that all codecs use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.layout import Part, Symbols
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.kernels import Kernels
from thinwire.packet import HEADER_NBYTES
from thinwire.rng import Key

Shapes = tuple[tuple[int, ...], ...]
Said = tuple[Tensor, Key, float]  # a packet's payload, its key, and its weight


class Pacer(Protocol):
    """Chooses the codec of each of a replica's rounds by the time that it has."""

    def before_send(self, update: Any, now: float, seconds: float) -> None:
        """Set the codec of the round `update`, which departs `now` and must land in `seconds`; infinite: it has no deadline."""

    def on_land(self, late: bool) -> None:
        """A round has landed; `late`: training waited for it."""


@runtime_checkable
class Codec(Protocol):
    """Turns a flat fp32 tensor into a predictable number of bytes on its device, and back.

    A codec is a frozen dataclass; its text is its identity on the wire. Its random numbers are a pure function of
    the packet's `key`, which both sides know. A subclass writes `nbytes`, `encode` and `decode_add`, and **declares**
    its other abilities. The defaults of the declarations below are those of a codec without special abilities. No caller
    tests a codec's type. Laws (`thinwire.testing.check` runs them): the payload has exactly `nbytes(numel)` bytes, and all of them
    are written; decoding depends on bytes and key only; the claims hold. A codec that `varies` may send fewer bytes.
    """

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the payload for `numel` elements (`packet_nbytes` adds the header); the largest number for a codec that `varies`."""

    @abstractmethod
    def encode(self, x: Tensor, payload: Tensor, key: Key) -> int | None:
        """Write flat fp32 `x` into `payload` (uint8, `nbytes(x.numel())`). Raises `NonFiniteError` if `x` holds NaN or infinity.

        Returns None; a codec that `varies` returns the number of bytes used at the front of `payload`, and writes zeros behind them.
        """

    @abstractmethod
    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Add `weight` times the decoded values to flat fp32 `out`; the same bits on every machine.

        The bytes come from a peer and may be arbitrary. Raises `PacketError` if they cannot be decoded, and leaves `out` unchanged.
        Otherwise they decode to some values, in time and memory that depend on `out.numel()` only. A hostile scale may make
        these NaN or infinite. All replicas decode the same values, so if the new anchor is not finite, all of them drop the
        round, and nothing changes.
        """

    # ---- claims

    @property
    def claims(self) -> frozenset[str]:
        """The properties that the codec claims for its values; `thinwire.testing.check` tests them, `thinwire.testing.CLAIMS` lists them."""
        return frozenset()

    @property
    def grain(self) -> int | None:
        """A delta may be cut at multiples of this number of elements and its parts encoded one by one, with the same values
        and the same number of bytes. None: only as a whole.
        """
        return None

    @property
    def any_device(self) -> bool:
        """Whether the codec itself, without codecs inside it, makes the same bytes on every device; otherwise deltas are copied to the host first."""
        return False

    @property
    def biased(self) -> bool:
        """Whether the codec's error, beyond the rounding of a float, does not average out over the rounds. The codecs inside
        it declare their own."""
        return True

    @property
    def samples(self) -> bool:
        """Whether it sends randomly drawn values, scaled up: the error may exceed the values, and a mean cannot be encoded again."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """The reason why every round needs the same replicas, as the end of a sentence that begins with the codec; empty if
        replicas may join and leave."""
        how = (
            "divides by those who sent a value, where a delta may count more than another; the codec inside it does not"
        )
        return how if self.joint else ""

    # ---- sizes

    @property
    def varies(self) -> bool:
        """Whether the number of bytes depends on the values: `nbytes` is the largest number, which is predicted and allocated. Only the
        outermost codec may vary; its `decode_add` ignores everything behind the used bytes of a payload.
        """
        return False

    def layout(self, numel: int) -> tuple[Part, ...]:
        """The parts of the payload for `numel` elements, in order. A codec that compresses the payload further uses them."""
        return (Symbols(self.nbytes(numel)),)

    # ---- shapes

    @property
    def needs_shapes(self) -> bool:
        """Whether it uses the shapes of the tensors that are concatenated in x. Without shapes it treats x as one vector. A
        replica calls `fitted` for each of its fragments."""
        return False

    def fitted(self, shapes: Shapes) -> Codec:
        """This codec for tensors of these `shapes`; it treats the rest of x as a vector."""
        return self

    def spans_of_rest(self, numel: int) -> tuple[tuple[int, int], ...]:
        """The first and last bound of each part of x that is too small for this codec, and is sent in another."""
        return ()

    # ---- precision, for policies

    @property
    def sparse(self) -> bool:
        """Whether it sends few of the values, and `denser` makes it send more."""
        return False

    def denser(self, density: float) -> Codec:
        """For a `sparse` codec: this codec, sending at least the share `density` of the values."""
        return self

    def few(self, numel: int) -> int | None:
        """For a `sparse` codec: the number of values in a payload for `numel` elements, if `sent` writes them and their indices. Then a caller
        decodes a packet once, and goes through all elements in pieces. None: it decodes all elements at once, with `decode_add`."""
        return None

    def sent(self, payload: Tensor, numel: int, index: Tensor, values: Tensor, key: Key, weight: float = 1.0) -> None:
        """Write to flat fp32 `values` what `decode_add` adds, and to int64 `index` the ascending indices below `numel` at which it does.
        The bytes may be arbitrary, as there. Raises `PacketError` if they cannot be decoded."""
        raise unwritten(self, "few", "sent")

    def forms(self) -> tuple[Codec, ...]:
        """Finer and coarser forms of this codec, from which a policy chooses; empty if none are known."""
        return ()

    def pacer(self) -> Pacer | None:
        """What chooses the form of each round by its deadline; None: the codec has one form."""
        return None

    def within(self, share: float, numel: int, skipped: int = 0) -> Codec:
        """For a codec with levels: this codec at the finest level that makes at most `share` of its `nbytes(numel)`, or at the coarsest. All
        levels are the same codec to receivers and on the wire. `skipped`: the rounds of this fragment in a row that sent no values.
        """
        return self

    # ---- joint decoding

    @property
    def joint(self) -> bool:
        """Whether the estimate is not the mean of the packets' values: then `decode_joint` decodes all packets of a round together."""
        return False

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        """The estimate of `numel` values from all `packets`, in their order; the same bits on every machine."""
        raise unwritten(self, "joint", "decode_joint")

    # ---- sums in transit

    @property
    def linear(self) -> bool:
        """Whether its codes may be added in transit, by any all-reduce, instead of being gathered.

        There are `len(sizes)` phases. In each, every replica projects its own x to a code, given the mean codes of the earlier
        phases, and the codes are averaged: `codes = [mean over replicas of project(x, tuple(codes), key)]`.
        Laws: `project` is linear in x for given means; `expand(codes)` is linear in the last code. With the mean code
        last, `expand` gives the estimate of the mean delta. With the replica's own code last, it gives what this replica has
        sent, and feedback keeps the rest. This is the *local* form of PowerSGD's residual: a residual against the estimate would
        grow without bound if replicas differ permanently. Random numbers come from the round's `shared` stream only.
        """
        return False

    @property
    def all_reduced(self) -> bool:
        """Whether an all-reduce may carry it: it is `linear`, or a float format whose mean can be rounded again at little loss."""
        return self.linear

    def sizes(self, numel: int) -> tuple[int, ...]:
        """The number of fp32 values that each phase adds up."""
        raise unwritten(self, "linear", "sizes")

    def project(self, x: Tensor, means: tuple[Tensor, ...], key: Key) -> Tensor:
        """The flat fp32 code of x for the phase after `means`. Raises `NonFiniteError` if `x` holds NaN or infinity."""
        raise unwritten(self, "linear", "project")

    def expand(self, codes: tuple[Tensor, ...], numel: int, key: Key) -> Tensor:
        """Flat fp32 values from a code of each phase; the same bits on every machine."""
        raise unwritten(self, "linear", "expand")

    def remembered(self, numel: int) -> int | None:
        """For a `linear` codec that starts from its last round (PowerSGD's Q): the number of these values, which are the first part
        of the last phase's mean code. `AllReduce` keeps them, equal on all replicas. None: each round starts anew."""
        return None

    def warmed(self, last: Tensor) -> Codec:
        """This codec, starting from the `last` kept values, and from random ones where these are zero, as in the first round."""
        return self


# claims that a codec may take over from one inside it
VALUES = frozenset({"exact", "odd", "contractive", "idempotent"})


def chance(parts: Sequence[Codec], own: Literal["", "unbiased", "drawn"] = "", fair: bool = True) -> frozenset[str]:
    """The claims about randomness of a codec around `parts`. `own`: its own random numbers, equal for all senders; `fair`: whether it
    is linear in the decoded values of the parts.
    """
    drawing = [part for part in parts if part.claims & {"unbiased", "drawn"}]
    if not drawing and not own:
        return frozenset()
    unbiased = fair and all(part.claims & {"exact", "unbiased"} for part in parts) and (drawing or own == "unbiased")
    shared = all("shared" in part.claims for part in drawing)
    return frozenset(["unbiased" if unbiased else "drawn", *(["shared"] if shared else [])])


def unwritten(piece: object, declared: str, member: str) -> ConfigurationError:
    """The error for a piece that lacks the member for one of its declarations.

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
    """Bytes of a packet: 48 of header, and the payload. For a codec that `varies`, this is the largest number.

    Args:
        codec: the packet's codec.
        numel: number of elements.

    >>> from thinwire.codecs import Cast
    >>> packet_nbytes(Cast("bf16"), numel=1000)
    2048
    """
    return HEADER_NBYTES + codec.nbytes(numel)


def check_finite(x: Tensor) -> None:
    """Raise `NonFiniteError` if `x` holds NaN or infinity.

    It takes one pass over `x`: the sum of squares in fp32. This sum can overflow for finite input, so if it is not finite, each element is
    checked.

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
    """Raise `ConfigurationError` unless `payload` has the size that `codec` needs for flat fp32 `values`; `shorter` allows smaller ones.
    Kernels do no further checks.
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


_PLAIN = (int, float, bool, str, type(None))


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
            # most are seen by their classes: a test of a protocol's attributes takes long, and this runs for every packet
            if Codec in type(inner).__mro__ or (type(inner) not in _PLAIN and isinstance(inner, Codec)):
                yield from nested(inner)


def rebuilt(codec: Any, change: Callable[[Any], Codec]) -> Codec:
    """A codec with `change` applied to all codecs inside it, then to itself.

    Args:
        codec: the outermost one, a dataclass.
        change: returns the codec that replaces a codec, or the same one.

    >>> from thinwire.codecs import Cast, Identity, TopK
    >>> rebuilt(TopK(0.01, Cast("bf16")), lambda one: Identity() if isinstance(one, Cast) else one)
    TopK(density=0.01, values=Identity())
    """

    def made(value: Any) -> Any:
        return rebuilt(value, change) if isinstance(value, Codec) else value

    inside = {field.name: getattr(codec, field.name) for field in fields(codec)}
    changed = {
        name: tuple(map(made, value)) if isinstance(value, tuple) else made(value) for name, value in inside.items()
    }
    return change(replace(codec, **changed))


def check_inner(codec: object, name: str, inner: object, joint: bool = False) -> None:
    """Raise `ConfigurationError` unless field `name` of `codec` takes any vector, and decodes packets one by one or `joint` is set."""
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
    """Raise `ConfigurationError` if `inner` contains a `joint` codec, because nested in `given` its `decode_joint` is never called."""
    if any(one.joint for one in nested(inner)):
        raise ConfigurationError(
            f"{given}: `joint` would never be called inside this codec; make it the outermost one, or put it inside Squares, "
            "DCT or Hadamard only."
        )


def may_skip(codec: Codec) -> bool:
    """Whether a round in `codec` may send no values, which its feedback must keep: where nothing fits, a byte alone is sent.

    Args:
        codec: any codec.

    >>> from thinwire.codecs import Sign
    >>> may_skip(Sign())
    False
    """
    return codec.varies and sum(part.nbytes for part in codec.within(0.0, 1 << 10).layout(1 << 10)) <= 1


def check_kept(codec: Codec, feedback: object | None) -> None:
    """Refuse a `codec` whose rounds may be skipped if no `feedback` keeps their deltas.

    Args:
        codec: the codec of a strategy.
        feedback: the strategy's feedback; None: what a codec loses is lost.

    Raises:
        ConfigurationError: a skipped delta would be lost.

    >>> from thinwire.codecs import Sign
    >>> check_kept(Sign(), None)
    """
    if feedback is None and may_skip(codec):
        raise ConfigurationError(
            f"{codec}: a skipped delta would be lost; give the strategy feedback=Feedback(), as streaming_sign has it, or choose skips=0."
        )


def check_whole(codec: Any) -> None:
    """Raise `ConfigurationError` if a setting of `codec` that is declared as a whole number is none, or has more than 64 bits."""
    for field in fields(codec):
        value = getattr(codec, field.name)
        whole = field.type == "int" or (field.type == "int | None" and value is not None)
        if whole and (type(value) is not int or not -(2**63) <= value < 2**63):
            raise ConfigurationError(
                f"{type(codec).__name__}({field.name}={value!r}): a whole number is needed, below 2**63."
            )


def warm_up(codec: Codec) -> None:
    """Encode and decode once, so that compiled code is ready before the first round: seconds the first time on a machine, then milliseconds.
    A process does so once for each codec.

    Args:
        codec: the codec of the coming rounds.

    >>> from thinwire.codecs import Identity
    >>> warm_up(Identity())
    """
    _warm(codec)  # type: ignore[arg-type]  # a frozen dataclass is hashable


@lru_cache(maxsize=4096)
def _warm(codec: Codec) -> None:
    codec = codec.fitted(((1 << 8, 1 << 8),))
    x = torch.ones(1 << 16)  # enough elements to compile all branches
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    for eighths in range(9):
        form = codec.within(eighths / 8, x.numel())
        if eighths == 8 or form is not codec:
            form.encode(x, payload, Key())
            form.decode_add(payload, x, Key())


# ---- values and packets on two devices


def runs_anywhere(codec: Codec) -> bool:
    """Whether `codec`, with all codecs inside it, makes the same bytes on every device."""
    return all(part.any_device for part in nested(codec))


def whole_anywhere(codec: Codec) -> bool:
    """Whether packets of `codec` are better decoded on the device of the values: a packet holds a whole fragment, so this takes few calls."""
    return codec.grain is None and not codec.joint and runs_anywhere(codec)


def encode_from(x: Tensor, codec: Codec, payload: Tensor, key: Key) -> int:
    """Encode values that may be on another device than the payload.

    A codec that makes the same bytes on every device encodes on the device of the values, so that only the packet's bytes are copied.

    Args:
        x: flat fp32, on any device.
        codec: the codec of the packet.
        payload: flat uint8 of `codec.nbytes(x.numel())` bytes.
        key: the packet's key.

    Returns:
        The number of used bytes of `payload`.

    >>> from thinwire.codecs import Identity
    >>> encode_from(torch.ones(3), Identity(), torch.empty(12, dtype=torch.uint8), Key())
    12
    """
    if x.device == payload.device or not runs_anywhere(codec):
        used = codec.encode(x.to(payload.device), payload, key)
    else:
        there = torch.empty(payload.shape, dtype=torch.uint8, device=x.device)
        used = codec.encode(x, there, key)
        payload.copy_(there)
    return payload.numel() if used is None else used
