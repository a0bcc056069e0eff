"""LoRA: what is trained, sent and saved. Without peft, only its absence is tested, and what does not need it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import read_events
from safetensors.torch import load_file, save_file
from small_runs import cut_back

from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.adapters import adapters, attach, merge_adapters
from thinwire.app.trainer.export import stored_model
from thinwire.app.trainer.huggingface import hugging_face
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import ModelSpec
from thinwire.app.trainer.setup import make_model
from thinwire.errors import ConfigurationError, MissingError, ModelError

PRESENT = importlib.util.find_spec("peft") is not None
needs_peft = pytest.mark.skipif(not PRESENT, reason="the extra thinwire[lora] is not installed")
TINY: dict[str, dict[str, Any]] = {
    "llama": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
}
TOKENS = torch.arange(32).view(2, 16)


def bare(kind: str) -> Any:
    return Transformer(SIZES["nano"], 1) if kind == "ours" else hugging_face(kind, 256, 1, **TINY[kind])


def adapted(kind: str, rank: int = 4) -> Any:
    """Returns a model with adapters that change its output."""
    model = attach(bare(kind), rank, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def test_a_missing_peft_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"lora=4.*pip install 'thinwire\[lora\]'"):
        attach(bare("ours"), 4, 0)


@needs_peft
@pytest.mark.parametrize("kind", ["ours", *TINY])
def test_new_adapters_change_no_output_and_are_the_only_trained_weights(kind: str) -> None:
    model, again = attach(bare(kind), 4, 0), attach(bare(kind), 4, 0)
    assert torch.equal(model.eval()(TOKENS).logits, bare(kind).eval()(TOKENS).logits)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert len({name.split(".lora_")[0] for name in trained}) == len(trained) / 2 >= 2 * 4
    assert all(torch.equal(p, dict(again.named_parameters())[name]) for name, p in trained.items())
    other = dict(attach(bare(kind), 4, 1).named_parameters())
    assert not all(torch.equal(p, other[name]) for name, p in trained.items())


@needs_peft
@pytest.mark.parametrize("kind", ["ours", *TINY])
def test_merged_adapters_compute_what_the_adapted_model_does(kind: str) -> None:
    model, plain = adapted(kind), bare(kind).eval()
    before = plain(TOKENS).logits
    plain.load_state_dict(merge_adapters(model, model.state_dict()))
    torch.testing.assert_close(plain(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, plain(TOKENS).logits, atol=1e-2)


@needs_peft
def test_a_model_without_linear_layers_in_its_blocks_is_refused() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
    with pytest.raises(ModelError, match="no linear layer in its blocks"):
        attach(model, 4, 0)


def run_of(text: str, **changes: Any) -> Run:
    settings: dict[str, Any] = dict(
        text=(text,), model="nano", steps=12, every=4, delay=1, batch=2, sequence=32, checkpoint_every=5, eval_batches=2,
        carrier="threads", timeout=600.0,
    )  # fmt: skip
    return Run.of(**(settings | changes))


def train(folder: Path, run: Run, resume: bool = False) -> dict[str, Any]:
    run_folder.new_folder(run, folder, resume)
    return launch.train_threads(run, folder, resume, lambda: None)


def test_adapters_train_a_pretrained_model_further(tmp_path: Path, text: str) -> None:
    first = train(tmp_path / "first", run_of(text, steps=16, lr=2e-3))
    path = tmp_path / "first/model.safetensors"
    model = make_model(ModelSpec(model=str(path)), 32, 0, 256)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in load_file(path).items())
    second = train(tmp_path / "second", run_of(text, model=str(path), steps=4, lr=1e-5, eval_every=1))
    evaluated = [e["loss"] for e in read_events(tmp_path / "second/events/replica-0.jsonl") if e["event"] == "eval"]
    assert evaluated[0] == pytest.approx(first["eval_loss"], rel=0.01) and second["steps"] == 4
    # the model of a second training also names its size
    again = stored_model(tmp_path / "second/model.safetensors", 256, 32)
    assert sum(p.numel() for p in again.parameters()) == first["parameters"]


def test_files_without_a_model_are_refused(tmp_path: Path) -> None:
    whole = {"model": "nano", "vocabulary": 256, "context": 32, "positions": "rotary", "tokenizer": "bytes"}
    for name, metadata, says in (
        ("bare", None, "give the model.safetensors of a run folder"),
        ("foreign", whole | {"model": "hf:x/y"}, "hf:FOLDER"),
        ("other", whole | {"vocabulary": 300}, "300 tokens"),
        ("unfit", whole, "does not fit"),
        ("odd", [], "cannot be read"),
    ):
        rows = metadata["vocabulary"] if isinstance(metadata, dict) else 1
        told = None if metadata is None else {"thinwire": json.dumps(metadata)}
        save_file({"embedding.weight": torch.zeros(rows, 2)}, tmp_path / f"{name}.safetensors", told)
        with pytest.raises((ModelError, ConfigurationError), match=says):
            stored_model(tmp_path / f"{name}.safetensors", 256, 32)
    (tmp_path / "text.safetensors").write_text("not one")
    for name, kind in (("text", ModelError), ("absent", MissingError)):
        with pytest.raises(kind, match="cannot be read"):
            stored_model(tmp_path / f"{name}.safetensors", 256, 32)


@needs_peft
def test_only_adapters_are_sent_and_both_model_forms_are_saved(tmp_path: Path, text: str) -> None:
    """End to end: only the adapters are sent, the base is unchanged, and a stopped run resumes bit for bit."""
    base = tmp_path / "base/model.safetensors"
    train(tmp_path / "base", run_of(text, steps=4))
    settings = run_of(text, model=str(base), lora=2, steps=16)
    summary = train(tmp_path / "lora", settings)
    model = make_model(settings.model, settings.data.sequence, settings.seed, 256)
    factors = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert summary["parameters"] == factors < 0.1 * 200_000
    departs = [e["nbytes"] for e in read_events(tmp_path / "lora/events/replica-0.jsonl") if e["event"] == "depart"]
    assert departs and max(departs) < 0.6 * factors + 100  # four bits, and a header
    written = load_file(tmp_path / "lora/adapter/adapter_model.safetensors")
    assert (
        written
        and sum(v.numel() for v in written.values()) == factors
        and any(bool(v.any()) for k, v in written.items() if "lora_B" in k)
    )
    plain, trained = load_file(base), load_file(tmp_path / "lora/model.safetensors")
    assert plain.keys() == trained.keys()
    assert torch.equal(plain["embedding.weight"], trained["embedding.weight"])
    assert not torch.equal(plain["blocks.0.mlp.up.weight"], trained["blocks.0.mlp.up.weight"])
    cut_back(tmp_path / "lora", tmp_path / "stopped", 10)
    train(tmp_path / "stopped", run_of(text, model=str(base), lora=2, steps=16), resume=True)
    events = read_events(tmp_path / "stopped/events/replica-0.jsonl")
    assert [event["from_step"] for event in events if event["event"] == "resume"] == [10]
    assert (tmp_path / "stopped/model.safetensors").read_bytes() == (tmp_path / "lora/model.safetensors").read_bytes()
    with pytest.raises(ConfigurationError, match="lora 2 there, 4 given"):
        run_folder.new_folder(run_of(text, model=str(base), lora=4, steps=16), tmp_path / "lora", True)


@needs_peft
def test_flasc_sends_sparse_adapters_both_ways(tmp_path: Path, text: str) -> None:
    train(tmp_path / "base", run_of(text, steps=4))
    model = str(tmp_path / "base/model.safetensors")
    settings = run_of(text, model=model, lora=2, strategy="flasc", delay=None, lr=0.05)
    summary, method = train(tmp_path / "run", settings), settings.make_method()
    assert method
    for rank, ended in enumerate(ends(tmp_path / "run")):
        sent = sum(method.nbytes_per_period(summary["parameters"], 2, rank, period) for period in range(3))
        counted = ended["ledger"]["sent"]["packet"].values()
        assert sent == sum(count["nbytes"] for count in counted) < 3 * 4 * summary["parameters"]
        assert ended["weights"] == summary["weights"] and ended["eval_loss"] == summary["eval_loss"]
    written = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert all(bool(value.any()) for value in written.values())


def ends(folder: Path) -> list[dict[str, Any]]:
    """Returns the `end` event of each replica."""
    files = sorted(folder.glob("events/*.jsonl"))
    return [next(e["summary"] for e in read_events(file) if e["event"] == "end") for file in files]


@needs_peft
@pytest.mark.parametrize("kind", TINY)
def test_peft_loads_the_saved_adapters(tmp_path: Path, text: str, kind: str) -> None:
    import peft

    folder = tmp_path / "base"
    bare(kind).model.save_pretrained(folder)
    train(tmp_path / "run", run_of(text, model=f"hf:{folder}", lora=2, steps=8, lr=0.01))
    loaded = peft.PeftModel.from_pretrained(hugging_face(folder).model, str(tmp_path / "run/adapter")).eval()
    plain = hugging_face(folder).eval()
    before = plain(TOKENS).logits
    plain = hugging_face(tmp_path / "run").eval()
    got = loaded(input_ids=TOKENS).logits
    torch.testing.assert_close(got, plain(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.equal(got, before)


@needs_peft
def test_adapter_names_match_peft(tmp_path: Path) -> None:
    model = adapted("gpt2")
    assert all(name.startswith("base_model.model.transformer.h.") for name in adapters(model, model.state_dict()))
