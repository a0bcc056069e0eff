"""A replica that test_bytes_on_the_wire.py starts in a network namespace.

It obeys lines on stdin: `count` prints the counts of its ledger and of the kernel for its connections; `rounds`
exchanges, and prints the predicted bytes of its packets.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections import Counter

import torch

from thinwire.codecs import Identity
from thinwire.comm import CountedGroup, Ledger, TorchGroup, gather, start_torch
from thinwire.comm.pacing import connections
from thinwire.comm.sockets import SocketFile, open_socket
from thinwire.exchange import Direct, SendContext, once
from thinwire.rng import Key

NUMELS = (0, 1, 300, 25_000, 750_000)
ROUNDS = 3

# Fields of Linux's `struct tcp_info` (since 4.19): name, offset, format.
INFO = (
    ("unacked", 24, "I"), ("acked", 120, "Q"), ("received", 128, "Q"), ("segments", 136, "I"), ("notsent", 144, "I"),
    ("sent", 200, "Q"),
)  # fmt: skip


def counted(files: set[SocketFile]) -> dict[str, int]:
    """Returns the kernel's counts for these connections: bytes without headers, and segments including pure acknowledgements."""
    total: Counter[str] = Counter()
    for file in files:
        with open_socket(file) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        total.update({name: struct.unpack_from(form, info, offset)[0] for name, offset, form in INFO})
    return dict(total)


def settled(files: set[SocketFile]) -> dict[str, int]:
    """Returns the same once the peers have acknowledged everything that was sent."""
    while (now := counted(files))["unacked"] or now["notsent"]:
        time.sleep(0.01)
    return now


def rounds(group: CountedGroup) -> int:
    """Exchanges a tensor of each size and returns the predicted bytes of the packets."""
    predicted, air = 0, SendContext(group)
    for number in range(ROUNDS):
        for fragment, numel in enumerate(NUMELS):
            key = Key(0, fragment, number, group.rank)
            estimate, _ = once(Direct(), air, Identity(), torch.ones(numel), key, {})
            assert estimate is not None and torch.equal(estimate, torch.ones(numel))
            predicted += Direct().nbytes_sent(Identity(), numel, group.size)
        gather(group, b"yes", 10, "vote")
    return predicted


def main() -> None:
    rank, size, address, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    start_torch(rank, size, address, port, 600.0)
    ledger, before = Ledger(), connections()
    group = CountedGroup(TorchGroup.from_world(size, timeout=600.0), ledger)
    files = connections() - before
    for line in sys.stdin:
        if line.strip() == "rounds":
            said = {"predicted": rounds(group)}
        else:
            said = {"ledger": ledger.as_dict(), "kernel": settled(files)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
