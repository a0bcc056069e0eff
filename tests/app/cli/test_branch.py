"""`thinwire branch` and `evaluate`, and `sample` and `export` of an ensemble, with experts of two sizes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from trained_runs import output_of

from thinwire.app.cli import export, main
from thinwire.app.trainer.model import SIZES
from thinwire.app.trainer.run import Run
from thinwire.errors import CheckpointError
from thinwire.lab.cli import branch
from thinwire.lab.experts.ensemble import Ensemble, Expert, sha256_of

SMALL = ["--batch", "1", "--sequence", "16", "--eval-batches", "2", "--carrier", "threads", "--every", "2"]
SMALL += ["--checkpoint-every", "0", "--eval-every", "4"]
STEPS = 4


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    made = {"sums": "".join(f"{i} + {i} = {2 * i}\n" for i in range(2000)), "words": "a thin wire carries it\n" * 900}
    for name, text in made.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return {name: Path(f"{name}.txt") for name in made}


def test_experts_are_branched_evaluated_sampled_and_merged(texts, capsys, monkeypatch):
    for size in ("nano", "tiny"):
        both = ["--text", *map(str, texts.values())]
        assert main(["train", "--model", size, "--steps", str(STEPS), *SMALL, *both, "--out", f"seed-{size}"]) == 0
    said, _ = output_of(capsys, "branch", "seed-nano", "--domain", "sums", "--text", texts["sums"], "--out", "e")
    per_token = dict.fromkeys(SIZES, 0) | {n: _at_16(n) for n in ("nano", "tiny")}
    (sums,) = said["experts"]
    assert (sums["tokens"], sums["flops"]) == (STEPS * 2 * 16, STEPS * 2 * 16 * per_token["nano"])
    run = (Path("e/sums/run.toml")).read_text()
    assert 'model = "' in run and "seed-nano/model.safetensors" in run and "lr = 0.002" in run  # a tenth of 0.02

    # An expert of another size takes as many steps as the same compute allows, and changes no file of the first.
    before, budget = files(Path("e/sums")), sums["flops"]
    said, _ = output_of(
        *(capsys, "branch", "seed-tiny", "--domain", "words", "--text", texts["words"], "--out", "e", "--flops", budget)
    )
    words = next(one for one in said["experts"] if one["domain"] == "words")
    step = 2 * 16 * per_token["tiny"]
    assert words["flops"] == budget // step * step and words["tokens"] < sums["tokens"]
    assert files(Path("e/sums")) == before
    assert words["parent"] == Ensemble.read(Path("e")).experts[1].parent != sums["parent"]

    said, advice = output_of(capsys, "evaluate", "e", "--text", *texts.values())
    rows = {row["text"]: row for row in said["texts"]}
    seeds = ", ".join(str(Path(f"seed-{size}").absolute()) for size in ("nano", "tiny"))  # each has read both texts
    assert [f"{name}.txt here may have been trained on, in {seeds};" in advice for name in texts] == [True, True]
    for name in texts:
        losses = rows[f"{name}.txt"]["losses"]
        assert list(losses) == ["mixture", "sums", "words"]  # experts of different shapes have no mean of weights
        assert losses["mixture"] <= min(losses["sums"], losses["words"]) + math.log(2) / 16 + 1e-6
    said, advice = output_of(capsys, "evaluate", "e/sums")  # an expert is a run, which keeps the path of its text
    (alone,) = said["texts"]
    assert "trained on, in " + str(Path("seed-nano").absolute()) in advice and "none of them was given" in advice
    assert alone["losses"]["loss"] == pytest.approx(rows["sums.txt"]["losses"]["sums"], abs=1e-6)
    cached = output_of(capsys, "evaluate", "e", "--text", texts["sums"], "--prior", texts["words"])[0]["texts"][0]
    assert cached["prior"] != {"sums": 0.5, "words": 0.5} and sum(cached["prior"].values()) == pytest.approx(1)
    said, advice = output_of(capsys, "sample", "e", "1 + 1", "--tokens", 3)
    assert said["text"].startswith("1 + 1") and "posterior over experts at the end: sums" in advice
    longer = "1 + 1 = 2\n" * 120  # longer than the context
    assert output_of(capsys, "sample", "e", longer, "--tokens", 1, "--prior", texts["words"])[0]["text"].startswith(
        longer
    )
    assert main(["export", "e"]) == 2 and "only equal ones have a mean" in capsys.readouterr().err

    # `branch --trained` enters a finished run as an expert without training.
    output_of(capsys, "branch", "e/sums", "--domain", "sums", "--out", "same", "--trained")
    output_of(capsys, "branch", "seed-nano", "--domain", "seed", "--out", "same", "--trained")
    output_of(capsys, "export", "same", "--to", "safetensors", "--out", "mean")
    first, second, mean = (load_file(f"{folder}/model.safetensors") for folder in ("same/seed", "same/sums", "mean"))
    assert all(torch.allclose(mean[name], (first[name] + second[name]) / 2, atol=1e-6) for name in mean)
    assert "mean of weights" in output_of(capsys, "evaluate", "same", "--text", texts["sums"])[0]["texts"][0]["losses"]

    _refused(texts, capsys)
    _not_finite(texts, capsys)
    _not_written(capsys, monkeypatch)


def _at_16(size: str) -> int:
    return SIZES[size].flops_per_token(16)


def _refused(texts: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--text", str(texts["sums"]), "--out", "e"]
    for arguments, why in {
        ("branch", "seed-nano", "--domain", "sums", *text): "is an expert already",
        ("branch", "seed-nano", "--domain", "../sums", *text): "domain='../sums': a name of letters",
        ("branch", "seed-nano", *text): "no domain: a name of letters",
        ("branch", "seed-nano", "--domain", "new", "--out", "e"): "no text of the domain",
        ("branch", "seed-nano", "--domain", "new", *text, "--flops", "10"): "for one inner step of all replicas",
        ("branch", "seed-nano", "--domain", "new", *text, "--flops", "inf"): "flops=inf: a finite number is needed",
        (
            "branch",
            "seed-nano",
            "--domain",
            "new",
            *text,
            "--strategy",
            "codistill",
            "--every",
            "20",
        ): "and an expert is one",
        ("branch", "seed-nano", "--domain", "new", *text, "--model", "tiny"): "begins with that run's model",
        ("branch", "nowhere", "--domain", "new", *text): "holds no run",
        ("evaluate", "e"): "is an ensemble",
        ("evaluate", "seed-nano", "--prior", "x"): "is no ensemble",
        ("sample", "seed-nano", "--prior", "x"): "is no ensemble",
    }.items():
        assert main(list(arguments)) == 2 and why in capsys.readouterr().err
    assert {path.name for path in Path("e").iterdir()} == {"sums", "words"}

    # The same command enters an expert that was trained but not entered, as after a kill between the two.
    said, expert = json.loads(Path("e/sums/expert.json").read_text()), Path("e/sums/expert.json")
    expert.unlink()
    again = ["branch", "seed-nano", "--domain", "sums", *text]
    assert main(again) == 0 and json.loads(expert.read_text()) == said

    # An invalid expert file is refused.
    for wrong in (
        {"domain": "words"},
        {"flops": "1"},
        {"tokens": -1},
        {"flops": math.nan},
        {"sequence": 0},
    ):
        expert.write_text(json.dumps(said | wrong))
        with pytest.raises(CheckpointError):
            Expert.read(Path("e/sums"))
    for wrong_text in ("", "[]", "[" * 100_000, '{"format": 1}'):
        expert.write_text(wrong_text)
        with pytest.raises(CheckpointError):
            Expert.read(Path("e/sums"))
    expert.write_text(json.dumps(said))
    model = Path("e/sums/model.safetensors")
    whole = model.read_bytes()
    model.write_bytes(whole[:1000])  # as after a copy that was cut off
    for verb in (["sample", "e", "1"], ["evaluate", "e", "--text", str(texts["sums"])], ["export", "e"]):
        assert main(verb) == 1 and "is not the model that expert.json names" in capsys.readouterr().err
    model.write_bytes(whole)


def _not_finite(texts: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A model with NaN is refused as an expert, as the parent of one and in an ensemble, and writes no text."""
    shutil.copytree("seed-nano", "nan")
    for folder in ("nan", "same/sums"):
        file = Path(folder, "model.safetensors")
        with safe_open(file, "pt") as model:
            said = model.metadata()
        save_file({name: torch.full_like(one, math.nan) for name, one in load_file(file).items()}, file, said)
    expert = json.loads(Path("same/sums/expert.json").read_text())
    Path("same/sums/expert.json").write_text(json.dumps(expert | {"sha256": sha256_of(Path("same/sums"))}))
    text = ["--text", str(texts["sums"])]
    for arguments, why in {
        ("branch", "nan", "--domain", "nan", "--out", "f", "--trained"): "nan/model.safetensors holds NaN",
        ("branch", "nan", "--domain", "nan", "--out", "f", *text): "nan/model.safetensors holds NaN",
        ("evaluate", "same", *text): "same/sums/model.safetensors holds NaN",
        ("sample", "same", "1"): "same/sums/model.safetensors holds NaN",
        ("sample", "nan", "1"): "scores of the next token are NaN",
    }.items():
        assert main(list(arguments)) == 1 and why in capsys.readouterr().err
    assert not Path("f").exists()
    assert output_of(capsys, "evaluate", "nan", *text)[0]["texts"][0]["losses"] == {"loss": None}


