"""The versions that named members have sent to a hub. Followers get a version when each of its objects is there and has its SHA-256.

    HUB/published/NAME/list.json       the newest complete version, as app/records/published.py describes
    HUB/published/NAME/objects/HASH    objects whose SHA-256 was checked
    HUB/published/NAME/parts/HASH      objects that have arrived in part

A member's objects are those of three versions at most: the one that followers get, the one before, which they may be reading, and the
one that arrives. So it has at most three times the allowed bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

from thinwire.app.records.published import Layout, Publication, PublishedFolder, Resource
from thinwire.errors import DataError, PacketError
from thinwire.files import contents, flush, write_whole
from thinwire.net.frames import CHUNK_NBYTES

LIST_NBYTES = 4 << 20  # most bytes of a list, and of a layout, which are read whole


class UploadedVersions(PublishedFolder):
    """The members `names` may publish, versions of at most `most` bytes each. `folder` is the hub's."""

    def __init__(self, folder: Path, names: Collection[str], most: int) -> None:
        super().__init__(folder, names)
        self._most = most
        self._shelves = {name: _Shelf(folder / "published" / name) for name in names}
        self._begun: dict[str, UploadedVersion] = {}

    def takes(self, name: str) -> bool:
        """See `Publishers`."""
        return name in (self.names or ())

    def forbid(self, names: Collection[str]) -> None:
        """See `Publishers`."""
        self.names = [name for name in self.names or () if name not in names]

    def begin(self, name: str, digest: str, nbytes: int) -> UploadedVersion:
        """See `Publishers`."""
        if nbytes > LIST_NBYTES:
            raise PacketError(f"a list of {nbytes} bytes is offered; a hub takes {LIST_NBYTES} at most.")
        if name in self._begun:
            self._begun[name].replaced = True
        self._begun[name] = UploadedVersion(self._shelves[name], Resource(digest, nbytes), self._most)
        return self._begun[name]


class UploadedVersion:
    """A version on its way: see `comm.secure.upload.Upload`."""

    def __init__(self, shelf: _Shelf, listed: Resource, most: int) -> None:
        self._shelf, self._listed, self._most = shelf, listed, most
        self._wants = self._objects()
        self._part: _Part | None = None
        self.replaced = False  # the member has begun another upload

    def wanted(self) -> tuple[str, int] | None:
        """See `Upload`."""
        self._check()
        while self._part is None or self._part.whole:
            if self._part:
                self._part.keep()
            self._part = next(self._wants, None)
            if self._part is None:
                return None
        return self._part.what.digest, self._part.offset

    def write(self, chunk: bytes) -> None:
        """See `Upload`."""
        self._check()
        assert self._part
        self._part.write(chunk)

    def _check(self) -> None:
        if self.replaced:
            raise PacketError("this publisher has begun another upload.")

    def _objects(self) -> Iterator[_Part]:
        """What is missing: the list, its layout, the other objects. Then the list is replaced."""
        if self._shelf.listed == self._listed.digest:
            return
        part = _Part(None, self._listed)
        yield part
        text = bytes(part.data)
        publication = Publication.read(text)
        named = publication.resources()
        self._check_bytes(named)
        if publication.layout.nbytes > LIST_NBYTES:
            raise PacketError(
                f"a layout of {publication.layout.nbytes} bytes is named; a hub takes {LIST_NBYTES} at most."
            )
        for part in self._shelf.missing([publication.layout]):  # once it is there, it says what else to keep
            self._shelf.delete_others(named)
            yield part
        named |= self._shelf.layout(publication.layout).resources()
        self._check_bytes(named)
        self._shelf.delete_others(named)
        yield from self._shelf.missing(named)
        self._shelf.replace(text, self._listed.digest, named)

    def _check_bytes(self, named: Collection[Resource]) -> None:
        """Raise `PacketError` for too many bytes. An object that is named with two sizes counts twice, and arrives with neither."""
        nbytes = self._listed.nbytes + sum(one.nbytes for one in named)
        if nbytes > self._most:
            raise PacketError(
                f"a version of {nbytes} bytes is offered, and this hub takes {self._most} of a publisher (--publish-bytes)."
            )


