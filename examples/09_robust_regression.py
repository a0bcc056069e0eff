"""A saddle point over processes: linear regression against the worst shift of the data, which all replicas share.

    python examples/09_robust_regression.py                            # four processes here
    python examples/09_robust_regression.py --out robust               # saves; after a kill, the same command resumes

min over w, max over r of (1/M) Σ mean (w·(a + r) − b)²/2 + ρ/2·|w|² − β/2·|r|²: replica m knows its own pairs (a, b).
"""

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from thinwire.comm import CountedGroup, Ledger, TorchGroup, start_torch
from thinwire.lab.methods import Masha1, Saddle, saddle

N, PAIRS, RHO, BETA = 20, 200, 0.01, 8.0


def pairs(replica: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(replica)
    a = torch.randn(PAIRS, N, generator=g) + torch.randn(N, generator=g)  # each replica's data have another centre
    return a, 0.6 * a[:, :10].sum(1) + 3 + torch.randn(PAIRS, generator=g)


def solve(method: Masha1, iterations: int, out: str | None) -> None:
    rank, world, prefix = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("TORCHELASTIC_RUN_ID")
    start_torch(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix=prefix)
    ledger, everybody = Ledger(), [pairs(replica) for replica in range(world)]
    group = CountedGroup(TorchGroup.from_world(replicas=world), ledger)

    def objective(w: Tensor, r: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ((a + r) @ w - b).square().mean() / 2 + RHO / 2 * w @ w - BETA / 2 * r @ r

    operators = [saddle(partial(objective, a=a, b=b), N) for a, b in everybody]
    at = Saddle(method, operators[rank], torch.zeros(2 * N), group)
    file = out and Path(f"{out}-{rank}.safetensors")
    tensors = load_file(file) if file and file.exists() else at.state()[0] | {"step": torch.zeros(1)}
    at.load_state(tensors, {"step": tensors["step"]})  # takes another replica's state if that is later
    while at.step < iterations:
        at.iterate()
        if file and at.step % 50 == 0:
            save_file(at.state()[0] | {"step": torch.tensor([at.step])}, draft := file.with_suffix(".draft"))
            draft.replace(file)
        if rank == 0 and at.step % 200 == 0:
            slope = torch.stack([operator(at.z) for operator in operators]).mean(0).norm()
            print(f"iteration {at.step:>5}: slope {slope:.1e}, {ledger.sent() / 1000:.1f} kB sent by each", flush=True)
    a, b = map(torch.cat, zip(*everybody))
    for name, w in ("least squares", torch.linalg.lstsq(a, b[:, None]).solution[:, 0]), ("robust", at.z[:N]):
        error = a @ w - b  # the worst shift is w·mean(error)/(β − |w|²)
        worst = error.square().mean() + w @ w * error.mean() ** 2 / (BETA - w @ w)
        if rank == 0:
            print(f"{name}: mean square {error.square().mean():.3f}, with the worst shift {worst:.3f}", flush=True)
    group.close()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.02, help="γ (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--out", help="where each replica saves: OUT-RANK.safetensors")
    options = parser.parse_args()
    method = Masha1(step=options.step)  # refuses an impossible step before any process starts
    if "RANK" in os.environ:
        solve(method, options.iterations, options.out)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *sys.argv]
        sys.exit(subprocess.call(torchrun, env=os.environ | {"OMP_NUM_THREADS": "1"}))


if __name__ == "__main__":
    main()
