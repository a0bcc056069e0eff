"""A group over a hub: `Group` for replicas that can only dial out."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from thinwire.comm.group import TIMEOUT, Messages, Sized, limit, travelling
from thinwire.errors import ConfigurationError, LinkError, ThinwireError
from thinwire.net.enrol import Admitted, Enrolment
from thinwire.net.frames import MEMBERS, Welcome, group_label, run_digest
from thinwire.net.link import HubLink
from thinwire.net.loop import LoopThread
from thinwire.net.posted import Receive
from thinwire.net.token import Token
from thinwire.net.upload import HubUploader

FAREWELL_SECONDS = 30.0  # most seconds that a closing group waits until requested messages have arrived
_ADVICE = "See there why, then start all replicas again from their last checkpoints."


class _SecureTransfer:
    queued_seconds = 0.0
    transfer_seconds = 0.0

    def __init__(self, group: SecureGroup, tag: int, due: list[tuple[str, int]]) -> None:
        self._group, self._tag = group, tag
        self._lock, self._over = threading.Lock(), threading.Event()
        self._due = set(due)  # transfers in progress: "to" or "from", and the peer
        self._errors: list[ThinwireError] = []
        self.receives: list[Receive] = []
        self.arrivals: dict[int, float] = {}
        if not due:
            self._over.set()

    def settled(self, way: str, peer: int, error: ThinwireError | None) -> None:
        """A message has arrived, or will not. Called in the loop's thread."""
        with self._lock:
            self._due.discard((way, peer))
            if error:
                self._errors.append(error)
            elif way == "from":
                self.arrivals[peer] = time.monotonic()
            if error or not self._due:
                self._over.set()

    def wait(self) -> None:
        self._over.wait(limit(self._group.timeout))
        with self._lock:  # the last message may have arrived since
            errors, due = list(self._errors), sorted(self._due)
        if errors or due:
            for receive in self.receives:
                receive.abandon()
        if errors:
            raise errors[0].with_traceback(None)
        if due:
            who = ", ".join(f"{way} replica {peer}" for way, peer in due)
            error = LinkError(
                f"a message {who} (tag {self._tag}) did not arrive within {self._group.timeout:g} s; this replica "
                f"{self._group.state}. Check the other replicas, or allow a longer timeout."
            )
            error.peer = due[0][1]
            self._group._give_up(error)
            raise error


