"""Writes the bundled model as a model of transformers: Apertus has the same parts in the same order.

It has RMSNorm before attention and MLP, QK-norm before rotary positions by halves, an MLP of two matrices, and no biases. Its
activation is a setting; ours is GELU by tanh. No architecture of transformers has these parts and learned positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from thinwire.app.trainer.huggingface import outline, save_model
from thinwire.app.trainer.model import EPS, MLP_FACTOR, ROTARY_BASE, Transformer
from thinwire.app.trainer.tokens import Bytes, Tokenizer
from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import ApertusConfig

_RENAMED = {
    "attention_norm.scale": "attention_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.scale": "feedforward_layernorm.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def apertus_config(model: Transformer, tokenizer: Tokenizer) -> ApertusConfig:
    """The configuration of `model` for transformers. Raises `ConfigurationError` for learned positions, and if transformers is missing."""
    shape = model.architecture
    if shape.positions != "rotary":
        raise ConfigurationError(
            f"positions={shape.positions!r} with --to hf: transformers has no such model; --to safetensors writes it for `thinwire train "
            "--model`, or train with --positions rotary."
        )
    try:
        from transformers import ApertusConfig
    except ImportError as error:
        raise ConfigurationError(
            "--to hf: the package transformers is needed, with its Apertus; pip install -U transformers."
        ) from error
    return ApertusConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=MLP_FACTOR * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=shape.context,
        rms_norm_eps=EPS,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        eos_token_id=tokenizer.end,
        bos_token_id=None,
        pad_token_id=None,
    )


def save_as_apertus(folder: Path, config: ApertusConfig, model: Transformer, tokenizer: Tokenizer) -> None:
    """Write the files for `AutoModelForCausalLM.from_pretrained(folder)`."""
    weights = {f"model.{name}": value for name, value in _weights(model).items()}
    save_model(folder, outline(config), weights, tokenizer.fingerprint)
    if isinstance(tokenizer, Bytes):
        _save_bytes(folder)


def _weights(model: Transformer) -> dict[str, Tensor]:
    """The weights under Apertus' names, with separate q, k and v."""
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name in _OUTSIDE:
            weights[_OUTSIDE[name]] = value
            continue
        _, number, part = name.split(".", 2)
        layer = f"model.layers.{number}"
        if part == "attention.qkv.weight":
            weights |= {f"{layer}.self_attn.{kind}_proj.weight": one for kind, one in zip("qkv", value.chunk(3))}
        elif part == "attention.qk_scale":
            weights |= {f"{layer}.self_attn.{kind}_norm.weight": one for kind, one in zip("qk", value.chunk(2))}
        else:
            weights[f"{layer}.{_RENAMED[part]}"] = value
    return weights


def _save_bytes(folder: Path) -> None:
    """Write a tokenizer whose tokens are the bytes, for `AutoTokenizer.from_pretrained(folder)`."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # the alphabet of byte-level tokenizers: printable bytes are themselves, the others are code points from 256 on
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    alphabet = {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(unseen)}
    fast = Fast(models.BPE(vocab=alphabet, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(str(folder))
