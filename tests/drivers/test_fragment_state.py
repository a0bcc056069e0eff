"""A fragment's state and a round's flight, without threads: exact values, and the buffers that each step keeps and returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import FragmentState, first_state
from thinwire.exchange import Buffers
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.filters import Filter
from thinwire.pieces.guard import Guard, Judged
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Whole
from thinwire.types import State

VALUES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]  # a weight of 3 × 2, and two biases
NUMEL = len(VALUES)
TWO_LINEAR = tw.pieces.outer.Nesterov(0.5, 0.5)


def held_by(strategy: tw.Strategy) -> FragmentState:
    model = nn.Linear(3, 2)
    begin = 0
    for parameter in model.parameters():
        values = torch.tensor(VALUES[begin : begin + parameter.numel()])
        parameter.data = values.view_as(parameter)
        begin += parameter.numel()
    return first_state(strategy, Whole().fragments(model)[0], 3, 0, 1)


def floats(*values: float) -> Tensor:
    return torch.tensor(values * (NUMEL // len(values)), dtype=torch.float32)


def lent(buffers: Buffers) -> int:
    return len(buffers._lent)


def flat(held: FragmentState) -> list[float]:
    return held.snapshot(torch.empty(NUMEL)).tolist()


def test_a_first_state_is_that_of_the_model():
    held = held_by(tw.Strategy())
    assert held.anchor.tolist() == flat(held) == VALUES and held.base is held.anchor
    assert (held.index, held.rounds, held.since, held.counted) == (3, 0, 0, 0.0)
    assert held.guard["norms"].tolist() == [0.0] * 3 and held.disk is None
    assert not any((held.state, held.feedback, held.exchange, held.aggregate, held.policy, held.filtered, held.flight))
    assert not held_by(tw.data_parallel()).guard, "the guard does not look at gradients"
    (one,) = Whole().fragments(nn.Linear(1, 1, bias=False))
    assert (
        first_state(tw.Strategy(anchors="device"), one, 0, 0, 1).anchor.tolist()
        == one.parameters[0][1].view(-1).tolist()
    )


def test_a_delta_is_the_base_minus_the_parameters():
    held = held_by(tw.Strategy())
    held.load_into_parameters(held.anchor + 3)
    assert held.delta(torch.empty(NUMEL)).tolist() == [-3.0] * NUMEL and held.finite()
    held.deviation = floats(2.0)
    assert held.base.tolist() == [value + 2 for value in VALUES]
    assert held.delta(torch.empty(NUMEL)).tolist() == [-1.0] * NUMEL
    held.fragment.parameters[1][1].data[1] = math.nan
    assert not held.finite()


@pytest.mark.parametrize(
    ("factors", "due"),
    [((), 107.0), ((0.25,), 82.0), ((0.25, 0.5), 78.5), ((0.0, 0.5), 103.5)],
)
def test_steps_in_flight_are_carried_over(factors: tuple[float, ...], due: float):
    """The anchor is 100, the departed parameters are 0, and the present ones 7."""
    held = held_by(tw.Strategy())
    held.anchor = floats(100.0)
    held.load_into_parameters(floats(7.0))
    held.carry_over(floats(0.0), *factors)
    assert flat(held) == [due] * NUMEL
    held.load_into_parameters(floats(17.0))
    held.carry_over(floats(10.0), *factors)
    alpha, kept = (*factors, 0.0, 1.0) if not factors else (*factors, 1.0)[:2]
    assert flat(held) == [100 - 90 * alpha + 7 * kept] * NUMEL


@pytest.mark.parametrize(("scale", "told"), [(1.0, False), (0.5, True), (2.0, True)])
def test_a_guard_scales_the_delta_and_the_parameters(scale: float, told: bool):
    class Fixed(Guard):
        def judged(self, norm: float, periods: float, state: State) -> Judged:
            return Judged(norm, scale, {"norms": floats(periods)})

    held = held_by(tw.Strategy())
    delta = floats(3.0, 0.0, 0.0, 4.0)
    held.load_into_parameters(held.anchor - delta)
    heard = held.guarded(Fixed(), delta, 2.0)
    assert delta.tolist() == [3 * scale, 0, 0, 4 * scale] * 2
    assert flat(held) == (held.anchor - delta).tolist() and held.guard["norms"][0] == 2
    assert (heard is not None) == told and (heard is None or (heard[0] == math.sqrt(50) and heard[1].scale == scale))
    assert held.guarded(Fixed(), floats(math.inf), 5.0) is None and held.guard["norms"][0] == 2


def test_rounds_are_numbered_and_land_after_their_delay():
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(5, 2), codec=tw.codecs.Int(8))
    held, buffers = held_by(strategy), Buffers()
    other = Identity()
    for given, number, rounds in ((None, 0, 1), (None, 1, 2), (7, 7, 8), (3, 3, 8), (None, 8, 9)):
        state = held.begin_round(strategy, floats(1.0), 40, number=given)
        flight = Flight(state, buffers)
        assert (state.number, state.departed, state.lands, held.rounds) == (number, 40, 42, rounds)
        assert held.flight is flight and flight.codec is state.codec is held.codec
    assert held.begin_round(strategy, floats(1.0), 40, codec=other).codec is other
    assert (state.outer, state.feedback, state.tokens, flight.share) == (None, None, 0.0, 1.0)


def test_memory_of_what_is_on_disk_is_released_except_in_flight():
    held, released = held_by(tw.Strategy(anchors="disk")), []
    assert held.disk and held.anchor.tolist() == VALUES
    held.disk.release = lambda: released.append(held.flight)  # type: ignore[method-assign]
    held.release()
    held.flight = SimpleNamespace()  # type: ignore[assignment]
    held.release()
    assert released == [None]
    held.disk = None
    held.release()


@dataclass(frozen=True)
class ByWhole(Outer):
    """A step that needs the whole fragment."""

    linear: ClassVar[bool] = True

    by: float = 0.5

    def init(self, anchor: Tensor) -> State:
        return {"last": torch.zeros_like(anchor)}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        return anchor - self.by * delta, {"last": delta.clone()}


@pytest.mark.parametrize(("outer", "kept"), [(tw.pieces.outer.Nesterov(0.5, 0.0), 2), (ByWhole(), 1)])
def test_an_eager_update_moves_the_parameters_by_the_own_share(outer: Outer, kept: int):
    """The share of a new delta is applied at once, and replaces that of the one before."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4, 4), merge=tw.pieces.merge.Eager(), outer=outer)
    held, buffers = held_by(strategy), Buffers()
    anchor = held.anchor.clone()
    for value, moved in ((8.0, -1.0), (16.0, -2.0), (4.0, -0.5)):
        delta = buffers.like(anchor).copy_(floats(value))
        strategy.merge.before_send(held, delta, strategy.outer, 0.25, buffers)
        assert held.own is delta and flat(held) == (anchor + moved).tolist()
        assert held.deviation is not None and held.deviation.tolist() == [moved] * NUMEL
        assert lent(buffers) == kept


