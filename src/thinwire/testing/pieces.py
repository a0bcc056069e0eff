"""Tests the laws of all pieces, and of pieces that are neither codecs nor exchanges."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.pieces.outer import Outer
from thinwire.testing.codecs import law
from thinwire.testing.toy import same_bits
from thinwire.types import State


def is_a_value(piece: Any) -> None:
    """A piece is a frozen dataclass with its text as identity: equal pieces have the same text and the same hash."""
    frozen = is_dataclass(piece) and not isinstance(piece, type) and type(piece).__dataclass_params__.frozen  # type: ignore[attr-defined]
    law(frozen, f"{piece!r}: an instance of a class under @dataclass(frozen=True) is needed")
    hidden = [field.name for field in fields(piece) if field.compare and not field.repr]
    law(not hidden, f"{', '.join(hidden)}: what the text leaves out is compared; give the field compare=False")
    again = replace(piece)
    law(
        again == piece and hash(again) == hash(piece),
        "a copy of the piece is another value: compare and hash its fields",
    )
    law(
        repr(again) == repr(piece) and " at 0x" not in repr(piece),
        f"{piece!r} does not say what it is: leave repr to dataclass",
    )


def walk(outer: Outer, anchor: Tensor, deltas: Tensor) -> Tensor:
    """The anchor after each of `deltas`. Fails if a step changes its inputs in place."""
    state = outer.init(anchor)
    for delta in deltas:
        before = {name: kept.clone() for name, kept in state.items()}
        kept = anchor.clone(), delta.clone()
        moved, after = outer.step(anchor, delta, state)
        same = all(same_bits(before[name], value) for name, value in state.items())
        law(same and same_bits(anchor, kept[0]) and same_bits(delta, kept[1]), "step changes its input in place")
        law(
            after.keys() == state.keys(), f"init gives {sorted(state)}, step {sorted(after)}: the state has other names"
        )
        again, _ = outer.step(anchor, delta, state)
        law(same_bits(moved, again), "the same step again gives other bits")
        anchor, state = moved, after
    return anchor


def outer_keeps_its_word(outer: Outer) -> None:
    """An outer step is pure, linear if it claims `linear`, and keeps its state at the end of training."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, generator=generator)
    deltas = torch.randn(2, 6, 100, generator=generator)
    apart = sum(walk(outer, start, each) - start for each in deltas)
    together = walk(outer, start, deltas.sum(0)) - start
    law(torch.isfinite(together).all(), "finite deltas give an anchor that is not")
    linear = torch.allclose(together, torch.as_tensor(apart), rtol=1e-4, atol=1e-4)
    law(linear or not outer.linear, "declares linear: steps of a sum are not the sum of steps")
    _, after = outer.last.step(start, deltas[0, 0], outer.init(start))
    law(after.keys() == outer.init(start).keys(), "last does not keep the state of the step whose last it is")


def outer_by_ranges(outer: Outer) -> None:
    """An `elementwise` outer step has the same bits if it is applied range by range."""
    if not outer.elementwise:
        return
    generator = torch.Generator().manual_seed(1)
    anchor, delta = torch.randn(2, 100, generator=generator)
    state = outer.init(anchor)
    law(
        all(kept.shape == anchor.shape for kept in state.values()),
        "declares elementwise: its state is not like the anchor",
    )
    for _ in range(3):
        whole, after = outer.step(anchor, delta, state)
        moved, written = torch.empty_like(anchor), {name: torch.empty_like(kept) for name, kept in state.items()}
        for begin, end in ((0, 1), (1, 64), (64, 100)):
            part: list[State] = [{name: kept[begin:end] for name, kept in of.items()} for of in (state, written)]
            outer.step_into(anchor[begin:end], delta[begin:end], part[0], moved[begin:end], part[1])
        same = same_bits(moved, whole) and all(same_bits(written[name], after[name]) for name in after)
        law(same, "declares elementwise: ranges stepped alone give other bits than the whole")
        anchor, state = whole, after
