"""Checkpoints: all that a replica needs to resume, bit for bit.

    FOLDER/replica-0/step-00000100/     one rank's; shards of a replica are replica-0.shard-1 and so on
        model.safetensors               the model's state dict, as this rank holds it
        inner.safetensors               the inner optimizer's state dict and attributes, random states, tensors of the notes
        outer.safetensors               anchors, outer state, feedback, deltas in the air
        manifest.json                   step, facts, notes, size and SHA-256 of every file, and its own SHA-256

Each file of tensors has in its metadata, as JSON, the tree in which they belong (state_tree.py).

Writing is atomic: all goes into a hidden folder beside, is flushed to the disk, and is renamed when whole. The folder has
one writer. What a writer that was killed leaves is hidden too, and goes with the next save:

    .step-00000100.partial      was being written
    .step-00000100.replaced     the one before of the same step; it counts until its successor has the name
    .step-00000100.dropped      was being deleted

A folder whose manifest does not fit its files is damaged; the one before is used. Nothing in a checkpoint can run code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from thinwire.comm.group import Group, gather_beside_training
from thinwire.errors import CheckpointError, PacketError
from thinwire.files import contents, flush, open_regular, parsed, save_file
from thinwire.pieces import optimizer_attributes, training_state
from thinwire.state_tree import Packed, Unlike, pack, pack_together, unpack
from thinwire.version import __version__

FORMAT = 1
_FILES = ("model.safetensors", "inner.safetensors", "outer.safetensors")
_MANIFEST = {"step": int, "strategy": str, "facts": dict, "frozen": bool, "notes": dict, "files": dict}
_TREE = "thinwire.tree"  # in the metadata of a file of tensors
_MOST_STEPS_NBYTES = 1 << 20  # of a list of checkpoints from another replica: more than 10,000
_MISSING_ELSEWHERE = "another replica has no whole checkpoint of this step"
_UNLIKE = "its anchors are not those of all other replicas at this step"
_NOTES = "notes."  # begins the names of their tensors


class Trained(Protocol):
    """What can be saved: a `Replica`, or a method with a loop of its own."""

    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def strategy(self) -> object: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])


def save(
    folder: Path,
    replica: Trained,
    notes: Mapping[str, Any],
    keep: int = 3,
    *,
    frozen: bool = True,
    parents: bool = True,
) -> Path:
    """Write `replica` and the caller's `notes` to `folder`/step-N, and delete all but the last `keep` of the checkpoints up to it.

    Never waits for a round in flight. If it fails, what was there before stays.

    Args:
        folder: of this rank's checkpoints; made if it is not there.
        replica: a `Replica`, or an attached method.
        notes: what the caller needs to resume, such as the state dicts of a schedule, a data loader or an average of weights: numbers, text,
            tensors, arrays, and lists, tuples and dicts of these. `read(...).manifest["notes"]` has them as they were, with their types.
        keep: number of checkpoints.
        frozen: False: without the parameters that do not train, which are equal in the model that is loaded into.
        parents: False: `folder` is made only if the one that it is in is there; not anew where somebody has deleted that meanwhile.

    Raises:
        CheckpointError: the checkpoint cannot be written; if the state is the cause, the message has the path of what cannot be saved.
    """
    (tensors, facts), _ = optimizer_attributes.without_attributes(
        replica.state()
    )  # they go beside the optimizer's state
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "thinwire": __version__,
        "step": replica.step,
        "strategy": repr(replica.strategy),
        "facts": facts,
        "frozen": frozen,
        "notes": dict(notes),
    }
    return write(folder, manifest, (*_packed(replica, frozen), pack(dict(tensors), "outer")), keep, parents=parents)


def check(replica: Trained, *, frozen: bool = True) -> None:
    """Raise `CheckpointError`, with the path of what cannot be saved, if `save` would. Call it after the first step, which makes the state of
    most optimizers; it copies no tensors.
    """
    _packed(replica, frozen)


def _packed(replica: Trained, frozen: bool) -> tuple[Packed, Packed]:
    optimizer = replica.optimizer
    held = training_state.optimizer_state(optimizer)
    attributes = optimizer_attributes.held_by(optimizer, replica.model)
    packages = optimizer_attributes.packages_of(optimizer)
    # named first, so that a message says optimizer.state[3]["hook"]
    known = optimizer_attributes.known_to(optimizer, replica.model)
    state = pack_together([held["state"], attributes], "optimizer", known, "optimizer.", packages)
    drawn = pack_random(torch.get_rng_state(), replica.model, np.random.get_state(legacy=False), random.getstate())
    tree = {"classes": held["classes"], "optimizer": state.json, "random": drawn.json}
    model = pack(training_state.model_state(replica.model, frozen), "model")
    return model, Packed(tree, state.tensors | drawn.tensors)


def write(
    folder: Path, manifest: dict[str, Any], contents: Sequence[Packed], keep: int, *, parents: bool = True
) -> Path:
    """Write the checkpoint with this `manifest`, without its checksums, and these `contents` of its three files. As `save`."""
    final = folder / f"step-{manifest['step']:08d}"
    partial = hidden(final, "partial")
    model, inner, outer = contents
    notes = pack(manifest.get("notes", {}), "notes", prefix=_NOTES)
    manifest = manifest | {"notes": notes.json}
    inner = Packed(inner.json, inner.tensors | notes.tensors)
    try:
        _make_folder(folder, parents)
        _clear(folder)
        partial.mkdir()
        for name, content in zip(_FILES, (model, inner, outer)):
            write_tree(content, partial / name)
        manifest["files"] = {name: _fingerprint(partial / name) for name in _FILES}
        (partial / "manifest.json").write_text(json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
        for name in (*_FILES, "manifest.json", "."):
            flush(partial / name)
        if final.exists():
            final.rename(hidden(final, "replaced"))
        partial.rename(final)
        flush(folder)
    except (OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        nbytes = sum(t.numel() * t.element_size() for content in contents for t in content.tensors.values())
        raise CheckpointError(
            f"the checkpoint at step {manifest['step']} was not written: {folder}: {error}. {_remedy(error, nbytes)}"
        ) from error
    shutil.rmtree(hidden(final, "replaced"), ignore_errors=True)
    # a resume has skipped later steps, so they do not count
    until_now = [path for path in folder.glob("step-*") if 0 <= step_of(path) <= manifest["step"]]
    for old in sorted(until_now, key=step_of)[:-keep]:
        drop(old)
    return final


def write_tree(content: Packed, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors. Unless they are a flat dict of plain tensors, their tree stands in the file's metadata. Raises `OSError`."""
    plain = content.json == {name: {"!tensor": name} for name in content.tensors}
    # one entry, because safetensors writes several in no fixed order, and equal runs must give equal bytes
    save_file(content.tensors, path, metadata if plain else {_TREE: json.dumps(content.json)})


