"""The checkpoints of a run's replicas in this folder, by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thinwire.app.records.printable import quoted
from thinwire.app.trainer.run_folder import check_links
from thinwire.checkpoint import anchors_digest, drop, found_in, read, step_of
from thinwire.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Saved:
    """One replica's checkpoint. `problem` is empty if it is whole. `when` is the time of writing, in seconds since 1970. `anchors` is their digest,
    which is equal on all replicas of a fixed group; "": unknown.
    """

    replica: str
    path: Path
    step: int
    when: float
    nbytes: int
    problem: str
    anchors: str = ""


@dataclass(frozen=True)
class CheckpointSet:
    """The checkpoints of all replicas at one step. A fixed group resumes from the newest step of which every replica has a whole one, with the
    same anchors on all.
    """

    step: int
    saved: tuple[Saved, ...]
    missing: tuple[str, ...]  # replicas without a checkpoint of this step

    @property
    def when(self) -> float:
        return max(one.when for one in self.saved)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.saved)

    @property
    def problems(self) -> list[str]:
        """The problems, one per line; empty if all replicas of this folder have a whole checkpoint."""
        broken = [f"{one.replica}: {one.problem}" for one in self.saved if one.problem]
        return [*broken, *(f"{name} has none" for name in self.missing), *self._unlike]

    @property
    def _unlike(self) -> list[str]:
        anchors = defaultdict(list)
        for one in self.saved:
            if not one.problem:
                anchors[one.replica.partition(".")[2], one.anchors].append(one.replica)  # shards have unlike ones
        camps = [", ".join(names) for names in anchors.values()]
        return [f"unlike anchors: {'; '.join(camps)}"] if len(anchors) > len({shard for shard, _ in anchors}) else []


def replicas_of(folder: Path) -> list[str]:
    """The names of the replicas that have trained in this folder; other machines have their own folders."""
    logs = {path.stem for path in folder.glob("events/*.jsonl")}
    return sorted(logs | {path.name for path in folder.glob("checkpoints/*") if path.is_dir()})


def list_checkpoints(folder: Path, hashes: bool) -> list[CheckpointSet]:
    """The checkpoints by step, oldest first. Files are hashed, or only their sizes are compared. The run may be active.

    Raises `ConfigurationError` if there is no run.
    """
    if not (folder / "run.toml").exists():
        raise ConfigurationError(
            f"{folder} holds no run: there is no run.toml in it. Give the folder that `thinwire train` wrote."
        )
    names = replicas_of(folder)
    by_step: dict[int, list[Saved]] = {}
    for name in names:
        for saved in _of_replica(folder / "checkpoints" / name, hashes):
            by_step.setdefault(saved.step, []).append(saved)
    return [
        CheckpointSet(step, tuple(saved), tuple(name for name in names if name not in {one.replica for one in saved}))
        for step, saved in sorted(by_step.items())
    ]


def _of_replica(folder: Path, hashes: bool) -> Iterator[Saved]:
    for path in found_in(folder):
        problem, anchors = "", ""
        try:
            anchors = anchors_digest(read(path, hashes).manifest)
        except CheckpointError as error:
            problem = str(error).removeprefix(f"{path} ")
        try:
            files = [file.stat() for file in path.iterdir()]
            when = path.stat().st_mtime
        except OSError:  # the run has just deleted it
            continue
        yield Saved(folder.name, path, step_of(path), when, sum(file.st_size for file in files), problem, anchors)


def prune_checkpoints(folder: Path, keep: int, each: bool) -> list[Saved]:
    """Delete old checkpoints, and return them. Every file is hashed first.

    The newest `keep` whole sets stay, and everything newer. If `each` replica resumes from its own checkpoint, as in an elastic run, the
    newest `keep` whole checkpoints of each stay. Raises `ConfigurationError`, and deletes nothing, if there is no whole set;
    `CheckpointError` if some cannot be deleted.
    """
    if keep < 1:
        raise ConfigurationError(
            f"--prune {keep}: at least 1 is needed; 2 keeps a second one if the newest is damaged."
        )
    check_links(folder)
    sets = list_checkpoints(folder, hashes=True)
    groups = [[saved for one in sets for saved in one.saved if saved.replica == name] for name in replicas_of(folder)]
    if each:
        whole = [[one.step for one in group if not one.problem] for group in groups]
    else:
        whole = [[one.step for one in sets if not one.problems]] * len(groups)
    if not all(steps for steps, group in zip(whole, groups) if group):
        raise ConfigurationError(
            f"{folder} has no whole set of checkpoints, so nothing was deleted; `thinwire checkpoints {quoted(folder)} --verify` says what is wrong."
        )
    gone = [
        saved
        for steps, group in zip(whole, groups)
        for saved in group
        if saved.step < steps[-1] and saved.step not in steps[-keep:]
    ]
    for saved in gone:
        drop(saved.path)
    if left := [saved.path for saved in gone if saved.path.exists()]:
        raise CheckpointError(
            f"{len(left)} of {len(gone)} checkpoints cannot be deleted, such as {left[0]}; check the permissions of its folder."
        )
    return gone
