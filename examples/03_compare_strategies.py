"""Four methods on one small problem, with the same data and seeds: the loss, and the bits that were sent.

    python examples/03_compare_strategies.py
    python examples/03_compare_strategies.py --steps 600 --replicas 4

The problem is a landscape of waves; one replica sees its left part more often, the other its right part.
"""

import argparse

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger

STRATEGIES = {
    "data_parallel": tw.data_parallel(),
    "diloco": tw.diloco(every=10),
    "streaming_diloco": tw.streaming_diloco(every=10, fragments=2, delay=2),
    "eager_diloco": tw.recipes.eager_diloco(every=10, fragments=2),
}


def heights(points: Tensor) -> Tensor:
    x, y = points.unbind(1)
    return (torch.sin(9 * x) * torch.cos(7 * y + x))[:, None]


def run(strategy: tw.Strategy, replicas: int, steps: int) -> tuple[float, float]:
    """Returns the loss on the whole landscape, and the bits that a replica sent per parameter and inner step."""

    def train(group: tw.Group) -> tuple[float, float]:
        ledger = Ledger()
        model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
        numel = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(group.rank)
        with tw.Replica(strategy, model, optimizer, CountedGroup(group, ledger)):
            for _ in range(steps):
                points = torch.rand(64, 2, generator=data)
                points[:, 0] = points[:, 0] ** (1.5 if group.rank % 2 else 1 / 1.5)  # more often left, or right
                nn.functional.mse_loss(model(points), heights(points)).backward()
                optimizer.step()
                optimizer.zero_grad()
        points = torch.rand(8192, 2, generator=torch.Generator().manual_seed(99))
        loss = nn.functional.mse_loss(model(points), heights(points)).item()
        return loss, 8 * ledger.sent("packet") / numel / steps

    torch.manual_seed(0)
    return tw.run_threads(replicas, train)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="inner steps of each replica (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("strategy", "loss", "bits per parameter and step", title=f"{options.replicas} replicas; measured")
    for name, strategy in STRATEGIES.items():
        loss, bits = run(strategy, options.replicas, options.steps)
        table.add_row(name, f"{loss:.4f}", f"{bits:.3g}")
    Console().print(table)


if __name__ == "__main__":
    main()
