"""Memory of a replica's process without its model: Python, torch and the kernels of a round. *Measured* in a separate process.

`python -m thinwire.app.plan.base` runs that process: it trains the smallest model for a few steps and prints its resident bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import torch

import thinwire.app.trainer.launch  # noqa: F401  # loads all that a replica imports
from thinwire.app.plan.machine import BASE_NBYTES
from thinwire.app.trainer.settings import ModelSpec
from thinwire.app.trainer.setup import make_model
from thinwire.comm import Group, run_threads
from thinwire.errors import ConfigurationError
from thinwire.recipes import streaming_diloco
from thinwire.replica import Replica


def resident_nbytes() -> int | None:
    """Resident bytes of this process; None if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return None


@lru_cache(maxsize=1)
def base_nbytes() -> int:
    """Resident bytes of a replica without its model, on this machine. Raises `ConfigurationError` if a replica cannot train here."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigurationError(
            f"the smallest model cannot be trained here ({why}); `thinwire doctor` reports what this machine lacks."
        )
    return int(done.stdout)


def _train(group: Group) -> None:
    model = make_model(ModelSpec(model="nano"), 128, 0, 256)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with Replica(streaming_diloco(every=2, delay=1), model, optimizer, group):
        for _ in range(4):
            model(tokens, tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run_threads(2, _train)
    print(resident_nbytes() or BASE_NBYTES)
