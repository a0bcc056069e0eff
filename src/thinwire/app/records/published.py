"""The agreed weights that a replica publishes for followers: a list of versions (ResourceSync's resource list, change list
and hashes, NISO Z39.99), and objects that are named by their SHA-256.

    RUN/published/replica-0/list.json       the newest version: of each fragment its state, a full copy, and changes since older states
    RUN/published/replica-0/objects/HASH    full copies, patches (app/records/patches.py), the layout of the model, the files beside it

A fragment's state is its values in bf16; the state's name is their SHA-256. A follower that holds state A can apply a change from A, no
matter which replica made it. The list is replaced atomically, and names only objects that are already stored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.errors import DataError, PacketError
from thinwire.files import contents, open_regular, parsed, write_whole

FORMAT = 1
CHUNK_NBYTES = 1 << 20
NOTHING = ""
MOST_FOLD = 2100  # largest ratio of a fragment's size to its full copy: deflate expands one byte to at most 1032
_HASH = re.compile("[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}")


@dataclass(frozen=True)
class Resource:
    """An object: its SHA-256 and its size in bytes."""

    digest: str
    nbytes: int


@dataclass(frozen=True)
class Change:
    """A patch from state `base` to state `to`. A full copy is a patch from `NOTHING`, which stands for zeros."""

    base: str
    to: str
    patch: Resource


@dataclass(frozen=True)
class FragmentVersion:
    """A fragment's newest state, of `nbytes` bytes in bf16; `full` is the newest full copy, `changes` are in order, the oldest first."""

    state: str
    nbytes: int
    full: Change
    changes: tuple[Change, ...]

    def way_from(self, held: str | None) -> list[Change]:
        """The changes that a follower with the state `held` must fetch, in the fewest bytes. A full copy comes first, if one is needed."""
        after = self._since(self.full.to)
        ways = [way for way in (self._since(held), None if after is None else [self.full, *after]) if way is not None]
        if not ways:
            raise PacketError("a published list has no way from its full copy to the newest state; fetch it again.")
        return min(ways, key=lambda way: sum(change.patch.nbytes for change in way))

    def _since(self, held: str | None) -> list[Change] | None:
        """The changes since the state `held`; None if the list has no change from it."""
        if held == self.state:
            return []
        places = [place for place, change in enumerate(self.changes) if change.base == held]
        return list(self.changes[places[-1] :]) if places else None


@dataclass(frozen=True)
class Publication:
    """A version of the agreed weights, after inner step `step`. `over`: the run has ended with this version. `layout` is a `Layout`."""

    version: int
    step: int
    over: bool
    layout: Resource
    fragments: tuple[FragmentVersion, ...]

    def resources(self) -> set[Resource]:
        """The objects that this list names itself; its layout names more."""
        changes = [change for one in self.fragments for change in (one.full, *one.changes)]
        return {self.layout, *(change.patch for change in changes)}

    def written(self) -> bytes:
        """The list as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def read(cls, text: str | bytes) -> Publication:
        """Parse what `written` wrote. Raises `PacketError`."""
        try:
            said = parsed(json.loads, text)
            if said["format"] != FORMAT:
                raise ValueError(f"its format is {said['format']!r:.40}, this version reads {FORMAT}")
            fragments = tuple(
                FragmentVersion(
                    _hash(one["state"]), _count(one["nbytes"]), _change(one["full"]), tuple(map(_change, one["changes"])),
                )
                for one in said["fragments"]
            )  # fmt: skip
            for one in fragments:
                states = [*(change.base for change in one.changes), one.state]
                if one.nbytes > MOST_FOLD * one.full.patch.nbytes:
                    raise ValueError("a fragment is larger than its full copy can make it")
                if [change.to for change in one.changes] != states[1:] or one.full.to not in states or one.full.base:
                    raise ValueError("its changes do not follow each other")
            numbers = _count(said["version"]), _count(said["step"])
            return cls(*numbers, said["over"] is True, _resource(said["layout"]), fragments)
        except (KeyError, TypeError, ValueError) as error:
            raise PacketError(f"a published list cannot be read ({type(error).__name__}: {error!s:.100}).") from None


@dataclass(frozen=True)
class TensorPlace:
    """The values of a tensor of the model's file: part of a fragment, starting at element `begin`."""

    name: str
    shape: tuple[int, ...]
    fragment: int
    begin: int


