"""Rounds whose values stay on the device of the model, so that only packets cross to the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from thinwire.codecs.device import whole_anywhere
from thinwire.exchange import Direct
from thinwire.pieces.aggregate import Mean
from thinwire.pieces.policy import Deciding
from thinwire.strategy import Strategy


def stays_on_device(strategy: Strategy) -> bool:
    """Whether the rounds of `strategy` stay on the device of the model.

    >>> from thinwire import streaming_diloco, streaming_sign
    >>> stays_on_device(streaming_sign(anchors="device")), stays_on_device(streaming_diloco(anchors="device"))
    (True, False)
    """
    plain = isinstance(strategy.exchange, Direct) and isinstance(strategy.aggregate, Mean) and not strategy.filters
    decides = isinstance(strategy.policy, Deciding)  # it measures values on the host
    return strategy.anchors == "device" and plain and not decides and whole_anywhere(strategy.codec)


def stream_of(values: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which other threads' work on the device of `values` follows what this thread has queued there."""
    return partial(torch.cuda.stream, torch.cuda.current_stream(values.device)) if values.is_cuda else nullcontext
