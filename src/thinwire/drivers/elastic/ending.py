"""The end of an elastic run: how late members get the final state.

All members that end a run together hold its final state. They note at the rendezvous that the run has ended, with the state digest.
If a member that took part is missing, the first of them keeps the state for a while: it continues to call, with a status that says
`over`. A member that meets it takes over the state, and has ended too. No round changes the final state; training that a late member
has not sent is not in it. A member that comes after that learns from the note that the run has ended (`EndedError`).

If the note cannot be written, others may not have the result of the vote, and go on. So each member that has it calls in the same way,
and notes the end as soon as it can. Until then its state is not final: if it meets members that went on, it takes over their state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

from thinwire.comm.state_transfer import give_parts, nearest, stand_by, take_facts, take_parts
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.plan import MemberStatus, RoundPlan, reconcile
from thinwire.errors import CheckpointError, EndedError, LinkError, PacketError, PeerError
from thinwire.membership.rendezvous import CLOSED, Membership
from thinwire.membership.view import View

PAUSE_SECONDS = 0.2  # seconds between calls of the member that keeps the final state
PROBED_NBYTES = 4 << 20  # of a whole state, from which on the nearest donor is worth a few probes


def level(
    view: View, plan: RoundPlan, statuses: Sequence[MemberStatus], agreed: GlobalState, observe: Callable[..., None],
    clock: Callable[[], float],
) -> str:  # fmt: skip
    """Members that are behind take over the state of a sound member: the fragments that have moved since. Returns its name if this
    member was behind, otherwise "". After an error the fragments that have arrived need not be sent again.

    The member that gives is the one from which a probe arrives soonest; the first, if there is one, or if the state is small.
    """
    group, donor = view.group, plan.sound[0]
    needy = [rank for rank in plan.behind if statuses[rank].state_digest != statuses[donor].state_digest]
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in agreed.parts()]
    if needy and len(plan.sound) > 1 and sum(sizes) >= PROBED_NBYTES:
        donor = nearest(group, plan.sound, needy, clock)
    if group.rank in needy:
        other = agreed.read(take_facts(group, donor))
        for fragment, part in take_parts(group, donor, agreed.missing(other), sizes):
            agreed.arrive(fragment, part, other)
        agreed.take_over(other, statuses[donor])
        return view.members[donor].name
    agreed.arrived.clear()
    if needy and group.rank == donor:
        others = [rank for rank in range(group.size) if rank != donor and rank not in needy]
        nbytes = give_parts(group, needy, agreed.parts(), agreed.facts(), others)
        observe("given", to=[view.members[rank].name for rank in needy], nbytes=nbytes)
    elif needy:
        stand_by(group, donor)
    return ""


def note_end(
    membership: Membership, agreed: GlobalState, keeps: bool, met: set[str], out: Collection[str],
    there: Collection[str] | None, known: bool,
) -> tuple[set[str], bool]:  # fmt: skip
    """Note the final state of the run, for members that did not hear the result of the vote on it. Returns the members for which this
    replica keeps the final state, of those that it `met` or whose deltas were counted, without those that are `out` or were
    revoked; and whether all members will hear of the end before they train further.

    These are the members that were not `there` at the vote, if this replica `keeps` the state. If the note cannot be written, they are all:
    the hub or lighthouse has gone, perhaps before others had the result. None, if late members need not be told (`known` is false), or
    another member tells them (`there` is None).
    """
    if not known:
        _note(membership, (agreed.run, agreed.state_digest))
        return set(), True
    if there is None:
        _note(membership, *_ends(agreed))
        return set(), True
    others = met.union(*(who for _, who, _ in agreed.counted.values())).difference(out, [membership.name])
    late = {name for name in others.difference(there) if not _revoked(membership, name)} if keeps else set[str]()
    closed = [(agreed.run, CLOSED)] if keeps and not late else []
    return (late, True) if _note(membership, *_ends(agreed), *closed) else (others, not others)


def _ends(agreed: GlobalState) -> list[tuple[str, ...]]:
    """The notes. The state comes first, so that a member that reads the end also reads its state."""
    return [(agreed.run, agreed.state_digest), (agreed.run,), ()]


def _note(membership: Membership, *ends: tuple[str, ...]) -> bool:
    """Whether this could be written; without a lighthouse late members do not learn of it."""
    try:
        for what in ends:
            membership.note_end(*what)
    except LinkError:
        return False
    return True


def _revoked(membership: Membership, name: str) -> bool:
    with suppress(LinkError):
        return membership.revoked(name)
    return False


def end_is_noted(membership: Membership, agreed: GlobalState) -> bool:
    """Whether the note says that the run has ended with this replica's state; False without a lighthouse."""
    with suppress(LinkError):
        return membership.ended(agreed.run, agreed.state_digest)
    return False


