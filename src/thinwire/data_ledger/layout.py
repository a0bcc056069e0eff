"""Writes a ledger as bytes, the same on every machine, and reads it; lengths are checked before memory is allocated.

header    magic, format, leases                              4s H H
          samples, seed, lanes, fragments, ahead, patience   Q q 4Q
          number, tail_from, trained, lost                   4 Q
a lease   length of the name, name in ASCII                  B, bytes
          serial, first, tail_at, version, absent            5 Q
          ranges, holes, fences: how many of each            3 I
          landed (one a fragment), ranges, holes, fences     Q each, two a range
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from thinwire.data_ledger.ledger import DataLedger, Lease
from thinwire.data_ledger.ranges import Range
from thinwire.errors import DataError

MAGIC, FORMAT = b"tdlg", 1
_HEAD, _FIXED = struct.Struct("<4sHH"), struct.Struct("<Qq8Q")
_LEASE, _COUNTS = struct.Struct("<5Q"), struct.Struct("<3I")
_MOST = 1 << 62  # the largest number in it


def encode(ledger: DataLedger) -> bytes:
    """The ledger as bytes."""
    one = ledger
    parts = [
        _HEAD.pack(MAGIC, FORMAT, len(one.leases)),
        _FIXED.pack(
            one.samples, one.seed, one.lanes, one.fragments, one.ahead, one.patience,
            one.number, one.tail_from, one.trained, one.lost,
        ),
    ]  # fmt: skip
    for lease in one.leases:
        name = lease.name.encode("ascii")
        parts += [bytes([len(name)]), name]
        parts.append(_LEASE.pack(lease.serial, lease.first, lease.tail_at, lease.version, lease.absent))
        parts.append(_COUNTS.pack(len(lease.ranges), len(lease.holes), len(lease.fences)))
        flat = [*lease.landed, *_flat(lease.ranges), *_flat(lease.holes), *lease.fences]
        parts.append(struct.pack(f"<{len(flat)}Q", *flat))
    return b"".join(parts)


def decode(data: bytes) -> DataLedger:
    """Read a ledger from untrusted bytes. Raises `DataError` for bytes that `encode` would not have written."""
    try:
        ledger = _read(data)
        if encode(ledger) != data:
            raise ValueError("bytes are left over")
    except (struct.error, ValueError, UnicodeDecodeError, IndexError) as error:
        raise DataError(
            f"a data ledger of {len(data)} bytes cannot be read ({error}); run the same version everywhere."
        ) from None
    return ledger


def digest(ledger: DataLedger) -> str:
    """The BLAKE2b digest of the ledger, 16 bytes, as hexadecimal digits."""
    return hashlib.blake2b(encode(ledger), digest_size=16).hexdigest()


def _read(data: bytes) -> DataLedger:
    magic, number, count = _HEAD.unpack_from(data)
    if (magic, number) != (MAGIC, FORMAT):
        raise ValueError(f"it begins with {magic!r}, format {number}; {MAGIC!r}, format {FORMAT} is needed")
    fixed = _FIXED.unpack_from(data, _HEAD.size)
    samples, seed, lanes, fragments, ahead, patience, commits, tail_from, trained, lost = fixed
    if not (0 < samples < _MOST and 0 < lanes < 1 << 16 and 0 < fragments < 1 << 20 and max(fixed[4:]) < _MOST):
        raise ValueError("a number is out of bounds")
    at, leases = _HEAD.size + _FIXED.size, list[Lease]()
    for _ in range(count):
        lease, at = _read_lease(data, at, fragments)
        leases.append(lease)
    if len({lease.name for lease in leases}) != count:
        raise ValueError("two leases have one name")
    return DataLedger(
        samples, seed, lanes, fragments, ahead, patience, commits, tail_from, tuple(leases), trained, lost
    )


def _read_lease(data: bytes, at: int, fragments: int) -> tuple[Lease, int]:
    end = at + 1 + data[at]
    name = data[at + 1 : end].decode("ascii")
    serial, first, tail_at, version, absent = _LEASE.unpack_from(data, end)
    counts = _COUNTS.unpack_from(data, end + _LEASE.size)
    at = end + _LEASE.size + _COUNTS.size
    numbers = fragments + 2 * counts[0] + 2 * counts[1] + counts[2]
    if at + 8 * numbers > len(data):
        raise ValueError("it is cut short")
    values = struct.unpack_from(f"<{numbers}Q", data, at)
    if max(values) >= _MOST or max(serial, first, tail_at, version, absent) >= _MOST:
        raise ValueError("a number is out of bounds")
    a, b, c = fragments, fragments + 2 * counts[0], numbers - counts[2]
    ranges, holes = _pairs(values[a:b]), _pairs(values[b:c])
    if any(begin >= end for begin, end in (*ranges, *holes)):
        raise ValueError("a range ends before it begins")
    if sum(end - begin for begin, end in ranges) != max(0, tail_at - first):
        raise ValueError("the ranges do not reach the tail")
    return Lease(name, serial, values[:a], first, tail_at, ranges, holes, version, values[c:], absent), at + 8 * numbers


def _flat(ranges: Iterable[Range]) -> list[int]:
    return [number for pair in ranges for number in pair]


def _pairs(values: tuple[int, ...]) -> tuple[Range, ...]:
    return tuple(zip(values[::2], values[1::2]))
