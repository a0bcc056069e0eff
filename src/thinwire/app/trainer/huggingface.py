"""Any Hugging Face causal language model and its tokenizer, with the same interface as our own.

    model = hugging_face("llama", vocabulary=256, hidden_size=128, num_hidden_layers=4)   # fresh, no hub
    model = hugging_face("checkpoints/my-model")                                          # a local folder
    logits, loss = model(tokens_BT, targets_BT)

Needs the extra: pip install thinwire[hf].
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from thinwire.app.trainer.model import Output, token_loss
from thinwire.app.trainer.tokens import dtype_of
from thinwire.errors import ConfigurationError, ModelError
from thinwire.files import contents, parsed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNBOUNDED = 1 << 20  # the context of a model without a limit (a recurrent one)
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")  # a folder with none of these is a config alone
# one of these is enough
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class HuggingFace(nn.Module):
    """A causal language model of transformers as tokens_BT, targets_BT → `Output`. `hugging_face` makes it.

    Our targets are already the next tokens, so the model's own `labels`, which it would shift again, are not
    used: the loss is the mean cross entropy in fp32, nats per token, in training and evaluation alike.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.vocabulary = int(config.vocab_size)
        self.context: int = getattr(config, "max_position_embeddings", UNBOUNDED)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's layers: its longest list of modules. FSDP2 shards these, a fragment counts them."""
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=nn.ModuleList())

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output:
        if tokens_BT.shape[1] > self.context:
            raise ConfigurationError(
                f"a sequence of {tokens_BT.shape[1]} tokens: this model takes at most {self.context}. "
                "Shorten the sequence."
            )
        logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        return Output(logits_BTV, None if targets_BT is None else token_loss(logits_BTV, targets_BT))


def hugging_face(
    source: str | Path | PretrainedConfig, vocabulary: int | None = None, seed: int = 0, **options: Any
) -> HuggingFace:
    """Make the model that `source` names.

    source       a transformers configuration, or the name of a kind of model ("llama", "gpt2"): fresh parameters;
                 a folder: its parameters, or fresh ones if it has only config.json;
                 a name with a slash: fetched from the hub
    vocabulary   number of tokens of the data's tokenizer: checked, and used for a kind of model without vocab_size in `options`
    seed         seed of fresh parameters. transformers draws normal numbers, whose last bit may differ between
                 processors: replicas on different machines must start from one saved folder.
    options      options of the configuration, if `source` is a kind of model

    Errors: ConfigurationError without transformers, for an unknown name, or a vocabulary that is too small;
    ModelError for a folder that cannot be loaded.
    """
    transformers = _transformers(source)
    config, stored = _configuration(transformers, source, vocabulary, options)
    kind, fp32 = transformers.AutoModelForCausalLM, _in_fp32(config)
    try:
        if stored:
            with _quiet(transformers):
                model = kind.from_pretrained(str(source), **fp32, **_from(source)).float()
            return HuggingFace(model.train(), config)  # it comes in evaluation mode
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return HuggingFace(kind.from_config(config).float(), config)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{source}: {error}; a causal language model with undamaged weights is needed. "
            "Choose another, or save it again with save_pretrained."
        ) from error


def outline(
    source: str | Path | PretrainedConfig, vocabulary: int | None = None, device: torch.device | None = None
) -> HuggingFace:
    """The model that `source` names, without values: only its configuration is read (or fetched from the hub), no weights.

    It is on the device "meta", or on the given one (for torch's fake tensors). Errors: like `hugging_face`.
    """
    transformers = _transformers(source)
    config, _ = _configuration(transformers, source, vocabulary, {})
    _in_fp32(config)
    try:
        with device or torch.device("meta"):
            return HuggingFace(transformers.AutoModelForCausalLM.from_config(config), config)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{source}: {str(error).splitlines()[0]}; a causal language model is needed. Choose another."
        ) from error


def save_model(folder: Path, model: HuggingFace, weights: Mapping[str, Tensor], tokenizer: str) -> None:
    """Write the files for `AutoModelForCausalLM.from_pretrained(folder)`: `weights`, under the names of this model's state dict without
    adapters, the configuration and further files. `tokenizer`: the fingerprint of the tokenizer of its training.
    """
    inner: Any = model.model
    state = {name.removeprefix("model."): value.contiguous() for name, value in weights.items()}
    first: dict[int, str] = {}
    for name, value in inner.state_dict(keep_vars=True).items():  # tied weights are written once
        if name in state:
            state[name] = state[first.setdefault(id(value), name)]
    _in_fp32(inner.config)
    inner.config.thinwire = {"tokenizer": tokenizer}
    with _quiet(_transformers(folder)):
        inner.save_pretrained(str(folder), state_dict=state, max_shard_size="1000TB")  # one file
    # safetensors makes files that only their owner can read
    modes = stat.S_IMODE((folder / "config.json").stat().st_mode)
    (folder / "model.safetensors").chmod(modes)


def has_weights(source: str) -> bool:
    """Whether `source` names trained parameters: a folder with weights, or a name on the hub."""
    folder = Path(source)
    return any(next(folder.glob(name), None) for name in WEIGHTS) if folder.is_dir() else "/" in source


def own_tokenizer(source: str) -> tuple[str, str | None] | None:
    """The tokenizer of the model `source`, as --tokenizer takes it, and its fingerprint if the model's files have it."""
    folder = Path(source)
    if not folder.is_dir():
        return (f"hf:{source}", None) if "/" in source else None
    try:
        said = parsed(json.loads, contents(folder / "config.json"))["thinwire"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):  # a model that Thinwire did not write
        return (f"hf:{source}", None) if any((folder / name).exists() for name in TOKENIZERS) else None
    kind = str(said).partition("-")[0]
    return {"bytes": "bytes", "bpe": f"bpe:{folder / 'tokenizer.json'}"}.get(kind, f"hf:{source}"), str(said)


