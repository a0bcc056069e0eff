"""Any Hugging Face causal language model, behind the same call as our own.

    model = hugging_face("llama", vocabulary=256, hidden_size=128, num_hidden_layers=4)   # fresh, no hub
    model = hugging_face("checkpoints/my-model")                                          # a local folder
    logits, loss = model(tokens_BT, targets_BT)

Needs the extra: pip install thinwire[hf].
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigurationError, ModelError
from thinwire.lm.model import Output, token_loss

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNBOUNDED = 1 << 20  # the context of a model that names none (a recurrent one)
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")  # a folder with none of these is a config alone


class HuggingFace(nn.Module):
    """A causal language model of transformers as tokens_BT, targets_BT → `Output`; made by `hugging_face`.

    Our targets are the next tokens already, so the model's own `labels`, which it would shift once more, are not
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
                f"a sequence of {tokens_BT.shape[1]} tokens · this model takes at most {self.context} · "
                "shorten the sequence"
            )
        logits_BTV = self.model(input_ids=tokens_BT, use_cache=False).logits
        return Output(logits_BTV, None if targets_BT is None else token_loss(logits_BTV, targets_BT))


def hugging_face(
    source: str | Path | PretrainedConfig, vocabulary: int | None = None, seed: int = 0, **options: Any
) -> HuggingFace:
    """The model that `source` names.

    source       a transformers configuration, or the name of a kind of model ("llama", "gpt2"): fresh parameters;
                 a folder: its parameters, or fresh ones where it holds only config.json;
                 a name with a slash: fetched from the hub
    vocabulary   tokens the data's tokenizer has: checked, and taken for a kind that `options` gives no vocab_size
    seed         of fresh parameters. transformers draws normal numbers, whose last bit may differ between
                 processors: replicas on unlike machines start from one saved folder.
    options      of the configuration, for a kind of model

    Errors: ConfigurationError without transformers, for an unknown name, or a vocabulary that is too small;
    ModelError for a folder that cannot be loaded.
    """
    transformers = _transformers(source)
    config, stored = _configuration(transformers, source, vocabulary, options)
    if vocabulary is not None and config.vocab_size < vocabulary:
        raise ConfigurationError(
            f"a model of {config.vocab_size} tokens and a tokenizer of {vocabulary} · every token needs a row · "
            "take the model's own tokenizer, or a model with a larger vocabulary"
        )
    kind = transformers.AutoModelForCausalLM
    try:
        if stored:
            return HuggingFace(kind.from_pretrained(str(source)).float(), config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return HuggingFace(kind.from_config(config).float(), config)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{source}: {error} · a causal language model is needed, and sound weights in a folder · "
            "choose another, or save it anew with save_pretrained"
        ) from error


def outline(source: str | Path, vocabulary: int | None = None, device: torch.device | None = None) -> HuggingFace:
    """The model that `source` names without values: its configuration alone is read (from the hub it is fetched), never weights.

    On the device "meta", or on the one that is given (for torch's fake tensors). Errors: as `hugging_face`.
    """
    transformers = _transformers(source)
    config, _ = _configuration(transformers, source, vocabulary, {})
    if vocabulary is not None and config.vocab_size < vocabulary:
        raise ConfigurationError(
            f"a model of {config.vocab_size} tokens and a tokenizer of {vocabulary} · every token needs a row · "
            "take the model's own tokenizer, or a model with a larger vocabulary"
        )
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", torch.float32)  # as they are trained
    try:
        with device or torch.device("meta"):
            return HuggingFace(transformers.AutoModelForCausalLM.from_config(config), config)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{source}: {str(error).splitlines()[0]} · a causal language model is needed · choose another"
        ) from error


def _transformers(source: object) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            f"a Hugging Face model ({source}) · the package transformers is needed · pip install thinwire[hf]"
        ) from error
    return transformers


def _configuration(
    transformers: Any, source: str | Path | PretrainedConfig, vocabulary: int | None, options: dict[str, Any]
) -> tuple[Any, bool]:
    """The configuration of `source`, and whether weights are stored with it."""
    given = isinstance(source, transformers.PretrainedConfig)
    folder = Path() if given else Path(str(source))
    fresh_kind = not given and not folder.is_dir() and "/" not in str(source)
    if options and not fresh_kind:
        raise ConfigurationError(
            f"options {sorted(options)} for {source} · only a kind of model such as 'llama' takes options · "
            "change its configuration instead"
        )
    if given:
        return source, False
    try:
        if fresh_kind:
            known = {} if vocabulary is None else {"vocab_size": vocabulary}
            return transformers.AutoConfig.for_model(str(source), **(known | options)), False
        config = transformers.AutoConfig.from_pretrained(str(source), local_files_only=folder.is_dir())
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0].split(" Should contain one of")[0]  # several hundred names follow
        raise ConfigurationError(
            f"model {str(source)!r}: {why} · a folder with config.json, a hub name or a kind of model such as 'llama' is "
            "needed · check the name"
        ) from error
    return config, not folder.is_dir() or any(next(folder.glob(name), None) for name in WEIGHTS)
