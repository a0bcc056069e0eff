"""`thinwire train --job my_job.py`: a user's own model and data under the real commands."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
import torch
from fresh import forget_own_files
from own_jobs import JOB, PLAIN, drop_checkpoints, last_losses, train, weights
from pages import ROOT
from safetensors import SafetensorError
from safetensors import torch as safetensors
from safetensors.torch import load_file

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.jobs.base import Share, Summed
from thinwire.app.jobs.batches import Batches
from thinwire.app.jobs.own import OwnJob, functions
from thinwire.app.plan.machine import Machine
from thinwire.app.records.run_record import RunRecord, best_loss
from thinwire.app.trainer import final
from thinwire.app.trainer.run import Run
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.pieces.own_files import file_of, pinned_file


def test_a_job_trains_is_reported_and_resumes_bit_for_bit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint of step 5 has a round in the air, which departed at 4 and lands at 6."""
    assert train("whole", "--steps", "12") == 0
    record = RunRecord.load("whole")
    assert record.status == "finished" and record.start.unit == "batches" and record.summary.tokens == 2 * 12
    assert record.summary.parameters == 4 * 16 + 16 + 16 * 2 + 2
    first, *_, last = record.evaluations.loss
    assert last < first
    settings = (here / "whole/run.toml").read_text()
    assert f"{here / 'job.py'}@" in settings
    assert "24 batches" in Path("whole/report.html").read_text()
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model.load_state_dict(load_file("whole/model.safetensors"))  # plain torch loads the weights
    shutil.copytree("whole", "cut")
    drop_checkpoints("cut", 5)
    assert main(["train", "--resume", "--out", "cut"]) == 0
    assert weights("cut") == weights("whole") and last_losses("cut") == last_losses("whole")
    assert not any(note.kind == "warning" for note in RunRecord.load("cut").notes)
    assert main(["report", "whole", "cut"]) == 0
    assert main(["sample", "whole", "x"]) == main(["export", "whole"]) == 2
    assert capsys.readouterr().err.count("whole has trained job.py, whose model only that file can make") == 2
    Path("whole/model.safetensors").unlink()  # as before the end of the run
    assert main(["export", "whole"]) == 2 and "When it has ended, load the weights" in capsys.readouterr().err


def test_an_evaluation_has_the_same_samples_for_every_batch(here: Path) -> None:
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        one, *others = (
            OwnJob("plain.py", 0, batch, 2).evaluation(model, torch.device("cpu"))["loss"] for batch in (1, 3, 8, 99)
        )
    assert others == pytest.approx([one] * 3, rel=1e-5)


def test_a_job_without_a_state_reads_its_batches_again_on_resume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One replica, because replicas that are threads share torch's generator, from which this file draws."""
    command = ["train", "--job", "plain.py", "--carrier", "threads", "--checkpoint-every", "5", "--keep", "9"]
    command += ["--replicas", "1", "--batch", "3", "--steps", "12", "--strategy", "diloco", "--every", "4"]
    assert main([*command, "--out", "whole"]) == 0
    record = RunRecord.load("whole")
    assert record.start.unit == "samples" and record.summary.tokens == 36
    events = [json.loads(line) for line in Path("whole/events/replica-0.jsonl").read_text().splitlines()]
    # the rate of the job's own optimizer
    assert {event["lr"] for event in events if event["event"] == "step"} == {0.05}
    shutil.copytree("whole", "cut")
    drop_checkpoints("cut", 5)
    assert main(["train", "--resume", "--out", "cut"]) == 0
    assert weights("cut") == weights("whole") and last_losses("cut") == last_losses("whole")
    assert "15 of its batches were read again" in capsys.readouterr().out