def read_tree(path: Path) -> Packed:
    """The inverse of `write_tree`. Raises `CheckpointError`, `OSError`, `SafetensorError`."""
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {}).get(_TREE)
    tensors = load_file(path)
    try:
        return Packed(parsed(json.loads, text) if text else {name: {"!tensor": name} for name in tensors}, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its tree cannot be read ({error}).") from error


def hidden(path: Path, state: str) -> Path:
    """The name beside `path` for a checkpoint that is partial, replaced or dropped."""
    return path.with_name(f".{path.name}.{state}")


def drop(path: Path) -> None:
    """Delete a checkpoint: it is gone at once, its files after that. One that cannot be deleted stays."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(hidden(path, "dropped")), ignore_errors=True)


def _make_folder(folder: Path, parents: bool) -> None:
    """Make `folder`, so that it is still there after a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=parents, exist_ok=True)
    for path in missing:
        flush(path.parent)


def _clear(folder: Path) -> None:
    """Clean up after a writer that was killed."""
    for left in folder.glob(".step-*"):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".replaced" and not final.exists():
            left.rename(final)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _remedy(error: Exception, nbytes: int) -> str:
    """What to do about a checkpoint that was not written."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"Training needs about {nbytes:,} bytes there; free some space."
    if number is not None:
        return "The cause is not a lack of space: check that the folder can be written and that no other rank writes there, or choose another --out."
    return "The disk is not the cause: this state cannot be written, and later ones may not be either; report it."


def read(path: Path, hashes: bool = True) -> Checkpoint:
    """Check a checkpoint's files against its manifest.

    Args:
        path: its folder, step-N.
        hashes: whether contents are compared, or only sizes.

    Raises:
        CheckpointError: it is damaged, or of another format; the message says what is wrong.
    """
    try:
        manifest = parsed(json.loads, contents(path / "manifest.json"))
        written = manifest.pop("sha256", None)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']!r:.40}, this version reads {FORMAT}; use the version that wrote it."
            )
        problem = _problem(path, manifest, hashes)
        if not problem and written != _digest(manifest):
            problem = "manifest.json is not what was written (checksum)"
        if not problem:
            manifest["notes"] = _notes(path, manifest["notes"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
    if problem:
        raise CheckpointError(f"{path} is damaged: {problem}.")
    return Checkpoint(path, manifest)


def _notes(path: Path, notes: Any) -> Any:
    """The notes of a manifest, with their tensors."""
    with safe_open(path / "inner.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith(_NOTES)}  # noqa: SIM118
    return unpack(Packed(notes, tensors), "notes")


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after; -1 if its name is no such."""
    name = re.fullmatch(r"step-([0-9]{8,})|\.step-([0-9]{8,})\.replaced", path.name)
    return int(name[1] or name[2]) if name else -1


