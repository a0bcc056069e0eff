"""A replica's first state of a fragment, from the strategy and the parameters."""

from __future__ import annotations

import torch

from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.state_dtype import in_state_dtype
from thinwire.exchange.buffers import CPU
from thinwire.pieces.partition import Fragment, local
from thinwire.strategy import Strategy


def first_state(strategy: Strategy, fragment: Fragment, index: int, rank: int, size: int) -> FragmentState:
    """A replica's first state of `fragment`."""
    parts = [local(p.detach()) for _, p in fragment.parameters]
    device = parts[0].device if strategy.anchors == "device" else CPU
    anchor = torch.cat([part.reshape(-1).to(device, torch.float32) for part in parts])
    feedback = in_state_dtype(strategy.feedback.init(anchor.numel()), strategy, anchor) if strategy.feedback else {}
    codec = strategy.codec.fitted(fragment.shapes)
    strategy.aggregate.check(size)
    memory = strategy.exchange.init(codec, anchor.numel(), rank, size)
    aggregated = strategy.aggregate.init(strategy.exchange.owns(codec, anchor.numel(), rank, size), size)
    filters = tuple(one.fitted(codec, anchor.numel(), size) for one in strategy.filters)
    filtered = tuple(one.init(anchor.numel()) for one in filters)
    policy, state = strategy.policy.init(codec), in_state_dtype(strategy.outer.init(anchor), strategy, anchor)
    guard = strategy.guard.init() if strategy.guard and strategy.guards else {}
    held = FragmentState(
        fragment, index, anchor, state, feedback, codec, memory, aggregated, policy, filters, filtered, guard
    )
    if strategy.anchors == "disk":
        held.move_to_disk()
    return held
