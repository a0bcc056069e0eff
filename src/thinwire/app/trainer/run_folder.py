"""The run folder, of which one command is in charge at a time. A run that resumes keeps its run file until a replica has resumed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.app.records.events import LONGEST_LINE, being_written, recent_events
from thinwire.app.records.printable import reason
from thinwire.app.trainer.resuming import check_ranks
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError, ThinwireError
from thinwire.files import check_inside, contents, held_by, lock

_DRAFT = ".run.toml"  # the run file of a run that is about to resume


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """A context in which no other command trains in `folder`, which a new run makes. Raises `ConfigurationError` if one does."""
    check_links(folder)
    try:
        if not resume:
            folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # `new_folder` says what is wrong
        yield
        return
    if not lock(held, wait=False):
        holder = held_by(held)
        os.close(held)
        raise ConfigurationError(
            f"another command trains in {folder}{holder}; choose another --out, or wait until it has ended."
        )
    try:
        yield
    finally:
        (folder / _DRAFT).unlink(missing_ok=True)  # of a run that was refused
        os.close(held)


def check_links(folder: Path) -> None:
    """Raise `ConfigurationError` if a file of the run in `folder` is elsewhere: training would write or delete there."""
    try:
        check_inside(folder)
    except (FileNotFoundError, NotADirectoryError):  # a new run, or what `check_folder` refuses
        pass
    except OSError as error:
        raise ConfigurationError(
            f"{folder} is no run folder of its own ({reason(error)}): nothing is written there. Put a copy in its place; to keep a run on "
            "another disk, give that place as --out."
        ) from None


def begun(folder: Path) -> bool:
    """Whether a run has begun in `folder`, so that --resume continues it; otherwise --resume begins it."""
    return (folder / "run.toml").exists()


def check_folder(run: Run, folder: Path, resume: bool, replica: str) -> None:
    """Raise `ConfigurationError` if `run` cannot begin, or `resume`, in `folder`. See `new_folder`."""
    check_links(folder)
    if not resume and _has_trained(folder, replica):
        raise ConfigurationError(f"{folder} holds a run already; choose another --out, or continue it with --resume.")
    if not resume:
        check_run_file(folder)
    if (folder / "config.json").exists() and not (folder / "run.toml").exists():
        raise ConfigurationError(f"{folder} holds a model already, which the run would replace; choose another --out.")
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"{folder} is a file, and the run needs a folder; choose another --out.")
    if resume and not begun(folder):
        raise ConfigurationError(
            f"{folder} holds no run to resume: it has no run.toml. Check the path, or start a new run."
        )
    if resume and (other := run.unlike(Run.load(folder / "run.toml"))):
        raise ConfigurationError(
            f"{folder} was begun with other settings: {other}. Resume with the run's own, or start a new run in another --out."
        )
    if resume:
        check_ranks(folder, replica)
    if active := [path for path in folder.glob(f"events/{replica}.jsonl") if being_written(path)]:
        raise ConfigurationError(
            f"a run is active in {folder}{held_by(*active)}; wait until it has stopped, or choose another --out."
        )
    held = sorted(path.stem for path in folder.glob("events/*.jsonl"))
    if not run.placement.elastic or not held:
        return
    of, here = ", ".join(held), {f"replica-{number}" for number in range(run.placement.replicas)}
    if replica not in ("*", *held):
        raise ConfigurationError(f"{folder} is the folder of {of}, and {replica} needs its own; give another --out.")
    if replica == "*" and here.isdisjoint(held):
        at = "--lighthouse HOST:PORT" if run.placement.carrier == "elastic" else "thinwire join TOKEN"
        raise ConfigurationError(
            f"{folder} is the folder of {of}, whose run meets elsewhere; resume it there, with {at} and --name {held[0]}."
        )


def check_run_file(folder: Path) -> None:
    """Raise `ConfigurationError` if a run in `folder` would replace a run.toml that a person has written or changed."""
    path = folder / "run.toml"
    if not path.exists():
        return
    with suppress(ThinwireError, OSError, ValueError):
        if contents(path) == Run.load(path).as_toml():  # of a run that has not begun
            return
    raise ConfigurationError(
        f"{path} is no file of a run that Thinwire has begun there, and a new run would replace it; choose another --out, or rename it."
    )


def _has_trained(folder: Path, replica: str) -> bool:
    """Whether a run in `folder` has made a step. One whose log cannot be read may have made one."""
    logs = [*folder.glob(f"events/{replica}.jsonl")]
    try:
        ends = [recent_events(log, LONGEST_LINE) for log in logs]
    except OSError:
        return True
    steps = any(not events or any(event["step"] for event in events) for events in ends)
    return steps or (bool(logs) and any(folder.glob(f"checkpoints/{replica}/step-*")))


def new_folder(run: Run, folder: Path, resume: bool, replica: str = "*") -> None:
    """Make the run folder and write its run file. Raises `ConfigurationError` if it holds another run.

    On several machines every process calls it for its `replica`, because each machine has its own folder.
    """
    check_folder(run, folder, resume, replica)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logs = [] if resume else [*folder.glob(f"events/{replica}.jsonl")]
        for log in logs:  # of a run that ended before its first step
            log.unlink()
        run.save(folder / (_DRAFT if resume else "run.toml"))
    except OSError as error:
        todo = "check its permissions and the free space" if resume else "choose another --out"
        raise ConfigurationError(f"{folder} cannot be written ({reason(error)}); {todo}.") from None


def run_in(folder: Path) -> Run:
    """The run that was last begun or is about to resume in `folder`."""
    with suppress(ConfigurationError):
        return Run.load(folder / _DRAFT)
    return Run.load(folder / "run.toml")


def resumed(folder: Path) -> None:
    """Called by each replica when nothing can refuse it any longer."""
    with suppress(FileNotFoundError):  # the first replica
        (folder / _DRAFT).replace(folder / "run.toml")


def set_aside(folder: Path, replica: str = "*") -> None:
    """Rename a run's checkpoints before it begins again in its folder; none is deleted."""
    for own in folder.glob(f"checkpoints/{replica}"):
        number = next(n for n in itertools.count(1) if not (folder / f"checkpoints-{n}" / own.name).exists())
        (folder / f"checkpoints-{number}").mkdir(exist_ok=True)
        own.rename(folder / f"checkpoints-{number}" / own.name)