def noted_ends(membership: Membership, statuses: Sequence[MemberStatus]) -> set[str]:
    """The state digests of members that say that the run is over, and with which the rendezvous has noted its end."""
    noted = set[str]()
    for status in statuses:
        with suppress(LinkError):
            if status.over and membership.ended(status.run, status.state_digest):
                noted.add(status.state_digest)
    return noted


def check_final(membership: Membership, agreed: GlobalState, error: EndedError) -> None:
    """Raise `error`, with advice, unless this replica holds the final state."""
    if end_is_noted(membership, agreed):
        return
    _, who, _ = agreed.counted[max(agreed.counted)] if agreed.counted else (0, (), "")
    others = ", ".join(name for name in who if name != membership.name) or "the others"
    raise EndedError(f"{error} Take the final weights from where {others} ended.") from error


def keep(
    next_view: Callable[[Callable[[], dict[str, Any]], float], View], membership: Membership, agreed: GlobalState, step: int,
    order: Sequence[int], late: set[str], seconds: float, observe: Callable[..., None], noted: Callable[[], object] | None = None,
) -> str:  # fmt: skip
    """Give the final state to the members `late`, and to others that come, for `seconds` at most; then leave, and return "". Members that
    have got it, or are revoked, are removed from `late`.

    If the end is not noted yet, `noted` is called as soon as it is. If others went on before that, this replica takes over their state,
    stays a member, and returns the name of the one that gave it; if they ended with another state, `EndedError` is raised.
    `next_view(status, seconds)` is the membership's.
    """
    observe("keeps", late=sorted(late), at_most_seconds=seconds)
    until = membership.clock() + seconds
    status = MemberStatus(agreed.round, agreed.state_digest, step, finishing=True, run=agreed.run, over=True).facts()
    while late and not membership.closed and (left := until - membership.clock()) > 0:
        view = None
        try:
            view = next_view(lambda: status, left)
            statuses = [MemberStatus.of(member.status, member.name) for member in view.members]
            plan = reconcile(statuses, order, noted_ends(membership, statuses))
            if view.group.rank in plan.behind:
                there = view.members[plan.sound[0]].name
                if noted is not None and level(view, plan, statuses, agreed, observe, membership.clock):
                    view.close()  # their round goes on without this replica, which brings nothing
                    return there
                # The lighthouse has forgotten the end, and the weights of this replica are in use already.
                observe("alone", reason=f"{there} went on after the end of the run, and will end with other weights")
                break
            level(view, plan, statuses, agreed, observe, membership.clock)
            late.difference_update(member.name for member in view.members)
        except (PeerError, PacketError, CheckpointError):  # the member has left again, or was no member
            if view is not None:
                view.close()
        else:
            if noted is not None and _note_unless_other(membership, agreed):
                noted()
                noted = None
        late -= {name for name in late if _revoked(membership, name)}
        membership.sleep(PAUSE_SECONDS)
    _note(membership, *_ends(agreed), (agreed.run, CLOSED))  # the first note may be lost with a lighthouse
    membership.close()
    return ""


def _note_unless_other(membership: Membership, agreed: GlobalState) -> bool:
    """Whether the end could be noted. Raises `EndedError` if others have ended the run with another state."""
    with suppress(LinkError):
        if membership.ended(agreed.run):
            check_final(membership, agreed, EndedError(f"the run has ended without replica {membership.name!r}."))
    return _note(membership, *_ends(agreed))
