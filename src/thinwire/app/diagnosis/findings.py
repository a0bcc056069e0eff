"""The findings of a diagnosis: a syndrome, its cause, and the figures that show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Syndrome(StrEnum):
    """What is wrong: the four syndromes of C4D (arXiv 2406.04594, section 4).

    >>> str(Syndrome.SLOW_LINK)
    'communication slow'
    """

    SLOW_LINK = "communication slow"
    SLOW_REPLICA = "non-communication slow"
    HUNG_LINK = "communication hang"
    HUNG_REPLICA = "non-communication hang"


class Side(StrEnum):
    """Where the cause is. A `WAY` leads from one replica to another; records of two replicas do not tell where on it the cause is.

    >>> str(Side.SENDER)
    'sender side'
    """

    REPLICA = "replica"
    SENDER = "sender side"
    RECEIVER = "receiver side"
    LINK = "link"
    WAY = "way"


@dataclass(frozen=True)
class Finding:
    """What is wrong, where, and the figures that show it.

    Args:
        syndrome: what is wrong.
        side: where the cause is.
        who: the replica; or the sender and the receiver of a link.
        both: whether the link is slow, or silent, in both directions.
        first, last: number of the first and the last round in which it was so, counted from the first that was recorded.
        seconds: seconds of a message, or of an inner step; of a hang, the seconds in which nothing has arrived.
        usual: seconds that the message or the inner step usually takes.
        detail: a phrase with the figures.
        began: of a hang, when its round began, in seconds since the waiting replica opened its log.

    >>> print(Finding(Syndrome.SLOW_LINK, Side.SENDER, ("2",), detail="in 6 of the last 8 rounds"))
    communication slow: the sender side of replica 2; in 6 of the last 8 rounds
    """

    syndrome: Syndrome
    side: Side
    who: tuple[str, ...]
    both: bool = False
    first: int = 0
    last: int = 0
    seconds: float = 0.0
    usual: float = 0.0
    detail: str = ""
    began: float = 0.0

    @property
    def suspect(self) -> str | None:
        """The replica that causes this, if it is only one."""
        return self.who[0] if self.side in (Side.REPLICA, Side.SENDER, Side.RECEIVER) else None

    @property
    def cause(self) -> tuple[Any, ...]:
        """Syndrome, side and replicas, which are equal in two findings of the same cause."""
        return self.syndrome, self.side, self.who

    @property
    def culprit(self) -> str:
        """
        >>> Finding(Syndrome.SLOW_LINK, Side.SENDER, ("2",)).culprit
        'the sender side of replica 2'
        """
        one, *other = map(called, self.who)
        if self.side is Side.REPLICA:
            return one
        if self.side in (Side.SENDER, Side.RECEIVER):
            return f"the {self.side} of {one}"
        way = f"{'between' if self.both else 'from'} {one} {'and' if self.both else 'to'} {other[0]}"
        if self.side is Side.LINK:
            return f"the link {way}"
        return f"the way {way} (two replicas cannot tell: {one}, {other[0]}, or the link)"

    @property
    def advice(self) -> str:
        return _ADVICE[self.syndrome, self.side]

    def __str__(self) -> str:
        return f"{self.syndrome}: {self.culprit}" + (f"; {self.detail}" if self.detail else "")

    def facts(self) -> dict[str, Any]:
        """The finding as values for JSON."""
        return asdict(self) | {"suspect": self.suspect, "culprit": self.culprit, "advice": self.advice}


def called(name: str) -> str:
    """
    >>> called("2"), called("replica-1")
    ('replica 2', 'replica-1')
    """
    return name if name.startswith("replica") else f"replica {name}"


_LESS = "a smaller codec or a longer `every` sends less over it"
_CHECK = "read the end of its log, check whether its process is alive or stopped, and start it again"
_PATH = "Look at what else uses that path (uploads, backups, another job), at its cable or tunnel"
_ADVICE = {
    (Syndrome.SLOW_LINK, Side.SENDER): f"Look at what else sends from that machine, and at its uplink; {_LESS}.",
    (
        Syndrome.SLOW_LINK,
        Side.RECEIVER,
    ): f"Look at what else that machine receives, at its downlink and its CPU; {_LESS}.",
    (
        Syndrome.SLOW_LINK,
        Side.REPLICA,
    ): "All its connections are slow, both ways: look at its interface, its tunnel, its CPU and who else uses them.",
    (Syndrome.SLOW_LINK, Side.LINK): f"{_PATH}, and run `thinwire probe` over it.",
    (Syndrome.SLOW_LINK, Side.WAY): f"{_PATH}, at both ends, and run `thinwire probe` over it.",
    (
        Syndrome.SLOW_REPLICA,
        Side.REPLICA,
    ): "It computes longer than the others: look at what else runs there, its temperature, its disk and its data.",
    (Syndrome.HUNG_REPLICA, Side.REPLICA): f"It did not begin a round that the others began: {_CHECK}.",
    (Syndrome.HUNG_LINK, Side.REPLICA): f"It stopped in the middle of a round: {_CHECK}.",
    (
        Syndrome.HUNG_LINK,
        Side.SENDER,
    ): "Nothing from it arrives anywhere: look at its uplink and at firewalls for what leaves it.",
    (
        Syndrome.HUNG_LINK,
        Side.RECEIVER,
    ): "Nothing arrives there: look at its downlink and at firewalls for what comes in.",
    (
        Syndrome.HUNG_LINK,
        Side.LINK,
    ): "The two do not reach each other, while both reach others: look at routes and firewalls between them.",
    (Syndrome.HUNG_LINK, Side.WAY): "Look at both machines and at what is between them.",
}
