"""Hugging Face models behind Thinwire's interface of models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from thinwire.app.trainer.huggingface import HuggingFace, hugging_face
from thinwire.errors import ConfigurationError

TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}


@pytest.fixture(params=sorted(TINY))
def model(request: pytest.FixtureRequest) -> HuggingFace:
    pytest.importorskip("transformers", reason="the extra thinwire[hf] is not installed")
    return hugging_face(request.param, vocabulary=256, **TINY[request.param])


def test_a_missing_transformers_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[hf\]'"):
        hugging_face("llama")


def test_loss_is_the_cross_entropy_of_the_given_targets_unshifted(model: HuggingFace) -> None:
    tokens = torch.randint(0, 256, (2, 17))
    logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    assert logits.shape == (2, 16, 256)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    # so it equals the loss that transformers computes from unshifted labels
    theirs = model.model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, theirs)


def test_a_hugging_face_model_learns(model: HuggingFace) -> None:
    tokens = torch.arange(34).remainder(7).view(2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


def test_a_hugging_face_model_describes_its_shape(model: HuggingFace) -> None:
    assert (model.vocabulary, model.context, len(model.blocks)) == (256, 64, 3)
    with pytest.raises(ConfigurationError, match="takes at most 64"):
        model(torch.zeros(1, 65, dtype=torch.long))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    pytest.importorskip("transformers", reason="the extra thinwire[hf] is not installed")
    before = torch.get_rng_state()
    first, again, other = (hugging_face("llama", 256, seed, **TINY["llama"]) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))


def test_a_folder_without_weights_gives_fresh_ones(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra thinwire[hf] is not installed")
    made = hugging_face("llama", 256, seed=5, **TINY["llama"])
    made.model.save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    made.model.config.save_pretrained(tmp_path / "bare")  # type: ignore[union-attr, operator]
    loaded, fresh = hugging_face(tmp_path / "whole", seed=6), hugging_face(str(tmp_path / "bare"), seed=6)
    assert all(module.training for one in (loaded, fresh) for module in one.modules())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), loaded.parameters()))
    assert not all(torch.equal(a, b) for a, b in zip(made.parameters(), fresh.parameters()))


def test_invalid_model_folders_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra thinwire[hf] is not installed")
    config = transformers.LlamaConfig(vocab_size=100, **TINY["llama"])
    with pytest.raises(ConfigurationError, match="100 tokens and a tokenizer of 256"):
        hugging_face(config, vocabulary=256)
    with pytest.raises(ConfigurationError, match="only a kind of model"):
        hugging_face(config, hidden_size=64)
    with pytest.raises(ConfigurationError, match="no-such-kind"):
        hugging_face("no-such-kind")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        hugging_face(tmp_path)
