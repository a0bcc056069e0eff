"""Emulates a thin link under any carrier, without root. Its figures are *emulated*.

The model: a replica has one uplink, which carries one message at a time in the order of posting, to any
receiver. A message of n bytes starts when the uplink is free, occupies it for 8 n / rate seconds, and is handed to the
carrier `delay_seconds` after its last bit left. So the delays of successive messages overlap; their serialisations
do not. With a trace (`TracedLink`) the rate changes over time. The downlink has no limit, and the time of the
carrier itself is added. Bits are counted without the headers of TCP/IP (about 3 % at an MTU of 1500), nothing is
lost, and there is no slow start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from thinwire.comm.group import Group, Messages, Sized, Transfer, WrappedGroup, travelling
from thinwire.comm.ledger import Ledger
from thinwire.comm.uplink import Link, Uplink
from thinwire.errors import LinkError


class _Departure(NamedTuple):
    due: float
    tag: int
    peer: int
    message: Tensor
    purpose: str
    queued: float
    transferred: float
    transfer: _LinkedTransfer


class LinkedGroup(WrappedGroup):
    """`group` with `link` as this replica's uplink. Every replica must wrap its group.

    `busy_seconds` is the total time for which messages occupy the uplink, booked ones included; divided by the wall time it is the link's
    utilization. The `timeout` of the carrier must be longer than the time that messages spend on a peer's link.

    Args:
        group: carries the messages.
        link: the uplink: its rate and its delay.
        ledger: counts the time of every message in the queue and on the link.

    >>> from thinwire import run_threads
    >>> from thinwire.comm import gather
    >>> def replica(group):
    ...     linked = LinkedGroup(group, Link(bits_per_second=8e6))
    ...     gather(linked, bytes(992), limit=1000, purpose="names")
    ...     return linked.busy_seconds
    >>> run_threads(2, replica)  # 1000 bytes at 8 Mbit/s
    [0.001, 0.001]
    """

    def __init__(self, group: Group, link: Link, ledger: Ledger | None = None) -> None:
        super().__init__(group)
        self.link, self.ledger = link, ledger
        self._uplink = Uplink(link)
        # Also in the order of arrival: all messages have the same delay.
        self._departures: deque[_Departure] = deque()
        self._changed = threading.Condition()
        self._closed = self._carrying = False

    @property
    def busy_seconds(self) -> float:
        return self._uplink.busy_seconds

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`. Receives are posted at once, sends when they arrive on the emulated link."""
        send = travelling(self, tag, send)
        arriving = self.group.post(tag, {}, recv, purpose, sized)
        with self._changed:
            if self._closed:
                raise self._closed_error()
            now = time.monotonic()
            times = [self._uplink.book(now, message.numel()) for message in send.values()]
            queued = times[0][0] - now if times else 0.0
            transfer = _LinkedTransfer(self._changed, arriving, len(times), queued)
            for (peer, message), (start, due) in zip(send.items(), times, strict=True):
                self._departures.append(
                    _Departure(due, tag, peer, message, purpose, start - now, due - start, transfer)
                )
                transfer.transfer_seconds = due - now - queued
            if self._departures and not self._carrying:  # no thread waits for messages that may never come
                self._carrying = True
                threading.Thread(target=self._carry, name=f"uplink-{self.rank}", daemon=True).start()
        return transfer

    def close(self) -> None:
        """See `Group.close`. Messages that are still on the uplink never arrive."""
        with self._changed:
            self._closed = True
            while self._departures:
                self._departures.popleft().transfer.error = self._closed_error()
            self._changed.notify_all()
        self.group.close()

    def _carry(self) -> None:
        """Hand each message to the carrier at its time of arrival, and never earlier, until none is left."""
        while True:
            with self._changed:
                if not self._departures:
                    self._carrying = False
                    return
                early = self._departures[0].due - time.monotonic()
                if early > 0:
                    self._changed.wait(early)
                    continue
                departure = self._departures.popleft()
            departure.transfer.hand_over(self.group, departure)
            if self.ledger is not None:
                self.ledger.add_on_link(departure.purpose, departure.peer, departure.queued, departure.transferred)

    def _closed_error(self) -> LinkError:
        return LinkError(f"the group of replica {self.rank} is closed. Post and wait before closing it.")


class _LinkedTransfer:
    def __init__(self, changed: threading.Condition, arriving: Transfer, departures: int, queued: float) -> None:
        self.queued_seconds = queued
        self.transfer_seconds = 0.0
        self.error: Exception | None = None
        self._changed, self._arriving, self._transfers = changed, arriving, [arriving]
        self._departures = departures

    @property
    def arrivals(self) -> Mapping[int, float]:
        return self._arriving.arrivals

    def hand_over(self, group: Group, departure: _Departure) -> None:
        transfer, error = None, None
        try:
            message = {departure.peer: departure.message}
            transfer = group.post(departure.tag, message, {}, departure.purpose)
        except Exception as failure:  # any error is raised in the thread that waits for this message
            error = failure
        with self._changed:
            if transfer is not None:
                self._transfers.append(transfer)
            self.error = self.error or error
            self._departures -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._departures == 0)
        if self.error is not None:
            raise self.error
        for transfer in self._transfers:
            transfer.wait()
