"""The main thread's side of the round loop: sends commands to the exchange thread, and returns outcomes between inner steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from thinwire.codecs import Codec
from thinwire.data_ledger import ReadCount
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import (
    Close,
    Command,
    Depart,
    Finish,
    Join,
    Load,
    Mailbox,
    Meet,
    Outcome,
    Ready,
    Report,
)
from thinwire.drivers.elastic.plan import MOST_WEIGHT
from thinwire.drivers.elastic.round_loop import RoundLoop
from thinwire.drivers.elastic.states import State
from thinwire.errors import LinkError
from thinwire.membership.rendezvous import Membership
from thinwire.strategy import Strategy
from thinwire.types import Observer


class RoundThread:
    """Runs this replica's rounds over `membership` on a separate thread; see `RoundLoop`. A method waits for a round only if it says so.

    `observe` is called on the exchange thread. `thread` must run its tasks one after another.
    """

    def __init__(
        self,
        strategy: Strategy,
        membership: Membership,
        agreed: GlobalState,
        codecs: Sequence[Codec],
        order: Sequence[int],
        *,
        observe: Observer,
        most_weight: float = MOST_WEIGHT,
        clock: Callable[[], float] = time.monotonic,
        thread: Executor | None = None,
    ) -> None:
        self.membership, self._delay = membership, strategy.schedule.delay
        self._mail = Mailbox()
        self.loop = RoundLoop(strategy, membership, agreed, codecs, order, self._mail, observe, most_weight, clock)
        self._thread = thread or ThreadPoolExecutor(1, f"thinwire-rounds-{membership.name}")
        self._told = 0  # commands sent

    # ---- commands

    def join(self, step: int) -> None:
        """Join a round of the others without a delta, and take over their state. Waits for it. If a member is lost in that round, it joins
        another one, for as long as it would search for a view.

        Raises `LinkError` if too few members are there, `DisagreementError` if this replica's settings differ from theirs.
        """
        clock = self.membership.clock
        until = clock() + self.membership.timeouts.view
        while True:
            self._tell(Join(step))
            self.wait(lambda: self.idle)
            if self.report.failure is not None:
                raise self.report.failure
            if not self.report.reason:
                return
            if self.report.alone or clock() >= until:
                raise LinkError(f"could not join: {self.report.reason}")

    def ask(self, step: int) -> None:
        """Hold one round without a delta, to get what it agrees on."""
        self._tell(Join(step))

    def load(self, agreed: GlobalState, held_since: Mapping[int, int]) -> None:
        """Resume from the `agreed` state of a checkpoint; see `Load`. Waits for a round that is in progress."""
        self._tell(Load(agreed, held_since))
        self.wait(lambda: self.idle)

    def trained(self, step: int, generation: int = 0, reads: ReadCount | None = None) -> None:
        """Report the newest inner `step`, and how far the reader has read in this generation."""
        self._mail.reads = generation, reads or ReadCount()
        self._mail.steps.append(step)

    def depart(self, *brought: Ready, own_steps: int) -> None:
        """Queue deltas, and hold the rounds that are due. `own_steps` are the inner steps of this replica."""
        self._tell(Depart(brought, own_steps, self.membership.clock()))

    def meet(self, *brought: Ready) -> None:
        """Queue deltas, and hold one round even if none is ready."""
        self._tell(Meet(brought))

    def finish(self, keep_seconds: float) -> None:
        """Report that all steps are trained. Waiting deltas are given back, so that they can be sent again with all that is left."""
        self._tell(Finish(keep_seconds))

    def close(self, leave: bool = True) -> None:
        """End the exchange thread, and wait for its end. With `leave` the membership is closed, so a round in progress fails.
        Idempotent.
        """
        if leave:
            self.membership.close()
        if not self._mail.closing.is_set():
            self._mail.closing.set()
            self._tell(Close())
            self._thread.shutdown(wait=True)

    def _tell(self, command: Command) -> None:
        self._told += 1
        self._thread.submit(self.loop.handle, command)

    # ---- results

    def outcomes(self, step: int) -> Iterator[Outcome]:
        """The outcomes that have arrived, in order, up to the first that is not due at `step`. Raises the error that ended the rounds."""
        if self.report.failure is not None:
            raise self.report.failure
        entries = self._mail.outcomes
        while entries:
            if any(one.counted is not None and one.counted.step + self._delay > step for one in entries[0]):
                return
            yield from entries.popleft()

    @property
    def report(self) -> Report:
        """The newest report of the loop."""
        return self._mail.report

    @property
    def idle(self) -> bool:
        """Whether every command was executed. Then every delta that departed has had its round, but perhaps not yet its outcome."""
        return self._told == self.report.done

    @property
    def over(self) -> bool:
        """Whether this replica holds the final state, and all outcomes have arrived."""
        return self.report.state in (State.KEEPING, State.ENDED)

    def wait(self, enough: Callable[[], bool]) -> None:
        """Wait until `enough()` is true. It is called after every report and `wake`."""
        self._mail.wait(enough)

    def fence(self, generation: int) -> int | None:
        """How far the reader of this generation may read now, while the samples are split anew; None: on and on."""
        fence = self._mail.fence
        return fence[1] if fence and fence[0] == generation else None

    def wake(self) -> None:
        """Make waiting threads check their condition again. May be called from any thread or signal handler."""
        self._mail.wake()
