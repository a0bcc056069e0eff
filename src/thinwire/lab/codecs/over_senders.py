"""The mean of each value over the replicas that sent it, instead of the mean over all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import Codec, Said, check_fit, check_inner
from thinwire.codecs.layout import Part
from thinwire.pieces.aggregate import mean_over_senders
from thinwire.rng import Key


@dataclass(frozen=True)
class OverSenders(Codec):
    """Send `codec`'s packets, and average each value over the replicas that sent it, not over all.

        x̂_i = Σ_m w_m·c_mi / Σ_{m: c_mi ≠ 0} w_m

    For sparse codecs. If replicas choose different values, the mean over all shrinks a value that few have sent. This mean does
    not, so it is *no estimate of the mean delta*, and is larger. Inside a change of basis the mean is taken in that basis:
    `Squares(DCT(OverSenders(ChunkedTopK(4096, 32)), axes=2))` is DeMo's (arXiv 2411.19870, released code), and
    `OverSenders(ChunkedTopK(4096, 64))` that of SparseLoCo's (Sarfi et al., arXiv 2508.15706, released code). *Differs*: a replica that sends a
    zero has not sent it.

    *Wire*: the codec's bytes. Cost: one pass per packet.

    Args:
        codec: a sparse one.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> from thinwire.codecs import TopK
    >>> OverSenders(TopK(0.01)).nbytes(1000) == TopK(0.01).nbytes(1000)
    True
    """

    codec: Codec

    biased: ClassVar[bool] = False
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_inner(self, "codec", self.codec)

    @property
    def claims(self) -> frozenset[str]:
        return self.codec.claims - {"local"}

    @property
    def grain(self) -> int | None:
        return self.codec.grain

    def nbytes(self, numel: int) -> int:
        return self.codec.nbytes(numel)

    def layout(self, numel: int) -> tuple[Part, ...]:
        return self.codec.layout(numel)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        self.codec.encode(x, payload, key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        self.codec.decode_add(payload, out, key, weight)

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        count = self.codec.few(numel)
        if count is not None and packets:
            return self._mean_of_sent(packets, count, torch.empty(numel))
        return mean_over_senders(self._decoded(packets, numel), numel)

    def _decoded(self, packets: Sequence[Said], numel: int) -> Iterator[tuple[Tensor, float]]:
        values = torch.zeros(numel)  # `mean_over_senders` sets them to zero again after each packet
        for payload, key, weight in packets:
            self.codec.decode_add(payload, values, key)
            yield values, weight

    def _mean_of_sent(self, packets: Sequence[Said], count: int, mean: Tensor) -> Tensor:
        """The same mean from indices and values, into `mean`. Apart from writing its zeros, the time depends on what was sent."""
        index, values = torch.empty(len(packets), count, dtype=torch.int64), torch.empty(len(packets), count)
        for (payload, key, _), places, some in zip(packets, index, values):
            check_fit(self.codec, mean, payload)
            self.codec.sent(payload, len(mean), places, some, key)
        shares = torch.tensor([weight for _, _, weight in packets])
        kernels.of(index, values, mean).mean_sent(index.view(-1), values.view(-1), shares, mean)
        return mean
