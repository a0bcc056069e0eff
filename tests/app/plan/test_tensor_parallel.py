"""Tensor-parallel plans from names and shapes: the rules of five families by hand, and split models against whole ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from site_ranks import Collectives, run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.trainer.model import Architecture, Transformer
from thinwire.comm import Link
from thinwire.lab.plan.split import layers_of, split
from thinwire.lab.plan.tensor_parallel import Layer, TensorParallel, derive, waiting

if TYPE_CHECKING:
    import transformers

pytestmark = [
    pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed"),
    pytest.mark.usefixtures("late_imports"),
]

TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
TOKENS[0, :4] = torch.tensor([1, 17, 33, 49])  # OPT's padding token, and the tokens at its row on other ranks


def gpt2(vocabulary: int = 64) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(kv_heads: int = 4) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=kv_heads,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def own() -> nn.Module:
    return Transformer(Architecture(layers=2, width=32, heads=4, vocabulary=64))


FAMILIES: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "opt": opt, "own": own}
BY_HAND = {
    "gpt2": """
        transformer.wte rows
        transformer.h.*.attn.c_attn outputs
        transformer.h.*.attn.c_proj inputs
        transformer.h.*.mlp.c_fc outputs
        transformer.h.*.mlp.c_proj inputs
        lm_head gathered""",
    "llama": """
        model.embed_tokens rows
        model.layers.*.self_attn.q_proj outputs
        model.layers.*.self_attn.k_proj outputs
        model.layers.*.self_attn.v_proj outputs
        model.layers.*.self_attn.o_proj inputs
        model.layers.*.mlp.gate_proj outputs
        model.layers.*.mlp.up_proj outputs
        model.layers.*.mlp.down_proj inputs
        lm_head gathered""",
    "t5": """
        shared rows
        encoder.embed_tokens rows
        encoder.block.*.layer.*.SelfAttention.q outputs
        encoder.block.*.layer.*.SelfAttention.k outputs
        encoder.block.*.layer.*.SelfAttention.v outputs
        encoder.block.*.layer.*.SelfAttention.o inputs
        encoder.block.*.layer.*.SelfAttention.relative_attention_bias heads
        encoder.block.*.layer.*.DenseReluDense.wi_0 outputs
        encoder.block.*.layer.*.DenseReluDense.wi_1 outputs
        encoder.block.*.layer.*.DenseReluDense.wo inputs
        decoder.embed_tokens rows
        decoder.block.*.layer.*.SelfAttention.q outputs
        decoder.block.*.layer.*.SelfAttention.k outputs
        decoder.block.*.layer.*.SelfAttention.v outputs
        decoder.block.*.layer.*.SelfAttention.o inputs
        decoder.block.*.layer.*.SelfAttention.relative_attention_bias heads
        decoder.block.*.layer.*.EncDecAttention.q outputs
        decoder.block.*.layer.*.EncDecAttention.k outputs
        decoder.block.*.layer.*.EncDecAttention.v outputs
        decoder.block.*.layer.*.EncDecAttention.o inputs
        decoder.block.*.layer.*.DenseReluDense.wi_0 outputs
        decoder.block.*.layer.*.DenseReluDense.wi_1 outputs
        decoder.block.*.layer.*.DenseReluDense.wo inputs
        lm_head gathered""",
    "opt": """
        model.decoder.embed_tokens rows
        model.decoder.layers.*.self_attn.k_proj outputs
        model.decoder.layers.*.self_attn.v_proj outputs
        model.decoder.layers.*.self_attn.q_proj outputs
        model.decoder.layers.*.self_attn.out_proj inputs
        model.decoder.layers.*.fc1 outputs
        model.decoder.layers.*.fc2 inputs
        lm_head gathered""",
    "own": """
        embedding rows
        blocks.*.attention.qk_scale summed
        blocks.*.attention.qkv outputs
        blocks.*.attention.out inputs
        blocks.*.mlp.up outputs
        blocks.*.mlp.down inputs
        head gathered""",
}


def splits_of(plan: TensorParallel) -> dict[str, str]:
    return {row.pattern: row.split for row in plan.rows if row.split != "whole"}


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.full_tensor() if isinstance(value, DTensor) else value


def outcome(model: nn.Module) -> Any:
    if isinstance(model, Transformer):
        return model(TOKENS, TOKENS)
    return model(input_ids=TOKENS, labels=TOKENS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_has_the_outputs_and_gradients_of_the_whole_model(family):
    """Logits and gradients to 1e-5 on 1, 2 and 4 ranks, the plan by hand, and two all-reduces per block and direction."""
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    for parameter in model.parameters():  # biases and norms too
        parameter.data += 0.1 * torch.randn_like(parameter)
    alone = copy.deepcopy(model)
    expected = outcome(alone)
    expected.loss.backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run(rank: int, mesh: Any) -> Any:
        mine = copy.deepcopy(model)
        plan = split(mine, mesh)
        with Collectives() as forward:
            found = outcome(mine)
        with Collectives() as backward:
            found.loss.backward()
        gradients = {name: whole(p.grad) for name, p in mine.named_parameters()}
        kept = sum(local(p).numel() for p in mine.parameters())
        exported = {name: whole(value.detach()) for name, value in mine.state_dict().items()}
        return plan, found.logits, gradients, kept, exported, forward.called + backward.called

    for ranks in (1, 2, 4):
        for plan, logits, gradients, kept, exported, called in run_ranks(ranks, run):
            assert splits_of(plan) == dict(line.split() for line in BY_HAND[family].strip().splitlines())
            assert kept == plan.kept and plan.numel == sum(p.numel() for p in alone.parameters())
            torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-5, atol=1e-5)
            assert not gradients
            assert exported.keys() == state.keys() and all(torch.equal(exported[name], state[name]) for name in state)
            counts = Counter(called)
            if ranks > 1 and family in ("gpt2", "llama", "opt"):
                # Two blocks, the table in the forward and the head in the backward pass.
                assert len(plan.all_reduces) == 2 * (2 * 2) + 2
                assert counts == {"all_reduce": 10, "all_gather_into_tensor": 1}


def test_indivisible_layers_stay_whole_in_every_block():
    def why(plan: TensorParallel, end: str) -> str:
        return next(row.why for row in plan.rows if row.pattern.endswith(end))

    plan = derive(layers_of(gpt2(63)), 4)
    assert splits_of(plan).keys() == {line.split()[0] for line in BY_HAND["gpt2"].split("\n") if ".h." in line}
    assert why(plan, "wte") == "63 tokens are not divisible by 4 ranks"
    plan = derive(layers_of(llama(kv_heads=2)), 4)
    assert "k_proj: 2 heads are not divisible by 4 ranks" in why(plan, "q_proj")
    assert not any("self_attn" in name for name in splits_of(plan)) and "model.layers.*.mlp.up_proj" in splits_of(plan)
    shapes = [
        (f"h.{block}.{name}", shape)
        for block, width in ((0, 8), (1, 6))
        for name, shape in (("a", (4, width)), ("b", (width, 4)))
    ]
    odd = [Layer(name, "linear", shape) for name, shape in shapes]
    assert not splits_of(derive(odd, 4)) and "6 inputs of h.1.b" in derive(odd, 4).rows[0].why
    assert set(splits_of(derive(odd, 2))) == {"h.*.a", "h.*.b"}
    with pytest.raises(tw.ConfigurationError, match="ranks=0: at least 1"):
        derive(odd, 0)


def test_ambiguous_layers_are_not_split():
    def pair(*layers: Layer) -> dict[str, str]:
        return splits_of(derive(layers, 2))

    up, down = Layer("m.linear_1", "linear", (8, 8)), Layer("m.linear_2", "linear", (8, 8))
    assert pair(up, down) == {"m.linear_1": "outputs", "m.linear_2": "inputs"}  # by order: "linear" contains no "in"
    assert pair(up) == {}
    assert pair(up, down, Layer("m.norm.weight", "other", (8,))) == {}
    widths = [Layer("m.dense_4h_to_h", "linear", (32, 8)), Layer("m.dense_h_to_4h", "linear", (8, 32))]
    assert pair(*widths) == {"m.dense_h_to_4h": "outputs", "m.dense_4h_to_h": "inputs"}
    assert pair(*widths, Layer("m.norm.weight", "other", (32,))) == {}
    fused = Layer("attn.query_key_value", "linear", (8, 24), head_width=4)
    out = Layer("attn.dense", "linear", (8, 8), head_width=4)
    assert pair(fused, out) == {} and pair(fused._replace(name="attn.qkv"), out) != {}
    assert pair(fused._replace(name="attn.qkv", head_width=0), out._replace(head_width=0)) == {}
    assert pair(fused._replace(name="attn.qkv"), out, Layer("attn.q_norm.weight", "other", (8,))) == {}


def test_waiting_is_the_number_of_all_reduces_times_their_time():
    plan = derive(layers_of(own()), 2)
    link = Link.parse("80mbit,10ms")
    found = waiting(plan, link, tokens=100, flops_per_second=1e9)
    assert found.waiting == pytest.approx(10 * 0.010 + 10 * 8 * 4 * 100 * 32 / 80e6)
    multiplied = plan.numel - 64 * 32
    assert found.work == pytest.approx(6 * multiplied * 100 / 1e9 / 2)
    alone = derive(layers_of(own()), 1)
    assert waiting(alone, link, 100, 1e9).waiting == 0.0
    tied = Transformer(replace(own().architecture, tied=True))  # type: ignore[arg-type]
    assert waiting(derive(layers_of(tied), 2), link, 100, 1e9).work == found.work


def test_the_command_prints_the_rule_of_each_parameter_and_refuses_a_thin_link(capsys):
    assert main(["plan", "tp", "tiny", "--ranks", "3", "--explain"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "blocks.*.attention.qkv" in said and "each of 3 fused parts by outputs, 1 of 3 heads a rank" in said
    assert main(["plan", "tp", "nano", "--ranks", "2"]) == 0
    assert "heads" not in capsys.readouterr().out
    assert main(["plan", "tp", "nano", "--ranks", "3"]) == 0  # nothing can be split: the reason needs no --explain
    assert "2 heads are not divisible by 3 ranks" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "tp", "1b", "--ranks", "4", "--link", "50mbit,30ms"]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "98 all-reduces" in refused and "of the time would be training" in refused and "predicted" in refused
    assert main(["plan", "tp", "1b", "--ranks", "4", "--link", "2000gbit,2us"]) == 0


@pytest.mark.parametrize("option", ["machine", "batch", "sequence"])
def test_what_only_counts_over_a_link_needs_one(option, capsys):
    assert main(["plan", "tp", "nano", f"--{option}", "4"]) == 2
    assert f"--{option} without --link" in capsys.readouterr().err
