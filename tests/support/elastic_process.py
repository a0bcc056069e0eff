"""One replica as a process, for test_elastic_processes.py: ADDRESS NAME FILE. It trains until the step in FILE, which may be written while it
trains, and ends by printing the digest of its anchors."""

import sys
import time
from pathlib import Path

import torch

import thinwire as tw
from thinwire.drivers.handshake import digest
from thinwire.membership import LighthouseRendezvous, Membership, Timeouts

QUICK = Timeouts(
    heartbeat_interval=0.5, heartbeat_timeout=1.5, grace=1.0, connect=5.0, transfer=5.0, vote=7.0, view=20.0
)


def main() -> None:
    address, name, last = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = torch.Generator().manual_seed(sum(map(ord, name)))

    def say(event: str, step: int, **fields: object) -> None:
        if event in ("round", "caught_up"):
            print(event, step, fields.get("committed"), flush=True)

    membership = Membership(LighthouseRendezvous(address), name, least=2, timeouts=QUICK)
    strategy = tw.streaming_diloco(every=10, delay=2, partition=tw.pieces.partition.Whole())
    with tw.Replica(strategy, model, optimizer, membership, observer=say) as replica:
        while not last.exists() or replica.step < int(last.read_text()):
            x = torch.randn(32, 64, generator=own)
            (model(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
    print("done", digest(replica.anchors()).hex(), flush=True)


if __name__ == "__main__":
    main()
