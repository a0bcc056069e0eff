"""A gossip round of a rule that judges each neighbour (lab/gossip/trust.py). It keeps each neighbour's values until the main thread lands it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import RoundState
from thinwire.exchange import Buffers
from thinwire.lab.gossip.trust import Heard, Judging, weighed
from thinwire.rng import Key
from thinwire.types import State


class JudgedUpdate(Flight):
    """A round among this replica and its neighbours `sources`. Its delta are the parameters at its departure. Call `judge` before `commit`."""

    decodes_own = False

    def __init__(
        self, round_: RoundState, rule: Judging, buffers: Buffers, sources: Sequence[int], size: int, key: Key
    ) -> None:
        super().__init__(round_, buffers)
        self._rule, self._key, self._size, self._sources = rule, key, size, sources
        numels = [numel for _, numel in rule.vectors(round_.fragment.codec, round_.delta.numel())]
        self._heard = buffers.floats(sum(numels) * len(sources)).fill_(torch.nan)  # NaN: not sent
        self._numels = numels
        self._after: State = {}

    def signal(self, begin: int, end: int) -> Tensor:
        return self.round.delta[begin:end]

    def settle(self, begin: int, mean: Tensor, own: Tensor | None) -> None:
        """Take the values that one neighbour sent; `Gossip` defines their places."""
        self._heard[begin : begin + mean.numel()] = mean

    def finish(self) -> bool:
        return True

    def close(self) -> None:
        """Keep the received values, because `commit` needs them."""

    def judge(self, losses: Callable[[Tensor], Sequence[float]]) -> dict[int, float]:
        """Compute the next anchor and state. `losses` computes the losses of given weights. Returns the weight of each neighbour that counts."""
        vectors, begin = list[dict[int, Tensor]](), 0
        for numel in self._numels:
            rows = self._heard[begin : begin + numel * len(self._sources)].view(len(self._sources), numel)
            vectors.append(dict(zip(self._sources, rows)))
            begin += rows.numel()
        finite = {rank: row for rank, row in vectors[0].items() if bool(torch.isfinite(row).all())}
        records = vectors[1] if len(vectors) > 1 else {}
        heard = Heard(self._key, self._size, self.round.delta, finite, records, losses)
        weights, self._after = self._rule.judges(heard, self.fragment.exchange)
        mean = weighed(self.round.delta, finite, weights)
        self.anchor, _ = self._rule.hears(
            self.fragment.anchor, self.round.delta, self.fragment.exchange, [mean], [self.round.delta]
        )
        return weights

    def commit(self) -> None:
        assert self.anchor is not None, "judge comes first"
        self.fragment.anchor, self.fragment.exchange = self.anchor, self._after
        self._buffers.give(self._heard)
        self._over()
