"""The view that a peer has of all others, without a registry. Views merge, and samples follow from a view alone (Plexus)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from thinwire.errors import PacketError

MOST_PEERS = 1 << 16
_MOST_CHANGES = 1 << 31
_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<IIIB")


class PeerEntry(NamedTuple):
    """An entry of a view, for one peer.

    Args:
        active: the newest round in which another peer received a message of it.
        counter: how often it has joined or left; only the peer itself raises it.
        joined: whether its newest change was to join.

    >>> PeerEntry(active=3, counter=2, joined=False).merged(PeerEntry(active=5, counter=1, joined=True))
    PeerEntry(active=5, counter=2, joined=False)
    """

    active: int
    counter: int
    joined: bool

    def merged(self, other: PeerEntry) -> PeerEntry:
        """Take the newer round, and the change with the larger counter. A leave beats a join with the same counter, which no honest peer sends."""
        counter, away = max((self.counter, not self.joined), (other.counter, not other.joined))
        return PeerEntry(max(self.active, other.active), counter, not away)


@dataclass(frozen=True)
class PeerView:
    """An entry for each peer, by its number. A view is frozen, so one that was sent never changes. `merged` is commutative, associative and
    idempotent, so views become equal in any order of merging.

    >>> view = PeerView.of(range(4)).with_entry(2, PeerEntry(0, 2, joined=False))
    >>> view.order(round_=7, window=50), PeerView.read(view.write()) == view
    ((1, 0, 3), True)
    """

    entries: Mapping[int, PeerEntry]

    @classmethod
    def of(cls, peers: Iterable[int]) -> PeerView:
        """The view in which all `peers` joined before the first round."""
        return cls({peer: PeerEntry(0, 1, joined=True) for peer in peers})

    def merged(self, other: PeerView) -> PeerView:
        """The view that has the newest entries of both."""
        if other.entries == self.entries:
            return self
        both = dict(self.entries)
        for peer, entry in other.entries.items():
            both[peer] = entry.merged(both[peer]) if peer in both else entry
        return PeerView(both)

    def with_entry(self, peer: int, entry: PeerEntry) -> PeerView:
        """The view merged with one entry."""
        known = self.entries.get(peer)
        new = entry if known is None else known.merged(entry)
        return self if new == known else PeerView({**self.entries, peer: new})

    def heard(self, peer: int, round_: int) -> PeerView:
        """The view after a message of `peer` in a round; a peer that is not in the view stays unknown."""
        known = self.entries.get(peer)
        return self if known is None else self.with_entry(peer, known._replace(active=round_))

    def order(self, round_: int, window: int, own: int = -1) -> tuple[int, ...]:
        """The candidates of a round, in the order in which they are asked. Peers with equal views have equal orders.

        It leaves out peers that have left, and peers that were not active in the previous `window` rounds; `own` always counts as active.
        """
        there = [
            peer
            for peer, entry in self.entries.items()
            if entry.joined and (entry.active >= round_ - window or peer == own)
        ]
        return tuple(sorted(there, key=lambda peer: _place(peer, round_)))

    def write(self) -> bytes:
        """4 bytes, and 13 for each peer."""
        each = (_ENTRY.pack(peer, *entry) for peer, entry in sorted(self.entries.items()))
        return _COUNT.pack(len(self.entries)) + b"".join(each)

    @classmethod
    def nbytes(cls, peers: int) -> int:
        """Bytes of a view of `peers` peers."""
        return _COUNT.size + peers * _ENTRY.size

    @classmethod
    def read(cls, written: bytes, most: int = MOST_PEERS) -> PeerView:
        """The view that `written` holds. Raises `PacketError` unless it is whole, of at most `most` peers, all below `most`, in order."""
        count = _COUNT.unpack_from(written)[0] if len(written) >= _COUNT.size else -1
        if not 0 <= count <= most or len(written) != cls.nbytes(count):
            raise PacketError(
                f"a view of {count} peers in {len(written)} bytes; at most {most} in 13 bytes each are due."
            )
        entries: dict[int, PeerEntry] = {}
        last = -1
        for peer, active, counter, joined in _ENTRY.iter_unpack(written[_COUNT.size :]):
            if not last < peer < most or joined > 1 or not 0 < counter < _MOST_CHANGES:
                raise PacketError(
                    f"a view has peer {peer} after {last}, counter {counter} and status {joined}; check who sent it."
                )
            entries[peer], last = PeerEntry(active, counter, bool(joined)), peer
        return cls(entries)


@lru_cache(maxsize=1 << 16)
def _place(peer: int, round_: int) -> bytes:
    """MD5 of "peer-round", as in the authors' code. It spreads the load, and is not a protection."""
    return hashlib.md5(f"{peer}-{round_}".encode(), usedforsecurity=False).digest()
