"""The provenance of a result: the machine, the versions, the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import thinwire

HERE = Path(__file__).parent


def provenance() -> dict[str, Any]:
    """Returns the provenance for the JSON of a benchmark. `load` is the one-minute load before the benchmark, which is noise."""
    versions = {name: installed(name) for name in ("torch", "numpy", "numba", "torchft")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "thinwire": thinwire.__version__, **versions},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "--", "src", "benchmarks/*.py")),
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def save(name: str, result: dict[str, Any], into: Path | None = None) -> Path:
    """Writes `result` where the table reads it: benchmarks/results/NAME.json unless `into` is given."""
    path = into or HERE / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(HERE.parent), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
