"""Random streams by name: every draw in a run is a pure function of the run's seed and of what it is for."""

from __future__ import annotations

import hashlib


def derive(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for `purpose` (a word) at `indices` (replica, round, ...), independent of every other.

    BLAKE2b of the text `seed/purpose/i/j/...`: the same on every machine and in every version of Python.

    >>> derive(0, "data", 1) == derive(0, "data", 1)
    True
    >>> derive(0, "data", 1) == derive(0, "data", 2)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
