"""From files to text: which files of a folder hold text, and their documents.

Plain text, JSON records, tables and Arrow files are read, also compressed, in UTF-8, or in UTF-16 and UTF-32 with a byte order mark.
Whatever else lies in a folder is added to a `PassedOver`, so that it can be named.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from thinwire.errors import ConfigurationError, DataError, MissingError
from thinwire.files import parsed

PLAIN, LINES, TABLES = (".txt", ".md", ".py"), (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
ARROW = (".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (*PLAIN, *LINES, ".json", *TABLES, *ARROW)  # read in folders; a file given by name may have any
CHUNK_CHARACTERS = 1 << 18  # characters tokenised at a time
LARGEST_DOCUMENT = 32 << 20  # characters of a record
# A row group of .parquet and a compressed file may hold EXPANDED bytes of text, or RATIO times their size.
EXPANDED, RATIO = 256 << 20, 100
_OF_A_RUN = frozenset({"events", "logs"})  # folders in a run folder before any other text is
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

PassedOver = dict[str, list[Path]]  # paths in folders of text that are not read, by the reason


@dataclass(frozen=True)
class Source:
    """A file of text. `name` is its path below the given folder: the split depends on it, not on the machine."""

    path: Path
    name: str
    nbytes: int
    modified: int


# Files in folders


def standard_library() -> Iterator[Source]:
    """The sources of this Python, without tests, character tables and files that its build wrote for one machine."""
    without = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    for source in find([sysconfig.get_paths()["stdlib"]], without):
        if source.path.suffix == ".py" and not source.name.startswith(("config-", "_sysconfigdata")):
            yield source


def find(
    paths: Sequence[str | Path],
    without: Collection[str] = (),
    passed_over: PassedOver | None = None,
    column: str = "text",
) -> Iterator[Source]:
    """Every file of text at `paths`. Folders are searched to the bottom in sorted order, through links too. Hidden files and folders, folders
    named in `without`, run folders, files of other types, and .json, .csv and .tsv files whose records have no text under `column` are left
    out; all but `without` are added to `passed_over`.
    """
    if "" in paths:
        raise DataError("text '': a file or folder is needed; an empty name would be the current folder.")
    for given in map(Path, paths):
        if given.is_file():
            yield _source(given, given.name)
            continue
        if not given.is_dir():
            if given.exists():
                raise DataError(f"{given} is a pipe or a device; a file or folder is needed. Write the text to a file.")
            raise MissingError(f"{given}: a file or folder that exists is needed. Check the path.")
        left_out = PassedOver() if passed_over is None else passed_over
        for name in sorted(_names(given, without, left_out)):
            if reason := _reason_to_pass_over(given / name, column):
                left_out.setdefault(reason, []).append(given / name)
            else:
                yield _source(given / name, name)


def _names(top: Path, without: Collection[str], passed_over: PassedOver) -> Iterator[str]:
    """The names of all files below `top`, relative to it."""

    def leave_out(reason: str, path: Path) -> None:
        passed_over.setdefault(reason, []).append(path)

    def unreadable(error: OSError) -> None:
        leave_out(f"folder that cannot be read ({error.strerror})", Path(error.filename))

    entered = set[tuple[int, int]]()  # links may lead to a folder twice, or in a circle
    for folder, below, files in os.walk(top, onerror=unreadable, followlinks=True):
        here = Path(folder)
        found = here.stat()
        if (found.st_dev, found.st_ino) in entered:
            below.clear()
            continue
        entered.add((found.st_dev, found.st_ino))
        if "run.toml" in files and not _OF_A_RUN.isdisjoint(below):
            leave_out("run folder", here)
            below[:] = [name for name in below if here == top and name not in _OF_A_RUN]
            files[:] = [name for name in files if here == top]  # text may be beside a run
        for name in (each for each in below if each.startswith(".")):
            leave_out("hidden", here / name)
        below[:] = sorted(name for name in below if not name.startswith(".") and name not in without)
        for name in files:
            if name.startswith("."):
                leave_out("hidden", here / name)
            else:
                yield (here / name).relative_to(top).as_posix()


def _reason_to_pass_over(path: Path, column: str) -> str:
    """Why a file in a folder is not read; "" if it is."""
    kind, packed = _kind(path)
    if kind not in SUFFIXES or (packed and kind in ARROW):
        return f"{''.join(path.suffixes[-2:] if packed else path.suffixes[-1:]).lower() or 'no suffix'}"
    try:
        found = path.stat()
    except OSError as error:
        # `Path.is_symlink` raises an error in a folder whose names may be read, but that may not be entered
        linked = os.path.islink(path)  # noqa: PTH114
        return f"link that leads nowhere ({error.strerror})" if linked else str(error.strerror)
    if not stat.S_ISREG(found.st_mode):
        return "pipe, socket or device"
    if kind == ".json" or kind in TABLES:  # often settings, which are no text
        try:
            next(pieces(_source(path, path.name), column), None)
        except _UnreadableError:
            return ""  # not for what it holds: reading it says what is wrong, as for any other file
        except (DataError, UnicodeDecodeError):
            return f"{kind} without text under {column!r}"
    return ""


def _source(path: Path, name: str) -> Source:
    # absolute, not resolved: a link into a store of blobs would lose its suffix. Bytes of the name that are not UTF-8 are spelled out.
    spelled = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return Source(path.absolute(), spelled, path.stat().st_size, path.stat().st_mtime_ns)


def check_column(sources: Sequence[Source], column: str) -> None:
    """Raise `DataError` for a `column` that none of `sources` can have. Plain text may be beside them, as a README is in many folders."""
    if column == "text" or any(_has_columns(*_kind(source.path)) for source in sources):
        return
    raise DataError(
        f"column={column!r}: {sources[0].path} is read as plain text{', and so are all others' * (len(sources) > 1)}; "
        f"{', '.join((*LINES, '.json', *TABLES, *ARROW))} have columns. Convert it, or leave --column out."
    )


def _has_columns(kind: str, packed: str) -> bool:
    return kind in (*LINES, ".json", *TABLES) or (kind in ARROW and not packed)


def _kind(path: Path) -> tuple[str, str]:
    """The suffix that says what a file holds, and the one of its compression."""
    suffixes = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return (suffixes[-2], suffixes[-1]) if suffixes[-1] in COMPRESSED else (suffixes[-1], "")


# Documents in a file


class _UnreadableError(DataError):
    """A file that cannot be opened or decompressed, whatever it holds."""


def pieces(source: Source, column: str) -> Iterator[str | None]:
    """The text of a file in pieces of bounded size; None ends a document. UnicodeDecodeError: no text in UTF-8.

    A JSON record and the row of a table are documents, with their text under `column`, which may be null; any other file is one document.
    """
    kind, packed = _kind(source.path)
    if kind in ARROW and not packed:
        for text in _rows(source, column):
            yield from _slices(text)
            yield None
        return
    with _opened(source, packed) as file:
        if kind in LINES or kind == ".json" or kind in TABLES:
            records = _lines if kind in LINES else _values if kind == ".json" else _table
            for where, record in records(source, file):
                yield from _slices(_text_of(record, where, column))
                yield None
            return
        while piece := file.read(CHUNK_CHARACTERS):
            piece += file.readline(CHUNK_CHARACTERS)  # to the end of a line, so that no word is cut
            if "\0" in piece:  # UTF-16 without its mark, or no text at all
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "text has no character 0")
            yield piece
        yield None


@contextmanager
def _opened(source: Source, packed: str) -> Iterator[IO[str]]:
    """The characters of a file, which may be compressed. Raises `DataError` if it cannot be read."""
    try:
        with source.path.open("rb") as file:
            raw = io.BufferedReader(_Unpacked(source, _unpack(source, packed)(file))) if packed else file
            head = raw.peek(4)
            mark = next((mark for mark in _MARKS if head.startswith(mark)), b"")
            with io.TextIOWrapper(raw, _MARKS.get(mark, "utf-8-sig"), newline="") as text:
                yield text
    except OSError as error:
        raise _UnreadableError(
            f"{source.path}: {error.strerror or error}; a file that can be read is needed. Make it so, or leave it out."
        ) from error


def _unpack(source: Source, packed: str) -> Callable[[Any], IO[bytes]]:
    """What decompresses an open file."""
    if packed == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise ConfigurationError(
                f"{source.path}: reading .zst needs zstandard; pip install 'thinwire[zstd]'."
            ) from error
        return lambda file: cast(
            IO[bytes], zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
        )
    made = {".gz": lambda file: gzip.GzipFile(fileobj=file), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
    return cast(Callable[[Any], IO[bytes]], made[packed])


class _Unpacked(io.RawIOBase):
    """The bytes in a compressed file. Raises `DataError` if it is damaged, or expands more than text does."""

    def __init__(self, source: Source, file: IO[bytes]) -> None:
        self._path, self._file, self._left = source.path, file, max(EXPANDED, RATIO * source.nbytes)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(memoryview(buffer)))
        except Exception as error:  # each library has its own
            raise _UnreadableError(
                f"{self._path}: {error}; a whole compressed file is needed. Download it again."
            ) from error
        self._left -= len(data)
        if self._left < 0:
            raise _UnreadableError(_EXPANDS.format(self._path))
        memoryview(buffer)[: len(data)] = data
        return len(data)


def _slices(text: str) -> Iterator[str]:
    """A document in pieces of bounded size, to the end of a line where that is near."""
    file = io.StringIO(text)
    while piece := file.read(CHUNK_CHARACTERS):
        yield piece + file.readline(CHUNK_CHARACTERS)


def _text_of(record: object, where: str, column: str) -> str:
    """The text of a record under `column`. Raises `DataError` if it has none."""
    if not isinstance(record, dict) or not isinstance(text := record.get(column, 0), str | None):
        if isinstance(record, dict) and column in record:
            found = f"{column} ({type(record[column]).__name__})"
        else:
            found = ", ".join(map(str, record)) if isinstance(record, dict) else f"none, but a {type(record).__name__}"
        raise _wrong_column(where, found, column)
    return (text or "").encode(errors="replace").decode()  # JSON can spell half a surrogate pair


def _lines(source: Source, file: IO[str]) -> Iterator[tuple[str, object]]:
    """JSON, one value on each line."""
    for number in itertools.count(1):
        if not (line := file.readline(LARGEST_DOCUMENT)):
            return
        where = f"{source.path}:{number}"
        if len(line) == LARGEST_DOCUMENT:
            raise DataError(
                f"{where} has {LARGEST_DOCUMENT:,} characters or more; shorter lines are needed. Split the document, or give it as .txt."
            )
        if not line.strip():
            continue
        try:
            yield where, parsed(json.loads, line)
        except ValueError as error:
            raise DataError(
                f"{where} is not JSON ({error}); each line needs one JSON object. Correct or remove the line."
            ) from error


def _values(source: Source, file: IO[str]) -> Iterator[tuple[str, object]]:
    """The values of an array, or values one after another, as many tools write them into .json."""
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    text = file.read(CHUNK_CHARACTERS).lstrip()
    array = text.startswith("[")
    at, number = int(array), 1
    while True:
        at = cast(re.Match[str], between.match(text, at)).end()
        if array and text.startswith("]", at):
            return
        where = f"{source.path}, record {number}"
        try:
            value, at = parsed(lambda text: decode(text, at), text)  # noqa: B023  # called at once
        except ValueError as error:
            # a value may end beyond the text that was read
            more = file.read(max(CHUNK_CHARACTERS, len(text) - at)) if len(text) - at < LARGEST_DOCUMENT else ""
            if not more:
                if at == len(text) and not array:
                    return
                raise DataError(
                    f"{where} is not JSON ({error}); objects of at most {LARGEST_DOCUMENT:,} characters are needed. Correct the file."
                ) from error
            text, at = text[at:] + more, 0
            continue
        yield where, value
        number += 1


def _table(source: Source, file: IO[str]) -> Iterator[tuple[str, object]]:
    """The rows of .csv and .tsv, under the names of their first line."""
    limit = csv.field_size_limit(LARGEST_DOCUMENT)  # of the whole process
    rows = csv.DictReader(file, delimiter=TABLES[_kind(source.path)[0]], strict=True)
    try:
        for row in rows:
            yield f"{source.path}:{rows.line_num}", row
    except csv.Error as error:
        raise DataError(
            f"{source.path}:{rows.line_num}: {error}; a table with quotes around fields of several lines is needed. Write it again."
        ) from error
    finally:
        csv.field_size_limit(limit)


# Arrow


def _rows(source: Source, column: str) -> Iterator[str]:
    """The texts in a file of Arrow or Parquet."""
    try:
        import pyarrow as arrow
    except ImportError as error:
        raise ConfigurationError(
            f"{source.path}: reading {source.path.suffix.lower()} needs pyarrow; pip install 'thinwire[parquet]'."
        ) from error
    try:
        yield from (_parquet if source.path.suffix.lower() == ".parquet" else _arrow)(source, column)
    except (arrow.ArrowException, OSError) as error:
        what = source.path.suffix.lower()
        raise DataError(f"{source.path}: {error}; a whole {what} file is needed. Download it again.") from error


def _parquet(source: Source, column: str) -> Iterator[str]:
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(source.path) as file:
        if not _holds_text(source, file.schema_arrow, column):
            return
    # as a dictionary, because a file of a few bytes may contain a long text a million times
    with parquet.ParquetFile(source.path, read_dictionary=[column], buffer_size=1 << 20) as file:
        for group in range(file.num_row_groups):
            left = _allowance(source, file.metadata.row_group(group), column)
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[column]):
                for text in _texts(source, batch.column(0)):
                    if (left := left - len(text)) < 0:
                        raise DataError(_EXPANDS.format(f"a row group of {source.path}"))
                    yield text


def _arrow(source: Source, column: str) -> Iterator[str]:
    """Arrow's stream, which `datasets` saves, or its file, which is Feather."""
    import pyarrow as arrow
    import pyarrow.ipc as ipc

    with arrow.OSFile(str(source.path)) as file:
        try:
            batches: Any = ipc.open_stream(file)
        except arrow.ArrowInvalid:
            file.seek(0)
            whole = ipc.open_file(file)
            schema, batches = whole.schema, map(whole.get_batch, range(whole.num_record_batches))
        else:
            schema = batches.schema
        if _holds_text(source, schema, column):
            for batch in batches:
                yield from _texts(source, batch.column(column))


