"""Immutable messages between the main thread and the round loop. Neither writes the state of the other.

main thread → loop      commands, one after another; and the newest inner step
loop → main thread      outcomes, one after another; and the newest report
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.data_ledger import Claim, DataLedger, ReadCount
from thinwire.drivers.elastic.global_state import GlobalState, Record
from thinwire.drivers.elastic.states import Event, State
from thinwire.types import State as Tensors


@dataclass(frozen=True)
class Ready:
    """A delta that waits for its round. It departed after inner step `step`; `claim` names the samples that it was trained on, read in
    the `generation` of the reader (data_ledger). `trained` is what this replica had trained then, in tokens or steps, of which `behind` is
    in the delta. `renewals` counts the outcomes of the fragment after which deltas that departed before must not be counted.
    """

    fragment: int
    delta: Tensor
    weight: float
    step: int
    feedback: Tensors
    claim: Claim | None = None
    generation: int = 0
    trained: float = 0.0
    renewals: int = 0
    behind: float = 0.0


NOTHING = Ready(-1, torch.empty(0), 0.0, 0, {})  # takes part without a delta


@dataclass(frozen=True)
class Join:
    """Meet the others, at inner step `step`."""

    event: ClassVar[Event] = Event.JOIN
    step: int


@dataclass(frozen=True)
class Load:
    """Resume from `agreed`, which a checkpoint held. The loop owns it from now on. For `held_since` see `Point`."""

    event: ClassVar[Event] = Event.LOAD
    agreed: GlobalState
    held_since: Mapping[int, int]


@dataclass(frozen=True)
class Depart:
    """Queue the deltas `brought`, and hold the rounds that are due. The deltas departed at `seconds` of the membership's clock, after
    `own_steps` inner steps of this replica.
    """

    event: ClassVar[Event] = Event.DEPART
    brought: tuple[Ready, ...]
    own_steps: int
    seconds: float


@dataclass(frozen=True)
class Finish:
    """All steps are trained. This replica may keep the final state for missing members, for `keep_seconds` at most."""

    event: ClassVar[Event] = Event.FINISH
    keep_seconds: float


@dataclass(frozen=True)
class Meet:
    """Hold one round with the deltas `brought`."""

    event: ClassVar[Event] = Event.MEET
    brought: tuple[Ready, ...]


@dataclass(frozen=True)
class Close:
    """Hold no more rounds."""

    event: ClassVar[Event] = Event.CLOSE


Command = Join | Load | Depart | Finish | Meet | Close


@dataclass(frozen=True)
class Point:
    """A point in the history of the agreed state: round, digest, counted replicas (`GlobalState.counted`), and ledger; and by fragment the
    first round that may have counted what this replica holds as its own progress (`PastDeltas`).
    """

    round: int = 0
    state_digest: str = ""
    counted: Record = field(default_factory=dict)
    ledger: DataLedger | None = None
    held_since: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a round for one fragment. The main thread takes it over.

    anchor     the new agreed anchor; None: nothing has changed
    state      the outer step's state
    counted    this replica's delta that is in the anchor, if any; its later progress is still to be sent
    recalled   `counted` had been given back before, so deltas that departed since hold it, too, and must not be counted
    feedback   the new feedback, if a delta was counted
    ready      this replica's delta that was due in the round
    returned   this replica's delta that seemed to be counted, and is not; it is still to be sent
    broken     the delta contained NaN or infinity, and was not sent
    anew       this replica's own progress is dropped; it continues from the anchor
    spent      with `anew`: a counted delta held that progress, and with it what feedback had held back, which is dropped, too
    dropped    the last of such outcomes for all fragments: others train its samples, so it continues with its present lease
    after      the agreed state after this outcome
    """

    fragment: int
    round: int
    anchor: Tensor | None = None
    state: Tensors = field(default_factory=dict)
    counted: Ready | None = None
    recalled: bool = False
    feedback: Tensors = field(default_factory=dict)
    ready: Ready | None = None
    returned: Ready | None = None
    broken: bool = False
    anew: bool = False
    spent: bool = False
    dropped: bool = False
    after: Point = field(default_factory=Point)


@dataclass(frozen=True)
class Report:
    """The state of the loop.

    done      number of commands that were executed
    step      the newest inner step that it knows
    next      the fragment of the next round
    run       the id of its run; "" before its first view
    alone     number of failed attempts in a row to find a view
    reason    why, or why its last round failed; "" if it did not
    failure   the error that ended the rounds
    ledger    the assignment of samples to replicas
    """

    state: State
    done: int
    step: int
    next: int
    run: str
    alone: int
    reason: str
    failure: BaseException | None
    ledger: DataLedger | None


class Mailbox:
    """The values that the two threads share, beside the queue of commands.

    steps      new inner steps, from the main thread
    reads      the reader's newest generation, and how far it has read, from the main thread
    fence      while the samples are split anew: the generation of the reader, and how far it may read until it is over; from the loop
    closing    set by the main thread: only `Close` is executed from now on
    outcomes   outcomes from the loop, in order; those that the main thread must take over together are one entry
    """

    report: Report  # the newest report; the loop publishes the first one when it is made

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=1)
        self.reads: tuple[int, ReadCount] = 0, ReadCount()
        self.fence: tuple[int, int] | None = None
        self.closing = threading.Event()
        self.outcomes: deque[Sequence[Outcome]] = deque()
        self._changed = threading.Condition()

    def publish(self, report: Report) -> None:
        with self._changed:
            self.report = report
            self._changed.notify_all()

    def wake(self) -> None:
        """Make waiting threads check their condition again. May be called from any thread or signal handler."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait until `enough()` is true. It is called after every report and `wake`."""
        with self._changed:
            self._changed.wait_for(enough)
