"""Predictions of the next token as bytes, how good they are, and how far a model is from them.

Of a distribution p over V tokens travel the K most probable ones, each with its probability, and the probability of the rest together.
These K + 1 outcomes are a distribution too, and so is every coarsening of the receiver's own, q:

    KL(p‖q) = Σ_{i ≤ K} p_i·(log p_i − log q_i) + p_rest·(log p_rest − log q_rest)          q_rest = Σ of all other q

Its gradient in the logits is zero wherever the outcomes are equally probable. So a model learns nothing from one that is equal to it but
what rounding adds, whatever K is.

On the wire −log p is a whole number of quarters of a nat, from 0 to 63:

| bytes                 | what                                                                        |
|-----------------------|-----------------------------------------------------------------------------|
| 1                     | k of the Rice code                                                          |
| ⌈P·K·⌈log₂ V⌉ / 8⌉    | tokens of P positions, the most probable first                              |
| ⌈P·6 / 8⌉             | −log p_rest of each position                                                |
| at most ⌈P·K·7 / 8⌉   | −log p of the tokens, which ascend: a Rice code of the steps between them   |

Whatever arrives is one of P distributions of finite numbers, or refused: nothing is allocated from what it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.bits import pack, packed_nbytes, unpack
from thinwire.errors import PacketError

BITS = 6  # of −log p
STEP = 0.25  # nats
_LARGEST = (1 << BITS) - 1


@dataclass(frozen=True)
class Predictions:
    """`tokens` [P, K] and the logarithms [P, K + 1] of their probabilities, the last that of all other tokens together."""

    tokens: Tensor
    logs: Tensor

    def part(self, begin: int, end: int) -> Predictions:
        """Those of some positions."""
        return Predictions(self.tokens[begin:end], self.logs[begin:end])


def most_probable(logits: Tensor, top: int, temperature: float) -> Predictions:
    """Of `logits` [P, V], divided by `temperature`: what is told of them, before it is rounded."""
    logs = torch.log_softmax(logits.detach().float() / temperature, -1)
    tokens = logs.topk(top, -1).indices
    return Predictions(tokens, _coarse(logs, tokens))


def divergence(logits: Tensor, told: Predictions, temperature: float) -> Tensor:
    """KL(told ‖ softmax(logits / temperature)) over the K + 1 outcomes, the mean over positions; nats.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    >>> round(divergence(logits, most_probable(logits, 1, 1.0), 1.0).item(), 6)
    0.0
    """
    own = _coarse(torch.log_softmax(logits.float() / temperature, -1), told.tokens)
    return (told.logs.exp() * (told.logs - own)).sum(-1).mean()


def cross_entropy(told: Predictions, targets: Tensor, vocabulary: int) -> float:
    """Of `targets` [P], the tokens that really follow; nats. What is told of all other tokens together counts for them alike."""
    rest = told.logs[:, -1] - math.log(vocabulary - told.tokens.shape[1])
    hit = told.tokens == targets[:, None]
    found = torch.where(hit, told.logs[:, :-1], torch.zeros(())).sum(-1)
    return -float(torch.where(hit.any(-1), found, rest).double().mean())


def weights_by_quality(losses: Sequence[float], sharpness: float) -> list[float]:
    """softmax(−sharpness·loss): what the predictions of each replica count.

    >>> [round(w, 4) for w in weights_by_quality([2.0, 2.0, 5.5], sharpness=5.0)]
    [0.5, 0.5, 0.0]
    """
    return torch.softmax(-sharpness * torch.tensor(losses, dtype=torch.float64), 0).tolist()


def _coarse(logs: Tensor, tokens: Tensor) -> Tensor:
    """The K + 1 outcomes' logarithms, of those [P, V] of all tokens."""
    rest = logs.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logs.gather(-1, tokens), rest], -1)


@dataclass(frozen=True)
class PredictionCoder:
    """Predictions at `positions` positions, of the `top` most probable of `vocabulary` tokens, as bytes.

    >>> PredictionCoder(positions=1280, vocabulary=256, top=8).nbytes  # at most
    20161
    """

    positions: int
    vocabulary: int
    top: int

    @property
    def nbytes(self) -> int:
        """The most bytes that predictions may take: known before anything is encoded, or allocated."""
        return self._fixed + packed_nbytes(self.positions * self.top, BITS + 1)

    @property
    def _width(self) -> int:
        return max(1, (self.vocabulary - 1).bit_length())

    @property
    def _fixed(self) -> int:
        return 1 + packed_nbytes(self.positions * self.top, self._width) + packed_nbytes(self.positions, BITS)

    @property
    def _chunk(self) -> int:
        """Ascending codes of a position become places without equals: so many there are."""
        return _LARGEST + self.top

    def encode(self, told: Predictions) -> Tensor:
        """The payload, on the CPU."""
        from thinwire.kernels import rice  # a compiler takes its time

        codes = (told.logs / -STEP).round().clamp(0, _LARGEST).long().cpu()
        places = (codes[:, :-1] + torch.arange(self.top)).reshape(-1)
        k = rice.parameter(places, self.top)
        if rice.nbytes(places, self.top, k) > packed_nbytes(len(places), BITS + 1):
            k = BITS  # no step is as long as 2^BITS
        coded = torch.empty(rice.nbytes(places, self.top, k), dtype=torch.uint8)
        rice.encode(places, self.top, k, coded.numpy())
        tokens = pack(told.tokens.cpu().reshape(-1), self._width)
        return torch.cat([torch.tensor([k], dtype=torch.uint8), tokens, pack(codes[:, -1].clone(), BITS), coded])

    def decode(self, payload: Tensor) -> Predictions:
        """What `payload` says. Raises `PacketError`."""
        from thinwire.kernels import rice

        count = self.positions * self.top
        if not self._fixed <= len(payload) <= self.nbytes:
            raise PacketError(f"predictions came in {len(payload)} bytes, {self._fixed} to {self.nbytes} were due.")
        ends = (1, 1 + packed_nbytes(count, self._width), self._fixed)
        tokens = unpack(payload[ends[0] : ends[1]].clone(), count, self._width).view(self.positions, self.top)
        rest = unpack(payload[ends[1] : ends[2]].clone(), self.positions, BITS)
        places = torch.empty(count, dtype=torch.int64)
        coded = payload[self._fixed :].clone().numpy()
        used = rice.decode(coded, self._chunk, self.top, self.positions * self._chunk, int(payload[0]), places)
        if used != len(coded):
            raise PacketError(f"the probabilities of {count} predictions are no {len(coded)} bytes of a Rice code.")
        ordered = tokens.sort(-1).values
        if int(tokens.max()) >= self.vocabulary or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise PacketError(f"predictions name a token twice, or one beyond the {self.vocabulary} that there are.")
        codes = torch.cat([places.view(self.positions, self.top) - torch.arange(self.top), rest[:, None]], -1)
        return Predictions(tokens, torch.log_softmax(codes * -STEP, -1))
