"""What the main thread and the round loop say to each other: immutable messages. Neither writes what the other holds.

main thread → loop      commands, one after another; and the newest inner step
loop → main thread      outcomes, one after another; and the newest report
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.data_ledger import Claim, DataLedger, ReadCount
from thinwire.elastic.global_state import GlobalState
from thinwire.elastic.states import Event, State
from thinwire.types import State as Tensors


@dataclass(frozen=True)
class Ready:
    """A delta that waits for its round. `step` is the inner step that it departed after; `claim` names the samples behind it, read
    in the `generation` of its reader (data_ledger).
    """

    fragment: int
    delta: Tensor
    weight: float
    step: int
    feedback: Tensors
    claim: Claim | None = None
    generation: int = 0


NOTHING = Ready(-1, torch.empty(0), 0.0, 0, {})  # to take part without a delta


@dataclass(frozen=True)
class Join:
    """Meet the others, at inner step `step`."""

    event: ClassVar[Event] = Event.JOIN
    step: int


@dataclass(frozen=True)
class Load:
    """Go on from `agreed`, which a checkpoint held. It belongs to the loop from now on."""

    event: ClassVar[Event] = Event.LOAD
    agreed: GlobalState


@dataclass(frozen=True)
class Depart:
    """Let `brought` wait for their rounds, and hold those that are due. It departed at `seconds` of the membership's clock,
    when this replica had trained `own_steps` inner steps itself.
    """

    event: ClassVar[Event] = Event.DEPART
    brought: tuple[Ready, ...]
    own_steps: int
    seconds: float


@dataclass(frozen=True)
class Finish:
    """All steps are trained. For `keep_seconds` at most this replica may have to keep the final state for those missing."""

    event: ClassVar[Event] = Event.FINISH
    keep_seconds: float


@dataclass(frozen=True)
class Meet:
    """Hold one round, and bring `brought` to it."""

    event: ClassVar[Event] = Event.MEET
    brought: tuple[Ready, ...]


@dataclass(frozen=True)
class Close:
    """Hold no more rounds."""

    event: ClassVar[Event] = Event.CLOSE


Command = Join | Load | Depart | Finish | Meet | Close


@dataclass(frozen=True)
class Point:
    """Where the agreed state stood: its round, its digest, who was counted on the way (`GlobalState.counted`), and who reads what."""

    round: int = 0
    state_digest: str = ""
    counted: Mapping[int, tuple[int, tuple[str, ...], str]] = field(default_factory=dict)
    ledger: DataLedger | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one fragment, for the main thread to take over.

    anchor     the agreed one now; None: nothing has changed
    state      of the outer step
    counted    this replica's delta that is in it, if any: the rest of its progress still is to travel
    feedback   what is held back now, if one was counted
    ready      the delta whose round this was
    returned   this replica's delta that was believed to be counted, and is not: it is still to travel
    broken     it held NaN or infinity, and was not sent
    anew       nothing of this replica's own progress still is to travel: it goes on from the anchor
    dropped    so it is for all fragments, since others train its samples: it goes on with what its lease says now
    after      the agreed state that this belongs to
    """

    fragment: int
    round: int
    anchor: Tensor | None = None
    state: Tensors = field(default_factory=dict)
    counted: Ready | None = None
    feedback: Tensors = field(default_factory=dict)
    ready: Ready | None = None
    returned: Ready | None = None
    broken: bool = False
    anew: bool = False
    dropped: bool = False
    after: Point = field(default_factory=Point)


@dataclass(frozen=True)
class Report:
    """Where the loop stands.

    done      how many commands it has carried out
    step      where training has got to, as far as it knows
    next      the fragment whose turn it is
    run       the run that it is in; "" before its first view
    alone     how often in a row it found no view, and
    reason    why, or why its last round failed; "" if it did not
    failure   what ended the rounds
    ledger    who reads which samples
    """

    state: State
    done: int
    step: int
    next: int
    run: str
    alone: int = 0
    reason: str = ""
    failure: BaseException | None = None
    ledger: DataLedger | None = None


class Mailbox:
    """What lies between the two threads, beside the queue of commands.

    steps      the newest inner step, from the main thread
    reads      the newest generation of its reader, and how far it has read
    closing    set by the main thread: no command but `Close` is carried out any more
    outcomes   from the loop, in order
    """

    report: Report  # the newest; the loop publishes one when it is made

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=1)
        self.reads: tuple[int, ReadCount] = 0, ReadCount()
        self.closing = threading.Event()
        self.outcomes: deque[Outcome] = deque()
        self._changed = threading.Condition()

    def publish(self, report: Report) -> None:
        with self._changed:
            self.report = report
            self._changed.notify_all()

    def wake(self) -> None:
        """Who waits looks again. From any thread, and from a signal handler."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, enough: Callable[[], bool]) -> None:
        """Until `enough()`, asked after every report and `wake`."""
        with self._changed:
            self._changed.wait_for(enough)