def test_methods_are_compared_on_a_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are compared by the job's `evaluate`, which gives one number for each set of weights."""
    command = ["compare", "--job", "job.py", "--steps", "8", "--carrier", "threads", "--out", "runs", "--json"]
    assert main([*command, "--strategies", "data_parallel", "diloco(every=4)", "just_one_byte"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert [row["strategy"] for row in rows] == ["data_parallel", "diloco(every=4)", "just_one_byte"]
    assert all(0 < row["eval_loss"] < 2 for row in rows) and len({row["eval_loss"] for row in rows}) == 3
    assert main(["report", "runs", "--json"]) == 0 and len(json.loads(capsys.readouterr().out)["runs"]) == 3


def test_an_evaluation_that_is_nan_fails_the_run_and_its_comparison(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was never made is None everywhere; NaN in JSON is null with a status that says so."""
    (here / "nan.py").write_text(
        JOB + "\nfine = evaluate\ndef evaluate(model):\n    return {'a': fine(model) * 0 / 0.0, 'b': 1.0}"
    )
    assert train("good", "--steps", "6") == 0
    capsys.readouterr()
    assert train("bad", "--steps", "6", "--eval-every", "3", "--json", job="nan.py") == 1
    said = capsys.readouterr()
    told = "the evaluation loss is NaN since step 3"
    assert f"thinwire train: bad: {told}, so there is no model that can be used. Check evaluate(model)," in said.err
    summary = json.loads(said.out, parse_constant=pytest.fail)
    assert summary["status"] == f"no result: {told}"
    assert (summary["eval_loss"], summary["losses"]) == (None, {"a": None, "b": 1.0})
    records = [RunRecord.load(name) for name in ("good", "bad")]
    best = best_loss(records)
    assert [record.score(best).parts["quality"] for record in records] == [1.0, 0.0]
    assert told in Path("bad/report.html").read_text()
    (here / "good/events/replica-1.jsonl").unlink()
    (here / "good/summary.json").unlink()
    killed = Path("good/events/replica-0.jsonl")  # before its first evaluation
    lines = [line for line in killed.read_text().splitlines() if not re.search('"event":"(eval|end)"', line)]
    killed.write_text("\n".join([*lines, ""]))
    record = RunRecord.load("good")
    assert record.summary.eval_loss is None and record.score(best).parts["quality"] is None
    command = ["compare", "--job", "nan.py", "--steps", "2", "--carrier", "threads", "--out", "runs", "--json"]
    assert main([*command, "--strategies", "data_parallel"]) == 1
    said = capsys.readouterr()
    (row,) = json.loads(said.out, parse_constant=pytest.fail)["strategies"]
    assert row["status"].startswith("no result") and row["eval_loss"] is None and "NaN" in said.err


def test_probe_plan_and_doctor_accept_a_job_and_the_plan_trains(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They use the job's parameters and step times. The batch is what the job collates, or one where it collates nothing."""
    for module in ("app.plan.compute", "app.cli.doctor"):  # tests/app/plan/test_links_and_machines.py measures it
        monkeypatch.setattr(f"thinwire.{module}.base_nbytes", lambda: 500_000_000)
    for name, sizes, micro in (("plain", [1, 2], 8), ("job", [1], 1)):
        job = ["--job", f"{name}.py"]
        assert main(["probe", *job, "--what", "machine", "--seconds", "0.02", "--out", "."]) == 0
        machine = Machine.load(Path("machine.toml"))
        assert machine.model == f"{name}.py" and machine.parameters == {"plain": 5, "job": 114}[name]
        assert [step.batch for step in machine.steps][: len(sizes)] == sizes[: len(machine.steps)]
        assert (
            main(["plan", "20mbit,40ms", "machine.toml", *job, "--tokens", "800", "--out", "plan.toml", "--json"]) == 0
        )
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told["parameters"] == machine.parameters and not told["refused"]
        assert any("not-a-language-model" in warning for warning in told["warnings"])
        planned = Run.load(Path("plan.toml"))
        assert planned.data.batch * planned.data.accumulate == micro and planned.data.sequence == 1
    train = ["train", "plan.toml", "--carrier", "threads", "--link", "none", "--steps", "2", "--out", "planned"]
    assert main(train) == 0
    main(["doctor", "planned/run.toml", "--step-seconds", "0.1", "--link", "20mbit", "--json"])
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert {"memory of a replica", "link"} <= {finding["what"] for finding in findings}
    (here / "plain.py").write_text("def model(): ...\n")
    # a `JobError`: the other functions are missing
    assert main(["plan", "20mbit", "machine.toml", "--job", "plain.py"]) == 1


def test_a_changed_job_file_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resume knows no file, as in a new process."""
    assert train("run", "--steps", "5") == 0
    (here / "job.py").write_text(JOB + "# other\n")
    forget_own_files(monkeypatch)
    assert main(["train", "--resume", "--out", "run", "--steps", "8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "job.py has changed since this run began: its digest" in said, said
    with pytest.raises(tw.DisagreementError, match="job"):
        two_files(here)


def two_files(here: Path) -> None:
    """Runs two replicas whose job files differ."""
    from thinwire.app.trainer.launch import train_here
    from thinwire.app.trainer.place import Place
    from thinwire.comm import run_threads

    (here / "other.py").write_text(JOB + "# another\n")
    runs = [Run.of(job=name, steps=2, every=2, delay=0).absolute() for name in ("job.py", "other.py")]
    run_threads(2, lambda group: train_here(runs[group.rank], Place(group, here / "two")))


def test_a_job_from_the_template_and_the_example_train(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine.py"]) == 0
    command = re.search(r"^next: thinwire (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert command and command[1].split() == ["train", "--job", "mine.py", "--steps", "200"]
    written = Path("mine.py").read_text()
    assert (
        "thinwire train --job mine.py" in written and main(["new", "mine.py"]) == 2 and main(["new", "mine.txt"]) == 2
    )
    assert Path("mine.py").read_text() == written
    for job in ("mine.py", str(ROOT / "examples/jobs/denoise.py")):
        out = Path(job).stem
        arguments = ["--carrier", "threads", "--steps", "6", "--eval-every", "3", "--out", out]
        assert main(["train", "--job", job, *arguments, "--every", "4", "--delay", "1"]) == 0
        first, last = RunRecord.load(out).evaluations.loss
        assert last < first


# ---- the parts


def test_batches_repeat_a_list_and_continue_a_stream(here: Path) -> None:
    """A list starts again when it ends. Random draws of the batches and of other code do not affect each other."""
    (here / "drawn.py").write_text(
        PLAIN.replace("while True:\n        x = torch.randn(4)", "for x in torch.randn(3, 4):")
    )
    make = functions("plain.py")["batches"]
    share, path = Share(0, 1, 2), here / "plain.py"
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    one = Batches(path, make, share)
    drawn = [one.take()[0] for _ in range(4)]
    assert torch.equal(torch.rand(3), undisturbed)
    two = Batches(path, make, share)
    assert "3 of its batches" in two.load_state({"taken": 3}) and torch.equal(two.take()[0], drawn[3])
    epochs = Batches(path, lambda share: [1, 2, 3], share)
    assert [epochs.take() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1] and epochs.state() == {"taken": 7}


def test_a_torchdata_loader_resumes_where_it_was() -> None:
    """The loader shuffles with torch's own generator; its state passes through JSON."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def make(share: Share) -> object:
        return torchdata.StatefulDataLoader(list(range(10)), batch_size=2, shuffle=True)

    def begun() -> Batches:
        return Batches(Path("any.py"), make, Share(0, 0, 1))

    whole, cut, back = begun(), begun(), begun()
    drawn = [whole.take().tolist() for _ in range(14)]
    assert sorted(x for batch in drawn[:5] for x in batch) == list(range(10)) and drawn[:5] != drawn[5:10]
    assert [cut.take().tolist() for _ in range(7)] == drawn[:7]
    assert back.load_state(json.loads(json.dumps(cut.state()))) == ""
    assert [back.take().tolist() for _ in range(7)] == drawn[7:]


@pytest.mark.parametrize("frozen", ["model[0]", "model"])
def test_an_evaluation_gives_each_layer_its_own_mode_back(here: Path, frozen: str) -> None:
    """A layer that is in evaluation mode stays so. A whole model in evaluation mode, as a pretrained one comes, trains in training mode."""
    text = PLAIN.replace(
        "    return nn.Linear(4, 1)",
        f"    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))\n    {frozen}.eval()\n    return model",
    )
    Path("norm.py").write_text(text)
    command = [
        "--job",
        "norm.py",
        "--carrier",
        "threads",
        "--replicas",
        "1",
        "--steps",
        "6",
        "--strategy",
        "local_sgd(every=2)",
    ]
    assert main(["train", *command, "--batch", "3", "--eval-every", "2"]) == 0
    (folder,) = Path("runs").iterdir()
    batches = load_file(folder / "model.safetensors")["0.num_batches_tracked"].item()
    assert batches == (0 if frozen == "model[0]" else 6)


@pytest.mark.parametrize(
    "own", ["", "def optimizer(model): return SharpnessAware(torch.optim.SGD(model.parameters(), 0.1), model, 0.1)"]
)
def test_both_passes_of_sam_read_the_micro_batches_of_their_step(here: Path, own: str) -> None:
    text = f"""
import torch
from thinwire.pieces.inner_optimizers import SharpnessAware
def model(): return torch.nn.Linear(1, 1)
def batches(share):
    for number in range(99): yield torch.full((1, 1), float(number))
def loss(model, batch):
    print(int(batch), file=open("read", "a"))
    return model(batch).square().mean()
def evaluate(model): return 0.0
{own}
"""
    Path("sam.py").write_text(text)
    options = [] if own else ["--optimizer", "SAM(SGD())"]
    assert train("out", *options, "--replicas", "1", "--steps", "3", "--accumulate", "2", job="sam.py") == 0
    read = [int(line) for line in Path("read").read_text().split()]
    assert read[-12:] == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]


def test_a_model_that_the_run_folder_cannot_hold_is_saved_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, save_file = here / "full", safetensors.save_file

    def save(tensors: object, path: Path, *more: object) -> None:
        if folder in path.parents:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, *more)

    for made in (folder, here / "tmp"):
        made.mkdir()
    monkeypatch.setattr(safetensors, "save_file", save)
    monkeypatch.setattr(final.tempfile, "tempdir", str(here / "tmp"))
    job = OwnJob("plain.py", 0)
    model = job.make_model()
    with pytest.raises(CheckpointError, match=r"No space left .* It is in .* instead: free some space"):
        final.store(Run.of(job="plain.py"), job, model, model.state_dict(), folder, "replica-0", "")
    (spare,) = (here / "tmp").iterdir()
    assert {"model.safetensors", "run.toml"} <= {path.name for path in spare.iterdir()} and not list(folder.iterdir())


def test_scalars_of_numpy_are_numbers(here: Path) -> None:
    """As numpy's means and sums give them."""
    (here / "scalars.py").write_text(
        "import numpy\n"
        + JOB.replace("def loss(", "def mean(")
        + "def loss(model, batch):\n    return mean(model, batch) * 4, numpy.int64(4)\n"
        + "def evaluate(model):\n    return {'a': numpy.float32(0.5), 'b': numpy.int64(2), 'c': numpy.float64(3.0)}\n"
    )
    job = OwnJob("scalars.py", seed=0)
    model = job.try_out(2)
    assert isinstance(loss := job.loss(model, 1, torch.device("cpu")), Summed) and loss.tokens == 4.0
    assert job.evaluation(model, torch.device("cpu")) == {"a": 0.5, "b": 2.0, "c": 3.0}


@pytest.mark.parametrize("how", ["forkserver", "spawn"])
def test_a_loader_that_starts_workers_anew_finds_the_classes_of_the_job(how: str, tmp_path: Path) -> None:
    """Python 3.14 starts workers by forkserver."""
    (tmp_path / "my.job.py").write_text("class Points:\n    pass\n")
    made = file_of(str(tmp_path / "my.job.py")).Points()
    with multiprocessing.get_context(how).Pool(1) as pool:
        assert pool.apply(type, (made,)) is type(made)


def test_a_pinned_file_that_was_moved_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("class Moved:\n    pass\n")
    pinned = pinned_file(str(tmp_path / "old.py"))
    (tmp_path / "old.py").rename(tmp_path / "new.py")
    with pytest.raises(ConfigurationError, match="If a run was moved, give the new one"):
        file_of(pinned)
    assert file_of(str(tmp_path / "new.py")) is file_of(pinned)
