"""Predictions of the next token: their bytes, their quality, and a model's divergence from them.

A replica sends the K most probable of V tokens with their probabilities p, and the probability of all other tokens together. These
K + 1 outcomes are a distribution. The receiver reduces its own distribution q to the same outcomes:

    KL(p‖q) = Σ_{i ≤ K} p_i·(log p_i − log q_i) + p_rest·(log p_rest − log q_rest)          q_rest = Σ of all other q

Its gradient in the logits is zero if both give the outcomes equal probabilities. So for any K a model learns nothing from an equal
model, except for rounding.

On the wire −log p is a whole number of quarters of a nat, from 0 to 63:

| bytes                 | what                                                                        |
|-----------------------|-----------------------------------------------------------------------------|
| 1                     | k of the Rice code                                                          |
| ⌈P·K·⌈log₂ V⌉ / 8⌉    | tokens of P positions, the most probable first                              |
| ⌈P·6 / 8⌉             | −log p_rest of each position                                                |
| at most ⌈P·K·7 / 8⌉   | −log p of the tokens, which ascend: a Rice code of the steps between them   |

A received packet decodes to P distributions of finite numbers, or is refused. No allocation depends on its content.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.layout import pack, packed_nbytes, unpack
from thinwire.errors import PacketError

BITS = 6  # of −log p
STEP = 0.25  # nats
_LARGEST = (1 << BITS) - 1


@dataclass(frozen=True)
class Predictions:
    """`tokens` [P, K], and the logarithms [P, K + 1] of their probabilities; the last column is that of all other tokens together."""

    tokens: Tensor
    logs: Tensor

    def part(self, begin: int, end: int) -> Predictions:
        """The predictions at positions `begin` to `end`."""
        return Predictions(self.tokens[begin:end], self.logs[begin:end])


def most_probable(logits: Tensor, top: int, temperature: float) -> Predictions:
    """The predictions that are sent for `logits` [P, V] / `temperature`, before rounding."""
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
    """Mean cross-entropy of `targets` [P], the tokens that follow in the text; nats. The probability of all other tokens together is
    divided equally among them."""
    rest = told.logs[:, -1] - math.log(vocabulary - told.tokens.shape[1])
    hit = told.tokens == targets[:, None]
    found = torch.where(hit, told.logs[:, :-1], torch.zeros(())).sum(-1)
    return -float(torch.where(hit.any(-1), found, rest).double().mean())


def weights_by_quality(losses: Sequence[float], sharpness: float) -> list[float]:
    """softmax(−sharpness·loss): the weight of each replica's predictions.

    >>> [round(w, 4) for w in weights_by_quality([2.0, 2.0, 5.5], sharpness=5.0)]
    [0.5, 0.5, 0.0]
    """
    return torch.softmax(-sharpness * torch.tensor(losses, dtype=torch.float64), 0).tolist()


def _coarse(logs: Tensor, tokens: Tensor) -> Tensor:
    """Logarithms of the K + 1 outcomes, from the logarithms [P, V] of all tokens."""
    rest = logs.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logs.gather(-1, tokens), rest], -1)


@dataclass(frozen=True)
class PredictionCoder:
    """Encodes predictions as bytes: at `positions` positions, the `top` most probable of `vocabulary` tokens.

    >>> PredictionCoder(positions=1280, vocabulary=256, top=8).nbytes  # at most
    20161
    """

    positions: int
    vocabulary: int
    top: int

    @property
    def nbytes(self) -> int:
        """Most bytes of a payload; it does not depend on the predictions."""
        return self._fixed + packed_nbytes(self.positions * self.top, BITS + 1)

    @property
    def _width(self) -> int:
        return max(1, (self.vocabulary - 1).bit_length())

    @property
    def _fixed(self) -> int:
        return 1 + packed_nbytes(self.positions * self.top, self._width) + packed_nbytes(self.positions, BITS)

    @property
    def _chunk(self) -> int:
        """Size of the index range of a position, in which its ascending codes become distinct indices."""
        return _LARGEST + self.top

    def encode(self, told: Predictions) -> Tensor:
        """The payload, on the CPU."""
        from thinwire.lab.codecs import rice

        codes = (told.logs / -STEP).round().clamp(0, _LARGEST).long().cpu()
        places = (codes[:, :-1] + torch.arange(self.top)).reshape(-1)
        k = rice.parameter(places, self.top)
        if rice.nbytes(places, self.top, k) > packed_nbytes(len(places), BITS + 1):
            k = BITS  # every step is shorter than 2^BITS
        coded = torch.empty(rice.nbytes(places, self.top, k), dtype=torch.uint8)
        rice.encode(places, self.top, k, coded.numpy())
        tokens = pack(told.tokens.cpu().reshape(-1), self._width)
        return torch.cat([torch.tensor([k], dtype=torch.uint8), tokens, pack(codes[:, -1].clone(), BITS), coded])

    def decode(self, payload: Tensor) -> Predictions:
        """The predictions in `payload`. Raises `PacketError`."""
        from thinwire.lab.codecs import rice

        count = self.positions * self.top
        if not self._fixed <= len(payload) <= self.nbytes:
            raise PacketError(f"predictions came in {len(payload)} bytes; {self._fixed} to {self.nbytes} are needed.")
        ends = (1, 1 + packed_nbytes(count, self._width), self._fixed)
        tokens = unpack(payload[ends[0] : ends[1]].clone(), count, self._width).view(self.positions, self.top)
        rest = unpack(payload[ends[1] : ends[2]].clone(), self.positions, BITS)
        places = torch.empty(count, dtype=torch.int64)
        coded = payload[self._fixed :].clone().numpy()
        used = rice.decode(coded, self._chunk, self.top, self.positions * self._chunk, int(payload[0]), places)
        if used != len(coded):
            raise PacketError(f"{len(coded)} bytes are not a Rice code of the probabilities of {count} predictions.")
        ordered = tokens.sort(-1).values
        if int(tokens.max()) >= self.vocabulary or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise PacketError(f"predictions name a token twice, or one outside the vocabulary of {self.vocabulary}.")
        codes = torch.cat([places.view(self.positions, self.top) - torch.arange(self.top), rest[:, None]], -1)
        return Predictions(tokens, torch.log_softmax(codes * -STEP, -1))
