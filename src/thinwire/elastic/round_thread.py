"""The main thread's side of the round loop: commands go to the exchange thread, outcomes are picked up between inner steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from thinwire.codecs import Codec
from thinwire.data_ledger import ReadCount
from thinwire.elastic.global_state import GlobalState
from thinwire.elastic.messages import Close, Command, Depart, Finish, Join, Load, Mailbox, Meet, Outcome, Ready, Report
from thinwire.elastic.plan import MOST_WEIGHT
from thinwire.elastic.round_loop import RoundLoop
from thinwire.elastic.states import State
from thinwire.errors import LinkError
from thinwire.membership.rendezvous import Membership
from thinwire.strategy import Strategy
from thinwire.types import Observer


class RoundThread:
    """This replica's rounds over `membership`, on a thread of their own; see `RoundLoop`. Nothing here waits for a round unless it says so.

    `observe` is called on the exchange thread. `thread` runs what is submitted one after another.
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
        self._told = 0  # commands

    # ---- commands

    def join(self, step: int) -> None:
        """Meet the others in a round of theirs, to which this replica brings nothing but takes over what they hold. Waits for it.

        Raises `LinkError` if too few are there, `DisagreementError` if this replica is not one of them.
        """
        self._tell(Join(step))
        self.wait(lambda: self.idle)
        if self.report.failure is not None:
            raise self.report.failure
        if self.report.reason:
            raise LinkError(f"replica {self.membership.name!r} could not join: {self.report.reason}")

    def ask(self, step: int) -> None:
        """Hold one round with nothing to bring, for what is agreed in it."""
        self._tell(Join(step))

    def load(self, agreed: GlobalState) -> None:
        """Go on from `agreed`, of a checkpoint. Waits for a round that is in progress."""
        self._tell(Load(agreed))
        self.wait(lambda: self.idle)

    def trained(self, step: int, generation: int = 0, reads: ReadCount | None = None) -> None:
        """Training has got to `step`, and in this generation of its reader has read so far."""
        self._mail.reads = generation, reads or ReadCount()
        self._mail.steps.append(step)

    def depart(self, *brought: Ready, own_steps: int) -> None:
        """Let deltas wait for their rounds, and hold those whose turn it is. `own_steps`: inner steps of this replica."""
        self._tell(Depart(brought, own_steps, self.membership.clock()))

    def meet(self, *brought: Ready) -> None:
        """Let deltas wait, and hold one round whatever is ready."""
        self._tell(Meet(brought))

    def finish(self, keep_seconds: float) -> None:
        """All steps are trained: what waits comes back, to be brought once more with all that is left."""
        self._tell(Finish(keep_seconds))

    def close(self, leave: bool = True) -> None:
        """End the exchange thread, and wait for its end. With `leave` the membership is closed, and a round in progress fails.
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

    # ---- what came of them

    def outcomes(self, step: int) -> Iterator[Outcome]:
        """What has come in, in order, up to the first that is not due at `step`. Raises what ended the rounds."""
        if self.report.failure is not None:
            raise self.report.failure
        outcomes = self._mail.outcomes
        while outcomes:
            counted = outcomes[0].counted
            if counted is not None and counted.step + self._delay > step:
                return
            yield outcomes.popleft()

    @property
    def report(self) -> Report:
        """Where the loop stands."""
        return self._mail.report

    @property
    def idle(self) -> bool:
        """Whether every command is carried out: every delta that departed has had its round, if not its outcome."""
        return self._told == self.report.done

    @property
    def over(self) -> bool:
        """Whether this replica holds the final state, and all outcomes are there."""
        return self.report.state in (State.KEEPING, State.ENDED)

    def wait(self, enough: Callable[[], bool]) -> None:
        """Until `enough()`, asked after every report and `wake`."""
        self._mail.wait(enough)

    def wake(self) -> None:
        """Who waits looks again. From any thread, and from a signal handler."""
        self._mail.wake()