@dataclass(frozen=True)
class Pretrained:
    """The tokenizer of a Hugging Face model, without chat templates; made by `load`."""

    source: Any
    end: int

    @classmethod
    def load(cls, source: str | Path) -> Pretrained:
        """Load from a folder, or by a name on the hub. Raises `ConfigurationError`."""
        transformers = _transformers(source, "tokenizer")
        try:
            found = transformers.AutoTokenizer.from_pretrained(str(source), **_from(source))
        except Exception as error:  # the Rust side raises bare Exception for a damaged file
            raise ConfigurationError(
                f"tokenizer 'hf:{source}': {_why(source, error)}; the folder or hub name of a tokenizer is needed. Check the name."
            ) from error
        if not getattr(found, "is_fast", False) or found.eos_token_id is None:
            raise ConfigurationError(
                f"tokenizer 'hf:{source}' is a {type(found).__name__}: a fast tokenizer with a token for the end of a text (eos_token) is needed. "
                "Convert it, or set its eos_token, and save it again."
            )
        return cls(found, int(found.eos_token_id))

    @cached_property
    def vocabulary(self) -> int:
        return 1 + max(map(int, self.source.get_vocab().values()))

    @cached_property
    def fingerprint(self) -> str:
        return "hf-" + hashlib.sha256(self.source.backend_tokenizer.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str | bytes) -> NDArray[np.unsignedinteger[Any]]:
        """Token numbers, without a beginning or an end of text."""
        text = text.decode() if isinstance(text, bytes) else text
        return np.array(
            self.source.backend_tokenizer.encode(text, add_special_tokens=False).ids, dtype_of(self.vocabulary)
        )

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self.source.backend_tokenizer.decode([int(token) for token in tokens])
        return text

    def save(self, folder: Path) -> None:
        """Write what `AutoTokenizer.from_pretrained(folder)` reads."""
        self.source.save_pretrained(str(folder))


def _from(source: str | Path) -> dict[str, bool]:
    """Options of `from_pretrained`: no code of the model's own is run, nor is its user asked, and a folder, or a name of a hub that does not
    answer, must be on this machine. Raises `OSError` if something in the folder is no file, which transformers would wait for.
    """
    folder = Path(source)
    for path in folder.iterdir() if folder.is_dir() else ():
        if not (path.is_file() or path.is_dir()):
            raise OSError(f"{path} is no regular file")
    return {"trust_remote_code": False, "local_files_only": folder.is_dir() or bool(_silence_of_hub(str(source)))}


def _in_fp32(config: Any) -> dict[str, Any]:
    """Set fp32 in `config`, and return the same as an option of `from_pretrained`. Otherwise transformers changes torch's default type
    for all threads while it makes a model of another type.
    """
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    setattr(config, name, torch.float32)
    return {name: torch.float32}


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """A context without progress bars, which every replica would show."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _transformers(source: object, what: str = "model") -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"a Hugging Face {what} ({source}): the package transformers is needed; pip install 'thinwire[hf]'."
        ) from error
    return transformers


def _configuration(
    transformers: Any, source: str | Path | PretrainedConfig, vocabulary: int | None, options: dict[str, Any]
) -> tuple[Any, bool]:
    """The configuration of `source`, which must have room for `vocabulary`, and whether weights are stored with it."""
    given = isinstance(source, transformers.PretrainedConfig)
    folder = Path() if given else Path(str(source))
    fresh_kind = not given and not folder.is_dir() and "/" not in str(source)
    if options and not fresh_kind:
        raise ConfigurationError(
            f"options {sorted(options)} for {source}: only a kind of model such as 'llama' takes options. "
            "Change its configuration instead."
        )
    config: Any = source
    known = {} if vocabulary is None else {"vocab_size": vocabulary}
    try:
        if fresh_kind:
            config = transformers.AutoConfig.for_model(str(source), **(known | options))
        elif not given:
            config = transformers.AutoConfig.from_pretrained(str(source), **_from(source))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model {str(source)!r}: {_why(source, error)}; a folder with config.json, a hub name or a kind of model such as 'llama' is "
            "needed. Check the name."
        ) from error
    if vocabulary is not None and config.vocab_size < vocabulary:
        raise ConfigurationError(
            f"a model of {config.vocab_size} tokens and a tokenizer of {vocabulary}: every token needs a row of the embedding. "
            "Take the model's own tokenizer, or a model with a larger vocabulary."
        )
    return config, not given and not fresh_kind and has_weights(str(source))


@cache
def _silence_of_hub(name: str) -> str:
    """Why the hub cannot be asked for `name`; "" if it answers. One request: transformers tries each file for most of a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(name, timeout=10)
    except (HfHubHTTPError, HFValidationError):  # an answer, or no name of a hub: transformers says more of it
        return ""
    except Exception as error:  # unlike kinds in unlike releases of huggingface_hub; also if it is told to be offline
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""


def _why(source: object, error: Exception) -> str:
    """The reason why transformers found nothing. A missing path is reported as such, not as an invalid name of the hub."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(source)) and not Path(str(source)).is_dir():
        return "there is no such folder"
    if not Path(str(source)).is_dir() and "/" in str(source) and (silence := _silence_of_hub(str(source))):
        return f"the hub does not answer ({silence}), and this machine has no copy"
    first = str(error).splitlines()[0].split(" Should contain one of")[0]  # several hundred names follow
    return first.rstrip(".")
