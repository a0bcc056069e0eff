"""Weighs deltas by their tokens: each replica scales its delta, so that the mean over replicas is the mean over tokens.

    Σ_m T_m·Δ_m / Σ_m T_m = 1/M · Σ_m (M·T_m / Σ_n T_n)·Δ_m

T_m is the number of tokens that replica m trained since its last delta of the fragment. If steps have different numbers of tokens, as
with packed documents, the plain mean of deltas gives a token of a small step more weight.
"""

from __future__ import annotations

import math
import struct

import torch

from thinwire.comm.group import Group
from thinwire.errors import CheckpointError, ConfigurationError, PacketError
from thinwire.strategy import Strategy

_COUNT = struct.Struct("<d")
_MOST_TOKENS = 1e12  # most tokens in a step
_MOST_TOKENS_OF_DELTA = 1e12 * _MOST_TOKENS  # so that sums of them are finite


def tokens_of_step(tokens: object) -> float:
    """Check a number of tokens. Raises `ConfigurationError`."""
    if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not 0 < tokens <= _MOST_TOKENS:
        raise ConfigurationError(
            f"tokens={tokens!r}: the number of tokens per inner step is needed, above 0 and at most {_MOST_TOKENS:.0e}."
        )
    return float(tokens)


def cannot_weigh(strategy: Strategy) -> str:
    """The part of `strategy` that cannot weigh deltas in a fixed group; "" if all of it can."""
    refused = {
        "Gradients(), whose replicas step together": strategy.exchanges_gradients,
        f"{strategy.exchange}, whose rule weighs neighbours": not strategy.exchange.traits.agrees,
        f"{strategy.merge}, which counts its own delta as one of M": strategy.merge.eager,
        f"{strategy.aggregate}, which is not a mean": not strategy.aggregate.linear,
        f"{strategy.codec}, which divides by the number of those who sent a value": strategy.codec.joint,
        f"{strategy.feedback}, whose references would drift from their agreed mean": strategy.feedback is not None
        and strategy.feedback.kappa > 0,
        f"{strategy.privacy}, which bounds the weight of a delta": strategy.privacy is not None,
    }
    return next((what for what, asked in refused.items() if asked), "")


def check_weighing(strategy: Strategy) -> None:
    """Raise `ConfigurationError` for what cannot weigh deltas in a fixed group."""
    if what := cannot_weigh(strategy):
        raise ConfigurationError(f"tokens= with {what}: deltas cannot be weighed there; leave it out.")


def check_unchanged(by_tokens: bool, tokens: float | None) -> None:
    """Raise `ConfigurationError` if a replica that began with or without `tokens` (`by_tokens`) has changed that since."""
    if by_tokens != (tokens is not None):
        raise ConfigurationError(
            "tokens were set for a replica that began without them, or removed: all replicas weigh deltas alike from the first round "
            "on. Give Replica(tokens=...) at the start."
        )


def check_saved(saved: bool, here: bool) -> None:
    """Raise `CheckpointError` unless deltas have weights of one kind in the checkpoint's run and `here`; true: the number of tokens."""
    if saved != here:
        ways = {True: "the number of its tokens", False: "1"}
        raise CheckpointError(
            f"in the checkpoint's run the weight of a delta is {ways[saved]}, here it is {ways[here]}; resume with the run's own setting."
        )


class FactOfAll:
    """A few bytes of each replica about a round, as many on all, sent to all others when its delta departs."""

    def __init__(self, group: Group, tag: int, own: bytes, purpose: str) -> None:
        message = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        peers = [peer for peer in range(group.size) if peer != group.rank]
        self._others = {peer: torch.zeros_like(message) for peer in peers}
        self._transfer = group.post(tag, dict.fromkeys(peers, message), self._others, purpose)

    def wait(self) -> dict[int, bytes]:
        """Those of the others. Raises `LinkError`."""
        self._transfer.wait()
        return {peer: bytes(other.tolist()) for peer, other in self._others.items()}


class TokenCount:
    """The numbers of tokens of all replicas' deltas in a round: 8 bytes to each other, sent when the delta departs."""

    def __init__(self, group: Group, tag: int, tokens: float) -> None:
        self._group, self._own = group, tokens
        self._facts = FactOfAll(group, tag, _COUNT.pack(tokens), "tokens")

    def share(self) -> float:
        """The factor of this replica's delta; waits for the others. Raises `LinkError`, `PacketError`."""
        counts = {peer: float(_COUNT.unpack(count)[0]) for peer, count in self._facts.wait().items()}
        if {self._own, *counts.values()} == {0.0}:  # the round that ends a run, right after another one
            return 1.0
        for peer, count in counts.items():  # 0: it started again, and has not trained since
            if not 0 <= count <= _MOST_TOKENS_OF_DELTA:
                raise PacketError(
                    f"replica {peer} sent {count} as the number of tokens of its delta; check that replica."
                )
        return self._own * self._group.size / math.fsum((self._own, *counts.values()))
