"""From text to numbers, and back. `texts.py` reads the text from files.

`Bytes()` needs no training. `BPE(vocabulary=...)` is learned once from the training text, and then stored beside the tokens as a JSON
file. A loss in nats per token, divided by `Corpus.bytes_per_token`, is in nats per byte, which can be compared between tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError, DataError, MissingError
from thinwire.files import contents

MOST_VOCABULARY = 1 << 24
END = "<|end|>"  # the separator of two documents


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
            raise (DataError if self.file.exists() else MissingError)(
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
