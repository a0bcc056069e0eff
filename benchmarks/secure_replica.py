"""One replica of secure.py: trains, exchanges and pings over one carrier, as it is told.

Protocol: one JSON line on stdout when it stands and is warm; then for each JSON line on stdin one JSON line on stdout with what was
measured. It ends with its stdin. The clock is the machine's, which all namespaces share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from methods import ATTACH, TIMEOUT, Attach, Part, over, say, standing
from rounds import instant
from tls_sockets import TlsGroup

from thinwire.comm import Group, TorchGroup, start_torch
from thinwire.net import join

TAG = 1 << 29  # of messages here; training uses lower ones
PING_NBYTES = 64
OUTSTANDING = 2  # bulk messages that are posted at once, so that the link is never idle


@dataclass(frozen=True)
class Place:
    """Where a replica sits: what it trains, and on which carrier."""

    part: Part
    carrier: str  # secure, gloo or tls; "" for methods with carriers of their own
    uplink: float | None  # bits per second, which the carrier is told
    token: str  # of the hub
    folder: str  # for keys


@contextmanager
def carried(place: Place) -> Iterator[Group | None]:
    """The group of this replica on its carrier."""
    part, folder = place.part, Path(place.folder)
    group: Group | None = None
    if place.carrier == "secure":
        names = ("lima", "oslo")
        group = join(place.token, names[part.rank], 2, folder, timeout=TIMEOUT, bits_per_second=place.uplink)
    elif place.carrier == "tls":
        group = TlsGroup(part.rank, part.addresses, part.port, folder, TIMEOUT)
    elif place.carrier == "gloo":
        start_torch(part.rank, 2, part.addresses[0], part.port, TIMEOUT)
        group = TorchGroup.from_world(2, timeout=TIMEOUT, uplink=place.uplink)
    yield group
    if group is not None:
        group.close()


def attached(place: Place, group: Group | None) -> Attach:
    """How the method is attached: over the group, or as the rival does it."""
    if group is None:
        return ATTACH[place.part.method]
    return lambda part, model, optimizer: over(group, part, model, optimizer)


def exchanges(group: Group | None, rtt: float, nbytes: int, warm: int, rounds: int, idle: float) -> dict[str, Any]:
    """Times of exchanges of one message each way; without a group, of gloo's all-reduce of as many bytes.

    All begin at one instant, after `idle` seconds without traffic of bulk, as there are between outer rounds.
    """
    meeting = group if group is not None else TorchGroup.from_world(2, timeout=TIMEOUT)
    rank = meeting.rank
    out, landing = torch.full((nbytes,), rank, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    dense = torch.zeros(nbytes // 4)
    spans = []
    for number in range(warm + rounds):
        begin = instant(meeting, 3 * rtt + idle)  # type: ignore[arg-type]  # any group will do
        time.sleep(max(0.0, begin - time.monotonic()))
        began = time.monotonic()
        if group is None:
            dist.all_reduce(dense)
        else:
            group.post(TAG + number, {1 - rank: out}, {1 - rank: landing}).wait()
            assert landing[0] == landing[-1] == 1 - rank
        spans.append((began, time.monotonic()))
    return {"spans": spans[warm:]}


def control(group: Group, rtt: float, nbytes: int, bulk: int, pings: int, every: float) -> dict[str, Any]:
    """Round trips of small messages while `bulk` messages of `nbytes` fill the link both ways.

    Rank 0 pings every `every` seconds, whether the one before is back or not, and rank 1 echoes.
    """
    rank, peer = group.rank, 1 - group.rank
    out, buffers = torch.zeros(nbytes, dtype=torch.uint8), [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
    small = [torch.zeros(PING_NBYTES, dtype=torch.uint8) for _ in range(pings)]
    begin = instant(group, 3 * rtt + 0.2)  # type: ignore[arg-type]
    receives = [group.post(TAG, {}, {peer: one}, "ping") for one in small]  # early, so that each may travel at once
    over_at = 0.0

    def fill() -> None:
        nonlocal over_at
        posted = [group.post(TAG + 1, {peer: out}, {peer: buffers[n % 2]}) for n in range(OUTSTANDING)]
        for number in range(OUTSTANDING, bulk):
            posted.pop(0).wait()
            posted.append(group.post(TAG + 1, {peer: out}, {peer: buffers[number % 2]}))
        for each in posted:
            each.wait()
        over_at = time.monotonic()

    time.sleep(max(0.0, begin - time.monotonic()))
    filling = threading.Thread(target=fill)
    filling.start()
    first = begin + 2 * rtt + 0.5  # the link is full by then
    sent: list[float] = []
    sends = []

    def ping() -> None:
        for number in range(pings):
            time.sleep(max(0.0, first + number * every - time.monotonic()))
            sent.append(time.monotonic())
            sends.append(group.post(TAG, {peer: torch.ones(PING_NBYTES, dtype=torch.uint8)}, {}, "ping"))

    pinging = threading.Thread(target=ping if rank == 0 else lambda: None)
    pinging.start()
    back = []
    for receive in receives:
        receive.wait()
        back.append(time.monotonic())
        if rank == 1:
            sends.append(group.post(TAG, {peer: torch.ones(PING_NBYTES, dtype=torch.uint8)}, {}, "ping"))
    for thread in (pinging, filling):
        thread.join()
    for each in sends:
        each.wait()
    return {"pings": list(zip(sent, back)) if rank == 0 else [], "bulk_seconds": over_at - begin}


def obey(place: Place) -> None:
    """Stand, then do what each line of stdin asks."""
    with carried(place) as group, standing(place.part, attached(place, group)) as window:
        say({"ready": place.part.rank})
        orders: dict[str, Callable[..., dict[str, Any]]] = {
            "train": lambda steps, lead: [window(count) for count in (lead, steps) if count][-1],
            "exchange": lambda **asked: exchanges(group, **asked),
            "control": lambda **asked: control(group, **asked),  # type: ignore[arg-type]
        }
        for line in sys.stdin:
            asked = json.loads(line)
            say(orders[asked.pop("do")](**asked))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    part = given.pop("part")
    obey(Place(Part(**{**part, "addresses": tuple(part["addresses"]), "batch": tuple(part["batch"])}), **given))
    os._exit(0)  # servers and carriers of the rivals have threads that do not end by themselves
