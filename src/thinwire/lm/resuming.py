"""Whether the run in a folder may be resumed, before anything in it changes."""

from __future__ import annotations

from pathlib import Path

from thinwire.decoupled.sampled_composition import SampleComposition
from thinwire.errors import ConfigurationError
from thinwire.lm.run import Run
from thinwire.records.run_record import RunRecord


def cannot_resume(run: Run) -> str:
    """Why a run cannot be resumed, in words; "" if it can."""
    if isinstance(run.make_method(), SampleComposition):
        return f"a run with {run.method.label} cannot resume, because no replica knows which one has the newest model"
    return ""


def complete(run: Run, folder: Path) -> bool:
    """Whether `folder` holds a run with all the steps of `run`, and the trained model."""
    models = [folder, *folder.glob("models/*")]  # the second for replicas with different models
    begun = any((one / "model.safetensors").exists() for one in models) and any(folder.glob("events/*.jsonl"))
    return begun and RunRecord.load(folder).summary.steps >= run.optimizer.steps


def check_resume(run: Run, folder: Path) -> None:
    """Raise `ConfigurationError` if the run in `folder` has not ended, and its method cannot resume."""
    if (why := cannot_resume(run)) and not complete(run, folder):
        raise ConfigurationError(f"--resume: {why}; start a new run in another --out.")


def check_ranks(folder: Path, replica: str) -> None:
    """Raise `ConfigurationError` if the replicas of the run in `folder` have another number of ranks than those that would resume it."""
    held = sorted(path.stem for path in folder.glob("events/*.jsonl"))
    if replica == "*":
        here, others = "replicas of one rank", [name for name in held if ".shard-" in name]
    else:
        here, others = replica, [name for name in held if name.split(".")[0] == replica.split(".")[0]]
    if others and replica not in others:
        raise ConfigurationError(
            f"{folder} holds a run of {', '.join(others)}, and {here} would resume it; start as many ranks for each replica as before "
            "(thinwire docs machines), or choose another --out."
        )
