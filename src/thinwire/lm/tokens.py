"""From files to text, from text to numbers, and back.

`Bytes()` needs no training. `BPE(vocabulary=...)` is learned once from the training text, and then stored beside the tokens as a JSON
file. A loss in nats per token, divided by `Corpus.bytes_per_token`, is in nats per byte, which can be compared between tokenizers.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError, DataError
from thinwire.records.files import contents, parsed

MOST_VOCABULARY = 1 << 24
END = "<|end|>"  # the separator of two documents
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")  # read in folders; a file given by name may have any
CHUNK_CHARACTERS = 1 << 18  # characters tokenised at a time
_OF_A_RUN = frozenset({"events", "logs"})  # folders in a run folder before any other text is
LARGEST_DOCUMENT = 32 << 20  # bytes of a line of .jsonl, characters of a row of .parquet
# A .parquet row group may hold EXPANDED bytes of text, or RATIO times its size in the file.
EXPANDED, RATIO = 256 << 20, 100


# Text in files


@dataclass(frozen=True)
class Source:
    """A file of text. `name` is its path below the given folder: the split depends on it, not on the machine."""

    path: Path
    name: str
    nbytes: int
    modified: int


def standard_library() -> Iterator[Source]:
    """The sources of this Python, without tests, character tables and files that its build wrote for one machine."""
    without = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    for source in find([sysconfig.get_paths()["stdlib"]], without):
        if source.path.suffix == ".py" and not source.name.startswith(("config-", "_sysconfigdata")):
            yield source


def find(
    paths: Sequence[str | Path], without: Collection[str] = (), passed_over: list[Path] | None = None
) -> Iterator[Source]:
    """Every file of text at `paths`. Folders are searched to the bottom in sorted order; hidden files and folders, folders named in `without`,
    and run folders, which are added to `passed_over`, are left out."""
    if "" in paths:
        raise DataError("text '': a file or folder is needed; an empty name would be the current folder.")
    for given in map(Path, paths):
        if given.is_file():
            yield _source(given, given.name)
        elif not given.is_dir():
            if given.exists():
                raise DataError(f"{given} is a pipe or a device; a file or folder is needed. Write the text to a file.")
            raise DataError(f"{given}: a file or folder that exists is needed. Check the path.")
        names = []
        for folder, below, files in os.walk(given):
            if "run.toml" in files and not _OF_A_RUN.isdisjoint(below):
                if passed_over is not None:
                    passed_over.append(Path(folder))
                below[:] = [name for name in below if Path(folder) == given and name not in _OF_A_RUN]
                files[:] = [name for name in files if Path(folder) == given]  # text may be beside a run
            below[:] = [name for name in below if not name.startswith(".") and name not in without]
            names += [Path(folder, name).relative_to(given).as_posix() for name in files if name[0] != "."]
        for name in sorted(names):
            path = given / name
            if path.suffix.lower() in SUFFIXES and path.is_file():
                yield _source(path, name)


def _source(path: Path, name: str) -> Source:
    # absolute, not resolved: a link into a store of blobs would lose its suffix
    return Source(path.absolute(), name, path.stat().st_size, path.stat().st_mtime_ns)


def pieces(source: Source, column: str) -> Iterator[str | None]:
    """The text of a file in pieces of bounded size; None ends a document. UnicodeDecodeError: not UTF-8.

    A .jsonl line and a .parquet row are documents, with their text under `column`; any other file is one document.
    """
    kind = source.path.suffix.lower()
    if kind == ".parquet":
        yield from _rows(source, column)
        return
    if kind in (".csv", ".tsv", ".json") and column != "text":
        raise DataError(
            f"column={column!r}: {source.path} is read as plain text; only .jsonl and .parquet have columns. Convert it, or leave --column out."
        )
    try:
        with source.path.open(encoding="utf-8-sig", newline="") as file:
            if kind == ".jsonl":
                yield from _lines(source, file, column)
                return
            while piece := file.read(CHUNK_CHARACTERS):
                yield piece + file.readline(CHUNK_CHARACTERS)  # to the end of a line, so that no word is cut
            yield None
    except OSError as error:
        raise DataError(
            f"{source.path}: {error.strerror}; a file that can be read is needed. Make it so, or leave it out."
        ) from error


def _slices(text: str) -> Iterator[str]:
    """A document in pieces of bounded size, to the end of a line where that is near."""
    file = io.StringIO(text)
    while piece := file.read(CHUNK_CHARACTERS):
        yield piece + file.readline(CHUNK_CHARACTERS)


def _lines(source: Source, file: IO[str], column: str) -> Iterator[str | None]:
    for number in itertools.count(1):
        if not (line := file.readline(LARGEST_DOCUMENT)):
            return
        if len(line) == LARGEST_DOCUMENT:
            raise DataError(
                f"{source.path}:{number} has {LARGEST_DOCUMENT:,} characters or more; shorter lines are needed. Split the document, "
                "or give it as .txt."
            )
        if not line.strip():
            continue
        try:
            record = parsed(json.loads, line)
        except ValueError as error:
            raise DataError(
                f"{source.path}:{number} is not JSON ({error}); each line needs one JSON object. Correct or remove the line."
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get(column), str):
            found = ", ".join(record) if isinstance(record, dict) else f"none, but a {type(record).__name__}"
            raise _wrong_column(f"{source.path}:{number}", found, column)
        yield from _slices(record[column].encode(errors="replace").decode())  # JSON can spell half a surrogate pair
        yield None


def _rows(source: Source, column: str) -> Iterator[str | None]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigurationError(
            f"{source.path}: reading .parquet needs pyarrow; pip install 'thinwire[parquet]'."
        ) from error
    try:
        with parquet.ParquetFile(source.path) as file:
            field = file.schema_arrow.field(column) if column in file.schema_arrow.names else None
            if field is None or not (arrow.types.is_string(field.type) or arrow.types.is_large_string(field.type)):
                found = ", ".join(f"{each.name} ({each.type})" for each in file.schema_arrow)
                raise _wrong_column(source.path, found, column)
        # as a dictionary, because a file of a few bytes may contain a long text a million times
        with parquet.ParquetFile(source.path, read_dictionary=[column], buffer_size=1 << 20) as file:
            for group in range(file.num_row_groups):
                left = _allowance(source, file.metadata.row_group(group), column)
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[column]):
                    for text in _texts(source, batch.column(0)):
                        if (left := left - len(text)) < 0:
                            raise DataError(_EXPANDS.format(source.path))
                        yield from _slices(text)
                        yield None
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path}: {error}; a whole .parquet file is needed. Download it again.") from error


def _wrong_column(where: object, found: str, column: str) -> DataError:
    return DataError(f"column={column!r}: {where} has no text in it; it has {found or 'none'}. Give another --column.")


_EXPANDS = f"{{}} has a row group that expands more than {RATIO} times · no text does · write the file again"


def _allowance(source: Source, group: Any, column: str) -> int:
    """Most bytes of text from a row group of .parquet. Raises `DataError` if its metadata declares more."""
    chunk = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == column)
    most: int = max(EXPANDED, RATIO * chunk.total_compressed_size)
    if chunk.total_uncompressed_size > most:
        raise DataError(_EXPANDS.format(source.path))
    return most


def _texts(source: Source, column: Any) -> Iterator[str]:
    """The rows of one batch."""
    for index in column.indices.to_pylist():
        text = "" if index is None else column.dictionary[index].as_py() or ""
        if len(text) > LARGEST_DOCUMENT:
            raise DataError(
                f"{source.path} has a row of {len(text):,} characters: at most {LARGEST_DOCUMENT:,} are read. Split the document."
            )
        yield text


# Tokenizers


class Tokenizer(Protocol):
    """Turns text into token numbers below `vocabulary`; `end` closes a document."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """A digest that is equal if and only if equal texts have equal tokens."""

    def encode(self, text: str | bytes) -> NDArray[np.unsignedinteger[Any]]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


def dtype_of(vocabulary: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The narrowest of uint8, uint16 and uint32 that holds every token."""
    return np.dtype(np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32)


