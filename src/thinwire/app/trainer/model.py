"""A decoder-only transformer in the paper's shape, from half a million to four billion parameters.

    model = Transformer(SIZES["tiny"], seed=0)
    logits, loss = model(tokens_BT, targets_BT)

Pre-norm (RMSNorm), QK-norm, z-loss, a GELU MLP four times as wide as the model, no biases: the Chinchilla
architecture as Streaming DiLoCo trains it (arXiv 2501.18512, appendix). What the paper leaves open is chosen
here: rotary positions, the norms' eps, the initialisation.

Shapes: B batch, T positions, D width, H heads, K width of a head (D = H·K), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.errors import ConfigurationError, ModelError

EPS = 1e-6  # in RMSNorm: small beside any activation, large beside fp32 round-off
ROTARY_BASE = 10_000.0
MLP_FACTOR = 4


@dataclass(frozen=True)
class Architecture:
    """The shape of a `Transformer`; it is its own configuration.

    Args:
        layers: number of blocks.
        width: number D of features, a multiple of `heads`.
        heads: number H of heads; rotary positions need an even width per head.
        vocabulary: number V of tokens; the data's tokenizer decides: `dataclasses.replace(SIZES["35m"], vocabulary=256)`.
        context: tokens of the longest sequence that the model takes.
        positions: "rotary" (no parameters) or "learned" (context · D parameters).
        tied: whether the output head is the embedding.
        z_loss: factor of mean(logsumexp(logits)²) in the training loss, which keeps the logits from drifting.

    Raises:
        ConfigurationError: a number is out of range, or width and heads do not fit.

    >>> Architecture(layers=2, width=64, heads=2).parameters()
    131520
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 256
    context: int = 1024
    positions: Literal["rotary", "learned"] = "rotary"
    tied: bool = False
    z_loss: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)}: at least 1 is needed. Give a positive whole number."
                )
        if self.width % self.heads:
            raise ConfigurationError(
                f"width={self.width} with heads={self.heads}: all heads need one width, a whole number. "
                f"Take a width that is a multiple of {self.heads}."
            )
        if self.positions not in ("rotary", "learned"):
            raise ConfigurationError(
                f"positions={self.positions!r}: 'rotary' or 'learned' is needed. Choose one of the two."
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ConfigurationError(
                f"rotary positions with {self.head_width} numbers per head: they turn pairs, so an even "
                f"number is needed. Change width or heads, or take positions='learned'."
            )
        if not 0.0 <= self.z_loss < math.inf:
            raise ConfigurationError(
                f"z_loss={self.z_loss}: a finite weight ≥ 0 is needed; 1e-4 is the paper's, 0 turns it off."
            )

    @property
    def head_width(self) -> int:
        """K = D / H."""
        return self.width // self.heads

    def parameters(self) -> int:
        """The exact number of parameters, in closed form.

        V·D (embedding) + V·D (head, unless tied) + context·D (learned positions) + D (last norm)
        + layers · (4·D² attention + 8·D² MLP + 2·D norms + 2·K QK-norm)
        """
        tables = self.vocabulary * (1 if self.tied else 2)
        tables += self.context if self.positions == "learned" else 0
        block = (4 + 2 * MLP_FACTOR) * self.width**2 + 2 * self.width + 2 * self.head_width
        return (tables + 1) * self.width + self.layers * block

    def flops_per_token(self, sequence: int | None = None) -> int:
        """Floating-point operations to train on one token: 6·N + 12·layers·D·T.

        N are the parameters that multiply (a table that is only looked up, the embedding of an untied model
        or learned positions, does not). The second term is attention's QKᵀ and AV, 2·2·T·D forward and twice
        that backward, without discount for the causal half: the convention of PaLM (arXiv 2204.02311,
        appendix B). T is `sequence`, by default the whole context. Recomputation is not counted.
        """
        looked_up = 0 if self.tied else self.vocabulary
        looked_up += self.context if self.positions == "learned" else 0
        multiplied = self.parameters() - looked_up * self.width
        return 6 * multiplied + 12 * self.layers * self.width * (sequence or self.context)


PAPERS_VOCABULARY = 32_000  # tokens


def _paper(layers: int, heads: int) -> Architecture:
    """A row of the paper's table of architectures: 64 numbers per head, vocabulary 32,000, sequence 2,048."""
    return Architecture(layers, 64 * heads, heads, vocabulary=PAPERS_VOCABULARY, context=2048)


def text_of_size(name: str, parameters: int) -> str:
    """What a size's name means, if the model has fewer parameters than its name says: it has another vocabulary than the paper's."""
    shape = SIZES.get(name)
    if shape is None or shape.vocabulary != PAPERS_VOCABULARY or parameters > 0.9 * shape.parameters():
        return ""
    return f"{name} is the paper's name for these layers: {shape.parameters() / 1e6:,.1f} M with its {shape.vocabulary:,} tokens"


SIZES: dict[str, Architecture] = {
    "nano": Architecture(layers=3, width=64, heads=2),  # many runs in an hour on a laptop
    "tiny": Architecture(layers=4, width=96, heads=3),  # learns to spell in two minutes on one CPU core
    "2m": Architecture(layers=6, width=160, heads=5),  # between tiny and mini
    "mini": Architecture(layers=9, width=256, heads=4),  # the size in benchmarks
    "35m": _paper(layers=6, heads=8),
    "100m": _paper(layers=9, heads=12),
    "200m": _paper(layers=12, heads=16),
    "300m": _paper(layers=15, heads=20),
    "500m": _paper(layers=18, heads=24),
    "1b": _paper(layers=24, heads=32),
    "4b": _paper(layers=36, heads=48),
}


class Output(NamedTuple):
    """What a language model returns: logits_BTV, and the loss (nats per token) where targets were given."""

    logits: Tensor
    loss: Tensor | None


class LanguageModel(Protocol):
    """What the trainer asks of a model: `Transformer` and `huggingface.HuggingFace` are two."""

    vocabulary: int
    context: int
    training: bool

    def __call__(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output: ...
    def train(self, mode: bool = True) -> Any: ...
    def parameters(self, recurse: bool = True) -> Any: ...


def token_loss(logits_BTV: Tensor, targets_BT: Tensor, z_loss: float = 0.0) -> Tensor:
    """mean(z − logit[target]) + z_loss · mean(z²) with z = logsumexp(logits), in fp32; nats per token.

    The first term is the cross entropy; both share one pass over the logits. `targets` are the next tokens
    already: nothing is shifted here.
    """
    logits_BTV = logits_BTV.float()
    z_BT = logits_BTV.logsumexp(-1)
    loss = (z_BT - logits_BTV.gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1)).mean()
    return loss + z_loss * z_BT.square().mean() if z_loss else loss


class Linear(nn.Linear):
    """A matrix without bias. Its values come from `Transformer.initialise`, never from the global generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """A table of rows. Its values come from `Transformer.initialise`, never from the global generator."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """x / rms(x) · scale over the last dimension, computed in fp32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape, self.scale.float(), EPS).to(x.dtype)


