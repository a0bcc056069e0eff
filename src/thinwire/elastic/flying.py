"""The exchange of one elastic round: from a delta to the fragment's next anchor."""

from __future__ import annotations

import torch

from thinwire.codecs import Codec
from thinwire.elastic.eviction import EvictionVoter
from thinwire.elastic.messages import Ready
from thinwire.elastic.plan import RoundPlan
from thinwire.errors import NonFiniteError, PacketError
from thinwire.exchange import Buffers, Round, SendContext
from thinwire.membership.view import View
from thinwire.packet import REFUSED
from thinwire.rng import Key
from thinwire.runtime.fragment_state import FragmentState, RoundUpdate
from thinwire.runtime.token_weights import weigh
from thinwire.strategy import Strategy


def fly(
    strategy: Strategy, codec: Codec, held: FragmentState, view: View, plan: RoundPlan, ready: Ready, context: SendContext,
    voter: EvictionVoter,
) -> RoundUpdate:  # fmt: skip
    """Exchange the round's fragment; all members `held` the same anchor of it.

    Every delta is multiplied by weight · M / `RoundPlan.whole`, so that the mean over all M members is the weighted mean. The remainder
    at the end of the run is less than a period, and is averaged, as in a fixed group. Raises `PacketError`, `NonFiniteError`.
    """
    group, fragment, anchor = view.group, plan.fragment, held.anchor
    own = group.rank in plan.counted
    share = plan.weights[group.rank] * group.size / plan.whole
    delta = ready.delta if own else torch.zeros_like(anchor)
    outer = strategy.outer.last if plan.finished else strategy.outer
    moved = RoundUpdate(held, delta, outer, strategy.feedback if own else None, Buffers())

    signal, settle = weigh(moved, share)
    key = Key(strategy.seed, fragment, plan.round, group.rank)
    round_ = Round(context, codec, anchor.numel(), key, signal)
    with voter.watches(round_, view):
        arrival = strategy.exchange.arrive(strategy.exchange.depart(round_, {}), settle)
    if any(flags & REFUSED for flags in arrival.flags):
        who = [view.members[rank].name for rank, flags in enumerate(arrival.flags) if flags & REFUSED]
        raise PacketError(f"{', '.join(who)} announced finite values and sent none; the round is dropped.")
    if arrival.void or not moved.finish():
        raise NonFiniteError("the anchor would not be finite; the round is dropped.")
    moved.close()
    moved.nbytes = strategy.exchange.nbytes_sent(codec, anchor.numel(), group.size, group.rank)
    moved.nbytes_sent = round_.nbytes_sent
    return moved
