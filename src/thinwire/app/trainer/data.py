"""Text as batches: finds files, splits them, tokenises them once into a cache, and reads batches from there.

    corpus = Corpus.open(["books/", "notes.jsonl"])
    tokens_BT, targets_BT = corpus.batch(seed=0, replica=1, replicas=4, step=17, batch=8, sequence=128)

Without paths the text is the Python standard library: about 10 MB of code and prose in every Python installation.

The cache has one folder for each pair of sources and tokenizer: `tokens.bin` (flat little-endian uint8, uint16 or uint32: the
training text, then the held-out text), `manifest.json`, and `tokenizer.json` if merges were learned. The
process with its lock file writes it under another name and renames it. It may be deleted at any time.

Shapes: B batch, T sequence.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.app.trainer.texts import SUFFIXES, PassedOver, Source, check_column, find, pieces, standard_library
from thinwire.app.trainer.tokens import BPE, Bytes, Tokenizer, dtype_of
from thinwire.data_ledger import Order, part_of
from thinwire.errors import ConfigurationError, DataError
from thinwire.files import UNSUPPORTED, contents, flush, lock, parsed
from thinwire.rng import derive

FORMAT = 1  # format of the cache; a new number rebuilds every cache
SAMPLE_NBYTES = 256 << 20  # bytes of text from which merges are learned
# number and bytes of evenly spaced blocks in a checksum: opening 100 GB must not take minutes
BLOCKS, BLOCK = 64, 1 << 20


# The cache: tokens on disk


@dataclass(frozen=True)
class Manifest:
    """The content of a cache folder. `split` is "files" (whole files are held out) or "tail" (the end of the text is)."""

    format: int
    name: str
    files: int
    held_out_files: int
    skipped: list[str]  # names of files that are no text in UTF-8
    nbytes: int
    tokens: int
    training_tokens: int
    split: str
    dtype: str
    tokenizer: str
    checksum: str


def default_cache() -> Path:
    """The platform's cache folder of this user. Raises `DataError` for a user without a home."""
    try:
        home = Path.home()
    except RuntimeError as error:  # as in a container, whose users may have no name
        raise DataError(
            f"user {os.getuid()} has no home folder, where the cache of tokens would be ({error}); set HOME to a folder that can be written."
        ) from None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "thinwire"
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "thinwire" / "cache"
    return home / ".cache" / "thinwire"


