"""Why there is a delay: the same training on an emulated thin link, without and with computing while packets fly.

    python examples/05_thin_link.py
    python examples/05_thin_link.py --link 2mbit,50ms --delays 0 2 8

Bytes and steps are equal in every row. With delay 0 a replica waits until the packet arrives; with a sufficient delay it never waits.
"""

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire as tw
from thinwire.comm import Link, LinkedGroup


def run(link: Link, delay: int, steps: int, step_seconds: float) -> tuple[float, float]:
    """Returns the seconds that replica 0 spent in its loop, and those in which it waited."""
    strategy = tw.streaming_diloco(every=10, fragments=2, delay=delay)

    def train(group: tw.Group) -> tuple[float, float]:
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.Generator().manual_seed(group.rank)
        with tw.Replica(strategy, model, optimizer, LinkedGroup(group, link)) as replica:
            began = time.monotonic()
            for _ in range(steps):
                x = torch.randn(8, 128, generator=data)
                nn.functional.mse_loss(model(x), x).backward()
                time.sleep(step_seconds)  # takes as long as a larger model
                optimizer.step()
                optimizer.zero_grad()
            return time.monotonic() - began, replica.stall_seconds  # without the last exchange, which nothing hides

    return tw.run_threads(2, train)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=Link.parse, default=Link.parse("4mbit,20ms"), help="default: %(default)s")
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 5], help="in inner steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="inner steps of each replica (default: %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.03, help="of one inner step (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("delay", "loop s", "waited s", "waited", title=f"two replicas on {options.link} each; emulated")
    for delay in options.delays:
        seconds, stalled = run(options.link, delay, options.steps, options.step_seconds)
        table.add_row(str(delay), f"{seconds:.2f}", f"{stalled:.2f}", f"{stalled / seconds:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
