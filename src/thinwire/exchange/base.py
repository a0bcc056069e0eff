"""The interface of an exchange, which turns packets into one estimate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import Group
from thinwire.errors import ConfigurationError
from thinwire.exchange.round import Round
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.partition import Fragment
from thinwire.types import State

if TYPE_CHECKING:
    from thinwire.comm.uplink import Link


@dataclass(frozen=True)
class ExchangeTraits:
    """What an exchange can do, and what it needs.

    Args:
        gathers: all replicas' values of a range are in one place at once, as an `Aggregate` that is not linear needs.
        agrees: the estimate has the same bits on all replicas; if not, each trains its own weights, which stay near each other (`Gossip`).
        multiplies: it computes the inner products of all replicas' values of a whole fragment before it aggregates any range.
        needs_hub: a hub of the carrier must average; its rank follows those of all replicas (`WithHub`).
        sends_own: the codec encodes values of single replicas, and not sums of them.

    >>> ExchangeTraits(gathers=True).agrees
    True
    """

    gathers: bool = False
    agrees: bool = True
    multiplies: bool = False
    needs_hub: bool = False
    sends_own: bool = True


@runtime_checkable
class Exchange(Protocol):
    """Turns all replicas' values of a fragment into one estimate of their mean, with the same bits on all if its `traits` say that it `agrees`.

    It has two halves, so that several rounds share the link: `depart` starts receiving and sending; `arrive` waits, decodes
    and yields the estimate range by range. An exchange may keep a state for each fragment: `init` makes it, and
    it returns the next one without changing the present one, so a failed round changes nothing.

    Laws (tests/exchange/test_exchanges.py): the estimate depends on the sent bytes only;
    `nbytes_sent` equals the ledger's count for the purpose "packet"; `check` refuses a codec that does not fit.
    A subclass writes the four abstract methods, and declares its `traits` and its other properties.
    """

    @property
    def traits(self) -> ExchangeTraits:
        """What it can do, and what it needs."""
        return ExchangeTraits()

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        """Number of elements of a fragment that replica `rank` of `size` aggregates."""
        return numel

    @property
    def needs_fixed_group(self) -> str:
        """The reason why every round needs the same replicas, as the end of a sentence that begins with the exchange; empty if
        replicas may join and leave, and the exchange keeps no state of them.
        """
        return "does not declare that replicas may come and go (needs_fixed_group = '')"

    @property
    def feedback(self) -> Feedback | None:
        """The feedback of replicas that send a mean of others' values; None if they have none."""
        return None

    def nbytes_products(self, size: int) -> int:
        """Bytes that a replica of `size` sends for inner products in a round whose aggregate needs them, headers included; the ledger's
        purpose is "products".
        """
        return 0

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        """Raise `ConfigurationError` unless this exchange can carry packets of `codec`, under the strategy's `feedback`."""
        return

    def check_beside(self, strategy: Any) -> None:
        """Raise `ConfigurationError` unless the other pieces of `strategy` work with this exchange."""
        return

    def seeded(self, seed: int) -> Exchange:
        """This exchange in a strategy with this `seed`, for what it draws before the first round."""
        return self

    def driver(self, training: Any, fragments: Sequence[Fragment], group: Group, site: Group | None) -> Any:
        """The driver of a replica, if this exchange does not agree: such replicas hold no anchors."""
        raise ConfigurationError(
            f"{self} declares that replicas do not agree, and names no driver for them; write its `driver`, or choose an exchange that agrees, "
            "such as Direct()."
        )

    def check_size(self, size: int) -> None:
        """Raise `ConfigurationError` if `size` replicas cannot use this exchange; `init` makes the checks that depend on a fragment."""
        return

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        """The first state of a fragment on replica `rank` of `size`, on the CPU. Raises `ConfigurationError` if
        the group does not fit.
        """
        return {}

    def why(self, fragments: Sequence[tuple[Codec, int]], size: int) -> list[str]:
        """A line for each choice made for `fragments` (codec and elements of each); empty for an exchange that chooses nothing."""
        return []

    @abstractmethod
    def depart(self, round_: Round, state: State) -> Any:
        """Start a round without waiting for peers. The returned value is passed to `arrive`."""

    @abstractmethod
    def arrive(self, departure: Any) -> Ranges:
        """Finish the round that `depart` began: yields its `Range`s, and returns the `Arrival`. The caller closes the round. Raises
        `LinkError`, `PacketError`."""

    def largest(self, departure: Any) -> dict[int, float]:
        """The largest absolute value in the packets of each replica after `arrive`, by rank; infinity for one that is not finite. Empty if
        this exchange has not all packets.
        """
        return {}

    def checksums(self, departure: Any) -> dict[int, str]:
        """A checksum of the packets of each replica after `arrive`, by rank. Empty if replicas do not get the same packets."""
        return {}

    @abstractmethod
    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        """Bytes that replica `rank` of `size` (None: the one that sends most) sends in a round, headers included."""

    def nbytes_of_each(self, codec: Codec, numel: int, size: int) -> list[int]:
        """Bytes that each of `size` replicas sends in a round; by default all as many as the one that sends most."""
        return [self.nbytes_sent(codec, numel, size)] * size

    @abstractmethod
    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        """Seconds of a round if every replica's uplink is `link`, with no other traffic (predicted)."""


class Range(NamedTuple):
    """A part of the estimate. Both tensors are valid until the next range.

    Args:
        begin: the number of elements before it.
        mean: the estimate from there on, of shape (elements,) in fp32.
        own: what this replica's own packets hold there, of the same shape: NaN where it refused and the aggregate tolerates that. None
            unless the round `decodes_own`.

    >>> import torch
    >>> Range(0, torch.zeros(2)).own is None
    True
    """

    begin: int
    mean: Tensor
    own: Tensor | None = None


@dataclass(frozen=True)
class Arrival:
    """The end of a round.

    If it is `void`, or if more flags have `REFUSED` than the aggregate tolerates, the round has no result: drop its values.

    Args:
        flags: the flags of each replica in rank order, one number each.
        state: the exchange's next state of the fragment.
        void: the estimate has overflowed, although all replicas' values were finite.

    >>> Arrival(flags=(0, 0), state={}).void
    False
    """

    flags: tuple[int, ...]
    state: State
    void: bool = False


Ranges = Generator[Range, None, Arrival]
"""Yields the ranges of an estimate, and returns how the round has ended."""


class Arriving:
    """An iterator over the ranges of a round; `arrival` is known after the last one.

    Args:
        ranges: of `Exchange.arrive`.

    >>> import torch
    >>> from thinwire import run_threads
    >>> from thinwire.codecs import Identity
    >>> from thinwire.exchange import Direct, Round, SendContext
    >>> from thinwire.rng import Key
    >>> def replica(group):
    ...     delta = torch.tensor([1.0, 3.0]) * group.rank
    ...     round_ = Round(SendContext(group), Identity(), 2, Key(sender=group.rank), lambda begin, end: delta[begin:end])
    ...     arriving = Arriving(Direct().arrive(Direct().depart(round_, {})))
    ...     means = [part.mean.tolist() for part in arriving]
    ...     round_.close()  # waits until all is sent
    ...     return means, arriving.arrival.flags
    >>> run_threads(2, replica)[0]
    ([[0.5, 1.5]], (0, 0))
    """

    arrival: Arrival

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges

    def __iter__(self) -> Iterator[Range]:
        self.arrival = yield from self._ranges


def fits(exchange: Exchange, codec: Codec) -> bool:
    """Whether `exchange` takes `codec`, without feedback."""
    try:
        exchange.check(codec, None)
    except ConfigurationError:
        return False
    return True
