"""A gossip round of a rule that judges each neighbour (lab/gossip/trust.py). It keeps each neighbour's values until the main thread lands it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.drivers.fragment import FragmentState, RoundUpdate
from thinwire.exchange import Buffers
from thinwire.lab.gossip.trust import Heard, Judging, weighed
from thinwire.rng import Key
from thinwire.types import State


class JudgedUpdate(RoundUpdate):
    """A round among this replica and its neighbours `sources`. `theta` are the parameters at its departure. Call `judge` before `commit`."""

    def __init__(
        self, fragment: FragmentState, theta: Tensor, rule: Judging, buffers: Buffers, sources: Sequence[int], size: int,
        *, key: Key, departed: int, lands: int,
    ) -> None:  # fmt: skip
        super().__init__(fragment, theta, None, None, buffers, number=key.round, departed=departed, lands=lands)
        self._rule, self._key, self._size, self._sources = rule, key, size, sources
        numels = [numel for _, numel in rule.vectors(fragment.codec, theta.numel())]
        self._heard = buffers.floats(sum(numels) * len(sources)).fill_(torch.nan)  # NaN: not sent
        self._numels = numels
        self._after: State = {}

    def signal(self, begin: int, end: int) -> Tensor:
        return self.delta[begin:end]

    def settle(self, begin: int, mean: Tensor, sent: Callable[[], Tensor]) -> None:
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
        heard = Heard(self._key, self._size, self.delta, finite, records, losses)
        weights, self._after = self._rule.judges(heard, self.fragment.exchange)
        mean = weighed(self.delta, finite, weights)
        self.anchor, _ = self._rule.hears(
            self.fragment.anchor, self.delta, self.fragment.exchange, [mean], [self.delta]
        )
        return weights

    def commit(self) -> None:
        assert self.anchor is not None, "judge comes first"
        self.fragment.anchor, self.fragment.exchange = self.anchor, self._after
        self._buffers.give(self._heard)
        self._over()