def _not_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is not copied into itself; on a full disk nothing is left, and one line says so."""
    trained = ["branch", "seed-nano", "--domain", "words", "--trained", "--out"]
    before = files(Path("seed-nano"))
    for out, why in {"seed-nano/e": "would be copied into itself", "seed-nano": "is the folder of a run"}.items():
        assert main([*trained, out]) == 2 and why in capsys.readouterr().err
    assert files(Path("seed-nano")) == before

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    def copytree(source: object, draft: Path, **_: object) -> None:
        draft.mkdir(parents=True)
        raise shutil.Error([("a", "b", "No space left on device"), ("c", "d", "No space left on device")])

    monkeypatch.setattr(branch.shutil, "copytree", copytree)
    monkeypatch.setattr(export, "save_as_apertus", full)
    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_saver.save", lambda *_, **__: _cut_off())
    for arguments, why in {
        (*trained, "full"): "thinwire branch: No space left on device. Check the path",
        ("export", "e/sums", "--out", "full/hf"): "thinwire export: full/hf: No space left on device. Check the path",
        (
            "export",
            "e/sums",
            "--to",
            "dcp",
            "--out",
            "full/dcp",
        ): "full/dcp: the model cannot be written. Check the path",
    }.items():
        assert main(list(arguments)) == 1 and why in capsys.readouterr().err
    assert not [path for path in Path("full").rglob("*") if path.is_file() or path.name == ".words-draft"]


def _cut_off() -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


def test_a_run_with_a_model_of_each_replica_is_no_expert(texts, capsys):
    for rank in range(2):
        Path(f"two/models/replica-{rank}").mkdir(parents=True)
        Path(f"two/models/replica-{rank}/model.safetensors").touch()
    Run.of(strategy="codistill").save(Path("two/run.toml"))
    assert main(["branch", "two", "--domain", "new", "--text", str(texts["sums"])]) == 2
    assert "two holds a model of each replica: give one of two/models/replica-0, two/models" in capsys.readouterr().err
