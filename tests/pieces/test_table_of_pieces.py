"""The table of pieces is complete, and pieces without communication keep the claims of their rows."""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest
import torch
from pieces import CODECS, OUTERS, SCHEDULES, TABLE, over
from strategies import GOSSIP, METHODS

import thinwire as tw
from thinwire.catalogue.methods import RECIPES
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.testing.toy import same_bits


def test_every_piece_has_a_row():
    in_table = {type(row.piece) for row in TABLE} | {tw.Strategy}
    assert set(PIECES.values()) == in_table


@over("row", CODECS)
def test_a_codec_declares_no_more_than_its_row_claims(row):
    """The rows are written by hand. Claims about randomness must be equal in both."""
    chance = {"unbiased", "drawn", "shared"}
    assert row.piece.claims <= row.claims and row.piece.claims & chance == row.claims & chance


def test_every_recipe_is_a_method():
    assert set(RECIPES) <= set(METHODS) | set(GOSSIP)


@over("name", RECIPES)
def test_a_recipe_is_one_return_statement(name):
    """It has a default for every argument and at most 15 lines."""
    assert isinstance(RECIPES[name](), tw.Strategy)
    function = ast.parse(inspect.getsource(RECIPES[name])).body[0]
    _, statement = function.body
    assert isinstance(statement, ast.Return) and statement.end_lineno - statement.lineno < 15
    assert ast.get_docstring(function) and not any(
        isinstance(n, ast.IfExp | ast.comprehension) for n in ast.walk(statement)
    )


@over("value", [row.piece for row in TABLE] + list((METHODS | GOSSIP).values()))
def test_the_text_of_a_piece_parses_to_an_equal_piece(value):
    again = parse(repr(value))
    assert again == value and hash(again) == hash(value) and repr(again) == repr(value)


@over("kind", PIECES.values())
def test_what_the_text_of_a_piece_leaves_out_is_not_compared(kind):
    """The replica fills it in."""
    assert not [field.name for field in dataclasses.fields(kind) if field.compare and not field.repr]


@over("value", [tw.pieces.transforms.Clip(0.01, 3), tw.pieces.transforms.Momentum(0.5, spared=((0, 1),))])
def test_the_text_of_a_piece_that_was_filled_in_parses_to_an_equal_piece(value):
    assert parse(repr(value)) == value and hash(parse(repr(value))) == hash(value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "E3M0(block=(lambda: 2)())",
        "E3M0.__class__",
        "open('x')",
        "1 + 1",
        "E3M0(",
        "",
        "E3M0(blok=2)",
    ],
)
def test_parse_runs_no_code(text):
    with pytest.raises(tw.ConfigurationError):
        parse(text)


@pytest.mark.parametrize("outer", [row for row in OUTERS], ids=str)
def test_outer_steps_keep_the_claims_of_their_rows(outer):
    torch.manual_seed(0)
    anchor = torch.randn(100)
    kept = anchor.clone()
    deltas = torch.randn(2, 6, 100)

    def walk(deltas, start):
        state = outer.piece.init(start)
        for delta in deltas:
            before, delta_before = {k: v.clone() for k, v in state.items()}, delta.clone()
            start, after = outer.piece.step(start, delta, state)
            assert all(same_bits(before[k], state[k]) for k in before) and same_bits(delta, delta_before), (
                "changed in place"
            )
            state = after
        return start

    assert ("stateless" in outer.claims) == (not outer.piece.init(anchor))
    together = walk(deltas.sum(0), anchor) - anchor
    apart = sum(walk(d, anchor) - anchor for d in deltas)
    assert torch.allclose(together, apart, rtol=1e-4, atol=1e-4) == ("linear" in outer.claims)
    assert outer.piece.linear == ("linear" in outer.claims)
    assert same_bits(anchor, kept)


