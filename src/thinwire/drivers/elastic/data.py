"""The data ledger in elastic rounds: which deltas are admitted, and what a member's reader learns from a round."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.comm.group import gather
from thinwire.data_ledger import DataLedger, LeasedReader, ReadCount
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import Outcome, Ready
from thinwire.drivers.elastic.plan import MemberStatus, RoundPlan
from thinwire.errors import PacketError
from thinwire.membership.view import View

_READS = struct.Struct("<qqq")  # serial, version and count


def status_fields(sound: bool, reads: ReadCount, waiting: Mapping[int, Ready]) -> dict[str, Any]:
    """Fields of the status: how far this replica has read, if that is `sound`, and weights and samples of the deltas that it has ready."""
    claims = {index: ready.claim for index, ready in waiting.items() if ready.claim and ready.weight > 0}
    return {
        "brings": {str(index): ready.weight for index, ready in waiting.items()},
        "reads": [reads.serial, reads.version, reads.count] if sound and reads.serial >= 0 else [],
        "claims": {str(i): [c.serial, c.version, *(n for pair in c.segments for n in pair)] for i, c in claims.items()},
    }


def most_counts(ledger: DataLedger | None, most_steps: int | None, every: int) -> int | None:
    """More samples than a replica can read in a run of `most_steps`, because it reads less than `ledger.ahead` in a period; None: not known."""
    return None if ledger is None or most_steps is None else ledger.ahead * (most_steps // every + 1)


def admit(plan: RoundPlan, agreed: GlobalState, view: View, statuses: Sequence[MemberStatus]) -> RoundPlan:
    """The plan without deltas that are already in the anchor, or whose samples belong to other replicas.

    A replica that resumed from a checkpoint may bring what an earlier process of it has sent after that checkpoint. The ledger knows
    these samples; without one, the rounds that the replica does not know tell.
    """
    fragment, ledger, refused = plan.fragment, agreed.ledger, set[int]()
    for rank in plan.counted:
        name, status = view.members[rank].name, statuses[rank]
        if ledger is not None and not ledger.admits(name, fragment, status.claim(fragment)):
            refused.add(rank)
        if ledger is None and rank in plan.behind and agreed.counted_since(status.round, name, fragment):
            refused.add(rank)
    return plan.without(refused)


def grants(ledger: DataLedger | None, view: View) -> bool:
    """Whether a round without deltas must still be decided, because a member has no samples to read."""
    return bool(ledger and any(ledger.lease(member.name) is None for member in view.members))


def reads_now(view: View, statuses: Sequence[MemberStatus], own: ReadCount, most: int | None) -> list[ReadCount]:
    """How far each member has read, in rank order. It is asked anew in a round that splits the samples, because a status may be many periods
    old by then. Raises `LinkError`, and `PacketError` with the member that says it has read less than in its status, or too much.
    """
    told = gather(view.group, _READS.pack(own.serial, own.version, own.count), _READS.size, "view")
    reads = list[ReadCount]()
    for rank, (raw, status) in enumerate(zip(told, statuses)):
        reading = ReadCount(*_READS.unpack(raw)) if len(raw) == _READS.size else ReadCount(-2)
        before = status.read_count
        same = (reading.serial, reading.version) == (before.serial, before.version)
        if not same or reading.count < before.count or (most is not None and reading.count > most):
            error = PacketError(
                f"{view.members[rank].name} reports that it has read {reading}, after {before} in its status"
            )
            error.peer = rank
            raise error
        reads.append(reading)
    return reads


def commit(agreed: GlobalState, view: View, plan: RoundPlan, reads: Sequence[ReadCount]) -> dict[str, Any]:
    """Update the ledger after a committed round, until which the members have read so far; returns the fields of the `data` event."""
    names = [member.name for member in view.members]
    claims = {
        names[rank]: MemberStatus.of(view.members[rank].status, names[rank]).claim(plan.fragment)
        for rank in plan.counted
    }
    named = agreed.commit_data(plan.fragment, claims, dict(zip(names, reads)))
    ways = {"trained": named.trained, "lost": named.lost, "returned": named.returned}
    return {way: [[name, begin, end] for name, (begin, end) in ranges] for way, ranges in ways.items()}


def is_void(ledger: DataLedger | None, name: str, status: MemberStatus, refused: bool) -> bool:
    """Whether the training of `name` must not be counted: its delta was `refused`, or other replicas have its samples now."""
    if ledger is None:
        return False
    reads, lease = status.read_count, ledger.lease(name)
    return refused or (reads.serial >= 0 and (lease is None or not lease.reads_alike(reads, reads.count)))


def tell_reader(reader: LeasedReader, outcome: Outcome) -> None:
    """Tell the reader which samples are in the anchor now, and which are no longer in the parameters."""
    if outcome.counted is not None and outcome.counted.claim is not None:
        reader.landed(outcome.fragment, outcome.counted.claim)
    if outcome.anew:
        reader.dropped(outcome.fragment)
    if outcome.returned is not None and outcome.returned.claim is not None:
        reader.returned(outcome.fragment, outcome.returned.claim)
