"""Whether the run in a folder may be resumed, before anything in it changes."""

from __future__ import annotations

from pathlib import Path

from thinwire.app.records.events import LONGEST_LINE, recent_events
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.trained import trains_on
from thinwire.checkpoint import found_in, step_of
from thinwire.errors import ConfigurationError


def cannot_resume(run: Run) -> str:
    """Why a run cannot be resumed, in words; "" if it can."""
    method = run.make_method()
    why = method.traits.cannot_resume if method else ""
    return f"a run with {run.method.label} cannot resume, {why}" if why else ""


def complete(run: Run, folder: Path) -> bool:
    """Whether `folder` holds a run with all the steps of `run`, and the trained model."""
    models = [folder, *folder.glob("models/*")]  # the second for replicas with different models
    begun = any((one / "model.safetensors").exists() for one in models) and any(folder.glob("events/*.jsonl"))
    return begun and not trains_on(folder) and RunRecord.load(folder).summary.steps >= run.optimizer.steps


def check_resume(run: Run, folder: Path) -> None:
    """Raise `ConfigurationError` if the run in `folder` has not ended, and its method cannot resume, or `run` has fewer steps than it has."""
    if complete(run, folder):
        return
    if why := cannot_resume(run):
        raise ConfigurationError(f"--resume: {why}; start a new run in another --out.")
    if (taken := steps_taken(run, folder)) > run.optimizer.steps:
        raise ConfigurationError(
            f"--steps {run.optimizer.steps} with --resume: the run in {folder} has taken {taken} steps; give --steps {taken} to end it there, or "
            "more to train longer."
        )


def steps_taken(run: Run, folder: Path) -> int:
    """Inner steps of the run at its newest checkpoints in `folder`; 0 if there are none."""
    each = [{step_of(path) for path in found_in(own)} for own in folder.glob("checkpoints/*")]
    newest = [max(steps) for steps in each if steps]
    if run.placement.elastic:  # replicas go on at the step of the one that is ahead
        return max(newest, default=0)
    if run.own_steps:
        return sum(newest) // max(1, len(newest))
    return max(set.intersection(*each), default=0) if each else 0


def steps_logged(folder: Path, replica: str) -> int:
    """Inner steps that `replica` has logged in `folder`; 0 if it has no log."""
    log = folder / "events" / f"{replica}.jsonl"
    if not log.exists():
        return 0
    return max((event["step"] for event in recent_events(log, LONGEST_LINE)), default=0)


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
