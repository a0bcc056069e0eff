"""Streaming DiLoCo in your own loop: two replicas as threads of one process, each with its own data.

    python examples/01_own_loop.py
    python examples/01_own_loop.py --steps 400 --every 50

Thinwire is only in the two calls of `tw.`: the context manager and `run_threads`.
"""

import argparse

import torch
from torch import Tensor, nn

import thinwire as tw


def batch(data: torch.Generator, size: int = 64) -> tuple[Tensor, Tensor]:
    """Returns points on the plane, and the product of their coordinates: a saddle."""
    points = torch.rand(size, 2, generator=data) * 2 - 1
    return points, points.prod(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="inner steps of each replica (default: %(default)s)")
    parser.add_argument("--every", type=int, default=20, help="inner steps between two rounds (default: %(default)s)")
    options = parser.parse_args()
    strategy = tw.streaming_diloco(every=options.every, fragments=2, delay=2)

    def train(group: tw.Group) -> float:
        model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(group.rank)  # every replica has its own data
        with tw.Replica(strategy, model, optimizer, group):
            for step in range(1, options.steps + 1):
                points, height = batch(data)
                loss = nn.functional.mse_loss(model(points), height)
                loss.backward()
                optimizer.step()  # counts an inner step; rounds depart and land in here
                optimizer.zero_grad()
                if group.rank == 0 and step % (options.steps // 5) == 0:
                    print(f"step {step:4d}: loss {loss.item():.5f} on replica 0's own data")
        points, height = batch(torch.Generator().manual_seed(99), 4096)
        return nn.functional.mse_loss(model(points), height).item()

    torch.manual_seed(0)
    losses = tw.run_threads(2, train)
    print(
        "after the last exchange, on unseen data: "
        + ", ".join(f"{loss:.8f}" for loss in losses)
        + " (one model, so equal)"
    )


if __name__ == "__main__":
    main()