def _checksum(file: Path) -> str:
    """BLAKE2b of the length and of at most BLOCKS evenly spaced blocks; of the whole file up to 64 MiB."""
    size = file.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with file.open("rb") as stream:
        for block in range(BLOCKS):
            stream.seek(max(block * BLOCK, (size - BLOCK) * block // (BLOCKS - 1)))
            digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def _load(folder: Path, tokenizer: Tokenizer) -> Corpus | None:
    """The corpus in a cache folder; None if there is none, or it is damaged."""
    try:
        manifest = Manifest(**parsed(json.loads, contents(folder / "manifest.json")))
        if isinstance(tokenizer, BPE) and tokenizer.file is None:
            tokenizer = BPE.load(folder / "tokenizer.json")
        if (tokenizer.fingerprint, _checksum(folder / "tokens.bin")) != (manifest.tokenizer, manifest.checksum):
            return None
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        tokens = _mapped(folder / "tokens.bin", dtype, manifest.tokens)
    except (OSError, ValueError, TypeError, DataError):
        return None
    return Corpus(folder, tokenizer, manifest, tokens)


def _mapped(path: Path, dtype: np.dtype[Any], tokens: int) -> np.memmap[Any, Any]:
    """The tokens in a file, which stay there."""
    try:
        return np.memmap(path, dtype, mode="r", shape=(tokens,))
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EINVAL, errno.EACCES, *UNSUPPORTED):
            raise
    return np.memmap(path, dtype, mode="c", shape=(tokens,))  # some FUSE and 9p mounts have private maps alone


def _prepare(folder: Path, name: str, sources: list[Source], tokenizer: Tokenizer, column: str, share: float) -> Corpus:
    """Tokenise into a folder of another name, then rename it, so that a folder with the right name is whole."""
    try:
        shutil.rmtree(folder, ignore_errors=True)  # a damaged cache
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise DataError(
            f"cache {folder.parent}: {error}; the cache of tokens must be writable. Make it so, or choose another HOME (in Python cache=…)."
        ) from error
    try:
        held_out = [source for source in sources if derive(0, f"held out {source.name}") < share * 2**63]
        training = [source for source in sources if source not in set(held_out)]
        by_files = 0.2 < sum(s.nbytes for s in held_out) / (share * sum(s.nbytes for s in sources)) < 3
        if not by_files:
            training, held_out = sources, []
        given = tokenizer
        if isinstance(tokenizer, BPE) and tokenizer.file is None:
            tokenizer = tokenizer.train(_sample(training, column), making / "tokenizer.json")
        with (making / "tokens.bin").open("wb") as out:
            first = _tokenise(training, tokenizer, column, out)
            second = _tokenise(held_out, tokenizer, column, out)
        flush(making / "tokens.bin")
        tokens, nbytes, skipped = first[0] + second[0], first[1] + second[1], first[2] + second[2]
        if not tokens:
            raise DataError(
                f"{name}: no text (files found: {len(sources)}, not UTF-8: {len(skipped)}, the others empty); "
                "text in UTF-8 is needed. Give other files."
            )
        dtype = dtype_of(tokenizer.vocabulary)
        by_files = by_files and first[0] > 0 and second[0] > 0  # all files of a part may be skipped
        boundary = first[0] if by_files else tokens - int(tokens * share)
        manifest = Manifest(
            FORMAT, name, len(sources), len(held_out) if by_files else 0, skipped, nbytes, tokens, boundary,
            "files" if by_files else "tail", dtype.name, tokenizer.fingerprint, _checksum(making / "tokens.bin"),
        )  # fmt: skip
        with (making / "manifest.json").open("w") as out_text:
            json.dump(dataclasses.asdict(manifest), out_text, indent=2)
        flush(making / "manifest.json")
        if _load(folder, given) is None:  # without locks, another process may have made it meanwhile
            making.rename(folder)
    except OSError as error:
        raise DataError(
            f"cache {folder}: {error}; the cache of tokens needs more space. Free some, or choose another HOME (in Python cache=…)."
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    corpus = _load(folder, given)
    if corpus is None:
        raise DataError(f"cache {folder}: another program changed it while it was made. Run the command again.")
    return corpus


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context with this cache folder's lock: one thread or process prepares the cache, the others wait and then load it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise DataError(
            f"cache {folder.parent}: {error}; the cache of tokens must be writable. Make it so, or choose another HOME (in Python cache=…)."
        ) from error
    with file:  # closing the file, or the end of the process, releases the lock
        lock(file)
        yield


def _tokenise(sources: list[Source], tokenizer: Tokenizer, column: str, out: IO[bytes]) -> tuple[int, int, list[str]]:
    """Append the tokens of `sources`. Returns (tokens, bytes, names of skipped files); a document's end counts as one byte."""
    dtype = dtype_of(tokenizer.vocabulary).newbyteorder("<")
    begin, nbytes, skipped = out.tell(), 0, list[str]()
    for source in sources:
        start, length, open_document = out.tell(), 0, False
        try:
            for piece in pieces(source, column):
                if piece:
                    data = piece.encode()
                    out.write(tokenizer.encode(data).astype(dtype, copy=False).tobytes())
                    length, open_document = length + len(data), True
                elif piece is None and open_document:
                    out.write(np.array([tokenizer.end], dtype).tobytes())
                    length, open_document = length + 1, False
        except UnicodeDecodeError:  # remove the part that was written
            out.seek(start)
            out.truncate()
            skipped.append(source.name)
            length = 0
        nbytes += length
    return (out.tell() - begin) // dtype.itemsize, nbytes, skipped


def _sample(sources: list[Source], column: str) -> Iterator[str]:
    """Every n-th piece of the training text, about SAMPLE_NBYTES in all."""
    stride = 1 + sum(source.nbytes for source in sources) // SAMPLE_NBYTES
    number = 0
    for source in sources:
        try:
            for piece in pieces(source, column):
                if piece:
                    if number % stride == 0:
                        yield piece
                    number += 1
        except UnicodeDecodeError:
            continue


def _text_of(passed_over: PassedOver) -> str:
    """What was passed over, in words: each reason with its paths."""
    named = []
    for reason, paths in sorted(passed_over.items()):
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        named.append(f"{reason}: {len(paths)} ({', '.join(map(str, sorted(paths)[:3]))}{more})")
    return "; ".join(named) or "none"


# Batches: positions in the tokens, as pure functions


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised text on disk, cut into windows of `sequence` tokens. `Corpus.open` makes it; it is never loaded as a whole."""

    folder: Path
    tokenizer: Tokenizer
    manifest: Manifest
    tokens: NDArray[np.unsignedinteger[Any]]
    passed_over: tuple[str, ...] = ()  # what lies in the folders of text and is not read, in lines for people

    @classmethod
    def open(
        cls,
        paths: Sequence[str | Path] = (),
        tokenizer: Tokenizer | None = None,
        cache: str | Path | None = None,
        column: str = "text",
        held_out_share: float = 0.05,
    ) -> Corpus:
        """Find the text and tokenise it, unless there is a sound cache of this text and tokenizer.

        paths            files and folders; empty: the Python standard library
        tokenizer        `Bytes()` by default; an untrained `BPE` is trained on the training text
        cache            a folder; by default the user's cache folder
        column           the name of the text column of records and tables
        held_out_share   share of the text for evaluation: whole files, chosen by the hash of their names; if there are too few
                         files for this share, the end of the text (`describe` shows which)

        Sources are identified by path, size and time of change. Files that are no text in UTF-8, and in folders run folders, hidden files and
        those of other types, are passed over and named.
        Errors: DataError for a missing path, no text, a wrong column, a broken line.
        """
        if not 0.0 < held_out_share <= 0.5:
            raise ConfigurationError(
                f"held_out_share={held_out_share}: evaluation needs some of the text, and training most of it. Take 0.05."
            )
        tokenizer = tokenizer or Bytes()
        name = ", ".join(map(str, paths)) or f"Python {sys.version_info[0]}.{sys.version_info[1]} standard library"
        by_path, passed_over = dict[str, Source](), PassedOver()
        for source in find(paths, passed_over=passed_over, column=column) if paths else standard_library():
            by_path.setdefault(os.path.realpath(source.path), source)  # a folder and a file in it: read it once
        sources = list(by_path.values())
        if not sum(source.nbytes for source in sources):
            raise DataError(
                f"{name}: no text (files found: {len(sources)}; passed over: {_text_of(passed_over)}); files that are not empty are needed, "
                f"in {', '.join(SUFFIXES)}."
            )
        check_column(sources, column)
        recipe = (FORMAT, tokenizer.fingerprint, column, held_out_share, *map(dataclasses.astuple, sources))
        key = hashlib.blake2b(repr(recipe).encode(), digest_size=12).hexdigest()
        folder = Path(cache or default_cache()) / f"tokens-{key}"
        if (corpus := _load(folder, tokenizer)) is None:
            with _alone(folder):
                corpus = _load(folder, tokenizer) or _prepare(folder, name, sources, tokenizer, column, held_out_share)
        if paths and (skipped := corpus.manifest.skipped):
            passed_over["no text in UTF-8"] = [Path(each) for each in skipped]
        lines = (f"not read as text: {_text_of(passed_over)}",) if passed_over else ()
        return dataclasses.replace(corpus, passed_over=lines)

    @property
    def vocabulary(self) -> int:
        """The number of different tokens, which the model's vocabulary must have."""
        return self.tokenizer.vocabulary

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the whole text: nats per byte = nats per token / this. A document's end counts as one byte."""
        return self.manifest.nbytes / self.manifest.tokens

    @property
    def fingerprint(self) -> str:
        """A digest of the tokens and their split, which replicas that share one text compare."""
        known = (self.tokenizer.fingerprint, self.manifest.checksum, self.manifest.training_tokens)
        return hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()

    def windows(self, sequence: int) -> int:
        """Number of windows of the training text; a window has `sequence` tokens and the next token of each."""
        return max(0, (self.manifest.training_tokens - 1) // sequence)

    def batch(
        self, seed: int, replica: int, replicas: int, step: int, batch: int, sequence: int
    ) -> tuple[Tensor, Tensor]:
        """tokens_BT and targets_BT (int64; the targets are the next tokens) of a replica's `step`, counted from 0.

        A pure function of its arguments. Replica m owns the windows m, m + replicas, ..., so the windows of two replicas
        never overlap. It reads each of its windows once per epoch, in an order that differs between replicas and epochs.
        """
        for given, low, high, name in (
            (replica, 0, replicas, "replica"), (step, 0, math.inf, "step"), (batch, 1, math.inf, "batch"),
            (sequence, 1, math.inf, "sequence"),
        ):  # fmt: skip
            if not low <= given < high:
                raise ConfigurationError(f"{name}={given}: {low} ≤ {name} < {high} is needed. Correct the number.")
        windows = self.windows(sequence)
        begin, end = part_of(windows, replicas, replica)
        if begin == end:
            raise DataError(
                f"{self.manifest.training_tokens} training tokens for {replicas} replicas: each needs a window of "
                f"{sequence} tokens and one more. Give more text, or a shorter sequence."
            )
        count = step * batch + np.arange(batch, dtype=np.int64)
        epoch, place = np.divmod(count, end - begin)
        return self.cut(Order(windows, seed, replicas).samples_at(epoch * windows + begin + place), sequence)

    def cut(self, windows: NDArray[np.int64], sequence: int) -> tuple[Tensor, Tensor]:
        """tokens_BT and targets_BT of these windows."""
        return self._cut(windows * sequence, sequence)

    def held_out(self, most: int, sequence: int, batch: int) -> list[tuple[Tensor, Tensor]]:
        """At most `most` sequences of the held-out text, evenly spread over it, in batches of at most `batch`. They are the same on every
        replica, and for every `batch`.
        """
        first, count = self.manifest.training_tokens, self.manifest.tokens - self.manifest.training_tokens
        windows = max(0, (count - 1) // sequence)
        if not windows:
            raise DataError(
                f"{count} held-out tokens: one window of {sequence} and one more are needed. "
                "Give more text, or a shorter sequence."
            )
        count = min(most, windows)
        starts = first + np.arange(count, dtype=np.int64) * windows // count * sequence
        return [self._cut(starts[at : at + batch], sequence) for at in range(0, count, batch)]

    def _cut(self, starts: NDArray[np.int64], sequence: int) -> tuple[Tensor, Tensor]:
        both = torch.from_numpy(self.tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def describe(self) -> dict[str, str | int | float]:
        """Facts about the text, for display."""
        held_out = {"files": f"{self.manifest.held_out_files} whole files", "tail": "the end of the text"}
        return {
            "text": self.manifest.name,
            "files": self.manifest.files,
            "skipped files (not UTF-8)": len(self.manifest.skipped),
            "bytes": self.manifest.nbytes,
            "tokens": self.manifest.tokens,
            "held out tokens": self.manifest.tokens - self.manifest.training_tokens,
            "held out": held_out[self.manifest.split],
            "tokenizer": self.tokenizer.fingerprint,
            "vocabulary": self.vocabulary,
            "bytes per token": round(self.bytes_per_token, 3),
        }