def _holds_text(source: Source, schema: Any, column: str) -> bool:
    """Whether `column` has any text; all its rows may be null. Raises `DataError` if it has another type."""
    import pyarrow as arrow

    kind = schema.field(column).type if schema.names.count(column) == 1 else None
    kind = kind.value_type if kind is not None and arrow.types.is_dictionary(kind) else kind
    views = [arrow.string_view()] if hasattr(arrow, "string_view") else []
    if kind not in (arrow.string(), arrow.large_string(), arrow.null(), *views):
        found = ", ".join(f"{each.name} ({each.type})" for each in schema)
        raise _wrong_column(source.path, found, column)
    return bool(kind != arrow.null())


def _wrong_column(where: object, found: str, column: str) -> DataError:
    return DataError(f"column={column!r}: {where} has no text in it; it has {found or 'none'}. Give another --column.")


_EXPANDS = f"{{}} expands more than {RATIO} times · no text does · write the file again"


def _allowance(source: Source, group: Any, column: str) -> int:
    """Most bytes of text from a row group of .parquet. Raises `DataError` if its metadata declares more."""
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == column)
    most: int = max(EXPANDED, RATIO * chunk.total_compressed_size)
    if chunk.total_uncompressed_size > most:
        raise DataError(_EXPANDS.format(f"a row group of {source.path}"))
    return most


def _texts(source: Source, column: Any) -> Iterator[str]:
    """The rows of one batch."""
    import pyarrow as arrow

    column = column if arrow.types.is_dictionary(column.type) else column.dictionary_encode()
    for index in column.indices.to_pylist():
        text = "" if index is None else column.dictionary[index].as_py() or ""
        if len(text) > LARGEST_DOCUMENT:
            raise DataError(
                f"{source.path} has a row of {len(text):,} characters: at most {LARGEST_DOCUMENT:,} are read. Split the document."
            )
        yield text
