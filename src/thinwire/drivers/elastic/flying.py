"""The exchange of one elastic round: from a delta to the fragment's next anchor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.codecs import Codec
from thinwire.drivers.elastic.eviction import EvictionVoter
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.plan import RoundPlan
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import FragmentState, RoundState
from thinwire.errors import LinkError, PacketError
from thinwire.exchange import Arriving, Buffers, Round, SendContext
from thinwire.exchange.record import Record
from thinwire.membership.rendezvous import ALMOST, culprits, last_alone
from thinwire.membership.view import View
from thinwire.packet import REFUSED
from thinwire.rng import Key
from thinwire.strategy import Strategy


def fly(
    strategy: Strategy, codec: Codec, held: FragmentState, view: View, plan: RoundPlan, ready: Ready, context: SendContext,
    voter: EvictionVoter, timeout: float,
) -> tuple[Flight, dict[str, float], dict[int, str]]:  # fmt: skip
    """Exchange the round's fragment; all members `held` the same anchor of it.

    Every delta is multiplied by weight · M / `RoundPlan.whole`, so that the mean over all M members is the weighted mean. The remainder
    at the end of the run is less than a period, and is averaged, as in a fixed group. Returns the update, the member for which it waited
    (`waits`), and checksums of all packets by rank.
    Raises `PacketError`, `BlamedError`.
    """
    group, fragment, anchor = view.group, plan.fragment, held.anchor
    own = group.rank in plan.counted
    share = plan.weights[group.rank] * group.size / plan.whole
    delta = ready.delta if own else torch.zeros_like(anchor)
    outer = strategy.outer.last if plan.finished else strategy.outer
    state = RoundState(held, delta, outer, strategy.feedback if own else None, plan.round, 0, 0, codec)
    moved = Flight(state, Buffers(), share)
    key = Key(strategy.seed, fragment, plan.round, group.rank)
    round_ = Round(context, codec, anchor.numel(), key, moved.signal, decodes_own=moved.decodes_own)
    names, began = [member.name for member in view.members], view.clock()
    try:
        with voter.watches(round_, view):
            departure = strategy.exchange.depart(round_, {})
            arriving = Arriving(strategy.exchange.arrive(departure))
            for begin, mean, values in arriving:
                moved.settle(begin, mean, values)
            round_.close()
            arrival = arriving.arrival
    except LinkError as error:
        absent = missing(round_.record(names, 0.0, False), names)
        peers = culprits(error.peer, absent, group.size, view.clock() - began >= ALMOST * timeout)
        if peers == (error.peer,):
            raise
        raise BlamedError(str(error), peers) from error
    if refused := tuple(rank for rank, flags in enumerate(arrival.flags) if flags & REFUSED):
        who = ", ".join(names[rank] for rank in refused)
        raise BlamedError(f"{who} announced finite values and sent none; the round is dropped.", refused)
    if arrival.void or not moved.finish():
        largest = strategy.exchange.largest(departure)
        most = max(largest.values(), default=0.0)
        wrong = tuple(rank for rank, value in largest.items() if value >= most)
        who = "".join(f" Values of {names[rank]} reach {largest[rank]:.3g}." for rank in wrong)
        raise BlamedError(f"the anchor would not be finite; the round is dropped.{who}", wrong)
    sums = strategy.exchange.checksums(departure)
    moved.close()
    moved.nbytes = strategy.exchange.nbytes_sent(codec, anchor.numel(), group.size, group.rank)
    moved.nbytes_sent = round_.nbytes_sent
    return moved, waits(round_.record(names, 0.0, True), names), sums


class BlamedError(LinkError):
    """A round failed because of the ranks `peers`; of unknown ones, if there are none."""

    def __init__(self, text: str, peers: tuple[int, ...]) -> None:
        super().__init__(text)
        self.peers = peers


def blamed(error: BaseException) -> tuple[int, ...]:
    """The ranks that made a round fail with `error`, as far as it is known."""
    if isinstance(error, BlamedError):
        return error.peers
    peer = error.peer if isinstance(error, LinkError | PacketError) else None
    return () if peer is None else (peer,)


def missing(record: Record, names: Sequence[str]) -> list[int]:
    """The ranks whose messages are missing in the first stage in which any are: all that is missing later may be missing because of them."""
    due = [flow for flow in record.received if flow.there < flow.parts]
    first = min((flow.stage for flow in due), default=0)
    return [names.index(flow.peer) for flow in due if flow.stage == first]


def waits(record: Record, names: Sequence[str]) -> dict[str, float]:
    """The seconds for which this member waited for the packet of one other alone, by name: from the time when it had the packets of all
    others, and had sent its own. Only the first stage is compared, because all later ones wait for it.
    """
    came = {flow.peer: max(flow.at.values()) for flow in record.received if flow.stage == 0 and flow.at}
    return last_alone(came)
