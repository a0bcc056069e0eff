"""A follower keeps an ordinary model folder at the newest agreed weights of a run. The folder is replaced atomically."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from thinwire.app.records.patches import Bits, apply_patch, state_of
from thinwire.app.records.published import NOTHING, FragmentVersion, Layout, Origin, Publication, Resource, TensorPlace
from thinwire.errors import ConfigurationError, PacketError
from thinwire.files import save_file

MODEL, STATES = "model.safetensors", "thinwire-states.json"


@dataclass(frozen=True)
class Followed:
    """A version that has arrived. `nbytes` were fetched for it, the list included; a full copy of its weights has `full_nbytes`.

    `copied`: number of fragments that were fetched as full copies. `first`: whether it is this follower's first version.
    """

    version: int
    step: int
    nbytes: int
    full_nbytes: int
    copied: int
    fragments: int
    first: bool
    over: bool


class WeightsFollower:
    """Keeps the folder `out` at the newest version of `source`.

    `out` is a symbolic link to the folder of a version beside it, so it changes atomically. The folder of the previous version
    stays until the next one, for processes that are reading it. After a restart the follower resumes from the version in
    `out`, and from partly fetched objects.

    Raises:
        ConfigurationError: `out` exists, and is no such link.
    """

    def __init__(self, source: Origin, out: Path) -> None:
        self._source, self._out = source, out
        self._room = out.parent / f".{out.name}.versions"
        if out.exists() and not out.is_symlink():
            if not out.is_dir() or any(out.iterdir()):
                raise ConfigurationError(f"{out} is there already; choose another --out, or remove it.")
            out.rmdir()
        self._parts, self._draft = self._room / "parts", self._room / "draft"
        self._parts.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._draft, ignore_errors=True)  # of a process that was killed
        self._states: dict[int, tuple[str, Bits]] = {}  # name and values of each fragment's newest state here
        self._copied = set[int]()  # fragments fetched as full copies since the last version
        self._layout: tuple[Resource, Layout, dict[str, Tensor]] | None = None
        self._read = b""
        self._nbytes = 0  # bytes fetched since the last version
        self._first = True

    def update(self) -> Followed | None:
        """Fetch the newest version, and replace the folder; None if there is nothing new.

        Raises `DataError` if an object of the list was deleted (the next update reads the list again), `PacketError` for an object that
        does not match its digest, and `OSError`; the folder stays as it was.
        """
        text = self._source.newest()
        if text is None or text == self._read:
            return None
        self._nbytes += len(text)
        publication = Publication.read(text)
        layout, rest = self._laid_out(publication)
        if not self._states:
            self._find_states(layout.places, len(publication.fragments))
        for index, fragment in enumerate(publication.fragments):
            values, copied = self._bring(fragment, self._states.get(index))
            # If the next one does not arrive, this one is not fetched again.
            self._states[index] = (fragment.state, values)
            self._copied |= {index} if copied else set()
        self._write(publication, layout, rest)
        full = sum(fragment.nbytes for fragment in publication.fragments)
        done = Followed(
            publication.version, publication.step, self._nbytes, full, len(self._copied), len(publication.fragments), self._first,
            publication.over,
        )  # fmt: skip
        self._copied, self._read, self._nbytes, self._first = set(), text, 0, False
        return done

    def _bring(self, fragment: FragmentVersion, held: tuple[str, Bits] | None) -> tuple[Bits, bool]:
        """A fragment's newest values, and whether a full copy was needed. Raises `PacketError`."""
        way = fragment.way_from(held[0] if held else None)
        copied = bool(way) and way[0].base == NOTHING
        values = held[1] if held else np.empty(0, np.uint16)
        for change in way:
            patch = self._fetch(change.patch)  # first, because its size bounds that of a full copy
            values = apply_patch(np.zeros(fragment.nbytes // 2, np.uint16) if change.base == NOTHING else values, patch)
        if 2 * len(values) != fragment.nbytes:
            raise PacketError(f"a fragment has {2 * len(values)} bytes, {fragment.nbytes} were announced.")
        if way and state_of(values) != fragment.state:
            raise PacketError(f"changes did not lead to the state {fragment.state[:12]} that was announced.")
        return values, copied

    def _fetch(self, what: Resource) -> bytes:
        """Fetch an object and verify it; a part that has arrived before is not fetched again. Raises `PacketError`, `DataError`."""
        path = self._parts / what.digest
        with path.open("ab") as file:
            for chunk in self._source.read(what.digest, file.tell()) if file.tell() < what.nbytes else ():
                self._nbytes += len(chunk)
                if file.tell() + len(chunk) > what.nbytes:
                    break
                file.write(chunk)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != what.digest:
            if len(data) >= what.nbytes:
                path.unlink()
            raise PacketError(f"object {what.digest[:12]} does not match its announced digest; it is fetched again.")
        path.unlink()
        return data

    def _laid_out(self, publication: Publication) -> tuple[Layout, dict[str, Tensor]]:
        if self._layout is None or self._layout[0] != publication.layout:
            layout = Layout.read(self._fetch(publication.layout))
            _check(layout.places, publication)
            try:
                rest = load(self._fetch(layout.rest))
            except SafetensorError as error:
                raise PacketError(f"the tensors that are not exchanged cannot be read ({error}).") from None
            self._files = {name: self._fetch(one) for name, one in layout.files.items()}
            self._layout = publication.layout, layout, rest
        return self._layout[1:]

    def _find_states(self, places: Sequence[TensorPlace], fragments: int) -> None:
        """Load the fragments that the version in the folder has; a state's name is the hash of its values."""
        model = self._out / MODEL
        if not model.is_file():
            return
        try:
            with safe_open(str(model), "pt") as file:
                parts: list[list[tuple[int, Tensor]]] = [[] for _ in range(fragments)]
                for place in places:
                    parts[place.fragment].append((place.begin, file.get_tensor(place.name)))
        except (SafetensorError, OSError):
            return
        for index, own in enumerate(parts):
            flat = [value.reshape(-1) for _, value in sorted(own, key=lambda one: one[0])]
            if flat and all(value.dtype == torch.bfloat16 for value in flat):
                values = torch.cat(flat).view(torch.int16).numpy().view(np.uint16)
                self._states[index] = state_of(values), values

    def _write(self, publication: Publication, layout: Layout, rest: dict[str, Tensor]) -> None:
        """Write the folder of this version, then replace the link. If the disk is full, what was written of it is deleted."""
        names = "".join(one.state for one in publication.fragments)
        folder = self._room / f"{publication.version}-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
        try:
            self._write_draft(publication, layout, rest)
        except BaseException:
            shutil.rmtree(self._draft, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        self._draft.replace(folder)
        before = self._out.readlink().name if self._out.is_symlink() else ""
        link = self._room / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(self._room.name) / folder.name)
        link.replace(self._out)
        for old in self._room.iterdir():
            if old.is_dir() and old.name not in (before, folder.name, "parts"):
                shutil.rmtree(old, ignore_errors=True)
        for part in self._parts.iterdir():  # of versions before, which were replaced while they arrived
            part.unlink()

    def _write_draft(self, publication: Publication, layout: Layout, rest: dict[str, Tensor]) -> None:
        tensors = dict(rest)
        for place in layout.places:
            count = int(np.prod(place.shape, dtype=np.int64))
            part = self._states[place.fragment][1][place.begin : place.begin + count]
            values = torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
            tensors[place.name] = values.view(place.shape)
        self._draft.mkdir()
        save_file(tensors, self._draft / MODEL, layout.metadata)
        for name, data in self._files.items():
            (self._draft / name).write_bytes(data)
        said = {"version": publication.version, "step": publication.step, "over": publication.over}
        (self._draft / STATES).write_text(json.dumps(said | {"states": [one.state for one in publication.fragments]}))


def _check(places: Sequence[TensorPlace], publication: Publication) -> None:
    """Raise `PacketError` if a tensor is outside its fragment."""
    for place in places:
        size = publication.fragments[place.fragment].nbytes if place.fragment < len(publication.fragments) else -1
        if 2 * (place.begin + int(np.prod(place.shape, dtype=object))) > size:
            raise PacketError(f"{place.name!r:.60} is outside its fragment.")
