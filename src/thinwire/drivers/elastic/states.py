"""The round loop as a table of states, events and transitions with their actions. No I/O.

The loop (round_loop.py) runs on one thread, and only this thread holds the state. An event is a message from the main thread, or the
result of a round. An event that has no row in the present state is a mistake in the program: `transition` raises. docs/rounds.md
shows the table; a test drives the loop through every row of it.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The state of this replica between two events."""

    JOINING = "holds random weights, and has met no other member"
    TRAINING = "takes part in rounds"
    IN_DOUBT = "voted yes on its own delta, and does not know the result"
    FINISHING = "has trained all its steps, and sends the remaining deltas"
    FINISHING_IN_DOUBT = "has trained all its steps, and does not know whether its last delta was counted"
    ENDING = "notes the end of the run at the rendezvous"
    WAITING = "holds the result of the vote on the end, and could not note it"
    KEEPING = "keeps the final state for missing members"
    ENDED = "holds the final state"
    FAILED = "an error has ended the rounds; the main thread raises it"
    CLOSED = "holds no more rounds"


class Event(Enum):
    """Events. The first six are messages from the main thread."""

    JOIN = "meet the others in a first round"
    LOAD = "resume from a checkpoint"
    DEPART = "deltas have departed"
    FINISH = "all steps are trained"
    MEET = "hold one more round, with these deltas"
    CLOSE = "hold no more rounds"
    ALONE = "no view was found"
    RUN_ENDED = "the run has ended with the state that this replica holds"
    LEVEL = "a view was found, and this replica holds what its members agreed on"
    CAUGHT_UP = "a view was found, and this replica took over what its members agreed on"
    DECIDED = "the round is over: it was committed, or changed nothing"
    UNDECIDED = "this replica voted yes on its own delta, and the result did not arrive"
    OVER = "the members voted that the run is over, or one of them says so"
    NOBODY_LATE = "no member is missing at the end, or another member keeps the final state"
    SOMEBODY_LATE = "members are missing at the end, and this member keeps the final state for them"
    UNNOTED = "the end could not be noted, so that others may not know of it"
    NOTED = "the end is noted"
    OVERTAKEN = "others did not know of the end and went on, and this replica took over what they agreed on"
    KEPT = "the missing members have the final state, or the time to keep it is over"
    FAILED = "an error was raised"


class Action(Enum):
    """Actions of the loop in a transition."""

    HOLD_DUE = "hold rounds while one is due"
    HOLD_ONE = "hold one round"
    ADOPT = "take over the checkpoint's state"
    GIVE_FINAL = "give the main thread the final state"
    GIVE_BACK = "give back the deltas that wait for a round"
    START_ANEW = "replace the parameters by the anchors"
    TAKE_OVER = "move the parameters with the anchors"
    LOOK_UP_DOUBT = "look up in the new state whether the delta was counted"
    DROP_DOUBT = "treat the delta as not counted: a member that knew of the commit would be ahead"
    REMEMBER = "keep the delta and its feedback"
    NOTE_END = "note the end, and find the missing members"
    KEEP = "give the final state to members that come"
    END_SENDING = "end the sending thread"


A, E, S = Action, Event, State

