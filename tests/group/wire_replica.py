"""A replica that test_group_wire.py starts in a network namespace.

It does what a line on stdin says (`idle`, `rounds`, `leave`) and answers with what its ledger has sent since.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from thinwire.codecs import Identity
from thinwire.exchange import Air, Direct, once
from thinwire.group import CountedGroup, Ledger, TorchGroup, gather, start_torch
from thinwire.seeds import Key

NUMELS = (0, 1, 300, 25_000, 750_000)
ROUNDS = 3


def rounds(group: CountedGroup) -> int:
    """Exchange a tensor of each size; predicted bytes of the packets."""
    predicted, air = 0, Air(group)
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
    start_torch(rank, size, address, port, 40.0)
    ledger = Ledger()
    group = CountedGroup(TorchGroup.from_world(size, timeout=40.0), ledger)
    for line in sys.stdin:
        before, predicted = ledger.as_dict(), 0
        if line.strip() == "leave":
            os._exit(0)
        if line.strip() == "rounds":
            predicted = rounds(group)
        else:
            time.sleep(1.0)
        print(json.dumps({"before": before, "after": ledger.as_dict(), "predicted": predicted}), flush=True)


if __name__ == "__main__":
    main()
