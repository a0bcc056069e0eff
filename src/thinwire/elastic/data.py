"""What rounds among replicas that come and go do about data (data_ledger): which deltas are admitted, and what a member is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.data_ledger import DataLedger, LeasedReader, ReadCount
from thinwire.elastic.global_state import GlobalState
from thinwire.elastic.messages import Outcome, Ready
from thinwire.elastic.plan import MemberStatus, RoundPlan
from thinwire.membership.view import View


def says(sound: bool, reads: ReadCount, waiting: Mapping[int, Ready]) -> dict[str, Any]:
    """For the status: how far this replica has read, if that is `sound`, and the samples behind the deltas that it has ready."""
    claims = {index: ready.claim for index, ready in waiting.items() if ready.claim and ready.weight > 0}
    return {
        "reads": [reads.serial, reads.version, reads.count] if sound and reads.serial >= 0 else [],
        "claims": {str(i): [c.serial, c.version, *(n for pair in c.segments for n in pair)] for i, c in claims.items()},
    }


def admitted(plan: RoundPlan, ledger: DataLedger | None, view: View, statuses: Sequence[MemberStatus]) -> RoundPlan:
    """The round without the deltas whose samples are not their replicas', or are in the anchor already."""
    if ledger is None:
        return plan
    claims = ((rank, view.members[rank].name, statuses[rank].claim(plan.fragment)) for rank in plan.counted)
    return plan.without({rank for rank, name, claim in claims if not ledger.admits(name, plan.fragment, claim)})


def grants(ledger: DataLedger | None, view: View) -> bool:
    """Whether a round that counts no delta is decided all the same: a member has no samples to read."""
    return bool(ledger and any(ledger.lease(member.name) is None for member in view.members))


def commit(agreed: GlobalState, view: View, plan: RoundPlan) -> dict[str, Any]:
    """The ledger after a round that was committed; the fields of an event."""
    statuses = {member.name: MemberStatus.of(member.status, member.name) for member in view.members}
    claims = {view.members[rank].name: statuses[view.members[rank].name].claim(plan.fragment) for rank in plan.counted}
    named = agreed.commit_data(plan.fragment, claims, {name: status.read_count for name, status in statuses.items()})
    ways = {"trained": named.trained, "lost": named.lost, "returned": named.returned}
    return {way: [[name, begin, end] for name, (begin, end) in ranges] for way, ranges in ways.items()}


def is_void(ledger: DataLedger | None, name: str, status: MemberStatus, refused: bool) -> bool:
    """Whether what `name` has trained is not to be counted: its delta was `refused`, or others have its samples now."""
    if ledger is None:
        return False
    reads, lease = status.read_count, ledger.lease(name)
    return refused or (reads.serial >= 0 and (lease is None or not lease.reads_alike(reads, reads.count)))


def note(reader: LeasedReader, outcome: Outcome) -> None:
    """Let the reader know which samples are in the anchor now, or are in the parameters no more."""
    if outcome.counted is not None and outcome.counted.claim is not None:
        reader.landed(outcome.fragment, outcome.counted.claim)
    if outcome.anew:
        reader.dropped(outcome.fragment)
    if outcome.returned is not None and outcome.returned.claim is not None:
        reader.returned(outcome.fragment, outcome.returned.claim)
