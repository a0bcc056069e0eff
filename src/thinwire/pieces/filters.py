"""What a strategy asks of its filters, and a chain of them; pieces/transforms.py has some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import ConfigurationError
from thinwire.types import State


@runtime_checkable
class Filter(Protocol):
    """Changes the signal before `Feedback` and the codec, and the estimate after them:

        s → signal → (feedback, codec, exchange) → settle → estimate

    Tensors are whole fragments, flat, in fp32, on the CPU. Nothing is changed in place, except `held` in `settle`, so a refused round
    leaves the state unchanged. A subclass writes `signal` or `settle` or both.
    """

    @property
    def momentum(self) -> bool:
        """Whether it has momentum; then no other piece may have momentum."""
        return False

    @property
    def needs_whole(self) -> bool:
        """Whether it needs a replica's whole signal, and not only a rank's shard or a bucket."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round."""
        return "is fitted to a number of replicas, or keeps what all of them must agree on"

    @property
    def full(self) -> int:
        """The number of first rounds that may be sent in fp32 with any codec (see `dense`); `NEVER_KNOWN` if only the run tells."""
        return 0

    def fitted(self, codec: Codec, numel: int, size: int) -> Filter:
        """This filter for a fragment of `numel` in `codec`, among `size` replicas."""
        return self

    def init(self, numel: int) -> State:
        """The first state for a fragment."""
        return {}

    def dense(self, state: State) -> bool:
        """Whether a round that departs in this state is sent in fp32 with any codec. The same on all replicas."""
        return False

    def signal(self, s: Tensor, state: State) -> Tensor:
        """The signal to send instead of `s`."""
        return s

    def settle(self, s: Tensor, sent: Tensor, mean: Tensor, state: State, held: State) -> tuple[Tensor, State]:
        """The estimate instead of the `mean` of all replicas, and the next state.

        `s` is the input of `signal`, `sent` the decoded own packet. It may set values to zero in `held`, the next state of feedback.
        """
        return mean, {}


def check_filters(filters: Sequence[Filter]) -> None:
    """Raise `ConfigurationError` unless these are filters, and at most one of them has momentum."""
    if not isinstance(filters, tuple) or any(not isinstance(f, Filter) or isinstance(f, type) for f in filters):
        raise ConfigurationError(
            f"filters={filters!r}: a tuple of Filters is needed, such as (Clip(1.0), Momentum(0.9))."
        )
    owners = [f for f in filters if f.momentum]
    if len(owners) > 1:
        raise ConfigurationError(
            f"filters={filters!r}: {len(owners)} of them keep momentum, one owner is needed; leave one of "
            f"{', '.join(map(str, owners))}."
        )


def said(filters: Sequence[Filter], states: Sequence[State], s: Tensor) -> list[Tensor]:
    """The input of each filter, from the first to the last, and then the signal to encode."""
    inputs = [s]
    for one, state in zip(filters, states, strict=True):
        inputs.append(one.signal(inputs[-1], state))
    return inputs


def settled(
    filters: Sequence[Filter],
    states: Sequence[State],
    inputs: Sequence[Tensor],
    sent: Tensor,
    mean: Tensor,
    held: State,
) -> tuple[Tensor, tuple[State, ...]]:
    """The estimate after all filters, from the last to the first, and their next states."""
    after: list[State] = []
    for one, state, s in reversed(list(zip(filters, states, inputs[:-1], strict=True))):
        mean, following = one.settle(s, sent, mean, state, held)
        after.append(following)
    return mean, tuple(reversed(after))
