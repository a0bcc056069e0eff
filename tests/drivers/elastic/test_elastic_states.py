"""The state table of the round loop, row by row: the real loop takes each row on a simulated cluster, and no other row is possible.

The loop belongs to one replica. If a row needs something that only other replicas cause (an unanswered vote, a state to take
over), the function at which the loop meets it is replaced.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_toy import Inline, one_thread

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.drivers.elastic import round_loop
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.round_thread import RoundThread
from thinwire.drivers.elastic.states import TRANSITIONS, Action, Event, State, transition
from thinwire.errors import LinkError, UndecidedError
from thinwire.membership.rendezvous import Membership
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.membership.testing.lighthouse import SimulatedVoteStore
from thinwire.membership.view import View

__all__ = ["one_thread"]  # a fixture
PASSING = State.ENDING, State.WAITING, State.KEEPING
DOCS = Path(__file__).parents[3] / "docs" / "rounds.md"


class Subject:
    """The loop of one replica. Its methods bring it into a state and cause events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.cluster, self.events = monkeypatch, SimulatedCluster(), list[str]()
        self.taken: list[tuple[State, Event]] = []
        anchor = torch.zeros(4)
        strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4), outer=tw.pieces.outer.Average())
        self.rounds = RoundThread(
            strategy, self.cluster.membership("a", least=1), GlobalState([anchor], [{}], state_digest="d"), [Identity()], [0],
            observe=lambda event, step, **fields: self.events.append(event), thread=Inline(),
        )  # fmt: skip

        def taken(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
            self.taken.append((state, event))
            return transition(state, event)

        monkeypatch.setattr(round_loop, "transition", taken)

    @property
    def state(self) -> State:
        return self.rounds.report.state

    # ---- states

    def bring_into(self, state: State) -> None:
        if state is not State.JOINING:
            self.rounds.join(0)
        if state is State.IN_DOUBT:
            self.unanswered()
            self.depart()
        elif state not in (State.JOINING, State.TRAINING, State.FAILED, State.CLOSED):
            self.rounds.finish(keep_seconds=60.0)
        if state is State.FINISHING_IN_DOUBT:
            self.unanswered()
            self.rounds.meet(delta())
        elif state in (State.ENDING, State.WAITING, State.KEEPING, State.ENDED):
            self.rounds.meet(delta())
        if state is State.ENDED:
            self.rounds.meet()
        elif state is State.FAILED:
            self.fail()
        # the loop leaves ENDING, WAITING and KEEPING before a command ends, so their events start from FINISHING
        assert self.state is (State.FINISHING if state in PASSING else state)

    def unanswered(self) -> None:
        """Makes the lighthouse die during the next vote."""

        def decide(view: View, question: str, yes: bool, seconds: float, *what: str) -> bool:
            self.cluster.lighthouse.stop()
            raise UndecidedError("the lighthouse has gone")

        self.patch.setattr(View, "decide", decide)

    # ---- events

    def depart(self) -> None:
        self.rounds.depart(delta(), own_steps=4)

    def round(self) -> None:
        """Makes the loop hold a round from its current state."""
        if self.state in (State.JOINING, State.TRAINING):
            with suppress(LinkError, RuntimeError):
                self.rounds.join(0)
        elif self.state is State.IN_DOUBT:
            self.rounds.depart(own_steps=4)
        else:
            self.rounds.meet()

    def light(self) -> None:
        if not self.cluster.lighthouse.up:
            self.cluster.lighthouse.start()

    def alone(self) -> None:
        self.cluster.lighthouse.stop()
        self.round()

    def level(self) -> None:
        self.light()
        self.round()

    def catch_up(self) -> None:
        self.patch.setattr(round_loop, "level", lambda *_: "b")
        self.level()

    def decide(self) -> None:
        """Ends a round. If the loop is behind or in doubt, the state that it lacks is not available."""
        if self.state in (State.JOINING, State.IN_DOUBT, State.FINISHING_IN_DOUBT):

            def level(*_: Any) -> str:
                self.cluster.lighthouse.stop()  # so no round follows this one
                raise LinkError("the donor has gone")

            self.patch.setattr(round_loop, "level", level)
        self.level()

    def undecided(self) -> None:
        self.unanswered()
        self.depart() if self.state is State.TRAINING else self.rounds.meet(delta())

    def over(self) -> None:
        if self.state is State.TRAINING:  # it meets a member that keeps the final state
            reconcile = round_loop.reconcile
            self.patch.setattr(round_loop, "reconcile", lambda *given: replace(reconcile(*given), over=True))
        self.round()

    def run_ended(self) -> None:
        self.light()
        agreed, membership = self.rounds.loop.agreed, self.rounds.membership
        for what in ((agreed.run,), (agreed.run, agreed.state_digest)):
            SimulatedVoteStore(self.cluster.lighthouse, self.cluster, "z").put(membership._end_of(*what))
        self.round()

    def somebody_late(self) -> None:
        self.rounds.loop._met.add("b")
        self.round()

    def unnoted(self, times: int = 1) -> None:
        """Makes the lighthouse go away while the end is noted."""
        note, left = Membership.note_end, [times]

        def note_end(membership: Membership, *what: str) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise LinkError("the lighthouse has gone")
            note(membership, *what)

        self.patch.setattr(Membership, "note_end", note_end)
        self.somebody_late()

    def overtaken(self) -> None:
        self.patch.setattr(round_loop, "keep", lambda *_: "b")
        self.unnoted()

    def fail(self) -> None:
        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("on purpose")

        self.patch.setattr(Membership, "next_view", fails)
        self.round()

    def fail_while(self, name: str) -> None:
        def fails(*_: object) -> None:
            raise RuntimeError("on purpose")

        self.patch.setattr(round_loop, name, fails)

    def happen(self, state: State, event: Event) -> None:
        if event is Event.FAILED and state in PASSING:
            self.fail_while("note_end" if state is State.ENDING else "keep")
        if state is State.WAITING and event is not Event.OVERTAKEN:
            self.unnoted(times=1 << 62 if event is Event.KEPT else 1)
            return
        if event is Event.FAILED and state in PASSING:
            self.somebody_late()
            return
        {
            Event.JOIN: lambda: self.rounds.join(0), Event.LOAD: lambda: self.rounds.load(GlobalState([torch.ones(4)], [{}]), {}),
            Event.DEPART: self.depart, Event.FINISH: lambda: self.rounds.finish(0.0), Event.MEET: self.rounds.meet,
            Event.CLOSE: self.rounds.close, Event.ALONE: self.alone, Event.RUN_ENDED: self.run_ended, Event.LEVEL: self.level,
            Event.CAUGHT_UP: self.catch_up, Event.DECIDED: self.decide,
            Event.UNDECIDED: self.undecided, Event.OVER: self.over, Event.NOBODY_LATE: self.round,
            Event.SOMEBODY_LATE: self.somebody_late, Event.KEPT: self.somebody_late, Event.FAILED: self.fail,
            Event.UNNOTED: self.unnoted, Event.OVERTAKEN: self.overtaken,
        }[event]()  # fmt: skip


def delta() -> Ready:
    return Ready(0, torch.ones(4), 1.0, 4, {})


@pytest.mark.parametrize(("state", "event"), TRANSITIONS, ids=lambda one: one.name)
def test_the_round_loop_takes_every_transition_of_the_table(
    state: State, event: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(monkeypatch)
    subject.bring_into(state)
    subject.taken.clear()
    subject.happen(state, event)
    assert (state, event) in subject.taken, [f"{s.name} {e.name}" for s, e in subject.taken]
    assert not isinstance(subject.rounds.report.failure, AssertionError)
    if state not in PASSING and subject.taken == [(state, event)]:
        assert subject.state is TRANSITIONS[state, event][0]


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_events_outside_the_table_are_refused(state: State) -> None:
    for event in Event:
        if (state, event) in TRANSITIONS:
            assert transition(state, event) == TRANSITIONS[state, event]
        else:
            with pytest.raises(AssertionError, match=f"{event.name} cannot happen in {state.name}"):
                transition(state, event)


def test_every_state_is_reachable_and_can_be_left() -> None:
    reached, there = {State.JOINING}, {State.JOINING}
    while there:
        there = {after for (state, _), (after, _) in TRANSITIONS.items() if state in there} - reached
        reached |= there
    assert reached == set(State)
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.CLOSED}
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert {action for _, actions in TRANSITIONS.values() for action in actions} == set(Action)


def test_an_impossible_event_ends_the_rounds_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(monkeypatch)
    subject.rounds.meet()
    with pytest.raises(AssertionError, match="MEET cannot happen in JOINING"):
        list(subject.rounds.outcomes(0))


def test_an_undecided_delta_is_settled_by_the_state_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that is taken over shows whether the delta, whose vote nobody answered, was counted."""
    for counted in (True, False):
        with monkeypatch.context() as patch:
            subject = Subject(patch)
            subject.bring_into(State.IN_DOUBT)
            list(subject.rounds.outcomes(99))

            def take_over(
                _: object, plan: object, statuses: object, agreed: GlobalState, *__: object, who: bool = counted
            ) -> str:
                agreed.commit(0, torch.ones(4), {}, ("a", "b") if who else ("b",))
                agreed.round += 1
                return "b"

            patch.setattr(round_loop, "level", take_over)
            subject.level()
            first, *_ = subject.rounds.outcomes(99)
            assert first.ready is not None and (first.counted is not None) == counted
            assert subject.state is State.TRAINING


def written(path: Path) -> set[str]:
    """Returns the attributes that `path` assigns, such as `self.rounds.step`."""
    found: set[str] = set()
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) else targets
        found |= {
            ast.unparse(part) for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute)
        }
    return found


def test_no_other_module_writes_attributes_of_the_loop_or_membership() -> None:
    source = Path(tw.__file__).parent
    paths = [*source.glob("drivers/elastic/*.py"), *source.glob("app/trainer/*.py"), *source.glob("*.py")]
    assert "self._state" in written(source / "drivers" / "elastic" / "round_loop.py")
    others = re.compile(r"\b(rounds|loop|membership|voter|agreed|group)\.\w+$")
    for path in paths:
        wrong = {name for name in written(path) if others.search(name)}
        own = {"self.agreed.round", "self.agreed.run"} if path.name == "round_loop.py" else set()
        assert not wrong - own, f"{path}: {wrong}; send a message, or call a method"


def drawn() -> str:
    """Returns the table in the form of docs/rounds.md: a row for each state, with what each event makes the loop do."""
    lines = ["| state: this replica | event: what the loop does (next state) |", "|---|---|"]
    for state in State:
        cells = []
        for (_, event), (after, actions) in ((row, then) for row, then in TRANSITIONS.items() if row[0] is state):
            done = ", then ".join(action.value for action in actions) or "–"
            cells.append(f"`{event.name}`: {done}" + (f" (`{after.name}`)" if after is not state else ""))
        lines.append(f"| `{state.name}`: {state.value} | {' · '.join(cells)} |")
    return "\n".join(lines)


def test_the_docs_page_draws_the_transition_table() -> None:
    assert drawn() in DOCS.read_text(encoding="utf-8"), f"docs/rounds.md is to draw this:\n\n{drawn()}"