def test_a_late_round_starts_the_parameters_at_the_anchor():
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4, 4), merge=tw.pieces.merge.Reset())
    held, buffers = held_by(strategy), Buffers()
    for value in (8.0, 16.0):
        held.load_into_parameters(held.anchor + 1)
        delta = buffers.like(held.anchor).copy_(floats(value))
        strategy.merge.before_send(held, delta, strategy.outer, 0.25, buffers)
        assert held.own is delta and flat(held) == VALUES and lent(buffers) == 1
    flight = Flight(held.begin_round(strategy, delta, 8), buffers)
    flight.settle(0, floats(2.0), delta)
    flight.finish()
    flight.discard()
    assert lent(buffers) == 1, "the delta is needed longer"


def arrived(held: FragmentState, strategy: tw.Strategy, buffers: Buffers, mean: Tensor, **given: Any) -> Flight:
    """A round of a delta of ones that has arrived in two parts."""
    flight = Flight(held.begin_round(strategy, buffers.like(mean).fill_(1.0), 1, **given), buffers)
    assert not flight.finish(), "nothing has arrived"
    for begin, end in ((0, 5), (5, NUMEL)):
        values = flight.signal(begin, end).clone()
        flight.settle(begin, mean[begin:end].clone(), values)
    return flight


class Doubled(Filter):
    """Sends twice the signal, and halves the estimate."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def init(self, numel: int) -> State:
        return {"last": torch.zeros(numel)}

    def fitted(self, codec: tw.codecs.Codec, numel: int, size: int) -> Doubled:
        return self

    def dense(self, state: State) -> bool:
        return bool(state["last"][0] == 6)

    def signal(self, s: Tensor, state: State) -> Tensor:
        self.seen.append(s.tolist())
        return 2 * s

    def settle(self, s: Tensor, sent: Tensor, mean: Tensor, state: State, held: State) -> tuple[Tensor, State]:
        self.seen += [s.tolist(), sent.tolist()]
        return mean / 2, {"last": mean.clone()}


# outer step, feedback, filtered; buffers lent after the round has arrived, finished, closed, and been committed or discarded
ROUNDS = [
    (None, None, False, 2, 2, 2, 0),
    (TWO_LINEAR, None, False, 3, 3, 3, 2),
    (TWO_LINEAR, Feedback(), False, 5, 5, 4, 3),
    (ByWhole(), None, False, 2, 2, 1, 0),
    (None, Feedback(), False, 4, 4, 3, 1),
    (TWO_LINEAR, None, True, 3, 3, 1, 0),
    (None, Feedback(), True, 5, 5, 2, 1),
]


@pytest.mark.parametrize("anchors", ["host", "disk"])
@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize(("outer", "feedback", "filtered", "there", "finished", "closed", "after"), ROUNDS)
def test_a_round_computes_its_results_beside_the_state(
    outer, feedback, filtered, there, finished, closed, after, good, anchors
):
    """A committed round keeps the buffers of what it has changed; on disk, and after a discarded one, nothing is lent."""
    doubled = Doubled()
    strategy = tw.Strategy(codec=tw.codecs.Sign(), feedback=feedback, outer=outer or TWO_LINEAR, anchors=anchors)
    strategy.__dict__["filters"] = (doubled,) if filtered else ()
    held, buffers, mean = held_by(strategy), Buffers(), floats(6.0, 4.0)
    if feedback:
        held.feedback["residual"] += 3
    start, mean_due = held.anchor.clone(), mean / 2 if filtered else mean
    state_before = {name: value.clone() for name, value in held.state.items()}
    flight = arrived(held, strategy, buffers, mean, outer=outer)
    told = flight.signal(0, NUMEL).tolist()
    assert told == [(2.0 if filtered else 1.0) + (3.0 if feedback else 0.0)] * NUMEL
    assert lent(buffers) == there
    assert flight.finish() and lent(buffers) == finished
    flight.close()
    assert lent(buffers) == closed
    if filtered:
        assert doubled.seen == [[1.0] * NUMEL, [1.0] * NUMEL, told], "a filter runs once"
    due, state = outer.step(start, mean_due, state_before) if outer else (mean_due, {})
    assert flight.anchor is not None and flight.anchor.tolist() == due.tolist()
    assert held.anchor.tolist() == VALUES and held.flight is flight
    (flight.commit if good else flight.discard)()
    assert held.flight is None
    assert lent(buffers) == (after if good and anchors == "host" else 0)
    assert held.anchor.tolist() == (due if good and outer else start).tolist()
    for name, value in (state if good and outer else state_before).items():
        assert held.state[name].tolist() == value.tolist()
    assert [one["last"].tolist() for one in held.filtered] == [(mean if good else 0 * mean).tolist()] * filtered
    if feedback:
        assert held.feedback["residual"].tolist() == ([0.0] if good else [3.0]) * NUMEL
    if filtered:
        assert isinstance(held.due(strategy.policy, 1), Identity) == good


@pytest.mark.parametrize(
    ("value", "good"), [(3e38, True), (-3e38, True), (1.0, True), (math.inf, False), (math.nan, False)]
)
@pytest.mark.parametrize("outer", [tw.pieces.outer.Nesterov(1.0, 0.0), ByWhole(1.0), None])
def test_a_round_without_a_finite_anchor_is_refused(value: float, good: bool, outer: Outer | None):
    """The sum of squares may overflow. A single value counts, in the first part of a round and in the last."""
    for at in (0, NUMEL - 1):
        strategy = tw.Strategy(outer=outer or TWO_LINEAR)
        mean = floats(0.0)
        mean[at] = value
        flight = arrived(held_by(strategy), strategy, Buffers(), mean, outer=outer)
        assert flight.finish() == good


@pytest.mark.parametrize("feedback", [None, Feedback()])
def test_a_given_anchor_is_taken_as_it_is(feedback: Feedback | None):
    strategy = tw.Strategy(outer=TWO_LINEAR, codec=tw.codecs.Sign(), feedback=feedback)
    held, given, buffers = held_by(strategy), floats(5.0), Buffers()
    flight = Flight(held.begin_round(strategy, floats(1.0), 1, outer=TWO_LINEAR, given=given), buffers)
    flight.settle(0, floats(math.nan), floats(0.25))
    assert flight.finish() and flight.anchor is given and not flight.outer
    assert [kept.tolist() for kept in flight.feedback.values()] == [[0.75] * NUMEL] * bool(feedback)


@pytest.mark.filterwarnings("error")  # torch warns if it must resize a result
def test_a_signal_has_room_for_the_longest_range():
    """Room is made anew for a longer range, and kept for a shorter one."""
    strategy = replace(tw.Strategy(codec=tw.codecs.Sign()), feedback=Feedback())
    model = nn.Linear(100, 10)
    held, buffers = first_state(strategy, Whole().fragments(model)[0], 0, 0, 1), Buffers()
    flight = Flight(held.begin_round(strategy, torch.ones(1010), 1), buffers)
    for begin, end, room in ((0, 300, 1280), (300, 900, 2560), (900, 1010, 2560)):
        assert flight.signal(begin, end).tolist() == [1.0] * (end - begin)
        assert sum(whole.numel() for whole in buffers._lent.values()) == room


def all_of(held: FragmentState) -> dict[str, list[float]]:
    """All values that a fragment keeps from round to round."""
    filtered = {f"filter {index}": state for index, state in enumerate(held.filtered)}
    states = {name: getattr(held, name) for name in ("state", "feedback", "exchange", "aggregate", "policy")} | filtered
    kept = {f"{name}.{key}": value.tolist() for name, state in states.items() for key, value in state.items()}
    return kept | {"anchor": held.anchor.tolist(), "parameters": flat(held)}


def test_a_discarded_round_leaves_every_state_as_it_was_and_a_committed_one_replaces_it():
    """Those of the exchange, the aggregate and the policy too, which the round made beside the others."""
    strategy = tw.Strategy(codec=tw.codecs.Sign(), feedback=Feedback(), outer=TWO_LINEAR)
    strategy.__dict__["filters"] = (Doubled(),)
    for good in (False, True):
        held, buffers = held_by(strategy), Buffers()
        kinds = ("exchange", "aggregate", "policy")
        for name in kinds:
            setattr(held, name, {"last": floats(2.0)})
        held.feedback["residual"] += 3
        before = all_of(held)
        update = arrived(held, strategy, buffers, floats(6.0, 4.0), outer=TWO_LINEAR)
        for name in kinds:
            setattr(update, name, {"last": floats(9.0)})
        assert update.finish()
        update.close()
        (update.commit if good else update.discard)()
        after = all_of(held)
        changed = {name for name in before if after[name] != before[name]}
        assert changed == (set(before) - {"parameters"} if good else set())


def test_a_state_that_a_tolerated_round_without_this_replica_made_infinite_is_the_one_before():
    """Value by value, in the feedback and in every filter: what others sent counts."""
    strategy = tw.Strategy(codec=tw.codecs.Sign(), feedback=Feedback())
    strategy.__dict__["filters"] = (Doubled(),)
    held = held_by(strategy)
    update = Flight(held.begin_round(strategy, floats(1.0), 1), Buffers())
    held.feedback, update.feedback = {"residual": floats(3.0, 4.0)}, {"residual": floats(math.nan, 5.0)}
    held.filtered, update.filtered = ({"last": floats(1.0, 2.0)},), ({"last": floats(7.0, -math.inf)},)
    update.keep_own_state()
    assert update.feedback["residual"].tolist() == floats(3.0, 5.0).tolist()
    assert update.filtered[0]["last"].tolist() == floats(7.0, 2.0).tolist()
    assert held.feedback["residual"].tolist() == floats(3.0, 4.0).tolist()
