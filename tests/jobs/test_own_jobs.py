"""`thinwire train --job my_job.py`: a user's own model and data under the real commands."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fresh import forget_own_files
from pages import ROOT
from safetensors.torch import load_file

import thinwire as tw
from thinwire.cli import main
from thinwire.errors import JobError
from thinwire.jobs.base import Share
from thinwire.jobs.batches import Batches
from thinwire.jobs.own import functions
from thinwire.jobs.portable import decoded, encoded
from thinwire.jobs.several import routed
from thinwire.lm.run import Run
from thinwire.plan.machine import Machine
from thinwire.records.run_record import RunRecord

JOB = '''\
"""Points on a plane, and which side of a line they lie on."""
import os
from pathlib import Path
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

class Points:
    """Saves itself, as torchdata's loaders do."""
    def __init__(self, share):
        self.share, self.generator = share, torch.Generator().manual_seed(share.seed % 2**63 + share.index)
    def __iter__(self):
        return self
    def __next__(self):
        x = torch.randn(8, 4, generator=self.generator)
        return {"x": x, "y": (x.sum(1) > 0).long()}
    def state_dict(self):
        return {"generator": self.generator.get_state()}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

def batches(share):
    return Points(share)

steps = 0
def loss(model, batch):
    global steps
    steps += 1
    if steps == 7 and Path("kill").exists():
        os.kill(os.getpid(), 9)
    if steps == 3 and Path("fail").exists():
        raise ValueError("two\\nlines")
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def evaluate(model):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
'''
# A job without a state of its own, with samples to collate and its own optimizer.
PLAIN = """\
import torch
from torch import nn

def model():
    return nn.Linear(4, 1)

def batches(share):
    while True:
        x = torch.randn(4)
        yield x, x.sum()

def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.stack(y)

def loss(model, batch):
    x, y = batch
    return (model(x)[:, 0] - y).square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
"""
SMALL = ["--every", "4", "--delay", "2", "--checkpoint-every", "5", "--keep", "9", "--eval-every", "6"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "plain.py").write_text(PLAIN)
    return tmp_path


def train(out: str, *arguments: str, job: str = "job.py", small: Sequence[str] = SMALL) -> int:
    return main(["train", "--job", job, "--out", out, *small, "--carrier", "threads", *arguments])


def weights(out: str) -> bytes:
    return (Path(out) / "model.safetensors").read_bytes()


def last_losses(out: str) -> list[float]:
    return [float(replica.loss[-1]) for replica in RunRecord.load(out).replicas]


def drop_checkpoints(out: str, after: int) -> None:
    for path in Path(out).glob("checkpoints/*/step-*"):
        if path.name > f"step-{after:08d}":
            shutil.rmtree(path)
    (Path(out) / "model.safetensors").unlink()


def test_a_job_trains_is_reported_and_resumes_bit_for_bit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint of step 5 has a round in the air, which departed at 4 and lands at 6."""
    assert train("whole", "--steps", "12") == 0
    record = RunRecord.load("whole")
    assert record.status == "finished" and record.unit == "batches" and record.summary.tokens == 2 * 12
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


def test_a_job_without_a_state_reads_its_batches_again_on_resume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One replica, because replicas that are threads share torch's generator, from which this file draws."""
    command = ["train", "--job", "plain.py", "--carrier", "threads", "--checkpoint-every", "5", "--keep", "9"]
    command += ["--replicas", "1", "--batch", "3", "--steps", "12", "--strategy", "diloco", "--every", "4"]
    assert main([*command, "--out", "whole"]) == 0
    record = RunRecord.load("whole")
    assert record.unit == "samples" and record.summary.tokens == 36
    events = [json.loads(line) for line in Path("whole/events/replica-0.jsonl").read_text().splitlines()]
    # the rate of the job's own optimizer
    assert {event["lr"] for event in events if event["event"] == "step"} == {0.05}
    shutil.copytree("whole", "cut")
    drop_checkpoints("cut", 5)
    assert main(["train", "--resume", "--out", "cut"]) == 0
    assert weights("cut") == weights("whole") and last_losses("cut") == last_losses("whole")
    assert "15 of its batches were read again" in capsys.readouterr().out


def thinwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_processes_resume_to_the_weights_of_an_uninterrupted_run(here: Path) -> None:
    """kill -9 at the seventh step, with a round in the air. Before that, an error in the job that occurs only in training is shown
    as one line."""
    (here / "fail").touch()
    failed = thinwire("train", "--job", "job.py", "--out", "failed", *SMALL, "--steps", "12")
    line = JOB[: JOB.index("        raise ValueError")].count("\n") + 1
    assert failed.returncode == 1 and failed.stderr == f"{here}/job.py:{line}, in loss: ValueError: two lines\n"
    (here / "fail").unlink()
    (here / "kill").touch()
    killed = thinwire("train", "--job", "job.py", "--out", "run", *SMALL, "--steps", "12")
    assert killed.returncode == 1 and f"exit code -{int(signal.SIGKILL)}" in killed.stderr, killed.stderr
    (here / "kill").unlink()
    done = thinwire("train", "--resume", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert train("whole", "--steps", "12") == 0
    assert weights("run") == weights("whole")


@pytest.mark.slow
def test_a_job_runs_elastically_and_survives_a_kill(here: Path) -> None:
    """The killed replica returns, and its data continues where its checkpoint was."""
    (here / "job.py").write_text(JOB.replace("os.kill(", 'Path("kill").unlink(); os.kill('))
    (here / "kill").touch()
    done = thinwire("train", "--job", "job.py", "--elastic", "--out", "run", *SMALL, "--steps", "12", "--least", "1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert not (here / "kill").exists() and RunRecord.load("run").status == "finished"


def test_methods_are_compared_on_a_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are compared by the job's `evaluate`, which gives one number for each set of weights."""
    command = ["compare", "--job", "job.py", "--steps", "8", "--carrier", "threads", "--out", "runs", "--json"]
    assert main([*command, "--strategies", "data_parallel", "diloco(every=4)", "just_one_byte"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert [row["strategy"] for row in rows] == ["data_parallel", "diloco(every=4)", "just_one_byte"]
    assert all(0 < row["eval_loss"] < 2 for row in rows) and len({row["eval_loss"] for row in rows}) == 3


def test_probe_plan_and_doctor_accept_a_job_and_the_plan_trains(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They use the job's parameters and step times. The batch is what the job collates, or one where it collates nothing."""
    for module in ("plan.compute", "cli.doctor"):  # tests/plan/test_links_and_machines.py measures it
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
    from thinwire.comm import run_threads
    from thinwire.lm.launch import train_here
    from thinwire.lm.place import Place

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


# ---- errors in the file


def wrong(here: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what `thinwire train` prints for a job with this text: one line, without a traceback."""
    (here / "wrong.py").write_text(text)
    capsys.readouterr()
    assert train("run", "--steps", "6", job="wrong.py") == 1
    said = capsys.readouterr().err.strip()
    assert "Traceback" not in said and "thinwire train" not in said and said.count("\n") == 0, said
    return said


def test_errors_are_shown_with_their_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, line = here / "wrong.py", JOB[: JOB.index("    return nn.functional")].count("\n") + 1
    said = wrong(here, JOB.replace('model(batch["x"])', 'model(batch["x"].T)'), capsys)
    assert said.startswith(f"{path}:{line}, in loss: RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert wrong(here, JOB + "1 / 0\n", capsys).startswith(
        f"{path}:{JOB.count(chr(10)) + 1}, in <module>: ZeroDivisionError"
    )
    assert wrong(here, JOB + "def (\n", capsys).startswith(
        f"{path}:{JOB.count(chr(10)) + 1}: SyntaxError: invalid syntax"
    )
    assert "A job file may import what is installed" in wrong(here, "import nobody_s_module\n" + JOB, capsys)
    told = wrong(here, JOB.replace("def batches(share):", "def batches(share):\n    [][1]"), capsys)
    assert "in batches: IndexError: list index out of range" in told


def test_missing_functions_and_wrong_results_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        JOB.replace(
            "def loss(", "def los("
        ): "has no loss(model, batch); a job has model(), batches(share), loss(model, batch)",
        JOB.replace("def batches(share)", "def batches()"): "batches() cannot be called as batches(share)",
        JOB.replace(
            "return nn.functional.cross_entropy(model(b", "return 3 or (model(b"
        ): "loss(model, batch) returned a value of type int; a scalar tensor",
        JOB.replace("return Points(share)", "return []"): "the iterable from batches(share) is empty",
        JOB.replace(
            "return Points(share)", "return 3"
        ): "batches(share) returned a value of type int; an iterable is needed",
        JOB.replace("return Points(share)", "yield torch.zeros(0, 4)"): "yielded an empty batch as number 1",
        JOB.replace("    return nn.Sequential(", "    return str("): "in model: TypeError",
        JOB.replace(
            'return nn.functional.cross_entropy(model(batch["x"])', 'return torch.zeros(3) + (model(batch["x"])[0, 0]'
        ).replace(', batch["y"])\n', ")\n"): "returned a tensor of shape (3,); a scalar tensor",
        JOB.replace(
            '(model(batch["x"])', '(model(batch["x"]).detach()'
        ): "returned a tensor that depends on no parameter",
    }
    for text, expected in cases.items():
        assert text != JOB
        assert expected in wrong(here, text, capsys)


def test_errors_that_occur_only_in_training_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A generator that ends, and an `evaluate` that returns no number."""
    said = wrong(
        here, JOB.replace("return Points(share)", "yield from list(next(Points(share)) for _ in range(3))"), capsys
    )
    assert "batches(share) ended after 3 for Share(seed=0, index=" in said and "while True" in said
    shutil.rmtree("run")
    assert "evaluate(model) returned a value of type str; a number" in wrong(
        here, JOB + "def evaluate(model):\n    return 'good'\n", capsys
    )


def test_settings_that_contradict_a_job_are_refused(here: Path) -> None:
    for settings in ({"lora": 4}, {"model": "mini"}, {"text": ("a.txt",)}, {"tokenizer": "bytes"}):
        with pytest.raises(tw.ConfigurationError, match=next(iter(settings))):
            Run.of(job="job.py", **settings)
    assert main(["train", "--job", "plain.py", "--optimizer", "AdamW", "--out", "run"]) == 2
    assert main(["train", "--job", "plain.py", "--strategy", "muloco", "--out", "run"]) == 2
    assert not Path("run").exists()


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


def test_states_of_jobs_pass_through_json() -> None:
    state = {
        "a": [1, 2.5, None, True, "x"],
        3: b"bytes",
        "t": torch.arange(6).reshape(2, 3),
        "e": torch.empty(0),
        "h": torch.ones(2).half(),
    }
    back = decoded(json.loads(json.dumps(encoded(state))))
    assert back["a"] == state["a"] and back[3] == b"bytes" and back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in "teh")
    with pytest.raises(JobError, match="holds a object"):
        encoded({"x": object()})
    for bad in (
        {"bytes in base64": "%"},
        {"tensor": "nothing"},
        {"tensor": "save", "bytes in base64": "", "shape": [1]},
        {"x": 1},
    ):
        with pytest.raises(tw.CheckpointError):
            decoded(bad)


# ---- several optimizers, several losses

MIN_MAX = """\
import torch
from torch import nn

def model():
    return nn.ModuleDict({"x": nn.Linear(1, 3, bias=False), "y": nn.Linear(3, 1, bias=False)})

def batches(share):
    while True:
        yield torch.randn(8, 1)

def loss(model, batch):
    worth = model["y"](torch.tanh(model["x"](batch))).mean()
    return [worth + model["x"].weight.square().sum(), model["y"].weight.square().sum() - worth]

def optimizer(model):
    return [torch.optim.SGD(model["x"].parameters(), lr=0.1), torch.optim.Adam(model["y"].parameters(), lr=0.1)]

def evaluate(model):
    return {"square": model["x"].weight.square().sum(), "largest": float(model["y"].weight.max())}
"""
SPARSE = """\
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(30, 4, sparse=%s), nn.Linear(4, 1))

def batches(share):
    while True:
        yield torch.randint(10, (8,))

def loss(model, batch):
    return (model(batch)[:, 0] - batch).square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)
"""


def test_each_optimizer_descends_only_its_own_loss() -> None:
    """For example, a generator's loss passes through the discriminator and does not train it."""
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in (x, y)]
    worth = x * y
    shown = routed([worth.sum(), 5 * y.sum() - worth.sum()], optimizers)
    (shown / 2).backward()
    assert shown.item() == 6 and x.grad.item() == 3 / 2 and y.grad.item() == (5 - 2) / 2


@pytest.mark.parametrize("strategy", ["streaming_sign", "qsgd"])
def test_a_job_with_two_optimizers_trains(here: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "two.py").write_text(MIN_MAX)
    assert train("whole", "--steps", "12", "--strategy", strategy, job="two.py", small=[]) == 0
    summary = RunRecord.load("whole").summary
    assert list(summary.losses) == ["square", "largest"] and summary.losses["square"] == summary.eval_loss
    (here / "two.py").write_text(MIN_MAX[: MIN_MAX.index("def evaluate")] + f"# {strategy}\n")
    assert train("none", "--steps", "4", job="two.py") == 1
    assert "returns 2 losses, and no single number to compare runs; write evaluate(model)" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["diloco(every=4)", "data_parallel", "qsgd"])
def test_sparse_gradients_train_like_dense_ones(here: Path, strategy: str) -> None:
    for sparse in (True, False):
        (here / f"{sparse}.py").write_text(SPARSE % sparse)
        arguments = ["--steps", "9", "--clip", "0.5", "--strategy", strategy]
        assert train(str(sparse).lower(), *arguments, job=f"{sparse}.py", small=[]) == 0
    one, other = (load_file(f"{sparse}/model.safetensors") for sparse in ("true", "false"))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in other)