class Attention(nn.Module):
    """Causal attention whose queries and keys are normed per head (QK-norm, arXiv 2302.05442) and rotated."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width, self.head_width = architecture.width, architecture.head_width
        self.rotary = architecture.positions == "rotary"
        self.context = architecture.context
        self.qkv = Linear(width, 3 * width)
        self.qk_scale = nn.Parameter(torch.ones(2 * architecture.head_width))  # flat: no matrix to decay
        self.out = Linear(width, width)
        if self.rotary:
            # Here and not passed in: FSDP2 would round a block's arguments to bf16, positions included.
            empty = torch.empty(self.context, 1, 1, architecture.head_width // 2)
            self.register_buffer("cos_TK", empty, persistent=False)
            self.register_buffer("sin_TK", empty.clone(), persistent=False)

    def fill_tables(self) -> None:
        """cos and sin of t · base^(−2k/K): rotary positions (Su et al., arXiv 2104.09864), by halves."""
        half = self.cos_TK.shape[-1]
        inverse = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angle_TK = (torch.arange(self.context, dtype=torch.float64)[:, None] * inverse)[:, None, None]
        self.cos_TK.copy_(angle_TK.cos())
        self.sin_TK.copy_(angle_TK.sin())

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, -1, self.head_width)  # of tensor-parallel ranks each has some of the heads
        qk, v_BTHK = qkv[:, :, :2], qkv[:, :, 2]
        qk = F.rms_norm(qk.float(), qk.shape[-1:], None, EPS) * self.qk_scale.float().view(2, 1, -1)
        if self.rotary:
            cos, sin = self.cos_TK[:T], self.sin_TK[:T]
            a, b = qk.chunk(2, -1)
            qk = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        q_BTHK, k_BTHK = qk.to(v_BTHK.dtype).unbind(2)
        y_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), is_causal=True
        )
        out: Tensor = self.out(y_BHTK.transpose(1, 2).reshape(B, T, -1))
        return out


class MLP(nn.Module):
    """down(gelu(up(x))), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, MLP_FACTOR * width)
        self.down = Linear(MLP_FACTOR * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): what FSDP2 shards and a fragment counts."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(architecture.width)
        self.attention = Attention(architecture)
        self.mlp_norm = RMSNorm(architecture.width)
        self.mlp = MLP(architecture.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class Transformer(nn.Module):
    """tokens_BT → `Output`: logits_BTV and, with targets_BT, the loss in nats per token.

    In training mode the loss is cross entropy + z-loss, in evaluation mode pure cross entropy. The same seed
    gives the same parameters, bit for bit, on every machine (see `initialise`). It works under bf16 autocast
    (norms, softmax statistics and loss stay in fp32), `torch.compile`, and FSDP2's `fully_shard` on each of
    `blocks` and then on the whole. A sequence longer than the context is refused with `ConfigurationError`.

    Args:
        architecture: the shape.
        seed: of the parameters; an integer number.

    >>> model = Transformer(Architecture(layers=2, width=64, heads=2), seed=0)
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> model(tokens, tokens).logits.shape
    torch.Size([1, 8, 256])
    """

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        self.architecture = architecture
        self.vocabulary, self.context = architecture.vocabulary, architecture.context
        self.embedding = Embedding(architecture.vocabulary, architecture.width)
        if architecture.positions == "learned":
            self.positions = Embedding(architecture.context, architecture.width)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.layers))
        self.norm = RMSNorm(architecture.width)
        self.head = Linear(architecture.width, architecture.vocabulary)
        if architecture.tied:
            self.head.weight = self.embedding.weight
        if not self.norm.scale.is_meta:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter: standard deviation 1/√(fan in), residual outputs 1/√(2·layers) of it.

        A table that is only looked up has a fan in of one: the residual stream begins at unit variance. (Measured on
        "tiny", 300 steps: loss 1.95; with 1/√D 2.03, with 0.02 2.09.) A tied table is also the head: 1/√D.

        Uniform and not normal, with the same variance: a uniform float is a shift and a product, rounded alike
        by every processor, where a logarithm is not. So replicas that start from one seed start from the same
        bits without sending anything. A model built under `torch.device("meta")` calls this after `to_empty`.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual = 1.0 / math.sqrt(2 * self.architecture.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("scale"):
                parameter.fill_(1.0)
                continue
            looked_up = name == "embedding.weight" and not self.architecture.tied
            width = math.sqrt(12 / (1 if looked_up else parameter.shape[-1]))  # uniform: deviation · √12
            if name.endswith(("out.weight", "down.weight")):
                width *= residual
            parameter.copy_(torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(width))
        for module in self.modules():
            if isinstance(module, Attention) and module.rotary:
                module.fill_tables()

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Output:
        length = tokens_BT.shape[1]
        if length > self.context:
            raise ConfigurationError(
                f"a sequence of {length} tokens: this model takes at most {self.context}. "
                f"Shorten the sequence or make the model with Architecture(context={length})."
            )
        x_BTD = self.embedding(tokens_BT)
        if self.architecture.positions == "learned":
            x_BTD = x_BTD + self.positions.weight[:length]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return Output(logits_BTV, None)
        z_loss = self.architecture.z_loss if self.training else 0.0
        return Output(logits_BTV, token_loss(logits_BTV, targets_BT, z_loss))


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Sequence[int], count: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Generate `count` tokens after `prompt`, drawn with softmax(logits / temperature); temperature 0 takes the most probable one.

    The whole context is read again for every token: suited to look at a model, not to serve one. Raises `ModelError` for a model whose
    scores are not finite.
    """
    if not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise ConfigurationError(f"temperature={temperature}: a finite temperature, 0 or from 1e-6 on, is needed.")
    if not prompt:
        raise ConfigurationError("an empty prompt: at least one token is needed. Begin with the tokenizer's `end`.")
    device = next(iter(model.parameters())).device
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens, was_training = list(prompt), model.training
    model.train(False)
    for _ in range(count):
        logits_V = model(torch.tensor([tokens[-model.context :]], device=device)).logits[0, -1].float().cpu()
        if not (logits_V < math.inf).all():
            raise ModelError(
                "the model's scores of the next token are NaN or infinite, as after a training that diverged; take another checkpoint or run."
            )
        if temperature:
            choice = torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
        else:
            choice = logits_V.argmax()
        tokens.append(int(choice))
    model.train(was_training)
    return tokens[len(prompt) :]