TRANSITIONS: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (S.JOINING, E.JOIN): (S.JOINING, (A.HOLD_ONE,)),
    (S.JOINING, E.LOAD): (S.TRAINING, (A.ADOPT,)),
    (S.JOINING, E.ALONE): (S.JOINING, (A.GIVE_BACK,)),
    (S.JOINING, E.LEVEL): (S.TRAINING, ()),
    (S.JOINING, E.CAUGHT_UP): (S.TRAINING, (A.START_ANEW,)),
    (S.JOINING, E.DECIDED): (S.JOINING, ()),  # it could not take over the state that it lacks
    (S.JOINING, E.FAILED): (S.FAILED, ()),
    (S.JOINING, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
    #
    (S.TRAINING, E.JOIN): (S.TRAINING, (A.HOLD_ONE,)),  # after LOAD
    (S.TRAINING, E.LOAD): (S.TRAINING, (A.ADOPT,)),
    (S.TRAINING, E.DEPART): (S.TRAINING, (A.HOLD_DUE,)),
    (S.TRAINING, E.FINISH): (S.FINISHING, (A.GIVE_BACK,)),
    (S.TRAINING, E.ALONE): (S.TRAINING, (A.GIVE_BACK,)),
    (S.TRAINING, E.RUN_ENDED): (S.ENDED, ()),
    (S.TRAINING, E.LEVEL): (S.TRAINING, ()),
    (S.TRAINING, E.CAUGHT_UP): (S.TRAINING, (A.TAKE_OVER,)),
    (S.TRAINING, E.DECIDED): (S.TRAINING, ()),
    (S.TRAINING, E.UNDECIDED): (S.IN_DOUBT, (A.REMEMBER,)),
    (S.TRAINING, E.OVER): (S.ENDING, (A.NOTE_END,)),  # it met a member that keeps the final state
    (S.TRAINING, E.FAILED): (S.FAILED, ()),
    (S.TRAINING, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
    #
    (S.IN_DOUBT, E.DEPART): (S.IN_DOUBT, (A.HOLD_DUE,)),
    (S.IN_DOUBT, E.FINISH): (S.FINISHING_IN_DOUBT, (A.GIVE_BACK,)),
    (S.IN_DOUBT, E.ALONE): (S.IN_DOUBT, (A.GIVE_BACK,)),
    (S.IN_DOUBT, E.RUN_ENDED): (S.ENDED, ()),
    (S.IN_DOUBT, E.LEVEL): (S.TRAINING, (A.DROP_DOUBT,)),
    (S.IN_DOUBT, E.CAUGHT_UP): (S.TRAINING, (A.LOOK_UP_DOUBT, A.TAKE_OVER)),
    (S.IN_DOUBT, E.DECIDED): (S.IN_DOUBT, ()),  # it could not take over the state that it lacks
    (S.IN_DOUBT, E.FAILED): (S.FAILED, ()),
    (S.IN_DOUBT, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
    #
    (S.FINISHING, E.MEET): (S.FINISHING, (A.HOLD_ONE,)),
    (S.FINISHING, E.ALONE): (S.FINISHING, (A.GIVE_BACK,)),
    (S.FINISHING, E.RUN_ENDED): (S.ENDED, ()),
    (S.FINISHING, E.LEVEL): (S.FINISHING, ()),
    (S.FINISHING, E.CAUGHT_UP): (S.FINISHING, (A.TAKE_OVER,)),
    (S.FINISHING, E.DECIDED): (S.FINISHING, ()),
    (S.FINISHING, E.UNDECIDED): (S.FINISHING_IN_DOUBT, (A.REMEMBER,)),
    (S.FINISHING, E.OVER): (S.ENDING, (A.NOTE_END,)),
    (S.FINISHING, E.FAILED): (S.FAILED, ()),
    (S.FINISHING, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
    #
    (S.FINISHING_IN_DOUBT, E.MEET): (S.FINISHING_IN_DOUBT, (A.HOLD_ONE,)),
    (S.FINISHING_IN_DOUBT, E.ALONE): (S.FINISHING_IN_DOUBT, (A.GIVE_BACK,)),
    (S.FINISHING_IN_DOUBT, E.RUN_ENDED): (S.ENDED, ()),
    (S.FINISHING_IN_DOUBT, E.LEVEL): (S.FINISHING, (A.DROP_DOUBT,)),
    (S.FINISHING_IN_DOUBT, E.CAUGHT_UP): (S.FINISHING, (A.LOOK_UP_DOUBT, A.TAKE_OVER)),
    (S.FINISHING_IN_DOUBT, E.DECIDED): (S.FINISHING_IN_DOUBT, ()),  # it could not take over the state that it lacks
    (S.FINISHING_IN_DOUBT, E.FAILED): (S.FAILED, ()),
    (S.FINISHING_IN_DOUBT, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
    #
    (S.ENDING, E.NOBODY_LATE): (S.ENDED, ()),
    (S.ENDING, E.SOMEBODY_LATE): (S.KEEPING, (A.KEEP,)),
    (S.ENDING, E.UNNOTED): (S.WAITING, (A.KEEP,)),
    (S.ENDING, E.FAILED): (S.FAILED, ()),
    #
    (S.WAITING, E.NOTED): (S.KEEPING, ()),  # from now on the main thread may use the final state
    (S.WAITING, E.OVERTAKEN): (S.FINISHING, (A.TAKE_OVER,)),
    (S.WAITING, E.KEPT): (S.ENDED, ()),
    (S.WAITING, E.FAILED): (S.FAILED, ()),
    #
    (S.KEEPING, E.KEPT): (S.ENDED, ()),
    (S.KEEPING, E.FAILED): (S.FAILED, ()),
    #
    (S.ENDED, E.LOAD): (S.ENDED, (A.GIVE_FINAL,)),  # no checkpoint is newer
    (S.ENDED, E.DEPART): (S.ENDED, ()),
    (S.ENDED, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
    #
    (S.FAILED, E.DEPART): (S.FAILED, ()),
    (S.FAILED, E.CLOSE): (S.CLOSED, (A.END_SENDING,)),
}


def transition(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """The state after `event`, and what to do. Raises `AssertionError` for an event that cannot happen in `state`.

    >>> after, actions = transition(State.FINISHING, Event.OVER)
    >>> after.name, [action.name for action in actions]
    ('ENDING', ['NOTE_END'])
    """
    if (state, event) not in TRANSITIONS:
        raise AssertionError(f"{event.name} cannot happen in {state.name}: see thinwire/drivers/elastic/states.py")
    return TRANSITIONS[state, event]
