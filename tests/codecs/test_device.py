"""The device on which a delta is encoded, and the copy to the host. A meta tensor stands for one on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.codecs.base import Codec, encode_from, runs_anywhere
from thinwire.rng import Key

SEEN: list[tuple[Tensor, Tensor]] = []


@dataclass(frozen=True)
class RecordingCodec(Codec):
    """A codec that records the tensors that it gets."""

    any_device: bool = True
    used: int | None = None

    def nbytes(self, numel: int) -> int:
        return numel

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> int | None:
        SEEN.append((x, payload))
        return self.used

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Nothing: these tests encode."""


def test_only_the_payload_is_copied_if_the_codec_runs_anywhere() -> None:
    here, there, payload = torch.zeros(4), torch.zeros(4, device="meta"), torch.zeros(4, dtype=torch.uint8)
    for codec, due in ((RecordingCodec(), 4), (RecordingCodec(used=3), 3), (RecordingCodec(any_device=False), 4)):
        SEEN.clear()
        assert encode_from(here, codec, payload, Key()) == due
        ((_, written),) = SEEN
        assert written is payload, "on one device nothing is copied"
    SEEN.clear()
    with pytest.raises(NotImplementedError, match="meta"):  # a meta tensor cannot be copied: here the payload
        encode_from(there, RecordingCodec(), payload, Key())
    ((encoded, written),) = SEEN
    assert encoded is there and written.device == there.device and written.shape == payload.shape
    SEEN.clear()
    with pytest.raises(NotImplementedError, match="meta"):  # here the values
        encode_from(there, RecordingCodec(any_device=False), payload, Key())
    assert not SEEN


def test_element_wise_and_sparse_codecs_run_anywhere() -> None:
    codecs = tw.codecs
    anywhere = [codecs.Identity(), codecs.Cast(), codecs.Sign(), codecs.E3M0(), codecs.TopK(), codecs.RandomK()]
    assert all(map(runs_anywhere, anywhere))
    assert not any(map(runs_anywhere, [tw.lab.codecs.LowRank(), tw.lab.codecs.Entropy(codecs.E3M0())]))
