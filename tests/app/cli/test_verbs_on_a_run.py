"""Verbs on a trained run: checkpoints, resume with another number of replicas, sample, export and top."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from run_folders import read_events
from safetensors.torch import load_file
from trained_runs import SMALL, output_of, trained_run

from thinwire.app.cli import main
from thinwire.app.records.events import EventLog
from thinwire.app.report.top import Top
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.trained import trained_model
from thinwire.checkpoint import FORMAT, Checkpoint, read, write
from thinwire.comm import ThreadGroup, run_threads
from thinwire.drivers.unequal.method import decoupled_diloco
from thinwire.lab.methods import METHODS, Method
from thinwire.lab.pairs.method import ad_psgd
from thinwire.lab.samples.method import plexus
from thinwire.lab.sites.method import halos
from thinwire.rng import derive
from thinwire.state_tree import pack
from thinwire.testing.toy import toy

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp
    import transformers

pytestmark = pytest.mark.usefixtures("late_imports", "one_cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run of two replicas with checkpoints of steps 2, 4 and 6, each with a round in flight. Tests must not change it."""
    text = "".join(f"line {i}: {i * i % 97} thin wires carry {i}\n" for i in range(3000))
    options = ["--steps", "6", "--every", "2", "--delay", "1", "--fragments", "1", "--checkpoint-every", "2"]
    return trained_run(tmp_path_factory.mktemp("trained"), cache, text, *options)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_an_evaluation_is_of_the_same_text_for_every_batch(
    trained: Path, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was trained, and evaluated, in batches of one sequence."""
    at_the_end = [
        event["loss"] for event in read_events(trained / "events/replica-0.jsonl") if event["event"] == "eval"
    ][-1]
    said, _ = output_of(capsys, "evaluate", trained, "--eval-batches", 1, "--batch", batch)
    assert said["texts"][0]["losses"]["loss"] == pytest.approx(at_the_end, rel=1e-5)


def test_checkpoints_are_listed_verified_and_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = output_of(capsys, "checkpoints", run)
    assert [(one["step"], one["whole"], one["replicas"]) for one in found["checkpoints"]] == [
        (step, True, ["replica-0", "replica-1"]) for step in (2, 4, 6)
    ]
    assert "a resume starts at step 6" in text and "2 of 2" in text
    damaged = run / "checkpoints/replica-1/step-00000006/outer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    # Without --verify only sizes are checked.
    assert "a resume starts at step 6" in output_of(capsys, "checkpoints", run)[1]
    found, text = output_of(capsys, "checkpoints", run, "--verify")
    assert not found["checkpoints"][2]["whole"] and "a resume starts at step 4" in text
    assert found["checkpoints"][2]["problems"] == [
        "replica-1: is damaged: outer.safetensors is not what was written (size or checksum)."
    ]
    shutil.rmtree(run / "checkpoints/replica-0/step-00000002")
    assert output_of(capsys, "checkpoints", run)[0]["checkpoints"][0]["problems"] == ["replica-0 has none"]
    # A set newer than the newest whole one may still be written.
    found, _ = output_of(capsys, "checkpoints", run, "--prune", "1")
    assert [one["step"] for one in found["checkpoints"]] == [4, 6] and len(found["deleted"]) == 1
    assert sorted(path.name for path in (run / "checkpoints/replica-1").iterdir()) == ["step-00000004", "step-00000006"]
    shutil.rmtree(run / "checkpoints/replica-0")
    assert main(["checkpoints", str(run), "--prune", "1"]) == 2
    assert "has no whole set of checkpoints, so nothing was deleted" in capsys.readouterr().err
    assert main(["checkpoints", "nothing"]) == 2


def test_a_changed_manifest_is_reported_as_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest's hash covers its facts and notes, which the hashes of the files do not."""
    manifest = run / "checkpoints/replica-0/step-00000006/manifest.json"
    said = json.loads(manifest.read_text())
    said["facts"]["rounds"][0] += 1
    manifest.write_text(json.dumps(said))
    found, _ = output_of(capsys, "checkpoints", run)
    assert found["checkpoints"][2]["problems"] == [
        "replica-0: is damaged: manifest.json is not what was written (checksum)."
    ]


UNEQUAL = [
    decoupled_diloco(),
    halos(sites=1),
    plexus(),
    ad_psgd(),
    ad_psgd(slow=(1, 2)),
    METHODS["fedavg"](),
]


@pytest.mark.parametrize("method", UNEQUAL, ids=str)
def test_methods_with_own_steps_are_known_before_they_are_attached(method: Method) -> None:
    def attach(group: ThreadGroup) -> bool:
        model = toy()
        attached = method.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
        attached.close()
        return attached.own_steps

    assert run_threads(2, attach) == [method.traits.own_steps] * 2


def test_replicas_of_unequal_speed_have_checkpoints_of_their_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each resumes from its own newest one; of replica 1, the last two were damaged."""
    folder = tmp_path / "run"
    for rank, steps in ((0, (8, 9, 10)), (1, (3, 4, 5))):
        for step in steps:
            nothing = {"strategy": "", "facts": {}, "frozen": True, "notes": {}}
            manifest = {"format": FORMAT, "thinwire": "", "step": step} | nothing
            write(folder / f"checkpoints/replica-{rank}", manifest, [pack({"x": torch.zeros(1)}, "x")] * 3, 3)
    for strategy, says in (
        ("decoupled_diloco", "each replica resumes from its own newest whole one"),
        ("ad_psgd(slow=(1, 2))", "each replica resumes from its own newest whole one"),
        ("ad_psgd", "no whole checkpoint: the run cannot resume"),
        ("plexus", "a run with plexus cannot resume"),
    ):
        Run.of(strategy=strategy).save(folder / "run.toml")
        assert says in output_of(capsys, "checkpoints", folder)[1]
    Run.of(strategy="decoupled_diloco").save(folder / "run.toml")
    for step in (4, 5):
        (folder / f"checkpoints/replica-1/step-{step:08d}/outer.safetensors").unlink()
    found, text = output_of(capsys, "checkpoints", folder, "--prune", "1")
    assert [one["step"] for one in found["checkpoints"]] == [3, 4, 5, 10] and "each replica resumes" in text
    shutil.rmtree(folder / "checkpoints/replica-1/step-00000003")
    assert "replica-1: no whole checkpoint, and each replica needs one" in output_of(capsys, "checkpoints", folder)[1]


def test_an_unfinished_run_of_plexus_is_not_resumed_and_a_comparison_begins_it_again(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Run.load(trained / "run.toml").data.text
    asked = ["compare", *SMALL, "--text", *text, "--steps", "4", "--checkpoint-every", "2", "--out", "both"]
    assert main([*asked, "--strategies", "plexus(every=2)"]) == 0
    folder = next(tmp_path.glob("both/*-seed-0"))
    assert main(["train", "--resume", "--out", str(folder)]) == 0
    assert "finished already" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    for verb, says in (
        (["train", "--resume", "--out"], "--resume: a run with plexus(every=2) cannot resume, because no replica"),
        (["evaluate"], "which a run with plexus(every=2) has at its end only"),
    ):
        assert main([*verb, str(folder)]) == 2
        assert says in " ".join(capsys.readouterr().err.split())
    assert main([*asked, "--strategies", "plexus(every=2)"]) == 0
    assert (folder / "model.safetensors").exists() and list(folder.glob("checkpoints-1/replica-*/step-*"))


def parts(folder: Path, replica: int, step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Checkpoint]:
    path = folder / f"replica-{replica}" / f"step-{step:08d}"
    model, inner, outer = (load_file(path / f"{name}.safetensors") for name in ("model", "inner", "outer"))
    return model, inner, outer, read(path)


def same(a: dict[str, Any], b: dict[str, Any], without: str = "") -> bool:
    names = [name for name in b if not without or not name.startswith(without)]
    return all(torch.equal(a[name], b[name]) for name in names) and set(names) <= a.keys()


def test_a_run_is_resumed_with_more_and_then_fewer_replicas(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["resume", run, "--replicas", 3, "--steps", 8, "--keep", 9]
    summary, text = output_of(capsys, *asked)
    assert (
        "from 2 to 3 replicas at step 6: at the agreed weights begin replica 2 with the inner moments of replica 0"
        in text
    )
    assert summary["steps"] == 8 and summary["replicas"] == 3 and summary["tokens"] == (2 * 6 + 3 * 2) * 16
    ends = [read_events(run / f"events/replica-{n}.jsonl")[-1]["summary"]["weights"] for n in range(3)]
    assert len(set(ends)) == 1
    for rank in range(3):
        model, inner, outer, made = parts(run / "checkpoints", rank, 6)
        model_before, inner_before, outer_before, before = parts(run / "checkpoints-1", rank % 2, 6)
        assert before.manifest["facts"]["flights"] and not made.manifest["facts"]["flights"]
        assert same(outer, outer_before, "0.delta") or rank == 2
        if rank < 2:  # an old replica keeps its own state
            assert same(model, model_before) and same(inner, inner_before)
        else:
            anchors = [value for name, value in outer.items() if name.endswith(".anchor")]
            values, due = (torch.cat([v.flatten() for v in one]).sort()[0] for one in (model.values(), anchors))
            assert torch.equal(values, due) and not same(model, model_before)
            stream = torch.Generator().manual_seed(derive(0, "random state", 2, 6) % 2**63)
            assert same(inner, inner_before, "random") and torch.equal(inner["random.cpu"], stream.get_state())
            assert all(torch.equal(outer[name], outer_before[name]) for name in outer if "feedback" not in name)
    summary, text = output_of(capsys, "resume", run, "--replicas", 1, "--steps", 9)
    assert "from 3 to 1 replicas at step 8: replica 1, 2 leaves" in text
    assert summary["status"] == "finished" and summary["replicas"] == 1
    assert summary["tokens"] == (2 * 6 + 3 * 2 + 1) * 16 and (run / "checkpoints-2/replica-2.jsonl").is_file()


def test_a_resume_with_another_number_of_replicas_is_refused_without_a_whole_set(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also refused: a changed setting and a method with a state per replica. The run folder stays unchanged."""
    for path in (run / "checkpoints/replica-1").iterdir():
        (path / "inner.safetensors").unlink()
    before = sorted(path.name for path in run.iterdir())
    assert main(["resume", str(run), "--replicas", "3", "--steps", "9"]) == 1
    assert "no step of which all 2 replicas have a whole checkpoint" in capsys.readouterr().err
    assert main(["resume", str(run), "--replicas", "3", "--seed", "1"]) == 2
    assert "begun with other settings: seed 0 there, 1 given" in capsys.readouterr().err
    assert main(["resume"]) == 2 and "the run folder is needed first" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == before and Run.load(run / "run.toml").placement.replicas == 2
    for name, says in (("dgc", "dgc keeps what each replica has not sent"), ("fedavg", "fedavg keeps")):
        Run.load(run / "run.toml").with_strategy(name).save(run / "run.toml")
        assert main(["resume", str(run), "--replicas", "3", "--steps", "9"]) == 2
        assert says in capsys.readouterr().err


def test_a_trained_model_is_sampled_exported_and_trained_further(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers loads the export with equal logits, and a run trains it further as a Hugging Face model."""
    asked = ["sample", run, "line 7", "--tokens", 12, "--seed", 3]
    said, _ = output_of(capsys, *asked)
    assert said["text"].startswith("line 7") and 0 < said["tokens"] <= 12 and said["step"] is None
    assert output_of(capsys, *asked)[0] == said != output_of(capsys, *asked[:-1], 4)[0]
    assert main([*map(str, asked)]) == 0 and said["text"].split("\n")[0] in capsys.readouterr().out
    assert output_of(capsys, "sample", run, "--tokens", 1, "--temperature", 0)[0]["tokens"] <= 1  # without a prompt
    assert main(["sample", str(run), "--temperature", "nan"]) == 2 and "temperature=nan" in capsys.readouterr().err

    output_of(capsys, "export", run, "--out", "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained("hf")
    spoken = transformers.AutoTokenizer.from_pretrained("hf")
    text = "thin wires é\x01 carry\n 42"
    tokens = spoken(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == list(text.encode()) and spoken.decode(tokens[0]) == text
    own = trained_model(run).model
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=tokens).logits, own(tokens).logits, atol=1e-4)
    assert main(["export", str(run), "--out", "hf"]) == 2 and "is there already" in capsys.readouterr().err

    output_of(capsys, "export", run, "--to", "safetensors", "--out", "plain")
    assert Path("plain/model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    fresh = {name: torch.zeros_like(value) for name, value in own.state_dict().items()}
    output_of(capsys, "export", run, "--to", "dcp")
    dcp.load({"model": fresh}, checkpoint_id=run / "exported-dcp", no_dist=True)  # by torch's own reader
    assert all(torch.equal(value, fresh[name]) for name, value in own.state_dict().items())
    more = [
        *SMALL[2:],
        "--text",
        str(Run.load(run / "run.toml").data.text[0]),
        "--steps",
        "2",
        "--checkpoint-every",
        "1",
    ]
    output_of(capsys, "train", "--model", "hf:hf", *more, "--out", "further")
    said, _ = output_of(capsys, "sample", "further", "line", "--tokens", 3)
    assert said["text"].startswith("line")
    output_of(capsys, "export", "further", "--out", "again")
    transformers.AutoModelForCausalLM.from_pretrained("again")


def test_an_unfinished_run_is_sampled_from_the_agreed_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model.safetensors").unlink()
    found = trained_model(run)
    assert found.step == 6
    outer = load_file(run / "checkpoints/replica-1/step-00000006/outer.safetensors")
    anchors = torch.cat([value for name, value in outer.items() if name.endswith(".anchor")])
    assert torch.equal(torch.cat([p.detach().flatten() for p in found.model.parameters()]).sort()[0], anchors.sort()[0])
    assert "this is the model of step 6" in output_of(capsys, "sample", run, "a", "--tokens", 2)[1]
    shutil.rmtree(run / "checkpoints")
    assert main(["export", str(run)]) == 2
    assert "holds no model.safetensors yet" in capsys.readouterr().err


def test_a_finished_run_that_trains_on_is_known_by_its_newest_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it ends again: its old model would be of an earlier step."""
    log = run / "events/replica-0.jsonl"
    start = next(line for line in log.read_text().splitlines() if json.loads(line)["event"] == "start")
    log.write_text(log.read_text() + start + "\n")
    assert trained_model(run).step is None  # it has no checkpoint since then
    ended = (run / "model.safetensors").stat().st_mtime
    for manifest in run.glob("checkpoints/*/step-00000006/manifest.json"):
        os.utime(manifest, (ended + 1, ended + 1))
    assert trained_model(run).step == 6
    assert "this is the model of step 6" in output_of(capsys, "evaluate", run, "--eval-batches", 1)[1]
    assert output_of(capsys, "export", run, "--to", "safetensors", "--out", "plain")[0]["step"] == 6


def test_an_evaluation_reads_the_column_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own, unless another is given."""
    words = [{"body": f"thin wires {i}", "text": "zzzz"} for i in range(2000)]
    file = tmp_path / "both.jsonl"
    file.write_text("".join(json.dumps(word) + "\n" for word in words))
    settings = (run / "run.toml").read_text()
    (run / "run.toml").write_text(settings.replace('column = "text"', 'column = "body"'))

    def loss(*more: str) -> float:
        asked = ("evaluate", run, "--text", file, "--eval-batches", 1, *more)
        told: float = output_of(capsys, *asked)[0]["texts"][0]["losses"]["loss"]
        return told

    assert loss() == loss("--column", "body") != loss("--column", "text")


def test_an_evaluation_names_text_that_the_run_has_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt", "other.txt")]
    for text in texts:
        text.write_text(f"thin wires carry {text.name}\n" * 300)
    Run.load(run / "run.toml").changed(text=tuple(map(str, texts[:2]))).save(run / "run.toml")
    said = [output_of(capsys, "evaluate", run, "--text", text, "--eval-batches", 1)[1] for text in texts]
    assert ["may have been trained on" in one for one in said] == [True, True, False]
    assert "trained on" not in output_of(capsys, "evaluate", run, "--eval-batches", 1)[1]


def test_top_shows_the_state_of_each_replica(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run, a run whose replicas were killed, and a running one with a dead replica."""
    facts, text = output_of(capsys, "top", run.parent)
    assert [(one["name"], one["state"], one["checkpoint"]) for one in facts["replicas"]] == [
        ("replica-0", "ended", 6), ("replica-1", "ended", 6)
    ]  # fmt: skip
    assert facts["step"] == facts["steps"] == 6 and "step 6/6 · 0 of 2 live · evaluation" in text
    assert all(one["nbytes"] > 0 and one["loss"] > 0 for one in facts["replicas"])
    logs = [run / f"events/replica-{n}.jsonl" for n in range(2)]
    for log in logs:  # as if killed: without the last event
        log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:-1]))
    assert {one["state"] for one in output_of(capsys, "top", run)[0]["replicas"]} == {"dead"}
    with EventLog(logs[1]) as going:
        start = next(event for event in read_events(logs[0]) if event["event"] == "start")
        going.emit(
            "start",
            0,
            **{n: v for n, v in start.items() if n not in ("event", "seconds", "step")} | {"wall_time": time.time()},
        )
        going.emit(
            "step", 7, loss=2.0, lr=0.1, grad_norm=1.0, tokens=16, begin=0.0, compute_seconds=0.5, progress=7, sent=9
        )
        facts, text = output_of(capsys, "top", run)
        assert [one["state"] for one in facts["replicas"]] == ["dead", "trains"]
        assert "1 of 2 live" in text and "32 tokens/s" in text and facts["seconds_left"] is not None
        going.emit("retry", 7, reason="the lighthouse is silent")
        assert output_of(capsys, "top", run)[0]["replicas"][1]["state"] == "waits: the lighthouse is silent"
        top = Top(run)
        top.read(time.time())
        assert top.facts(time.time() + 3600)["replicas"][1]["state"].startswith("silent for 1 h") and not top.over
    assert main(["top", str(run / "checkpoints")]) == 2 and "holds no run" in capsys.readouterr().err


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_stopped_run_is_not_ended_with_fewer_steps_than_it_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model.safetensors").unlink()
    before = files(run)
    assert main(["resume", str(run), "--steps", "4"]) == 2
    assert "has taken 6 steps; give --steps 6 to end it there, or more" in capsys.readouterr().err
    assert files(run) == before
    assert main(["resume", str(run), "--steps", "6"]) == 0 and (run / "model.safetensors").exists()


def test_a_run_that_was_resumed_after_its_end_and_stopped_is_not_finished(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run / "model.safetensors"
    first = model.read_bytes()
    assert main(["resume", str(run), "--steps", "8"]) == 0
    second = model.read_bytes()
    for log in run.glob("events/*.jsonl"):  # as a kill before the end leaves it
        log.write_text("".join(line for line in log.read_text().splitlines(True) if '"event":"end"' not in line))
    model.write_bytes(first)
    os.utime(model, (0, 0))
    assert main(["resume", str(run), "--steps", "7"]) == 2 and "has taken 8 steps" in capsys.readouterr().err
    assert main(["resume", str(run), "--steps", "8"]) == 0 and model.read_bytes() == second
