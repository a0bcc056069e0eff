"""Elastic replicas behind any NAT: they find each other at a hub, which also carries their groups (thinwire.net).

A certificate proves a member's name: the hub passes on a presence, and adds a process to a group, only under that name. The hub keeps
the same `MemberRegistry` as a lighthouse, and decides nothing else.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from thinwire.comm.group import Group
from thinwire.errors import DisagreementError, LinkError
from thinwire.membership.remote_rendezvous import RemoteRendezvous
from thinwire.membership.rendezvous import AbsentError
from thinwire.membership.view import Presence
from thinwire.net.calls import Refused
from thinwire.net.enrol import Enrolment
from thinwire.net.group import connected_group
from thinwire.net.keys import check_name
from thinwire.net.link import HubLink
from thinwire.net.loop import LoopThread
from thinwire.net.requests import HubChannel
from thinwire.net.upload import HubUploader


class HubRendezvous(RemoteRendezvous):
    """One replica's view of a hub, which was started with `--elastic`.

    Args:
        enrolment: this replica's name and key there.
        run: name of the run, if it has one; runs with other names meet at the same hub.
        bits_per_second: bits that it can send in a second; None: chunks are not spaced.
    """

    advice = "Start it with `thinwire hub --elastic`, and check that this machine reaches it."
    relays = True

    def __init__(self, enrolment: Enrolment, run: str = "", bits_per_second: float | None = None) -> None:
        super().__init__()
        self.where = enrolment.token.where
        self._enrolment, self._rate = enrolment, bits_per_second
        self._run = check_name(run) if run else ""
        self._thread: LoopThread | None = LoopThread.shared()
        self._link: HubLink | None = None  # of the present group
        self._leaving = threading.RLock()  # no caller of `leave` ends the loop while another closes its channel in it

    @property
    def address(self) -> str:
        """A name for messages; no replica can connect to it."""
        return f"hub:{self._enrolment.name}"

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        """See `Rendezvous`."""
        label = hashlib.sha256(f"thinwire elastic {self._run} {epoch}".encode()).digest()
        process = self._incarnation.encode()
        times = self._timeouts
        link = self._link = HubLink(
            self._enrolment,
            label,
            len(members),
            self._rate,
            "",
            rank,
            process,
            times.heartbeat_timeout,
            False,
        )
        try:
            group = connected_group(link, times.connect, times.transfer, farewell=2 * times.heartbeat_interval)
        except LinkError as error:
            absent = [member.name for member in members if member.name not in link.here] if link.here else []
            if absent and link.waited:  # otherwise the hub may have gone before the others connected
                raise AbsentError(f"{', '.join(absent)} did not connect: {error}", absent) from error
            raise
        if group.names != tuple(member.name for member in members):
            group.close()
            raise LinkError(f"{', '.join(group.names)} came in place of the members of the view")
        return group

    def uploader(self) -> HubUploader:
        """What sends versions to the hub under this replica's name, in the pauses of the messages of its groups."""
        return HubUploader(self._enrolment, lambda: self._link)

    def reaches(self, other: Presence) -> bool:
        """Whether the hub receives its heartbeats."""
        try:
            return self._vote_store is not None and bool(
                self._vote_store.channel.ask("here", who=other.incarnation)["here"]
            )
        except LinkError:
            return False

    def leave(self) -> None:
        """See `Rendezvous`."""
        with self._leaving:
            super().leave()
            thread, self._thread = self._thread, None
            if thread:
                thread.release()

    def _channel(self) -> HubChannel:
        if self._thread is None:
            raise LinkError(f"this replica has left {self.where}")
        try:
            silent = self._timeouts.heartbeat_timeout
            return HubChannel(self._enrolment, self._incarnation, self._run, self._thread, silent)
        except Refused as error:
            raise DisagreementError(f"replica {self._name!r} cannot take part: {error}") from None
