"""Outer state and feedback in bf16: in fp32 while a round computes them, and rounded when it stores them.

Anchors stay in fp32: a step smaller than half of a value's last bit would be lost for good, and in bf16 that is 1/512 of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.strategy import Strategy
from thinwire.types import State


def in_state_dtype(state: State, strategy: Strategy, anchor: Tensor) -> State:
    """`state` with those tensors in the strategy's `state_dtype` that have a value for each parameter of `anchor`."""
    if strategy.state_dtype == "fp32":
        return state
    return {name: kept.to(torch.bfloat16) if kept.numel() == anchor.numel() else kept for name, kept in state.items()}


def in_fp32(state: State) -> State:
    """`state` in fp32: what is in fp32 itself, copies of the rest."""
    return {name: kept.float() for name, kept in state.items()}


def part_in_fp32(state: State, begin: int, end: int) -> State:
    """Elements `begin` … `end` of `state` in fp32: views of what is in fp32, copies of the rest."""
    return {name: kept[begin:end].float() for name, kept in state.items()}


def store(values: State, into: State, begin: int, end: int) -> None:
    """Round `values` to elements `begin` … `end` of `into`: to nearest, ties to even, so to the same bits on all machines."""
    for name, value in values.items():
        if into[name].dtype != value.dtype:
            into[name][begin:end].copy_(value)