def found_in(folder: Path) -> list[Path]:
    """All folders in `folder` that may be checkpoints, oldest first."""
    replaced = [path for path in folder.glob(".step-*.replaced") if not path.with_name(path.stem[1:]).exists()]
    return sorted([*folder.glob("step-*"), *replaced], key=lambda path: (step_of(path), path.name))


def _problem(path: Path, manifest: Mapping[str, Any], hashes: bool) -> str:
    """How the files differ from their manifest, or the manifest from its folder's name; empty if they do not."""
    if odd := [name for name, kind in _MANIFEST.items() if type(manifest[name]) is not kind]:
        return f"its manifest has no sound {', '.join(odd)}"
    if step_of(path) != manifest["step"]:
        return f"its manifest is of another step, {manifest['step']!s:.40}"
    for name in _FILES:
        written = manifest["files"][name]
        if written[: 2 if hashes else 1] != _fingerprint(path / name, hashes):
            return f"{name} is not what was written (size or checksum)"
        with safe_open(path / name, "pt"):  # checks the positions of tensors in its header against the file
            pass
    return ""


def newest_common(
    folder: Path, group: Group, site: Group | None = None
) -> tuple[Checkpoint | None, list[dict[str, str]]]:
    """The newest step of which every rank has a whole checkpoint, with the same anchors on all replicas that must agree on them, and why others
    were skipped, or what each rank has. Collective.

    Args:
        folder: of this rank's checkpoints.
        group: the replicas.
        site: the ranks of this replica, if it is sharded.

    Raises:
        LinkError, PacketError, DisagreementError: a replica was lost, sent what is no list of steps, or waits elsewhere.
    """
    skipped: list[dict[str, str]] = []
    found = {checkpoint.step: checkpoint for checkpoint in _whole(found_in(folder), skipped)}
    common, held, unlike = (
        {step: anchors_digest(checkpoint.manifest) for step, checkpoint in found.items()},
        [],
        set[int](),
    )
    for who, peers in (("replica", group), ("shard", site)):
        if peers is not None:
            texts = gather_beside_training(peers, json.dumps(common).encode(), _MOST_STEPS_NBYTES, "resume")
            told = [_steps(text, f"{who} {rank}") for rank, text in enumerate(texts)]
            held += [{"path": f"{who} {rank}", "reason": _held(steps)} for rank, steps in enumerate(told)]
            shared = {step: {steps[step] for steps in told} for step in set.intersection(*map(set, told))}
            if who == "replica":  # shards have unlike anchors
                unlike = {step for step, digests in shared.items() if len(digests) > 1}
            common = {step: common[step] for step in sorted(shared.keys() - unlike)}
    if not common:
        return None, skipped + held + [{"path": str(found[step].path), "reason": _UNLIKE} for step in sorted(unlike)]
    step = max(common)
    skipped += [
        {"path": str(checkpoint.path), "reason": _UNLIKE if s in unlike else _MISSING_ELSEWHERE}
        for s, checkpoint in found.items()
        if s > step
    ]
    return found[step], skipped


def anchors_digest(manifest: Mapping[str, Any]) -> str:
    """The digest of the anchors in the checkpoint with this manifest, which must be equal on all replicas; "" if the method has none."""
    return str(manifest["facts"].get("anchors", ""))


