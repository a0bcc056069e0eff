"""The exchange that adds up codes: a reduce-scatter and an all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Arrival, Arriving, Exchange, Range, Ranges
from thinwire.exchange.chunks import PIECE_NUMEL
from thinwire.exchange.round import Round
from thinwire.exchange.two_shot import Reduction, reduction_nbytes
from thinwire.pieces.feedback import Feedback
from thinwire.types import State


@dataclass(frozen=True)
class AllReduce(Exchange):
    """Average the codes, not the decoded values, of codecs that declare `all_reduced`: LowRank, RandomK, Identity and Cast.

        x̂ = decode(1/M · Σ_m code_m)      code_m: the code of replica m's signal; one sum for each phase of the codec

    It is a reduce-scatter and an all-gather of point-to-point messages. The owner of each shard adds in rank order, so all replicas
    have the same bits on any carrier. LowRank has the two phases of PowerSGD, with the residual against this replica's own message.
    With Cast the mean is rounded again, as in `TwoShot`.

    *Source*: PowerSGD (arXiv 1905.13727, Algorithm 1) for LowRank; reduce-scatter and all-gather as in Thakur, Rabenseifner, Gropp 2005
    (IJHPCA 19). *Differs*: a shard goes to its owner directly, in one delay; gloo's ring would take a round trip for each of its 2(M−1) steps.

    *Wire*: each replica sends 2(M−1)/M·(4 bytes per code, 2 with Cast), where `Direct` sends (M−1)·nbytes. Predicted: 2 delays per
    phase + 8·(bytes sent) / rate.

    State: for a codec that starts from its last round (LowRank: 4 bytes per value of Q), these values, equal on all replicas.
    There is none with a `Membership`, whose replicas may have missed the last round.

    >>> AllReduce()
    AllReduce()
    """

    needs_fixed_group: ClassVar[str] = ""

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        if not codec.all_reduced:
            raise ConfigurationError(
                f"{self} with {codec}: a codec whose codes can be added is needed, such as Identity(), Cast(), RandomK() or "
                "LowRank(); or choose TwoShot() or Direct()."
            )

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        remembered = codec.remembered(numel)
        return {} if remembered is None else {"last": torch.zeros(remembered)}

    def depart(self, round_: Round, state: State) -> _Phases:
        return _Phases(round_, state)

    def arrive(self, departure: _Phases) -> Ranges:
        return (yield from departure.arrive())

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return sum(reduction_nbytes(values, count, size, rank or 0) for values, count in _phases(codec, numel))

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        if size == 1:
            return 0.0
        hops = 2 * len(_phases(codec, numel))
        return link.serialisation_seconds(self.nbytes_sent(codec, numel, size)) + hops * link.delay_seconds


def _phases(codec: Codec, numel: int) -> list[tuple[Codec, int]]:
    """The codec and the number of codes of each phase."""
    if not codec.linear:
        return [(codec, numel)]
    return [(Identity(), count) for count in codec.sizes(numel)]


class _Phases:
    """A round, one reduction after another; all receives are posted at the beginning."""

    def __init__(self, round_: Round, state: State) -> None:
        self.round, self._state, self._goes_on = round_, state, False
        self._codec = round_.codec
        codec, last = round_.codec, state.get("last")
        if last is not None and len(last) == codec.remembered(round_.numel):
            self._codec, self._goes_on = codec.warmed(last), True
        self._reductions = [
            Reduction(round_, codec, count, 2 * number)
            for number, (codec, count) in enumerate(_phases(round_.codec, round_.numel))
        ]
        self._own: list[Tensor] = []  # codes of this replica
        self._means: list[Tensor] = []
        for reduction in self._reductions:
            reduction.expect()
        self._reductions[0].send(self._project if self._codec.linear else round_.signal)

    def arrive(self) -> Ranges:
        if not self._codec.linear:
            return replace((yield from self._reductions[0].arrive()), state=self._state)
        flags, void = [0] * self.round.size, False
        for number, reduction in enumerate(self._reductions):
            if number:
                reduction.send(self._silence if void else self._project)
            mean = self.round.context.buffers.floats(reduction.numel)
            arriving = Arriving(reduction.arrive())
            for begin, part, _ in arriving:
                mean[begin : begin + part.numel()] = part
            flags = [a | b for a, b in zip(flags, arriving.arrival.flags)]
            void |= arriving.arrival.void
            self._means.append(mean)
        if not void:
            yield from self._expand()
        after = self._after() if self._goes_on and not void else self._state
        self.round.context.buffers.give(*self._means)
        return Arrival(tuple(flags), after, void)

    def _after(self) -> State:
        """The state from which the next round starts."""
        last = self.round.context.buffers.like(self._state["last"])
        return {"last": last.copy_(self._means[-1][: len(last)])}

    def _project(self, begin: int, end: int) -> Tensor:
        """This replica's code of the phase, computed when its first part is needed. Raises `NonFiniteError`."""
        phase, codec = len(self._means), self._codec
        if len(self._own) == phase:
            signal = self.round.signal(0, self.round.numel).cpu()
            self._own.append(codec.project(signal, tuple(self._means), self.round.key))
        return self._own[phase][begin:end]

    def _silence(self, begin: int, end: int) -> Tensor:
        """Zeros for the remaining messages of a failed round, because peers wait for them."""
        return torch.zeros(end - begin)

    def _expand(self) -> Iterator[Range]:
        codec, numel, key = self._codec, self.round.numel, self.round.key
        estimate = codec.expand(tuple(self._means), numel, key)
        own = codec.expand((*self._means[:-1], self._own[-1]), numel, key) if self.round.decodes_own else None
        for begin in range(0, max(1, numel), PIECE_NUMEL):
            end = min(begin + PIECE_NUMEL, numel)
            yield Range(begin, estimate[begin:end], None if own is None else own[begin:end])