@dataclass(frozen=True)
class Layout:
    """How the model's folder is made from fragments: its exchanged tensors, `rest` (a safetensors file of the other tensors), the metadata
    of the model's file, and the other files of the folder.
    """

    places: tuple[TensorPlace, ...]
    rest: Resource
    metadata: dict[str, str]
    files: dict[str, Resource]

    def resources(self) -> set[Resource]:
        """The objects that this layout names."""
        return {self.rest, *self.files.values()}

    def written(self) -> bytes:
        """The layout as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, text: str | bytes) -> Layout:
        """Parse what `written` wrote. Raises `PacketError`, also for a file name that would lead out of the folder."""
        try:
            said = parsed(json.loads, text)
            places = tuple(
                TensorPlace(
                    str(one["name"]), tuple(map(_count, one["shape"])), _count(one["fragment"]), _count(one["begin"])
                )
                for one in said["places"]
            )
            files = {name: _resource(one) for name, one in said["files"].items()}
            if odd := [name for name in files if not _FILE.fullmatch(name)]:
                raise ValueError(f"{odd[0]!r:.60} is no file name")
            metadata = {str(name): str(value) for name, value in said["metadata"].items()}
            return cls(places, _resource(said["rest"]), metadata, files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PacketError(f"a published layout cannot be read ({type(error).__name__}: {error!s:.100}).") from None


class Origin(Protocol):
    """The source of a follower."""

    def newest(self) -> bytes | None:
        """The newest list, byte for byte as it was written; None if there is none yet."""

    def read(self, digest: str, offset: int) -> Iterator[bytes]:
        """Yield an object, starting at byte `offset`. Raises `DataError` if it was deleted: then a newer list exists."""


class PublishedFolder:
    """An `Origin` that reads a run folder, from the replica whose newest version has the highest step. `names`: only from these; None: all."""

    def __init__(self, run: Path, names: Collection[str] | None = None) -> None:
        self._run, self.names = run, names

    def newest(self) -> bytes | None:
        """See `Origin.newest`. Raises `DataError`."""
        found: list[tuple[int, bytes]] = []
        for path in self._found("list.json"):
            try:
                text = contents(path).encode()
                found.append((Publication.read(text).step, text))
            except (OSError, ValueError, PacketError) as error:
                raise DataError(
                    f"{path} cannot be read ({error}); check whether another process writes into that folder."
                ) from None
        return max(found, key=lambda one: one[0])[1] if found else None

    def read(self, digest: str, offset: int) -> Iterator[bytes]:
        """See `Origin.read`."""
        path = next(iter(self._found(f"objects/{digest}")), None)
        try:
            if path is None:
                raise FileNotFoundError("no replica has it")
            with open_regular(path) as file:
                file.seek(offset)
                while chunk := file.read(CHUNK_NBYTES):
                    yield chunk
        except OSError as error:
            raise DataError(f"object {digest[:12]} of {self._run} is gone ({error}); read the list again.") from None

    def _found(self, file: str) -> list[Path]:
        paths = sorted(self._run.glob(f"published/*/{file}"))
        return [path for path in paths if self.names is None or path.relative_to(self._run).parts[1] in self.names]


class Store:
    """The folder into which one replica publishes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._objects = folder, folder / "objects"
        self._objects.mkdir(parents=True, exist_ok=True)
        self._before: set[str] = set()  # objects of the list before: followers may be reading them

    def put(self, data: bytes) -> Resource:
        """Store an object; one that is stored already is not written again."""
        found = Resource(hashlib.sha256(data).hexdigest(), len(data))
        if not (self._objects / found.digest).exists():
            write_whole(self._objects / found.digest, data)
        return found

    def announce(self, publication: Publication, layout: Layout) -> None:
        """Replace the list, then delete the objects that neither it nor the list before names."""
        write_whole(self.folder / "list.json", publication.written())
        named = {one.digest for one in publication.resources() | layout.resources()}
        for path in self._objects.iterdir():
            if path.name not in named | self._before:
                path.unlink(missing_ok=True)
        self._before = named


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError(f"{value!r:.40} is no SHA-256")
    return value


def _change(value: Any) -> Change:
    base = value["base"]
    return Change(base if base == NOTHING else _hash(base), _hash(value["to"]), _resource(value["patch"]))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r:.40} is no number of bytes or steps")
    return value


def _resource(value: Any) -> Resource:
    return Resource(_hash(value["digest"]), _count(value["nbytes"]))
