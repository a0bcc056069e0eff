"""The tokenizer of a run: the one in its folder, of its settings, or of its model.

Token numbers have no meaning without it. So a run keeps its tokenizer beside its model (RUN/tokenizer.json), the model's file has the
tokenizer's fingerprint, and text with another tokenizer is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from thinwire.app.trainer.data import Corpus
from thinwire.app.trainer.export import draft_folder, metadata_of
from thinwire.app.trainer.huggingface import Pretrained, has_weights, own_tokenizer
from thinwire.app.trainer.settings import DataSpec
from thinwire.app.trainer.tokens import BPE, END, Bytes, Tokenizer
from thinwire.errors import ConfigurationError

FILE = "tokenizer.json"


def open_corpus(data: DataSpec, model: str, folder: Path | None = None) -> Corpus:
    """The text, tokenised (once on every machine), for `model` (as `--model` names it). `folder`: the run's folder, which may hold its
    tokenizer.

    Raises `ConfigurationError` if the model was trained with another tokenizer.
    """
    corpus = Corpus.open(data.text, make_tokenizer(data, model), column=data.column)
    kept = _kept(data, model, folder)
    # it was trained on other text, or its file was replaced
    if kept and kept.fingerprint != corpus.tokenizer.fingerprint:
        corpus = Corpus.open(data.text, kept, column=data.column)
    known = _trained_with(data, model)
    if known and known != corpus.tokenizer.fingerprint:
        raise ConfigurationError(
            f"tokenizer={data.tokenizer!r} is {corpus.tokenizer.fingerprint}, {model} was trained with {known}: token numbers would "
            f"change their meaning; leave --tokenizer out to take the model's own ({_own(model)[0]})."
        )
    return corpus


def make_tokenizer(data: DataSpec, model: str) -> Tokenizer:
    """The tokenizer that is set, otherwise the model's own, otherwise bytes. A BPE that is named by its size is not trained yet."""
    return _named(data.tokenizer or _own(model)[0])


def _named(asked: str) -> Tokenizer:
    kind, _, what = asked.partition(":")
    if kind not in ("bytes", "bpe", "hf") or (kind != "bytes") != bool(what):
        raise ConfigurationError(
            f"tokenizer={asked!r}: bytes, bpe:SIZE such as bpe:8192, bpe:FILE.json or hf:FOLDER_OR_NAME is needed."
        )
    if kind == "hf":
        return Pretrained.load(what)
    if kind == "bytes":
        return Bytes()
    return BPE(int(what)) if what.isdecimal() else BPE.load(what)


def tokenizer_of(data: DataSpec, model: str, folder: Path) -> Tokenizer:
    """The tokenizer in the run's `folder`, otherwise the model's own."""
    return _kept(data, model, folder) or make_tokenizer(data, model)


def keep_tokenizer(folder: Path, model: str, tokenizer: Tokenizer, writer: str) -> None:
    """Write `tokenizer` to the run's folder, for resuming and for users of the model; bytes need no file. Several replicas may write
    at once, each with its own `writer` name.
    """
    if isinstance(tokenizer, Bytes) or (folder / FILE).exists():
        return
    with draft_folder(folder, f"tokenizer.{writer}") as draft:
        if isinstance(tokenizer, Pretrained):
            tokenizer.save(draft)
        elif isinstance(tokenizer, BPE) and tokenizer.file:
            shutil.copyfile(tokenizer.file, draft / FILE)
            if model.startswith("hf:"):  # for transformers' AutoTokenizer
                said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
                (draft / "tokenizer_config.json").write_text(json.dumps(said))


def _kept(data: DataSpec, model: str, folder: Path | None) -> Tokenizer | None:
    if folder is None or not (folder / FILE).exists():
        return None
    kind = (data.tokenizer or _own(model)[0]).partition(":")[0]
    return Pretrained.load(folder) if kind == "hf" else BPE.load(folder / FILE)


def _trained_with(data: DataSpec, model: str) -> str | None:
    """The fingerprint of the tokenizer that the weights of `model` were trained with; None for fresh weights, or if it is not known."""
    name, known = _own(model)
    if model.startswith("hf:") and not has_weights(model.removeprefix("hf:")):
        return None
    if known or name == "bytes" or data.tokenizer is None:
        return known
    try:
        return _named(name).fingerprint
    except ConfigurationError:  # not a fast one: a text can only be tokenised by another
        return None


def _own(model: str) -> tuple[str, str | None]:
    """The tokenizer that belongs to `model` (bytes if it has none), and its fingerprint if the model has one."""
    if model.endswith(".safetensors"):
        said = metadata_of(model).get("tokenizer")
        name = f"bpe:{Path(model).with_name(FILE)}" if str(said).startswith("bpe-") else "bytes"
        return name if not str(said).startswith("hf-") else f"hf:{Path(model).parent}", said
    own = own_tokenizer(model.removeprefix("hf:")) if model.startswith("hf:") else None
    return own or ("bytes", None)
