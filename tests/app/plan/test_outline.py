"""Hugging Face models in a plan, counted from their configuration without weights. Most tests need transformers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import profiled
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire import streaming_diloco
from thinwire.app.cli import main
from thinwire.app.plan.compute import shape_of
from thinwire.app.plan.memory import activation_nbytes, replica_memory, saved_nbytes
from thinwire.app.plan.outline import Outline, kept_by_autograd, outline_of
from thinwire.app.trainer.huggingface import HuggingFace, hugging_face
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError

TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 160},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
}
PRESENT = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not PRESENT, reason="the extra thinwire[hf] is not installed")


@pytest.fixture(params=sorted(TINY))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A saved model whose weights cannot be read."""
    hugging_face(request.param, vocabulary=1000, **TINY[request.param]).model.save_pretrained(tmp_path)  # type: ignore[operator]
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    return str(tmp_path)


def real(folder: str) -> HuggingFace:
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    return hugging_face(kind, vocabulary=1000, **TINY[kind])


@pytest.mark.parametrize("name", ["nano", "tiny"])
def test_saved_bytes_counted_on_fake_tensors_are_close_to_the_exact_form(name: str) -> None:
    """Our own model has both: the count is at least the exact number, and at most 6 % more."""
    with FakeTensorMode():
        model, tokens = Transformer(SIZES[name]), torch.zeros(4, 128, dtype=torch.long)
        counted = kept_by_autograd(model, lambda: model(tokens, tokens))
    assert 1 <= counted / saved_nbytes(SIZES[name], 4 * 128) < 1.06


def test_an_outline_predicts_memory_and_flops() -> None:
    shape = Outline(
        layers=3, width=64, heads=4, vocabulary=1000, numel=300_000, looked_up=64_000, sequence=128,
        saved_nbytes=5_000_000, more_nbytes=4_000_000,
    )  # fmt: skip
    assert saved_nbytes(shape, 128) == 5_000_000 and saved_nbytes(shape, 4 * 128) == 17_000_000
    assert saved_nbytes(shape, 4 * 128, bf16=True) == 17_000_000 * 3 // 4 + 600_000
    assert shape.flops_per_token() == 6 * 236_000 + 12 * 3 * 64 * 128
    one, two = (
        replica_memory(shape, streaming_diloco(), [300_000], 2, batch=batch, sequence=128).peak() for batch in (8, 16)
    )
    assert two - one == 8 * 4_000_000 + 8 * 128 * 16 * 1000


@pytest.mark.skipif(PRESENT, reason="transformers is installed")
def test_a_missing_extra_is_an_error_with_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text('memory = "8GB"\nflops_per_second = 1e11\n')
    assert main(["plan", "50mbit", str(machine), "--model", "hf:gpt2"]) == 2
    assert "pip install thinwire[hf]" in capsys.readouterr().err


@needs_transformers
def test_an_outline_has_the_parameters_and_layers_of_the_model(folder: str) -> None:
    shape = shape_of(Run.of(model=f"hf:{folder}", sequence=32))
    parameters = dict(real(folder).named_parameters())
    assert isinstance(shape, Outline)
    assert shape.parameters() == sum(p.numel() for p in parameters.values())
    assert (shape.layers, shape.width, shape.heads, shape.vocabulary) == (3, 64, 4, 1000)
    tables = [p.numel() for name, p in parameters.items() if "embed_tokens" in name or "wpe" in name]
    assert shape.looked_up == sum(tables)  # gpt2's token table is also its head; its position table is not


@needs_transformers
@pytest.mark.parametrize("kind", sorted(TINY))
def test_the_peak_of_a_step_is_predicted_within_ten_percent(
    kind: str, tmp_path: Path, alone: Callable[..., int]
) -> None:
    """Against torch's profile of a forward and a backward pass on this CPU."""
    most = alone(profiled.of_forward_and_backward, kind, TINY[kind], 1000)
    hugging_face(kind, vocabulary=1000, **TINY[kind]).model.config.save_pretrained(tmp_path)  # type: ignore[union-attr,operator]
    shape = outline_of(str(tmp_path), 256, 64)
    assert activation_nbytes(shape, 4 * 64) == pytest.approx(most, rel=0.1)


@needs_transformers
def test_a_model_folder_is_planned_and_simulated(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("machine.toml").write_text('memory = "8GB"\nflops_per_second = 1e11\n')
    model = ["--model", f"hf:{folder}", "--sequence", "32"]
    assert main(["plan", "50mbit", "machine.toml", "--tokens", "1M", *model, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["parameters"] == sum(p.numel() for p in real(folder).parameters())
    assert Run.load(Path("plan.toml")).model.model == f"hf:{folder}"
    assert main(["simulate", "run", "--link", "50mbit", "--step-seconds", "0.1", *model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["parameters"] == plan["parameters"]


@needs_transformers
@pytest.mark.parametrize(
    ("source", "vocabulary", "sequence", "says"),
    [
        ("no-such-kind", 256, 32, "Check the name"),
        ("gpt2", 256, 5000, "takes at most 1024 tokens"),
        ("vit", 256, 32, "causal language model is needed|needs"),
    ],
)
def test_models_without_an_outline_are_refused(source: str, vocabulary: int, sequence: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        outline_of(source, vocabulary, sequence)


@needs_transformers
def test_a_model_with_too_small_a_vocabulary_is_refused(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="every token needs a row"):
        outline_of(folder, 8192, 32)
