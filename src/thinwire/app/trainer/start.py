"""The first event of a replica's log: its settings and its machine."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.app.jobs.base import Job, Share
from thinwire.app.records.start import CARRIER
from thinwire.app.trainer.run import Run
from thinwire.comm import parse_link
from thinwire.drivers.attached import Method
from thinwire.pieces.partition import Fragment
from thinwire.strategy import Strategy
from thinwire.version import __version__


def start(
    run: Run, share: Share, composition: Strategy | Method, fragments: Sequence[Fragment], job: Job
) -> dict[str, Any]:
    """The fields of a start event."""
    link, shapes = parse_link(run.placement.link), [fragment.shapes for fragment in fragments]
    made_of = {
        "made_of": run.made_of() | {"fragments": len(fragments)},
        "corpus": job.describe(),
        "unit": job.unit,
        "exchanges": [] if composition.own_loop else composition.choices(shapes, run.placement.replicas),
    }
    # in tables own names come last
    place = share.index if share.count == run.placement.replicas else run.placement.replicas
    on = machine()  # before `wall_time`, because it takes time
    return {
        "wall_time": time.time(),
        "replica": place,
        "replicas": run.placement.replicas,
        "run": run.settings() | made_of,
        "strategy": run.method.label,
        "parameters": sum(parameter.numel() for fragment in fragments for _, parameter in fragment.parameters),
        "fragments": [{"name": fragment.name, "numel": fragment.numel} for fragment in fragments],
        "link": link and {"bits_per_second": link.bits_per_second, "delay_seconds": link.delay_seconds},
        "carrier": CARRIER if run.placement.elastic else run.placement.carrier,
        "machine": on,
    }


def machine() -> Mapping[str, Any]:
    """The machine of a measurement."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "thinwire": __version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of this code; None without git, and for a copy that is installed, perhaps in the repository of something else."""
    here = Path(__file__)
    try:
        for command in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "--short", "HEAD"]):
            git = subprocess.run(["git", "-C", str(here.parent), *command], capture_output=True, text=True, check=False)
            if git.returncode:
                return None
    except OSError:  # there is no git
        return None
    return git.stdout.strip()
