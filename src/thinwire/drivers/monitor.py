"""What the replicas of a fixed group tell each other beside their rounds: where one waits, and that one has left.

All replicas perform the same collective operations in the same order: departures of rounds, gathers, the end. Each numbers its own. An operation
sends before it waits, so if all do the same, none waits for ever. A replica that waits longer than `PATIENCE` therefore tells the others in
which operation, and each compares it with its own operation of that number. If they differ, both raise a `DisagreementError` that names both.
An answer is also a sign of life: a replica that answers is slow and not lost, and is waited for.

Nothing is sent while nobody waits for long, except one message at the end.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from thinwire.comm.group import (
    CONTROL,
    CONTROL_TAGS,
    Group,
    Messages,
    Sized,
    Transfer,
    WrappedGroup,
    WrappedTransfer,
    unlimited,
)
from thinwire.errors import DisagreementError, LinkError, PeerError
from thinwire.exchange.send_queue import JobThread
from thinwire.packet import other_steps

T = TypeVar("T")
PATIENCE = (
    1.0  # seconds of a wait after which the others are told; then again after twice as long, up to `_MOST_PATIENCE`
)
_MOST_PATIENCE = 30.0
_LOOK = 0.2  # seconds between two looks at what the others have sent
_FIRST_WARNING = 60.0  # seconds of a wait after which the user is told; then again after twice as long
_FLUSH_SECONDS = 5.0  # most seconds that a replica which leaves waits until the others have its last message
_OPERATIONS = 1024  # the latest operations that a replica remembers; no other is further behind

# kind, number of the operation, inner step, text, a byte that is not zero: when it has come, all have
_LAYOUT = struct.Struct("<BQQ750sB")
_PURPOSE = "monitor"
ROUND = "round "  # the first word of a round, as an operation
_WAITS, _ANSWERS, _FINISHED, _CLOSED = range(1, 5)
_ALIKE = (
    "All replicas must take as many inner steps, and call mean(), averaged_buffers() and finish() after the same ones, never inside "
    "`if rank == 0:`. To stop early call replica.request_stop()."
)
_BY_RATE = (
    "Rounds follow the learning rate here, so it must be the same on all replicas: give a scheduler such as ReduceLROnPlateau "
    "replica.mean(loss), not each replica's own loss."
)
_sessions: WeakKeyDictionary[Group, int] = WeakKeyDictionary()  # by the carrier: how many monitors it has had


class Operation(NamedTuple):
    """A collective operation of a replica: its number, the inner step to which it belongs, and what it is, as words."""

    number: int
    step: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} after {self.step} inner steps"


class _Message(NamedTuple):
    kind: int
    number: int
    step: int
    what: str


class Monitor:
    """One replica's view of what the replicas of `group` do. `group` counts its messages.

    `warn` is called with a step and a text when a wait becomes long; `by_rate`: rounds follow the learning rate. `own_step` gives this replica's
    number of inner steps.
    """

    def __init__(
        self, group: Group, warn: Callable[[int, str], object] = lambda step, text: None, by_rate: bool = False
    ) -> None:
        carrier = group
        while isinstance(carrier, WrappedGroup):
            carrier = carrier.group
        session = 0
        with suppress(TypeError):  # a carrier of which there are no weak references
            session = _sessions.get(carrier, 0)
            _sessions[carrier] = session + 1
        # Each monitor has a tag: what an earlier one on this group left open takes none of its messages.
        self._group, self._tag = group, CONTROL + session % CONTROL_TAGS
        self._timeout = float(getattr(carrier, "timeout", threading.TIMEOUT_MAX))
        self.own_step: Callable[[], int] = lambda: 0
        self._warn, self._by_rate = warn, by_rate
        self._lock = threading.Lock()  # of all below
        self._operations: OrderedDict[int, Operation] = OrderedDict()
        self._count = 0
        self._waiting: tuple[Operation, float] | None = None  # since when
        self._error: PeerError | None = None  # replicas do different things
        self._last: Transfer | None = None  # this replica's last message
        self._ended: dict[int, _Message] = {}  # the last message of each peer
        self._heard = dict.fromkeys((peer for peer in range(group.size) if peer != group.rank), time.monotonic())
        self._steps: dict[int, int] = {}  # where each peer was when it answered
        self._elsewhere: dict[int, Operation] = {}  # where each peer waits, if this replica had not been there
        self._sent: list[Transfer] = []  # in transit: a carrier needs their buffers
        self._changed = threading.Condition(self._lock)
        self._asked_in: Operation | None = None
        self._asked, self._patience = 0.0, PATIENCE
        self._closed = threading.Event()
        self._receives = {peer: self._expect(peer) for peer in self._heard}
        if self._heard:
            args = ref(self), self._closed
            threading.Thread(target=_run, args=args, name="thinwire-monitor", daemon=True).start()

    def begin(self, what: str, step: int) -> Operation:
        """Number an operation that this replica begins. Raises `DisagreementError` if another is known to be elsewhere."""
        with self._lock:
            operation = Operation(self._count, step, what)
            self._operations[self._count] = operation
            self._count += 1
            if len(self._operations) > _OPERATIONS:
                self._operations.popitem(last=False)
            for peer, theirs in self._elsewhere.items():  # where they wait for this operation
                self._compare(peer, theirs)
            error = self._error
        if error:
            raise error
        return operation

    def wait(self, over: Callable[[float], object], operation: Operation) -> None:
        """Return when `operation` is over: `over` waits for it, for a number of seconds at most, and returns whether it is. Until then tell the
        others where this replica waits.

        If it never will be, because another has left or does something else, this one leaves, too: it closes the group, so that none waits
        for it. Raises `DisagreementError`, `LinkError`.
        """
        if over(_LOOK):
            return
        began, warned = time.monotonic(), _FIRST_WARNING
        with self._changed:
            self._waiting = operation, began
        try:
            while not over(_LOOK):
                if error := self.failure(operation):
                    self._leave(operation.step, error)
                    over(_FLUSH_SECONDS)  # at once, because its group is closed; its records are complete then
                    raise error
                if time.monotonic() - began > warned:
                    self._warn(operation.step, self._late(operation, time.monotonic() - began))
                    warned *= 2
        finally:
            with self._lock:
                self._waiting = None

    def run(self, task: Callable[[], T], what: str, step: int) -> T:
        """What the collective `task` returns; it runs on another thread, and this one watches. Raises like `wait`, and what `task` raises."""
        operation = self.begin(what, step)
        if not self._heard:
            return task()
        thread = JobThread("thinwire-collective")
        done = thread.submit(task)
        thread.close()
        self.wait(done_in(done), operation)
        try:
            return done.result()
        except LinkError as error:
            raise self.explained(error, operation) from error

    def failure(self, operation: Operation) -> PeerError | None:
        """Why `operation` will not end, if that is known."""
        with self._lock:
            if self._error:
                return self._error
            for peer, last in self._ended.items():
                if error := _left(peer, last, operation):
                    return error
            silent = time.monotonic() - self._timeout
            lost = [peer for peer, at in self._heard.items() if at < silent]
            began = self._waiting[1] if self._waiting else time.monotonic()
        if lost and began < silent:
            error = LinkError(
                f"replica {lost[0]} has given no sign of life for {self._timeout:g} s, while this replica waits in {operation}: the link is cut, "
                "or its process or machine stands still. Check that replica, then resume from a checkpoint."
            )
            error.peer = lost[0]
            return error
        return None

    def explained(self, error: LinkError, operation: Operation) -> PeerError:
        """`error`, or its cause, if another replica has told one: it tells before it leaves."""
        for _ in range(3 if error.peer in self._heard else 1):
            self._look()
            if cause := self.failure(operation):
                return cause
            time.sleep(_LOOK / 2)  # the carrier may have noticed the end before it handed over what came before
        return error

    def disagree(self, error: DisagreementError) -> DisagreementError:
        """`error`, which a packet showed, with advice for this strategy. The others are told when this replica leaves."""
        with self._lock:
            if self._error is None:
                self._error = DisagreementError(f"{_BY_RATE} {error}") if self._by_rate else error
        return error if self._error is error else DisagreementError(str(self._error))

    def _leave(self, step: int, error: PeerError) -> None:
        """Tell the others why this replica leaves, and close the group."""
        self.tell(step, finished=False)
        if self._last:
            flushing = JobThread("thinwire-last")
            futures.wait([flushing.submit(self._last.wait)], _FLUSH_SECONDS)
            flushing.close()
        self._group.close()

    def tell(self, step: int, finished: bool = True, first: int | None = None) -> None:
        """Tell the others that this replica has finished, or closed its Replica before that, if it has told neither. Does not wait.

        `first` is the number of the first operation for which it may not have sent all; None: it has for all that it has begun.
        """
        with self._lock:
            if self._last is None and self._heard:
                kind, why = (_FINISHED, "") if finished else (_CLOSED, str(self._error or ""))
                number = self._count if first is None else first
                self._last = self._send(_Message(kind, number, step, why))

    def agree(self, step: int) -> None:
        """Wait until all have finished. Raises `DisagreementError` if one did after another number of inner steps, `LinkError`."""
        operation = self.begin("the end", step)

        def over(seconds: float) -> bool:
            with self._changed:
                return self._changed.wait_for(
                    lambda: bool(self._unlike(operation)) or len(self._ended) == len(self._heard), seconds
                )

        try:
            self._look()
            self.wait(over, operation)
            with self._lock:
                if error := self._unlike(operation):
                    raise error
        except LinkError as error:
            told = LinkError(
                f"{error} This replica has finished after {step} inner steps and waits for all; all must take as many steps."
            )
            told.peer = error.peer
            raise told from error
        if self._last:
            with suppress(LinkError):  # all have finished, so each says itself what failed
                self._last.wait()  # this replica may close its group next

    def _unlike(self, end: Operation) -> PeerError | None:
        """The error if a replica has ended otherwise than by finishing after as many steps."""
        errors = (_left(peer, last, end, alike=True) for peer, last in sorted(self._ended.items()))
        return next((error for error in errors if error), None)

    def close(self) -> None:
        """End the thread. What the others send from here on is not read."""
        self._closed.set()

    def _turn(self) -> None:
        """Take in what the others have sent, and ask where they are if this replica waits for long."""
        self._look()
        with self._lock:
            if self._waiting is None:
                return
            operation, began = self._waiting
            if operation is not self._asked_in:
                self._asked_in, self._asked, self._patience = operation, began, PATIENCE
            if time.monotonic() - self._asked >= min(self._patience, self._timeout / 4):
                self._asked, self._patience = time.monotonic(), min(2 * self._patience, _MOST_PATIENCE)
                self._send(_Message(_WAITS, *operation))

    def _look(self) -> None:
        """Take in what the others have sent."""
        with self._changed:
            for peer in list(self._receives):
                while (message := self._come(peer)) is not None:
                    self._hear(peer, message)
            self._changed.notify_all()

    def _come(self, peer: int) -> _Message | None:
        """The next message of `peer`, if it has come."""
        transfer, room = self._receives.get(peer, (None, None))
        if transfer is None or room is None or not room[-1]:
            return None
        try:
            transfer.wait()
            self._receives[peer] = self._expect(peer)
        except LinkError:
            self._receives.pop(peer)
        kind, number, step, text, _ = _LAYOUT.unpack(room.numpy().tobytes())
        words = text.rstrip(b"\0").decode("ascii", "replace")
        return _Message(kind, number, step, "".join(c if c.isprintable() else "?" for c in words))  # a peer's

    def _hear(self, peer: int, message: _Message) -> None:
        self._heard[peer] = time.monotonic()
        if message.kind in (_FINISHED, _CLOSED):
            self._ended.setdefault(peer, message)
            return
        self._steps[peer] = message.step
        theirs = Operation(message.number, message.step, message.what)
        if message.kind == _WAITS:  # what this replica does in its place; nothing yet: it is behind, and lives
            answer = self._operations.get(message.number) or Operation(message.number, self.own_step(), "")
            self._send(_Message(_ANSWERS, *answer), to=peer)
            self._elsewhere[peer] = theirs
        if theirs.what:
            self._compare(peer, theirs)

    def _compare(self, peer: int, theirs: Operation) -> None:
        """Note the error if this replica does something else in the place of an operation of `peer`, and tell that one."""
        own = self._operations.get(theirs.number)
        if own and own != theirs and self._error is None:
            self._error = DisagreementError(_differ(peer, theirs, self._group.rank, own, self._by_rate))
            self._send(_Message(_ANSWERS, *own), to=peer)

    def _late(self, operation: Operation, seconds: float) -> str:
        with self._lock:
            others = [
                f"replica {peer} {'lives' if at > time.monotonic() - 3 * _MOST_PATIENCE else 'is silent'}"
                + (f" and was last seen after {self._steps[peer]} inner steps" if peer in self._steps else "")
                for peer, at in self._heard.items()
                if peer not in self._ended
            ]
        return f"this replica has waited for {seconds:.0f} s in {operation}: {', '.join(others)}."

    def _expect(self, peer: int) -> tuple[Transfer, Tensor]:
        room = torch.zeros(_LAYOUT.size, dtype=torch.uint8)
        return self._group.post(self._tag, {}, {peer: room}, _PURPOSE), room

    def _send(self, message: _Message, to: int | None = None) -> Transfer | None:
        text = message.what.encode("ascii", "replace")[:750]
        packed = bytearray(_LAYOUT.pack(message.kind, message.number, message.step, text, 1))
        own = torch.frombuffer(packed, dtype=torch.uint8)
        with suppress(LinkError):  # the group was closed, so no replica waits
            transfer = self._group.post(
                self._tag, dict.fromkeys(self._heard if to is None else (to,), own), {}, _PURPOSE
            )
            self._sent.append(transfer)
            return transfer
        return None


def _run(monitor: ref[Monitor], closed: threading.Event) -> None:
    """The thread of a monitor; it ends, too, when a Replica is dropped that was never closed."""
    while not closed.wait(_LOOK):
        if (alive := monitor()) is None:
            return
        alive._turn()
        del alive


def done_in(future: Future[Any]) -> Callable[[float], object]:
    """For `Monitor.wait`: whether `future` is done."""
    return lambda seconds: future.done() or futures.wait([future], seconds).done


def _left(peer: int, last: _Message, operation: Operation, alike: bool = False) -> PeerError | None:
    """The error if `peer`, whose last message is `last`, takes no part in `operation` of this replica; if `alike`, in an end after as many
    steps."""
    closed, count = last.kind == _CLOSED, last.step
    if closed and last.what:
        return DisagreementError(last.what)
    if closed and (last.number <= operation.number if not alike else count <= operation.step):
        error = LinkError(
            f"replica {peer} closed its Replica after {count} inner steps, before it had finished. Look for the error that made it leave."
        )
        error.peer = peer
        return error
    if (not closed and count < operation.step) or (alike and count != operation.step):
        return DisagreementError(
            other_steps(peer, f"has {'counted' if closed else 'finished after'} {count}", operation.step)
        )
    return None


def _differ(peer: int, theirs: Operation, rank: int, own: Operation, by_rate: bool) -> str:
    first, other = sorted(((peer, theirs), (rank, own)))
    advice = f"{_BY_RATE} {_ALIKE}" if by_rate and ROUND in theirs.what + own.what else _ALIKE
    return (
        f"replica {first[0]} is in {first[1]}, replica {other[0]} in {other[1]}, so they wait for each other. {advice}"
    )


class WatchedGroup(WrappedGroup):
    """The same group. Its waits have no limit, because a `Monitor` ends them."""

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`."""
        return _WatchedTransfer(self.group.post(tag, send, recv, purpose, sized))


class _WatchedTransfer(WrappedTransfer):
    def wait(self) -> None:
        with unlimited():
            self.transfer.wait()
