"""Law 12: with torch, numpy and safetensors alone the core imports, trains and resumes, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import copy, hashlib, sys
from pathlib import Path
import torch
import thinwire as tw
from thinwire import checkpoint

def trained(steps, resumed_from=None, saved_at=None):
    torch.manual_seed(0)  # here, because threads share the generator
    first = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))

    def replica(group):
        model = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        folder = Path(sys.argv[1], str(group.rank))
        method = tw.streaming_sign(every=8, fragments=2, delay=2, partition=tw.pieces.partition.BySize(2))
        with tw.Replica(method, model, optimizer, group) as attached:
            if resumed_from is not None:
                found, _ = checkpoint.newest_common(folder, group)
                checkpoint.load(found, attached)
            while attached.step < steps:
                draw = torch.Generator().manual_seed(1000 * attached.step + group.rank)
                loss = model(torch.randn(4, 64, generator=draw)).square().mean()
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                if attached.step == saved_at:
                    checkpoint.save(folder, attached, {})
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return tw.run_threads(2, replica)

whole = trained(20, saved_at=11)
assert whole == trained(20, resumed_from=11), "a resume is not bit for bit"
print(*set(whole), *sorted({name.partition(".")[0] for name in sys.modules} & {"numba", "rich", "tyro", "plotly", "grpc"}),
      *sorted(name for name in sys.modules if name.startswith(("thinwire.app", "thinwire.net", "thinwire.lab", "thinwire.integrations"))))
"""


def run(folder: Path, first: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
    done = subprocess.run(
        [sys.executable, "-c", first + PROGRAM, str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_core_trains_and_resumes_alone_with_the_same_bits(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", "import only_core")
    assert len(alone) == 64, f"one digest, and nothing of the app or of what it needs: {alone}"
    assert run(tmp_path / "all", "").split()[0] == alone


@pytest.mark.slow
def test_the_core_passes_its_tests_alone() -> None:
    folders = [f"tests/{name}" for name in ("codecs", "comm", "data_ledger", "exchange", "laws", "pieces")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "only_core", "-n", "2", *folders]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