class SecureGroup:
    """A `Group` whose replicas meet at a hub: each dials out over mutual TLS, so it may be behind any NAT. `join` makes one.

    A connection that breaks is made again, and a killed hub is waited for; messages continue where they were. A transfer
    ends only if its replica has left, was revoked or has restarted, or after `timeout`. After a time-out the group cannot be used:
    leave it and resume from a checkpoint.

    Args:
        link: the connection to the hub, which has joined the group.
        thread: runs the link.
        place: this replica's place in the group.
        timeout: most seconds of a `wait`.
        farewell: most seconds that `close` waits for others.
    """

    def __init__(self, link: HubLink, thread: LoopThread, place: Welcome, timeout: float, farewell: float) -> None:
        self._link, self._thread, self._farewell = link, thread, farewell
        self.rank, self.size, self.names, self.timeout = place.rank, len(place.names), place.names, timeout
        self._closed: LinkError | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """The state of the connection as words for messages, such as `is connected to the hub`."""
        return self._link.state

    @property
    def here(self) -> set[str]:
        """The names of the members that are connected to the hub, as far as this one knows."""
        return {name for peer, name in enumerate(self.names) if peer == self.rank or self._link.present(peer)}

    @property
    def gone(self) -> set[str]:
        """The names of the members that will not come back."""
        return {self.names[peer] for peer in list(self._link.messages.gone)}

    @property
    def run(self) -> str:
        """The hub's run file for its members; "" if it has none."""
        return self._link.enrolment.run

    @property
    def uploaded(self) -> int:
        """Bytes sent to the hub, with the headers of frames and without those of gRPC and TLS."""
        return self._link.uploaded

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> _SecureTransfer:
        """See `Group.post`. A tensor that is sent to several peers in one post goes to the hub once."""
        send, recv = travelling(self, tag, send), travelling(self, tag, recv)
        due = [("to", peer) for peer in send] + [("from", peer) for peer in recv]
        transfer = _SecureTransfer(self, tag, due)
        for peer, buffer in recv.items():
            transfer.receives.append(_receive(transfer, peer, tag, buffer, sized))
        same: dict[tuple[int, int], tuple[memoryview, list[int]]] = {}
        for peer, message in send.items():
            key = message.data_ptr(), message.numel()
            same.setdefault(key, (_view(message), []))[1].append(peer)
        messages, link = self._link.messages, self._link

        def posted() -> None:
            for receive in transfer.receives:
                messages.receive(receive)
            for data, peers in same.values():
                messages.send(tag, data, peers, lambda peer, error: transfer.settled("to", peer, error))
            link.wake()

        with self._lock:
            if self._closed:
                raise self._error()
            if due:
                self._thread.loop.call_soon_threadsafe(posted)
        return transfer

    def uploader(self) -> HubUploader:
        """What sends versions to the hub under this replica's name, in the pauses of the group's messages."""
        return HubUploader(self._link.enrolment, lambda: self._link)

    def use_timeout(self, seconds: float) -> None:
        """Limit each later `wait` to `seconds`."""
        self.timeout = seconds

    def close(self) -> None:
        """See `Group.close`. Returns when all messages that others requested have arrived, if they can be reached."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._error()
        self._thread.run(self._end())
        self._thread.release()

    def __enter__(self) -> SecureGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        receives, self._link.messages.receives = self._link.messages.receives, {}
        for receive in receives.values():
            receive.settled(self._error())
        await self._link.leave(self._farewell)
        self._link.messages.fail(self._error())

    def _give_up(self, error: LinkError) -> None:
        """A transfer was too late: fail all other transfers now; the group cannot be used any more."""
        with self._lock:
            if not self._closed:
                self._thread.loop.call_soon_threadsafe(self._link.messages.fail, error)

    def _error(self) -> LinkError:
        return LinkError(f"the group of replica {self.rank} is closed. Post and wait before closing it.")


def _receive(transfer: _SecureTransfer, peer: int, tag: int, buffer: Tensor, sized: Sized | None) -> Receive:
    told = (lambda: sized(buffer)) if sized else None
    return Receive(peer, tag, buffer.numel(), _view(buffer), lambda error: transfer.settled("from", peer, error), told)


def _view(message: Tensor) -> memoryview:
    return message.numpy().data


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def join(
    token: str,
    name: str,
    size: int,
    folder: Path | str = ".thinwire",
    run: str = "",
    timeout: float = TIMEOUT,
    bits_per_second: float | None = None,
    place: int = 0,
    say: Callable[[str], object] = lambda state: None,
    warn: Callable[[str], object] = _warn,
) -> SecureGroup:
    """Dial the hub of `token`, and join a group of `size` replicas. Returns when all have joined.

    Args:
        token: the token that `thinwire hub` printed.
        name: this replica's name: small letters, digits and hyphens. The order of the names is the order of ranks.
        size: number of replicas.
        folder: keeps the replica's key, with which it may join again without a new token.
        run: a text that must be the same on all replicas of a group, such as the name of the run.
        timeout: most seconds of a transfer, and of the wait for the other replicas.
        bits_per_second: the number of bits that this replica can send in a second: chunks are spaced so that small messages need not wait;
            None: they are not spaced.
        place: ranks follow places; equal places follow names.
        say: called on another thread with each new state of the wait, such as "waits for 1 of 3 members; here: bern, oslo".
        warn: called on another thread when the hub, or a replica of the group, has been away for some seconds, with its name; a `RuntimeWarning`
            by default. The group waits for it for longer.

    Raises:
        ConfigurationError: the token or the name is not valid.
        LinkError: the hub refuses, or not all joined in time.
    """
    if not 1 <= size <= MEMBERS or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ConfigurationError(
            f"size={size}, timeout={timeout}: 1 to {MEMBERS} replicas and a positive, finite time are needed."
        )
    enrolment = Enrolment(Token.read(token), name, Path(folder))
    link = HubLink(
        enrolment, group_label(size, run), size, bits_per_second, _ADVICE, place, say=say, run=run_digest(run)
    )  # fmt: skip
    link.warn = warn
    return connected_group(link, timeout, timeout)


def connected_group(link: HubLink, seconds: float, timeout: float, farewell: float = FAREWELL_SECONDS) -> SecureGroup:
    """Open `link`, wait until all members have joined, and return their group. Raises `LinkError` if not all joined within `seconds`."""
    thread = LoopThread.shared()
    try:
        thread.run(link.begin())
        place = link.place(seconds)
    except BaseException:
        try:
            thread.run(link.leave(0.0))
        finally:
            thread.release()
        raise
    return SecureGroup(link, thread, place, timeout, farewell)


def admit(token: str, name: str, folder: Path | str = ".thinwire") -> Admitted:
    """Join the hub of `token` as `name`, without a group: the hub issues a certificate, and sends its run file and settings.

    Args:
        token, name, folder: as for `join`.

    Raises:
        ConfigurationError: the token or the name is not valid.
        LinkError: the hub refuses, or does not answer.

    >>> import tempfile
    >>> from thinwire.net import Hub
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hub = Hub(Path(folder, "hub"))
    ...     told = admit(str(hub.invite()), "oslo", folder)
    ...     hub.close()
    >>> told.elastic
    False
    """
    enrolment = Enrolment(Token.read(token), name, Path(folder))
    thread = LoopThread.shared()
    try:
        return thread.run(enrolment.admitted())
    finally:
        thread.release()