class _Part:
    """An object that arrives into the file `path`, which is moved to `kept` when its SHA-256 is right; None: into memory."""

    def __init__(self, path: Path | None, what: Resource, kept: Path | None = None) -> None:
        self._path, self.what, self._kept = path, what, kept
        self._sum, self.offset, self.data = hashlib.sha256(), 0, bytearray()
        if path and path.exists():
            if path.stat().st_size > what.nbytes:
                path.unlink()
            else:
                with path.open("rb") as file:
                    while chunk := file.read(1 << 20):
                        self._took(chunk)

    @property
    def whole(self) -> bool:
        return self.offset == self.what.nbytes

    def _took(self, chunk: bytes) -> None:
        self._sum.update(chunk)
        self.offset += len(chunk)

    def write(self, chunk: bytes) -> None:
        due = min(CHUNK_NBYTES, self.what.nbytes - self.offset)
        if len(chunk) != due:
            raise PacketError(
                f"a chunk of {len(chunk)} bytes came, and {due} were wanted of object {self.what.digest[:12]}."
            )
        if self._path is None:
            self.data += chunk
        else:
            try:
                with self._path.open("ab") as file:
                    file.write(chunk)
            except OSError:
                self._path.unlink(missing_ok=True)  # others need the room
                raise
        self._took(chunk)

    def keep(self) -> None:
        if self._sum.hexdigest() != self.what.digest:
            if self._path:
                self._path.unlink(missing_ok=True)
            raise DataError(f"object {self.what.digest[:12]} does not match its digest; send it again.")
        if self._path and self._kept:
            self._path.touch()
            flush(self._path)
            self._path.replace(self._kept)


class _Shelf:
    """The folder of one member."""

    def __init__(self, folder: Path) -> None:
        self._list, self._objects, self._parts = folder / "list.json", folder / "objects", folder / "parts"
        for path in (self._objects, self._parts):
            path.mkdir(parents=True, exist_ok=True)
        self._before, self._now, self.listed = set[str](), set[str](), ""
        try:
            text = contents(self._list).encode()
            publication = Publication.read(text)
            named = publication.resources() | self.layout(publication.layout).resources()
            self._now, self.listed = {one.digest for one in named}, hashlib.sha256(text).hexdigest()
        except (OSError, ValueError, PacketError):  # none yet, or damaged: the next version replaces it
            self._list.unlink(missing_ok=True)

    def layout(self, what: Resource) -> Layout:
        """The layout `what`, which must be there. Raises `PacketError`."""
        return Layout.read((self._objects / what.digest).read_bytes())

    def missing(self, named: Collection[Resource]) -> Iterator[_Part]:
        """Those that are not there yet."""
        for what in sorted(named, key=lambda one: one.digest):
            kept = self._objects / what.digest
            if not kept.exists():
                yield _Part(self._parts / what.digest, what, kept)
            elif kept.stat().st_size != what.nbytes:
                raise PacketError(f"object {what.digest[:12]} is named with {what.nbytes} bytes, and has another size.")

    def delete_others(self, named: Collection[Resource]) -> None:
        """Delete what belongs to none of the last two versions, and is not in `named`."""
        keep = self._before | self._now | {one.digest for one in named}
        for path in (*self._objects.iterdir(), *self._parts.iterdir()):
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def replace(self, text: bytes, digest: str, named: Collection[Resource]) -> None:
        """Give followers this version, and delete what only the last but one had."""
        flush(self._objects)
        write_whole(self._list, text)
        self._before, self._now, self.listed = self._now, {one.digest for one in named}, digest
        self.delete_others(named)
