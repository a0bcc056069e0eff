"""Fuzzes packets: arbitrary bytes in place of a packet, chosen by libFuzzer from the code's branches, for as long as one likes.

    pip install atheris                                  # wheels for Linux, Python 3.11 and later
    python tests/support/fuzz.py -max_total_time=300       # seconds; further options are libFuzzer's; a folder keeps the corpus

The first byte chooses the packet's header or a codec, the second a number of elements; the rest are the bytes of the peer.
A failed check ends it with a traceback and a file `crash-…`; run it with that file to reproduce the failure.
"""

from __future__ import annotations

import sys
import zlib
from itertools import zip_longest

import atheris

with atheris.instrument_imports(include=["thinwire"]):
    import hostile
    import torch
    from pieces import CODECS

    import thinwire as tw
    from thinwire.packet import HEADER_NBYTES, empty_packet, payload, seal

SEALED = empty_packet(hostile.DUE.nbytes)
payload(SEALED).fill_(37)
seal(SEALED, hostile.DUE)
GOOD = SEALED.numpy().tobytes()
CHECKSUM = slice(HEADER_NBYTES - 4, HEADER_NBYTES)


def one(raw: bytes) -> None:
    if len(raw) < 2:
        return
    place, numel, raw = raw[0] % (len(CODECS) + 3), hostile.NUMELS[raw[1] % len(hostile.NUMELS)], raw[2:]
    if place == len(CODECS):
        hostile.check_header(raw, GOOD)
    elif place > len(CODECS):  # a slightly changed packet; the second variant with a checksum that fits
        changed = bytearray(a ^ b for a, b in zip_longest(GOOD, raw[: len(GOOD)], fillvalue=0))
        if place > len(CODECS) + 1:
            changed[CHECKSUM] = bytes(4)
            changed[CHECKSUM] = zlib.crc32(changed).to_bytes(4, "little")
        hostile.check_header(bytes(changed), GOOD)
    else:
        hostile.check_payload(place, numel, raw)


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert tw.codecs.E3M0().nbytes(90) == hostile.DUE.nbytes
    atheris.Setup([*sys.argv, "-max_len=3000"], one)
    atheris.Fuzz()
