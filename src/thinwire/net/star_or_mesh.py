"""The choice between a star over the hub and a mesh of straight streams, by measured delays and rates. No I/O.

The closed forms of TPI-LLM (arXiv 2410.00531, §3.2) for packets of n bytes, each for r receivers, with one-way delays τ of half a round
trip. A packet goes to the hub once, and straight once to each receiver:

    star    τ of the hub + 8·n / rate by the hub
    mesh    τ straight + 8·n·r / rate straight
    ring    r·τ straight + 8·n·r / rate straight

The rate by the hub is that of a message to all peers at once (measuring.py), so it has what the hub's uplink can carry to each of them.

*Differs*: TPI-LLM sends sums, and a packet here is not added on its way. So a ring sends as many bytes as a mesh, with more delays, and is
never faster if all links are alike. A member that forwards could also change what it passes on, so there is no ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from thinwire.errors import PacketError

_MOST = 1 << 53  # of each field; the closed forms are exact enough up to here


class Measured(NamedTuple):
    """A pair of members, or the worst of several: round trips in microseconds, and rates in bits per second.

    >>> near = Measured(100_000, 20_000_000, 10_000, 20_000_000)
    >>> near.straight(1_000_000, 1), near.straight(1_000_000, 2), near.straight(10_000, 4)
    (True, False, True)
    """

    hub_trip: int
    hub_rate: int
    straight_trip: int
    straight_rate: int

    def star_seconds(self, nbytes: int) -> float:
        """Seconds of a packet by the hub, for any number of receivers (predicted)."""
        return self.hub_trip / 2e6 + 8 * nbytes / self.hub_rate

    def mesh_seconds(self, nbytes: int, receivers: int) -> float:
        """Seconds of a packet that goes straight to each receiver (predicted)."""
        return self.straight_trip / 2e6 + 8 * nbytes * receivers / self.straight_rate

    def ring_seconds(self, nbytes: int, receivers: int) -> float:
        """Seconds of a packet that each receiver forwards to the next (predicted)."""
        return self.mesh_seconds(nbytes, receivers) + (receivers - 1) * self.straight_trip / 2e6

    def straight(self, nbytes: int, receivers: int) -> bool:
        """Whether packets of `nbytes` for so many receivers go straight."""
        return self.mesh_seconds(nbytes, receivers) < self.star_seconds(nbytes)


def parse_measured(fields: Iterable[int]) -> Measured:
    """The numbers of another member. Raises `PacketError` if one is not possible."""
    found = Measured(*fields)
    if not all(0 < one <= _MOST for one in found):
        raise PacketError(
            f"another member measured {tuple(found)}; numbers from 1 to {_MOST} are possible; run the same release of Thinwire everywhere"
        )
    return found


def worst(pairs: Iterable[Measured]) -> Measured:
    """The longest round trips and the lowest rates of all pairs."""
    hub_trips, hub_rates, straight_trips, straight_rates = zip(*pairs)
    return Measured(max(hub_trips), min(hub_rates), max(straight_trips), min(straight_rates))


def explained_choice(found: Measured, pairs: int, nbytes: int, receivers: int) -> str:
    """Text on the choice for packets of `nbytes` for `receivers`, with the numbers and where they come from."""
    mesh, star = found.mesh_seconds(nbytes, receivers), found.star_seconds(nbytes)
    ring = f", {found.ring_seconds(nbytes, receivers):.3g} s around a ring" if receivers > 1 else ""
    chosen = "mesh" if found.straight(nbytes, receivers) else "star over the hub"
    return (
        f"{chosen} for {nbytes} bytes to {receivers}: {mesh:.3g} s straight, {star:.3g} s by the hub{ring} (predicted); "
        f"round trips {found.straight_trip / 1000:.3g} ms straight, {found.hub_trip / 1000:.3g} ms by the hub, "
        f"{found.straight_rate / 1e6:.3g} and {found.hub_rate / 1e6:.3g} Mbit/s (measured, the worst of {pairs})"
    )
