"""What a first user types and reads: pages, exit codes, how to resume, a hub of models that does not answer."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from thinwire.app.cli import main
from thinwire.app.cli.docs import pages
from thinwire.app.records.summary import Summary
from thinwire.app.report.progress import COLUMNS
from thinwire.app.report.top import _COLUMNS
from thinwire.app.trainer.run import OF_A_RUN, PART_OF, Run

JOB = """\
import torch
def model(): return torch.nn.Linear(4, 3)
def batches(share):
    data = torch.Generator().manual_seed(share.index)
    while True:
        x = torch.randn(8, 4, generator=data)
        yield x, x[:, :3].argmax(1)
def loss(model, batch): return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_the_list_of_pages_says_where_to_begin_and_has_every_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0] == "Begin here" and told.splitlines()[1].split()[:3] == ["thinwire", "docs", "start"]
    assert set(pages()) - {"index"} <= set(re.findall(r"[\w/-]+", told))


def test_a_page_has_every_column_and_figure_of_the_displays() -> None:
    page = pages()["displays"].read_text().replace(",", " ")
    elastic = dict.fromkeys(("living", "taking_part"), 1.0) | dict.fromkeys(
        ("rounds_committed", "steps_trained", "steps_jumped", "steps_counted", "samples_trained"), 1
    )
    elastic |= {"samples_in_flight": 0, "samples_lost": 0, "uploaded": 1.0, "deltas_clipped": 1}
    shown = Summary("s", 2, 1, 1, 1, 1.0, 1, 1.0, 1.0, 1.0, 0.0, "measured", wire_bytes_foreseen=9, **elastic)  # type: ignore[arg-type]
    for word in {*COLUMNS, *_COLUMNS, *(what for what, _ in shown.figures())} - {"tokens/s"}:
        assert word in page or all(f" {part} " in page for part in word.split()), word


@pytest.mark.parametrize(
    "command",
    [
        "train --text nope", "train --model nope/model.safetensors", "train --tokenizer bpe:nope.json", "resume nope",
        "report nope", "report nope --diagnose", "top nope", "checkpoints nope", "sample nope x", "export nope",
        "evaluate nope", "plan nope.toml m.toml", "plan fit nope", "plan pack nope", "doctor nope.toml", "docs nope",
        "lighthouse --secret nope/x --host 127.0.0.1", "new nope/job.py", "join @nope --name a", "compare --text nope",
    ],
)  # fmt: skip
def test_what_is_not_there_ends_with_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    assert "nope" in capsys.readouterr().err


def test_a_resume_may_change_what_its_help_says(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    told = capsys.readouterr().out.partition("usage: thinwire train")[0]
    other = {"steps": 9, "lr": 1.0, "link": "5mbit", "eval_every": 7, "keep": 9, "checkpoint_every": 3, "timeout": 5.0}
    for name, value in other.items():
        assert f"--{name.replace('_', '-')}" in told and not Run().changed(**{name: value}).unlike(Run())
    assert all(f"--{name.replace('_', '-')} " not in told for name in OF_A_RUN if name != "replicas")
    assert Run().changed(seed=5).unlike(Run()) and set(OF_A_RUN) <= set(PART_OF)


def test_a_hub_of_models_that_does_not_answer_is_asked_once() -> None:
    """Each of the files that transformers looks for would be asked for again and again, for most of a minute."""
    pytest.importorskip("transformers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = []

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                asked.append(1)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "thinwire", "train", "--model", "hf:some/name", "--steps", "2"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        server.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 2 and "the hub does not answer" in done.stderr and done.stderr.count("\n") == 1
    assert len(asked) == 1


def test_a_job_gets_no_loss_of_a_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("m.toml").write_text('memory = "8GB"\nflops_per_second = 1e11\n')
    command = ["plan", "1mbit,300ms", "m.toml", "--job", "job.py", "--json"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(setting["loss"] is None for setting in said["settings"])
    alone = said["settings"][0]["replicas"] == 1
    assert alone == any(text.startswith("one-replica-alone: ") for text in said["warnings"])
    assert main([*command, "--loss", "3"]) == 2 and "none of a job" in capsys.readouterr().err
