"""`thinwire train` from a Hugging Face folder: transformers and peft read its results, and give the losses of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from thinwire.app.cli import main
from thinwire.app.trainer.settings import DataSpec
from thinwire.app.trainer.tokenizer import open_corpus

if TYPE_CHECKING:
    import transformers

pytestmark = pytest.mark.usefixtures("late_imports")

TINY: dict[str, dict[str, Any]] = {
    "llama": dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64,
    ),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
}  # fmt: skip
TEXT = "".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def folder_of(kind: str, tokenizer: Any, folder: Path) -> Path:
    """Saves weights, configuration and tokenizer with `save_pretrained`; the weights are in bf16, as in many models."""
    config = transformers.AutoConfig.for_model(kind, vocab_size=300, bos_token_id=0, eos_token_id=1, **TINY[kind])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: str, out: str, *more: str, text: str = "text.txt") -> int:
    small = "--batch 2 --sequence 32 --steps 6 --every 3 --delay 1 --eval-batches 2 --carrier threads --json"
    return main(["train", "--model", model, "--text", text, "--out", out, *small.split(), *more])


def loss_of(model: Any, source: str) -> float:
    """Returns the loss of a transformers model on the held-out text of a run."""
    corpus = open_corpus(DataSpec(text=("text.txt",)), source)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten())
            for tokens, targets in corpus.held_out(16, 32, 16)
        ]
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("lora", [(), ("--lora", "2")], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", TINY)
def test_a_model_folder_is_trained_further_and_the_result_loads_in_transformers(
    kind: str, lora: tuple[str, ...], tokenizer: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = folder_of(kind, tokenizer, here / "base")
    assert train("hf:base", "run", *lora) == 0
    evaluated = json.loads(capsys.readouterr().out)["eval_loss"]
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained("run", output_loading_info=True)
    assert not any(report.values()) and loaded.dtype == torch.float32
    assert loss_of(loaded, "hf:run") == pytest.approx(evaluated, rel=1e-5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert abs(loss_of(plain, "hf:base") - evaluated) > 1e-4
    assert len({path.stat().st_mode for path in Path("run").rglob("*") if path.is_file()}) == 1, "one mode for all"
    own = transformers.AutoTokenizer.from_pretrained("run")
    assert own.encode("thin wires") == tokenizer.encode("thin wires")
    if lora:
        import peft

        adapted = peft.PeftModel.from_pretrained(plain, "run/adapter")
        assert loss_of(adapted, "hf:run") == pytest.approx(evaluated, rel=1e-5)
        return
    assert train("hf:run", "next") == 0  # thinwire reads it, too
    assert main(["train", "--resume", "--out", "next", "--steps", "8"]) == 0


def test_a_model_folders_tokenizer_is_used_and_others_are_refused(
    tokenizer: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of("llama", tokenizer, here / "base")
    for other in ("bytes", "bpe:290"):
        assert train("hf:base", "run", "--tokenizer", other) == 2
        said = capsys.readouterr().err
        assert "base was trained with hf-" in said and "leave --tokenizer out" in said and "Traceback" not in said
    assert not Path("run").exists()


def test_an_exported_model_names_its_byte_or_bpe_tokenizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.AutoConfig.for_model("llama", vocab_size=300, **TINY["llama"])
    config.save_pretrained("bare")
    for given, other in (("bytes", "bpe:290"), ("bpe:290", "bytes")):
        out = given.replace(":", "")
        assert train("hf:bare", out, "--tokenizer", given) == 0
        assert train(f"hf:{out}", f"{out}-next") == 0
        assert train(f"hf:{out}", "refused", "--tokenizer", other) == 2
        assert f"{out} was trained with {given[:3]}" in capsys.readouterr().err
    ids = transformers.AutoTokenizer.from_pretrained("bpe290").encode("thin wires")
    assert ids == open_corpus(DataSpec(text=("text.txt",)), "hf:bpe290").tokenizer.encode("thin wires").tolist()
    assert train("bpe290/model.safetensors", "refused") == 1
    assert "give --model hf:" in capsys.readouterr().err


def test_damaged_weights_are_reported_in_one_line(
    tokenizer: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = folder_of("llama", tokenizer, here / "base") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert train("hf:base", "run") == 1
    assert "undamaged weights" in capsys.readouterr().err


def test_a_model_folder_is_never_overwritten(tokenizer: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder_of("llama", tokenizer, here / "base") / "model.safetensors"
    before = weights.read_bytes()
    assert train("hf:base", "base") == 2
    assert "choose another --out" in capsys.readouterr().err and weights.read_bytes() == before
