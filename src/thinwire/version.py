"""The version of the code, and the range of protocols from which replicas find whether they can work together."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__version__ = "0.1.0.dev0"  # .dev0 until 0.1.0 is out: then two trees can have this name, and `named` tells them apart
_STATED = re.compile(r"([0-9]{1,9}) to ([0-9]{1,9}) \(Thinwire ([A-Za-z0-9.+_-]{1,24})\)")


@dataclass(frozen=True)
class Protocols:
    """The protocols of one release: all from `oldest` to `newest`. The same for what it sends to a hub, and its messages to a lighthouse.

    A protocol is what all replicas of a run must share: the formats of their messages, and the arithmetic that gives all replicas
    the same bits. Replicas of different releases train together if one protocol is in the ranges of all.

    >>> before, after = Protocols(1, 1, "0.1.0"), Protocols(1, 2, "0.2.0")
    >>> str(after), Protocols.parse(str(after)) == after, common([before, after]), common([before, Protocols(2, 2, "0.3.0")])
    ('1 to 2 (Thinwire 0.2.0)', True, True, False)
    """

    oldest: int
    newest: int
    release: str

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest} (Thinwire {named(self.release)})"

    def __contains__(self, number: int) -> bool:
        return self.oldest <= number <= self.newest

    @classmethod
    def parse(cls, text: str) -> Protocols | None:
        """Parse the range that another replica sent; None if it cannot be parsed."""
        match = _STATED.fullmatch(text)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None


def named(release: str) -> str:
    """The name under which others know `release`. This one's, if it is not out, has a digest of its code: unlike trees have unlike names."""
    return f"{release}+{_digest_of_code()}" if release == __version__ and ".dev" in release else release


@cache
def _digest_of_code() -> str:
    """Eight digits; takes a twentieth of a second, once."""
    package, state = Path(__file__).parent, hashlib.blake2b(digest_size=4)
    for path in sorted(package.rglob("*.py")):
        state.update(hashlib.blake2b(path.relative_to(package).as_posix().encode()).digest())
        state.update(hashlib.blake2b(path.read_bytes()).digest())
    return state.hexdigest()


def unlike_releases(there: str, here: str, where: str) -> str:
    """Two stated ranges in words if they differ, which explains why other facts differ too; "" if they are equal.

    >>> unlike_releases("2 to 2 (Thinwire 0.2.0)", "2 to 2 (Thinwire 0.1.0)", "on replica 0")
    '; the versions differ too: protocols 2 to 2 (Thinwire 0.2.0) there, 2 to 2 (Thinwire 0.1.0) on replica 0. Install one version on all'
    """
    if there == here:
        return ""
    return f"; the versions differ too: protocols {there or 'none'} there, {here or 'none'} {where}. Install one version on all"


def newest_of_both(here: Protocols, there: Protocols) -> int | None:
    """The newest number in both ranges; None if they do not meet.

    >>> newest_of_both(Protocols(1, 3, "0.2.0"), Protocols(2, 5, "0.3.0")), newest_of_both(Protocols(1, 1, "0.1.0"), Protocols(2, 2, "0.3.0"))
    (3, None)
    """
    newest = min(here.newest, there.newest)
    return newest if newest >= max(here.oldest, there.oldest) else None


def common(stated: Collection[Protocols | None]) -> bool:
    """Whether one protocol is in all ranges. It is enough to compare pairs: ranges that overlap in pairs have a number in common."""
    known = [one for one in stated if one]
    return len(known) == len(stated) and max(one.oldest for one in known) <= min(one.newest for one in known)


# A release that changes the frames between members and a hub, requests to join a hub, requests of followers or publishers, or the messages between
# replicas and a lighthouse, raises `newest` here. It raises `oldest` to the same number, unless both its sides still speak the older ones.
HUB_FRAMES = Protocols(oldest=1, newest=1, release=__version__)
JOIN_REQUESTS = Protocols(oldest=1, newest=1, release=__version__)
FOLLOWER_REQUESTS = Protocols(oldest=1, newest=1, release=__version__)
PUBLISHER_REQUESTS = Protocols(oldest=1, newest=1, release=__version__)
LIGHTHOUSE_MESSAGES = Protocols(oldest=1, newest=1, release=__version__)

# A release that changes a format on the wire, or the last bit of a result, raises `newest`. It raises `oldest` to the same number,
# unless replicas of the previous release read its messages and compute the same bits.
PROTOCOLS = Protocols(oldest=1, newest=1, release=__version__)
