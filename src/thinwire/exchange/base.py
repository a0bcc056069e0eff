"""What an exchange is: how packets become one estimate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.emulated import Link
from thinwire.exchange.round import Round
from thinwire.pieces.feedback import Feedback
from thinwire.types import State

Settle = Callable[[int, Tensor, Callable[[], Tensor]], None]
"""Takes the estimate of the elements from the first number on; the last gives what this replica's own packets say of them.
Both tensors are lent until the call returns."""


@runtime_checkable
class Exchange(Protocol):
    """How every replica's values of a fragment become one estimate of their mean, the same bits on all if it `agrees`.

    Two halves, so that several rounds share the link: `depart` starts receiving and sending, `arrive` waits, decodes
    and hands over the estimate range by range. What an exchange remembers of a fragment is its state: `init` makes it,
    `arrive` returns the next and changes nothing of the present one, so a round that fails has changed nothing.

    Laws (tests/exchange/test_exchanges.py): the estimate depends on the bytes that travelled and on nothing else;
    `nbytes_sent` is what the ledger counts for the purpose "packet"; a codec that does not fit is refused by `check`.
    A subclass writes the four abstract methods, and declares what else is so of it.
    """

    @property
    def gathers(self) -> bool:
        """Whether all replicas' values of a range are in one place at once, as an `Aggregate` that is not linear needs."""
        return False

    @property
    def agrees(self) -> bool:
        """Whether the estimate has the same bits on all replicas; if not, each trains its own weights, which stay near each other (`Gossip`)."""
        return True

    @property
    def multiplies(self) -> bool:
        """Whether it computes the inner products of all replicas' values of a whole fragment before it aggregates any range."""
        return False

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        """Number of elements of a fragment that replica `rank` of `size` aggregates."""
        return numel

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round, as the end of a sentence that begins with the exchange; empty: they
        may come and go, and it keeps no state of those it has met.
        """
        return "does not declare that replicas may come and go (needs_fixed_group = '')"

    @property
    def needs_hub(self) -> bool:
        """Whether a hub of the carrier has to average: its rank is behind those of all replicas (`WithReducer`)."""
        return False

    @property
    def feedback(self) -> Feedback | None:
        """The feedback of replicas that send a mean of others' values; None: they keep none."""
        return None

    @property
    def sends_own(self) -> bool:
        """Whether the codec encodes values of single replicas, and not sums of them."""
        return True

    def nbytes_products(self, size: int) -> int:
        """Bytes that a replica of `size` sends for inner products in a round whose aggregate needs them, headers included; for the ledger's
        purpose "products".
        """
        return 0

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        """Raise `ConfigurationError` unless this exchange can carry what `codec` makes, under the strategy's `feedback`."""
        return

    def check_beside(self, strategy: Any) -> None:
        """Raise `ConfigurationError` unless the other pieces of `strategy` can be beside this exchange."""
        return

    def check_size(self, size: int) -> None:
        """Raise `ConfigurationError` if `size` replicas cannot exchange like this; what depends on a fragment, `init` refuses."""
        return

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        """What replica `rank` of `size` remembers of a fragment, at first; on the CPU. Raises `ConfigurationError` if
        the group does not fit.
        """
        return {}

    def why(self, fragments: Sequence[tuple[Codec, int]], size: int) -> list[str]:
        """A line for each choice made for `fragments` (codec and elements of each); empty for an exchange that chooses nothing."""
        return []

    @abstractmethod
    def depart(self, round_: Round, state: State) -> Any:
        """Start a round, without waiting for peers; the value returned is for `arrive`."""

    @abstractmethod
    def arrive(self, departure: Any, settle: Settle) -> Arrival:
        """End the round that `depart` began. Raises `LinkError`, `PacketError`."""

    @abstractmethod
    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        """Bytes that replica `rank` of `size` (without: the one that sends most) sends for a round, headers included."""

    @abstractmethod
    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        """Seconds of a round if every replica's uplink is `link`, with no other traffic (predicted)."""


@dataclass(frozen=True)
class Arrival:
    """The end of a round.

    There is no estimate, whatever was handed over, if it is `void` or if more flags have `REFUSED` than the aggregate tolerates.

    Args:
        flags: every replica's, in rank order; a number each.
        state: the exchange's next state of the fragment.
        void: the estimate has overflowed; no replica is at fault.

    >>> Arrival(flags=(0, 0), state={}).void
    False
    """

    flags: tuple[int, ...]
    state: State
    void: bool = False
