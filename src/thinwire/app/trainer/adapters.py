"""LoRA adapters on a language model, by peft: few trained and exchanged parameters beside many frozen ones.

    model = attach(Transformer(SIZES["tiny"]), rank=8, seed=0)

Every linear layer of the model's blocks computes W·x + B·(A·x) (Hu et al., arXiv 2106.09685; α = rank, so that the factor of B·A is 1). A is
random and B is zero, so at first the model does not change. All other parameters are frozen, and frozen parameters are not exchanged.

Needs the extra: pip install thinwire[lora].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.app.trainer.huggingface import HuggingFace
from thinwire.errors import ConfigurationError, ModelError
from thinwire.files import save_file

_FACTOR = re.compile(r"\.lora_([AB])\.default\.weight$")


def attach(model: nn.Module, rank: int, seed: int) -> nn.Module:
    """`model` with adapters of `rank` on the linear layers of its blocks, in place; all other parameters are frozen.

    A is uniform in ±1/√(inputs) and depends on `seed` only: the same bits on every replica. Raises `ConfigurationError` without
    peft, `ModelError` if the model has no such layers.
    """
    peft, base = _peft(rank), _base(model)
    inside = {id(layer) for block in model.blocks for layer in block.modules()}  # type: ignore[union-attr]
    names = [name for name, layer in base.named_modules() if id(layer) in inside and _adaptable(layer)]
    if not names:
        raise ModelError(
            f"{type(model).__name__} has no linear layer in its blocks; LoRA needs at least one. Train the whole model instead."
        )
    transposed = not any(isinstance(base.get_submodule(name), nn.Linear) for name in names)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names, fan_in_fan_out=transposed)
    peft.inject_adapter_in_model(config, base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(found := bool(_FACTOR.search(name)))
            if found and not parameter.is_meta and ".lora_A." in name:
                bound = parameter.shape[1] ** -0.5
                parameter.copy_(torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(2 * bound))
    return model


def adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' part of the model's `weights` (a state dict), under the names that peft gives them in a file."""
    prefix = "model." if isinstance(model, HuggingFace) else ""
    return {
        "base_model.model." + _FACTOR.sub(r".lora_\1.weight", name.removeprefix(prefix)): value.contiguous()
        for name, value in weights.items()
        if _FACTOR.search(name)
    }


def merge_adapters(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The `weights` of the model without adapters that computes the same: W + B·A instead of W, under the model's own names."""
    plain: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".lora_" in name:
            continue
        whole = name.replace(".base_layer.", ".")
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            module: Any = model.get_submodule(layer)
            added = weights[f"{layer}.lora_B.default.weight"] @ weights[f"{layer}.lora_A.default.weight"]
            added = added.T if module.fan_in_fan_out else added
            value = value + module.scaling["default"] * added.to(value.dtype)
        plain[whole] = value
    return plain


def save_adapters(folder: Path, model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Write the files for `peft.PeftModel.from_pretrained(base, folder)`; `source` is the base model's name."""
    config: Any = _base(model).peft_config["default"]  # type: ignore[index]
    config.base_model_name_or_path, config.inference_mode = source, True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(adapters(model, weights), folder / "adapter_model.safetensors", {"format": "pt"})


def _base(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, HuggingFace) else model


def _adaptable(layer: nn.Module) -> bool:
    """Whether `layer` is a linear layer: torch's, or GPT-2's transposed one."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _peft(rank: int) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError(
            f"lora={rank}: the package peft is needed for adapters; pip install 'thinwire[lora]'."
        ) from error
    return peft