def _steps(text: bytes, sender: str) -> dict[int, str]:
    """The steps of which the rank `sender` says that it has whole checkpoints, and the digests of their anchors."""
    try:
        return {int(step): str(digest) for step, digest in parsed(json.loads, text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise PacketError(
            f"{sender} sent {text[:40]!r}, which is no list of the steps of checkpoints ({error}); call newest_common() on all replicas, at one "
            "place in the script, and run the same version."
        ) from None


def _held(steps: Collection[int]) -> str:
    return f"has whole checkpoints of step {', '.join(map(str, sorted(steps)))}" if steps else "has no whole checkpoint"


def newest(folder: Path) -> tuple[Checkpoint | None, list[dict[str, str]]]:
    """The newest whole checkpoint of an elastic replica in `folder`, and the skipped ones, with reasons."""
    skipped: list[dict[str, str]] = []
    return next(_whole(reversed(found_in(folder)), skipped), None), skipped


def _whole(paths: Iterable[Path], skipped: list[dict[str, str]]) -> Iterator[Checkpoint]:
    """Those that are whole; the others are written to `skipped`."""
    for path in paths:
        try:
            yield read(path)
        except CheckpointError as error:
            if isinstance(error.__cause__, Unlike):  # an older one would not fit the script either
                raise
            skipped.append({"path": str(path), "reason": str(error)})


def set_aside_later(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps than `step`, from which this replica resumes, to passed-over-N. They belong to another
    future of this run, and must not count if another replica writes a checkpoint of the same step.
    """
    for path in found_in(folder):
        if step_of(path) > step:
            aside = path.with_name(f"passed-over-{step_of(path):08d}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def load(checkpoint: Checkpoint, replica: Trained) -> None:
    """Restore a checkpoint into `replica`, its model and its optimizer. Collective: rounds that were in flight depart again.

    Args:
        checkpoint: from `read` or `newest_common`.
        replica: made with the same strategy and the same kind of model and optimizer as the saved one.

    Raises:
        CheckpointError: it was made for another model, inner optimizer or strategy.
    """
    manifest = checkpoint.manifest
    if manifest["strategy"] != repr(replica.strategy):
        raise CheckpointError(
            f"{checkpoint.path} was made by {manifest['strategy']}, this run uses {replica.strategy!r}; resume with the run's own strategy."
        )
    path, model, optimizer = checkpoint.path, replica.model, replica.optimizer
    packed, inner, outer = (read_tree(path / name) for name in _FILES)
    places = optimizer_attributes.places(model)
    weights = unpack(packed, "model", copied=False, **places)
    facts: dict[str, Any] = inner.json if isinstance(inner.json, dict) else {}
    classes: Any = facts.get("classes")
    drawn = unpack(Packed(facts.get("random"), inner.tensors), "random states")
    named = isinstance(classes, list) and all(isinstance(names, list) for names in classes)
    named = named and all(isinstance(name, str) for names in classes for name in names)
    if (
        not named
        or not isinstance(weights, dict)
        or not isinstance(drawn, dict)
        or not drawn.keys() >= {"cpu", "cuda", "numpy", "python"}
        or "optimizer" not in facts
    ):
        raise CheckpointError(f"{path} is damaged: it lacks a model, an optimizer or random states.")
    try:
        training_state.check_model(model, weights, manifest["frozen"])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    training_state.check_optimizer_class(optimizer, classes or [])
    known, packages = optimizer_attributes.known_to(optimizer, model), optimizer_attributes.packages_of(optimizer)
    content = Packed(facts["optimizer"], inner.tensors)
    held = unpack(content, "the optimizer's state", known, packages=packages, **places)
    if not isinstance(held, list) or len(held) != 2:
        raise CheckpointError(f"{path} is damaged: it lacks an optimizer.")
    training_state.restore_optimizer(optimizer, {"classes": classes, "state": held[0]})
    optimizer_attributes.restore(optimizer, model, held[1])
    training_state.restore_model(model, weights)
    _restore_random_states(model, drawn)
    replica.load_state(unpack(outer, "outer"), manifest["facts"])


def pack_random(cpu: Tensor, model: nn.Module | None, numpy: object, python: tuple[Any, ...]) -> Packed:
    """What torch draws next on the CPU, and on the GPUs of `model`; and the states of numpy and Python."""
    version, numbers, gauss = python
    gpus = [torch.cuda.get_rng_state(gpu) for gpu in _gpus(model)] if model is not None else []
    states = {"cpu": cpu, "cuda": gpus, "numpy": numpy, "python": (version, np.array(numbers), gauss)}
    return pack(states, "random", prefix="random.")


def _restore_random_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    np.random.set_state(states["numpy"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    for gpu, state in zip(_gpus(model), states["cuda"]):  # fewer if it was written on another kind of machine
        torch.cuda.set_rng_state(state, gpu)


def _gpus(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def _fingerprint(path: Path, hashes: bool = True) -> list[Any]:
    """Size and SHA-256 of a file, or the size alone."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return [size, hashlib.file_digest(file, "sha256").hexdigest()] if hashes else [size]


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
