"""The loop of 01 over open networks: each replica dials a hub with a token, by mutual TLS.

python examples/12_own_loop_over_a_hub.py                                  # a hub and two replicas, all here
thinwire hub --out hub-folder --listen 0.0.0.0:29530 --uses 2              # the same by hand: where all can reach it,
python examples/12_own_loop_over_a_hub.py --token tw1.… --name oslo        # and on each machine
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.net import Hub, join


def train(token: str, name: str, size: int, steps: int, keys: str) -> None:
    with join(token, name=name, size=size, folder=keys) as carrier:
        ledger = Ledger()
        group = CountedGroup(carrier, ledger)
        torch.manual_seed(0)  # equal weights from the start
        model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(group.rank)
        with tw.Replica(tw.streaming_diloco(every=20, fragments=2, delay=2), model, optimizer, group):
            for _ in range(steps):
                points = torch.rand(64, 2, generator=data) * 2 - 1
                loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        total = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
        print(f"{name}: sum of |weights| {total:.9f}, {ledger.sent():,} bytes sent", flush=True)


def start_all(size: int, steps: int) -> int:
    """Starts a hub and `size` replicas on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder, "hub"))
        more = ["--token", str(hub.invite(size)), "--replicas", str(size), "--steps", str(steps), "--keys", folder]
        names = [f"replica-{index}" for index in range(size)]
        processes = [subprocess.Popen([sys.executable, __file__, "--name", name, *more]) for name in names]
        code = max(process.wait() for process in processes)
        hub.close()
        return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token", help="what `thinwire hub` printed; without it everything is started here")
    parser.add_argument("--name", default="oslo", help="of this replica (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of each replica (default: %(default)s)")
    parser.add_argument("--keys", default=".thinwire", help="folder of this machine's key (default: %(default)s)")
    options = parser.parse_args()
    if options.token is None:
        sys.exit(start_all(options.replicas, options.steps))
    train(options.token, options.name, options.replicas, options.steps, options.keys)


if __name__ == "__main__":
    main()