@dataclass(frozen=True)
class Bytes:
    """One token per byte of UTF-8. Byte 0, which no text contains, ends a document.

    >>> Bytes().encode("hé").tolist()
    [104, 195, 169]
    >>> Bytes().decode([104, 195, 169])
    'hé'
    """

    @property
    def vocabulary(self) -> int:
        return 256

    @property
    def end(self) -> int:
        return 0

    @property
    def fingerprint(self) -> str:
        return "bytes"

    def encode(self, text: str | bytes) -> NDArray[np.unsignedinteger[Any]]:
        """The bytes, as uint8."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; a broken UTF-8 sequence (a model may write one) becomes U+FFFD."""
        return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class BPE:
    """Byte-level byte-pair encoding (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2): any text has tokens.

    vocabulary   number of tokens: 256 bytes, the end of a document, and merges; `train` finds fewer merges in a small
                 text, and its result then has a smaller vocabulary
    file         a trained `tokenizer.json`; None: untrained, and `Corpus.open` trains it

    Replicas must have the same tokens. Sites with different text must all be given one file.

    >>> import tempfile
    >>> trained = BPE(260).train(["low lower lowest"] * 9, Path(tempfile.mkdtemp()) / "tokenizer.json")
    >>> trained.decode(trained.encode("slow"))
    'slow'
    """

    vocabulary: int = 4096
    file: Path | None = None

    def __post_init__(self) -> None:
        if not 256 < self.vocabulary <= MOST_VOCABULARY:
            raise ConfigurationError(
                f"BPE(vocabulary={self.vocabulary}): 256 bytes and the end of a document come before any merge. "
                f"Take at least 257 and at most {MOST_VOCABULARY:,}, or Bytes()."
            )

    @classmethod
    def load(cls, file: str | Path) -> BPE:
        """A trained tokenizer from its JSON file, with the vocabulary found there."""
        bpe = cls(file=Path(file))
        return replace(bpe, vocabulary=bpe._trained.get_vocab_size())

    @property
    def end(self) -> int:
        return 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the file's content; an untrained one is identified by its recipe."""
        if self.file is None:
            return f"bpe-{self.vocabulary}-untrained"
        return "bpe-" + hashlib.sha256(self._trained.to_str().encode()).hexdigest()[:16]

    @cached_property
    def _trained(self) -> Any:
        from tokenizers import Tokenizer as Trained

        if self.file is None:
            raise ConfigurationError(
                f"{self!r} is untrained: merges are needed to read or write tokens. "
                "Call train(texts, file), or give it to Corpus.open."
            )
        try:
            trained = Trained.from_str(contents(self.file))
        except Exception as error:  # the Rust side raises bare Exception for every fault
            raise DataError(
                f"{self.file}: {error}; the JSON file of a trained tokenizer is needed. Check the path, or train it again."
            ) from error
        if trained.token_to_id(END) != self.end:
            raise DataError(
                f"{self.file} has no token {END} with number {self.end}, which separates documents. "
                "Train with BPE.train, or add it to the file."
            )
        return trained

    def train(self, texts: Iterable[str], file: Path) -> BPE:
        """Learn the merges from `texts`, write them to `file`, return the tokenizer that reads it."""
        from tokenizers import Tokenizer as Trained
        from tokenizers import decoders, models, pre_tokenizers, trainers

        trained = Trained(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(texts, trainer)
        trained.save(str(file))
        return replace(self, vocabulary=trained.get_vocab_size(), file=file)

    def encode(self, text: str | bytes) -> NDArray[np.unsignedinteger[Any]]:
        """Token numbers, as uint16 (uint32 from 65,537 tokens on). END written out in a text is read as END."""
        text = text.decode() if isinstance(text, bytes) else text
        return np.array(self._trained.encode(text).ids, dtype_of(self.vocabulary))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; END is left out, broken UTF-8 becomes U+FFFD."""
        text: str = self._trained.decode([int(token) for token in tokens])
        return text