def test_nesterov_matches_the_paper_and_torch_sgd():
    """First step −η(1+μ)Δ = 0.76Δ, steady step −ηΔ/(1−μ) = 4Δ; and torch.optim.SGD(nesterov=True), within rounding."""
    outer, delta = tw.pieces.outer.Nesterov(0.4, 0.9), torch.ones(3)
    anchor, state = torch.zeros(3), tw.pieces.outer.Nesterov().init(torch.zeros(3))
    steps = []
    for _ in range(200):
        moved, state = outer.step(anchor, delta, state)
        steps.append((anchor - moved)[0].item())
        anchor = moved
    assert steps[0] == pytest.approx(0.76, rel=1e-6) and steps[-1] == pytest.approx(4.0, rel=1e-4)
    parameter = torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(1)))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    anchor = parameter.detach().clone()
    outer, state = tw.pieces.outer.Nesterov(0.7, 0.9), tw.pieces.outer.Nesterov().init(anchor)
    for i in range(20):
        parameter.grad = torch.randn(50, generator=torch.Generator().manual_seed(i))
        anchor, state = outer.step(anchor, parameter.grad, state)
        sgd.step()
        torch.testing.assert_close(anchor, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_nesterov_matches_the_recursion_in_python_floats():
    """v ← μv + Δ; anchor ← anchor − η(Δ + μv)."""
    outer = tw.pieces.outer.Nesterov(0.3, 0.7)
    anchor, state, a, v = torch.tensor([1.0]), outer.init(torch.tensor([1.0])), 1.0, 0.0
    for delta in (0.5, -0.25, 2.0, 0.125):
        anchor, state = outer.step(anchor, torch.tensor([delta]), state)
        v = 0.7 * v + delta
        a -= 0.3 * (delta + 0.7 * v)
        assert anchor.item() == pytest.approx(a, rel=1e-6)


@pytest.mark.parametrize("schedule", [row.piece for row in SCHEDULES if "steady" in row.claims], ids=str)
@over("fragments", [1, 2, 3, 5, 16])
def test_each_fragment_departs_once_in_any_period(schedule, fragments):
    """Any window of H steps after warm-up, also where P does not divide H and where P > H."""
    offsets = getattr(schedule, "offsets", None)
    if offsets and len(offsets) != fragments:
        with pytest.raises(
            tw.ConfigurationError, match=f"are for {len(offsets)} fragments, the partition makes {fragments}"
        ):
            schedule.departs(1, fragments)
        return
    horizon = 6 * schedule.every
    departures = [schedule.departs(step, fragments) for step in range(1, horizon + 1)]
    for begin in range(2 * schedule.every, horizon - schedule.every):
        window = [p for at in departures[begin : begin + schedule.every] for p in at]
        assert sorted(window) == list(range(fragments))
    assert [schedule.departs(step, fragments) for step in range(1, horizon + 1)] == departures  # pure


def test_staggered_departures_match_the_papers_example():
    """H = 100, P = 2: fragment 1 at 100, 200, …; fragment 2 at 150, 250, … (arXiv 2501.18512, Figure 1)."""
    schedule = tw.pieces.schedule.Staggered(100)
    at = {p: [t for t in range(1, 400) if p in schedule.departs(t, 2)] for p in (0, 1)}
    assert at == {0: [100, 200, 300], 1: [150, 250, 350]}
    thirds = [tw.pieces.schedule.Staggered(6).departs(step, 3) for step in range(1, 15)]
    assert thirds == [(), (), (), (), (), (0,), (), (1,), (), (2,), (), (0,), (), (1,)]
    given = [tw.pieces.schedule.Staggered(3, offsets=(1, 3)).departs(step, 2) for step in range(1, 7)]
    assert given == [(0,), (), (1,), (0,), (), (1,)]


def test_a_fragment_first_departs_after_a_whole_period():
    for fragments in (1, 3, 7):
        for step in range(1, 30):
            assert not tw.pieces.schedule.Staggered(30).departs(step, fragments)


def test_departures_spread_evenly_over_the_steps():
    """At most ⌈P/H⌉ fragments depart at one step."""
    for every, fragments in ((10, 3), (7, 7), (4, 9), (100, 37)):
        most = max(len(tw.pieces.schedule.Staggered(every).departs(t, fragments)) for t in range(1, 5 * every))
        assert most == -(-fragments // every)


def test_short_first_offsets_match_the_formula():
    """Fragment p first lands at ⌊(p+1)H/P⌋, or a period later if it would depart before the first step."""
    assert tw.pieces.schedule.short_first(6, 2, 1) == (2, 5) and tw.pieces.schedule.short_first(6, 2) == (3, 6)
    assert tw.pieces.schedule.short_first(6, 6, 5) == (2, 3, 4, 5, 6, 1)
    for every, fragments, delay in ((6, 2, 5), (10, 3, 4), (5, 5, 1), (7, 3, 0)):
        first = tw.pieces.schedule.short_first(every, fragments, delay)
        for p, step in enumerate(first):
            assert step >= 1 and (step + delay) % every == (p + 1) * every // fragments % every
