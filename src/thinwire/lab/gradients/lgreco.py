"""L-GreCo: chooses the codec of each matrix so that the total error is no more than that of one codec for all.

Replica 0 measures, decides, and sends the choice to the others before the next round departs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity, encode_from
from thinwire.errors import ConfigurationError, PacketError
from thinwire.exchange import Round
from thinwire.exchange.chunks import cut
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import MOST_STAGES, Stage
from thinwire.lab.codecs.per_tensor import Each
from thinwire.packet import payload
from thinwire.pieces.policy import Deciding
from thinwire.rng import Key
from thinwire.types import State

BUCKETS = 10_000  # steps of the error in the table


@dataclass(frozen=True)
class LGreCo(Deciding):
    """Choose for each matrix of `Each(codec)` one of `candidates` or the codec itself, in the fewest bytes without more loss in all:

        minimise Σ_l bytes(l, c_l)   subject to   Σ_l ‖z_l − q(z_l; c_l)‖ ≤ alpha · Σ_l ‖z_l − q(z_l; codec)‖

    by dynamic programming over 10,000 steps of error. z is what round n·window of the fragment encodes on replica 0, with
    its feedback added; the choice holds for the next `window` rounds. Before the first choice, and if a choice would not be smaller than
    one codec for all or would lose more, that codec is used. So by the measured errors it is never worse than one codec for all.

    *Source*: L-GreCo (Markov, Alimohammadi, Frantar, Alistarh, MLSys 2024, arXiv 2210.17357). *Differs*: z is one round's and not
    a mean of ten; candidates are any codecs, and their size is in bytes. Without `candidates` they are: TopK and ChunkedTopK with ten
    densities from a quarter to four times theirs; LowRank with half to twice the rank; Int with 2, 4 and 8 bits and blocks of a
    quarter and four times the size.

    *Wire*: the packets of the chosen codecs, and from replica 0 48 + 4 bytes a matrix to each other in a round that
    decides ("policy" in the ledger). Predicted bytes are those of one codec for all, an upper bound. State: the choices. Cost: each
    candidate's encoding and decoding once in `window` rounds, on replica 0's exchange thread.

    Args:
        candidates: codecs to choose from; empty: finer and coarser forms of the strategy's codec.
        alpha: factor by which the loss may exceed that of one codec for all; above 0.
        window: rounds between two choices.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> choose([[2.0, 0.0, 4.0], [2.0, 1.0, 4.0]], [[10, 30, 5], [100, 115, 80]], most=4.0)
    [0, 0]
    >>> choose([[2.0, 0.0, 4.0], [2.0, 1.0, 4.0]], [[10, 20, 5], [100, 115, 80]], most=4.0)
    [1, 2]
    """

    candidates: tuple[Codec, ...] = ()
    alpha: float = 1.0
    window: int = 10

    def __post_init__(self) -> None:
        if not all(isinstance(codec, Codec) and not isinstance(codec, type) for codec in self.candidates):
            raise ConfigurationError(
                f"LGreCo(candidates={self.candidates!r}): codecs are needed, such as (Int(4), Int(8))."
            )
        if not 0 < self.alpha < math.inf or type(self.window) is not int or self.window < 1:
            raise ConfigurationError(
                f"LGreCo(alpha={self.alpha}, window={self.window}): alpha > 0 and a window of at least 1 round are needed; 1 and 10 are usual."
            )

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        if not isinstance(codec, Each) or codec.chosen:
            raise ConfigurationError(
                f"{self} over {codec}: a codec for each matrix is needed, such as Each(TopK(0.01))."
            )
        return tuple(replace(codec, codec=option) for option in self._options(codec))

    def init(self, codec: Codec) -> State:
        return {"chosen": torch.zeros(len(_each(codec).matrices))}

    def at(self, codec: Codec, numel: int, number: int, state: State) -> Codec:
        options = self._options(_each(codec))
        chosen = tuple(options[int(index)] for index in state["chosen"])
        return replace(_each(codec), chosen=chosen) if bool(state["chosen"].any()) else codec

    # ---- decisions of replica 0

    def tells(self, codec: Codec, number: int) -> int:
        """How many numbers replica 0 sends to the others in round `number`."""
        return 0 if number % self.window else len(_each(codec).matrices)

    def before_send(self, codec: Codec, round_: Round) -> _Choices | None:
        count = self.tells(codec, round_.key.round)
        return _Choices(self, codec, round_, count) if count else None

    def decide(self, codec: Codec, signal: Callable[[int, int], Tensor], numel: int, key: Key) -> Tensor:
        """The choice for the next rounds: for each matrix the index of its option, fp32; `signal` is what this round encodes."""
        each = _each(codec)
        z, options = signal(0, numel), self._options(each)
        if not bool(torch.isfinite(z).all()):
            return torch.zeros(len(each.matrices))
        errors, sizes = [], []
        for part in each.split(z):
            coded = [option.fitted((tuple(part.shape),)) for option in options]
            errors.append([_error(one, part.reshape(-1), key) for one in coded])
            sizes.append([one.nbytes(part.numel()) for one in coded])
        most = self.alpha * sum(of[0] for of in errors)
        return torch.tensor(choose(errors, sizes, most), dtype=torch.float32)

    def told(self, codec: Codec, told: Tensor) -> State:
        """The next state, from the numbers that replica 0 `told`. Raises `PacketError`."""
        most = len(self._options(_each(codec)))
        if not bool(((told >= 0) & (told < most) & (told == told.floor())).all()):
            raise PacketError(
                f"replica 0 chose {told.tolist()[:8]}; whole numbers below {most} are needed. Run the same strategy on every replica."
            )
        return {"chosen": told}

    def _options(self, codec: Each) -> tuple[Codec, ...]:
        """The options of each matrix; the first is the codec for all."""
        return (codec.codec, *(self.candidates or _around(codec.codec)))


class _Choices:
    """A message of `count` numbers from replica 0 to all others, which leaves after the packets of `round_`; they do not wait for it."""

    def __init__(self, policy: LGreCo, codec: Codec, round_: Round, count: int) -> None:
        self._told = partial(policy.told, codec)
        self._decide = partial(policy.decide, codec, round_.signal, round_.numel, round_.key)
        self._round = Round(
            round_.context, Identity(), count, round_.key, self._decided, 0, round_.order, round_.step,
            on_stream=round_.on_stream,
        )  # fmt: skip
        self._stage = Stage(self._round, Identity(), MOST_STAGES - 1, purpose="policy")
        (message,) = cut(Identity(), 0, count)
        self._own: Outgoing | None = None
        if round_.rank == 0:
            self._own = self._stage.send(0, message, round_.peers, self._round.signal, round_.key)
        else:
            self._stage.expect({0: (message,)})

    def _decided(self, begin: int, end: int) -> Tensor:
        return self._decide()[begin:end]

    def on_arrival(self) -> State:
        self._stage.receive(0)
        packet = self._stage.packet(0, 0) if self._own is None else self._own.wait()
        numbers = torch.zeros(self._round.numel)
        Identity().decode_add(payload(packet), numbers, self._round.key)
        self._round.close()
        return self._told(numbers)


def choose(errors: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], most: float) -> list[int]:
    """An option for each layer, so that Σ sizes is least with Σ errors ≤ `most`; option 0 for all layers if nothing is smaller.

    A knapsack in steps of most / 10,000, to which errors are rounded up: the result is feasible, and hardly larger than the best.

    Args:
        errors: a number for each layer and option.
        sizes: bytes for each layer and option.
        most: the number that the sum of the errors may reach.

    >>> choose([[0.0, 1.0], [0.0, 5.0]], [[100, 10], [100, 10]], most=2.0)
    [1, 0]
    """
    uniform = [0] * len(errors)
    if not errors or not 0 < most < math.inf:
        return uniform
    steps = np.ceil(np.asarray(errors, dtype=np.float64) / (most / BUCKETS))  # [layers, options]
    least = np.zeros(BUCKETS + 1)  # by steps spent: the fewest bytes so far
    taken = np.zeros((len(errors), BUCKETS + 1), dtype=np.int64)
    for layer, (costs, nbytes) in enumerate(zip(steps, sizes)):
        offers = np.full((len(costs), BUCKETS + 1), np.inf)
        for option, cost in enumerate(costs):
            if cost <= BUCKETS:
                offers[option, int(cost) :] = least[: BUCKETS + 1 - int(cost)] + nbytes[option]
        taken[layer] = offers.argmin(0)
        least = offers.min(0)
    if not least[-1] < sum(of[0] for of in sizes):
        return uniform
    left, chosen = int(least.argmin()), uniform
    for layer in reversed(range(len(errors))):
        chosen[layer] = int(taken[layer, left])
        left -= int(steps[layer, chosen[layer]])
    return chosen


def _around(codec: Codec) -> tuple[Codec, ...]:
    """Finer and coarser forms of `codec`."""
    if not codec.forms():
        raise ConfigurationError(
            f"LGreCo() over Each({codec}): finer and coarser forms of it are not known; name some, as in LGreCo((Int(2), Int(4), Int(8)))."
        )
    return codec.forms()


def _each(codec: Codec) -> Each:
    assert isinstance(codec, Each), codec  # `codecs` refuses all others
    return codec


def _error(codec: Codec, x: Tensor, key: Key) -> float:
    """‖x − q(x)‖."""
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    encode_from(x, codec, payload, key)
    lost = x.to("cpu", copy=True)
    codec.decode_add(payload, lost, key, -1.0)
    return float(torch.linalg.vector_norm(lost, dtype=torch.float64))
