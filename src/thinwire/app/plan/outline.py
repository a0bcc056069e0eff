"""What a plan needs to know of a model that is not Thinwire's, from its configuration; nothing else is downloaded.

Parameters are counted on a model without storage. The bytes that autograd saves in a forward pass are also counted without
storage (torch's fake tensors), for one and for two sequences. The count *differs* from the bytes on a CPU by 0 to 8 % in five
families that were tried, because a fake mask is always kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.app.jobs.own import OwnJob
from thinwire.app.trainer.huggingface import outline
from thinwire.app.trainer.model import Architecture
from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Outline:
    """Counts, operations and saved bytes of a model, like `lm.model.Architecture` for Thinwire's models.

    `looked_up` are parameters of tables that take no part in a multiplication; `saved_nbytes` is for one sequence of `sequence`
    tokens in fp32, and `more_nbytes` for each further one.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    numel: int
    looked_up: int
    sequence: int
    saved_nbytes: int
    more_nbytes: int

    def parameters(self) -> int:
        return self.numel

    def flops_per_token(self, sequence: int | None = None) -> int:
        """6·N + 12·layers·D·T, as for Thinwire's models. All experts of a mixture are counted, which is too many."""
        return 6 * (self.numel - self.looked_up) + 12 * self.layers * self.width * (sequence or self.sequence)


Shape = Architecture | Outline


def outline_of_job(job: OwnJob) -> Outline:
    """The outline of a job in a file: a sample counts as a sequence of one token, and its layers are not known. Builds the model and
    runs two steps of it."""
    model, cpu = job.make_model(), torch.device("cpu")
    one, two = (kept_by_autograd(model, lambda: job.trial(model, batch, cpu)) for batch in (1, 2))  # noqa: B023  # called at once
    numel = sum(parameter.numel() for parameter in model.parameters())
    more = max(0, two - one) if job.divisible else one
    return Outline(1, 0, 1, 0, numel, 0, sequence=1, saved_nbytes=one, more_nbytes=more)


def outline_of(source: str, vocabulary: int, sequence: int) -> Outline:
    """The outline of the Hugging Face model that `source` names, for sequences of `sequence` tokens.

    Raises `ConfigurationError` without transformers, for an unknown name, and if the configuration lacks a value that is needed.
    """
    model = outline(source, vocabulary)
    if sequence > model.context:
        raise ConfigurationError(f"sequence={sequence}: hf:{source} takes at most {model.context} tokens.")
    config = getattr(model.model, "config").get_text_config()  # noqa: B009  # its type is not known here
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    values = [getattr(config, name, None) for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if not isinstance(value, int) or value < 1]
    if missing:
        raise ConfigurationError(
            f"model 'hf:{source}': its configuration lacks {', '.join(missing)}, which a plan needs. Take another model, or "
            "one of Thinwire's own sizes."
        )
    numel = sum(parameter.numel() for parameter in model.parameters())
    one, two = _saved_nbytes(source, vocabulary, sequence)
    layers, width, heads = (int(value) for value in values if value is not None)
    return Outline(
        layers, width, heads, model.vocabulary, numel, _looked_up(model), sequence, saved_nbytes=one, more_nbytes=two - one
    )  # fmt: skip


def _looked_up(model: nn.Module) -> int:
    """Parameters of embeddings that are not also the output head."""
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(numel for weight, numel in tables.items() if weight not in heads)


def _saved_nbytes(source: str, vocabulary: int, sequence: int) -> tuple[int, int]:
    """Bytes that autograd saves for one sequence and for two, in fp32."""
    with FakeTensorMode():
        model = outline(source, vocabulary, device=torch.device("cpu"))
        one, two = (torch.zeros(batch, sequence, dtype=torch.long) for batch in (1, 2))
        try:
            return kept_by_autograd(model, lambda: model(one, one)), kept_by_autograd(model, lambda: model(two, two))
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise ConfigurationError(
                f"model 'hf:{source}': its forward pass cannot be followed without data ({cause}). Measure it: `thinwire probe --model "
                f"hf:{source}`, or plan with the nearest of Thinwire's own sizes."
            ) from error


def kept_by_autograd(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of one `forward` pass of `model`: each storage once, without parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # kept alive, so that no two storages have the same address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
