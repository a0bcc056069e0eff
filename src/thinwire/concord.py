"""Elastic rounds, the part that is arithmetic: from what all members say of themselves to what all will do.

Rounds are numbered through all fragments: **turn** q is how many have been decided so far, committed or dropped. Members who
committed the same rounds hold the same anchors, and say so by a **chain**: a digest that grows by each moved anchor. Whoever
is behind in turns, or has another chain, is *behind*: it takes over the agreed state of those who are *sound* before
it is counted again. Its own progress is not lost by that: a delta is relative to its own anchor.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from thinwire.errors import PeerError


@dataclass(frozen=True)
class Claim:
    """What a replica says of itself when it asks for a round.

    turn        rounds that it has seen decided
    chain       digest of its anchors, see `grow`
    fragment    whose delta it has ready; −1: none
    weight      how much that delta counts, such as the tokens behind it; 0: not at all
    step        inner steps, for the learning rate of those who join
    fresh       it holds nothing but random weights
    finishing   it has trained all its steps
    carried     what deltas of other fragments count that missed their rounds, by fragment
    record      what it saw of its last round, as JSON, and
    suspect     whom it would go on without (eviction.py); "" nothing, nobody
    """

    turn: int
    chain: str
    fragment: int = -1
    weight: float = 0.0
    step: int = 0
    fresh: bool = False
    finishing: bool = False
    carried: Mapping[str, float] = field(default_factory=dict)
    record: str = ""
    suspect: str = ""

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any], name: str) -> Claim:
        """What `name` said. Its bytes are a peer's: raises `PeerError` where they are no claim."""
        kinds = {each.name: _KINDS[str(each.type)] for each in fields(cls)}
        fits = facts.keys() == kinds.keys() and all(type(facts[name]) in kind for name, kind in kinds.items())
        if (
            not fits
            or facts["turn"] < 0
            or facts["step"] < 0
            or len(facts["chain"]) > 64
            or not 0 <= facts["weight"] < 1e18
            or not all(
                key.isdecimal() and type(w) in (int, float) and 0 < w < 1e18 for key, w in facts["carried"].items()
            )
        ):
            raise PeerError(f"{name} made a claim that cannot be read; run the same version on every replica.")
        return cls(**facts)

    def brings(self, fragment: int) -> float:
        """What its delta of `fragment` counts; 0: it has none."""
        return self.weight if self.fragment == fragment else self.carried.get(str(fragment), 0.0)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "float": (int, float), "Mapping[str, float]": (dict,),
}  # fmt: skip


@dataclass(frozen=True)
class Concord:
    """What follows from the claims of a muster, in rank order; the same on every member.

    turn      that is next
    step      where training has got to: whoever has trained less goes on from here
    fragment  that this round is about; −1: there is nothing to exchange
    sound     ranks that hold the agreed state; the first one gives it to those behind
    behind    ranks that take it over first
    weights   what each counts in this round
    finished  whether all have trained all their steps; then:
    last      the fragment that all want to bring, or have nothing left of, so that this round is its last; −1: none
    wanted    the fragment that all should bring next time, if they differ; −1: all the same
    over      nobody has anything left to bring
    """

    turn: int
    step: int
    fragment: int
    sound: tuple[int, ...]
    behind: tuple[int, ...]
    weights: tuple[float, ...]
    finished: bool
    last: int
    wanted: int
    over: bool

    @property
    def counted(self) -> tuple[int, ...]:
        return tuple(rank for rank, weight in enumerate(self.weights) if weight > 0)


def reconcile(claims: Sequence[Claim]) -> Concord:
    """Who is sound, what this round is about, and what each delta counts.

    Sound are those with the most turns whose chain most of them share (of equally many: the lowest rank's). If nobody
    has trained yet the lowest rank is sound. The round is about the fragment of whoever has come farthest, since that is
    what the schedule says now. Who is behind is counted all the same if its delta is of this fragment: it is
    what that replica has trained, whatever the others did meanwhile; but not who is fresh. So is who came too late for an
    earlier round of this fragment, and carried its delta here.

    >>> ahead, late = Claim(turn=7, chain="b", fragment=1, weight=1.0), Claim(turn=5, chain="a", fragment=1, weight=1.0)
    >>> concord = reconcile([ahead, late])
    >>> concord.turn, concord.sound, concord.behind, concord.counted
    (7, (0,), (1,), (0, 1))
    """
    trained = [rank for rank, claim in enumerate(claims) if not claim.fresh]
    turn = max((claims[rank].turn for rank in trained), default=0)
    ahead = [rank for rank in trained if claims[rank].turn == turn] or [0]
    chains = Counter(claims[rank].chain for rank in ahead)
    chain = max(chains, key=lambda c: chains[c])  # of equally many the first counted: the lowest rank's
    candidates = ahead if trained else range(len(claims))
    sound = tuple(rank for rank in candidates if claims[rank].chain == chain)
    able = [rank for rank in trained if claims[rank].fragment >= 0 and claims[rank].weight > 0]
    lead = max(able, key=lambda rank: (claims[rank].step, -rank), default=None)
    fragment = -1 if lead is None else claims[lead].fragment
    finished, brought = all(claim.finishing for claim in claims), {claim.fragment for claim in claims}
    return Concord(
        turn=turn,
        step=max((claims[rank].step for rank in trained), default=0),
        fragment=fragment,
        sound=sound,
        behind=tuple(rank for rank in range(len(claims)) if rank not in sound),
        weights=tuple(claim.brings(fragment) if fragment >= 0 and not claim.fresh else 0.0 for claim in claims),
        finished=finished,
        last=max(brought) if finished and len(brought) == 1 else -1,
        wanted=min(brought - {-1}) if finished and len(brought) > 1 else -1,
        over=finished and brought == {-1},
    )


def grow(chain: str, turn: int, fragment: int, anchor: Tensor) -> str:
    """The chain after `fragment`'s anchor has moved in `turn`: BLAKE2b, 16 bytes, as hexadecimal digits."""
    state = hashlib.blake2b(f"{chain}/{turn}/{fragment}/".encode(), digest_size=16)
    state.update(anchor.detach().cpu().contiguous().view(-1).numpy().data)
    return state.hexdigest()
