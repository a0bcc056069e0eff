"""The owner of a part of a fragment: it sends the mean of all values, and may keep the codec's error for the next round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from thinwire.codecs import Codec, nested
from thinwire.codecs.base import may_skip
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Exchange
from thinwire.exchange.chunks import CodedRange, Message
from thinwire.exchange.decode import Decoder
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import Stage
from thinwire.packet import REFUSED
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.types import State


def check_owners(exchange: object, feedback: Feedback | None) -> None:
    """Raise `ConfigurationError` unless an owner can use `feedback`."""
    name = type(exchange).__name__
    if not isinstance(feedback, Feedback | None):
        raise ConfigurationError(f"{name}(feedback={feedback!r}): Feedback(...) or None is needed.")
    if feedback and feedback.kappa:
        raise ConfigurationError(
            f"{name}(feedback={feedback}): kappa=0 is needed, because an owner keeps no reference; choose Feedback()."
        )


def check_means(exchange: Exchange, codec: Codec) -> None:
    """Raise `ConfigurationError` unless an owner can encode means of any part of a fragment in `codec`."""
    if codec.needs_shapes:
        raise ConfigurationError(
            f"{exchange} with {codec}: a codec that can encode any part of a fragment is needed, this one needs the shapes "
            "of whole tensors; choose AllReduce() for LowRank, otherwise Direct(), or a codec without shapes, such as Sign(block=512)."
        )
    if any(inner.samples for inner in nested(codec)):
        raise ConfigurationError(
            f"{exchange} with {codec}: a codec that can encode a mean again is needed, this one would sample twice; choose AllReduce() or Direct()."
        )
    if may_skip(codec) and not exchange.feedback:
        raise ConfigurationError(
            f"{exchange} with {codec}: a mean that its owner skips would be lost; choose Direct(), skips=0, or an exchange with its own "
            "feedback, such as TwoShot(Feedback())."
        )


class Owner:
    """Encodes the means of `messages`, one after another, as packets of `stage` with `key`; `after` is the owner's next state."""

    def __init__(self, stage: Stage, key: Key, messages: Sequence[Message], feedback: Feedback | None, state: State):
        self._stage, self._key, self._messages, self._feedback, self._state = stage, key, messages, feedback, state
        self._buffers = stage.round.context.buffers
        self.after: State = {name: self._buffers.floats(held.numel()) for name, held in state.items()}

    def say(
        self, index: int, mean: Callable[[CodedRange], Tensor], marks: Sequence[int], to: Sequence[int], room: Decoder
    ) -> Outgoing:
        """Encode the mean of message `index` and send it `to` these ranks. If too many `marks` have `REFUSED`, there is no mean."""
        message, void = self._messages[index], room.void(marks)
        means = self._buffers.floats(message.numel)
        for coded in message.ranges:
            part = means[coded.begin - message.begin : coded.end - message.begin]
            part.zero_() if void else part.copy_(mean(coded))

        def signal(begin: int, end: int) -> Tensor:
            part = means[begin - message.begin : end - message.begin]
            return self._feedback.signal(part, self._held(self._state, begin, end)) if self._feedback else part

        packet = self._stage.write(index, message, signal, self._key, REFUSED if void else 0, marks)
        self._stage.post(packet, to)
        if self._feedback and not packet.flags & REFUSED:
            for coded in message.ranges:
                part = means[coded.begin - message.begin : coded.end - message.begin]
                sent = room.sent(coded, packet.packet, self._key)
                before, after = (self._held(state, coded.begin, coded.end) for state in (self._state, self.after))
                self._feedback.settle(part, sent, sent, before, after)
        self._buffers.give(means)
        return packet

    def _held(self, state: State, begin: int, end: int) -> State:
        start = self._messages[0].begin
        return {name: held[begin - start : end - start] for name, held in state.items()}
