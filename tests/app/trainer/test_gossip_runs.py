"""Gossip through the path of the public command: trained, stopped and resumed; the saved model is the mean over all replicas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import read_events
from safetensors.torch import load_file

from thinwire.app.trainer import launch, run_folder, supervisor
from thinwire.app.trainer.resize import resize
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError

STEPS = 8


def small_run(text: str, **changes: object) -> Run:
    settings: dict[str, object] = dict(
        text=(text,), strategy="noloco", topology="random_pairs", every=3, delay=1, partition="BySize(2)", replicas=4, steps=STEPS,
        model="nano", batch=1, sequence=16, checkpoint_every=4, keep=9, eval_batches=1, eval_every=4, carrier="threads", timeout=600.0,
    )  # fmt: skip
    return Run.of(**(settings | changes))  # type: ignore[arg-type]


def run_in(folder: Path, run: Run, resume: bool = False) -> None:
    run_folder.new_folder(run, folder, resume)
    train = launch.train_threads if run.placement.carrier == "threads" else supervisor.train_processes
    train(run, folder, resume, lambda: None)


def events_of(folder: Path, kind: str, replica: int = 0) -> list[Any]:
    found = read_events(folder / "events" / f"replica-{replica}.jsonl")
    return [event for event in found if event["event"] == kind]


def test_a_gossip_run_resumes_bit_for_bit_and_saves_the_mean(tmp_path: Path, text: str) -> None:
    whole = tmp_path / "whole"
    run_in(whole, small_run(text))
    model = load_file(whole / "model.safetensors")

    # The saved model is the mean of the replicas' weights at the last step, which differ.
    own = [load_file(next(whole.glob(f"checkpoints/replica-{r}/step-{STEPS:08d}/model.safetensors"))) for r in range(4)]
    name = max(model, key=lambda one: model[one].numel())
    assert not torch.equal(own[0][name], own[1][name])
    for name, value in model.items():
        if value.is_floating_point():
            mean = torch.stack([one[name] for one in own]).double().mean(0)
            torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=1e-5)

    # The output says so.
    assert [event["of"] for event in events_of(whole, "eval")] == ["own", "mean"]
    ends = [events_of(whole, "end", rank)[-1]["summary"] for rank in range(4)]
    assert {end["eval_of"] for end in ends} == {"mean"} and len({end["weights"] for end in ends}) == 1

    # A new replica would have no weights.
    with pytest.raises(ConfigurationError, match="each replica has its own weights"):
        resize(small_run(text, replicas=2), whole, torch.nn.Linear(1, 1))

    # A resume from the middle, with a round in the air, gives the same bits.
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    (again / "model.safetensors").unlink()
    for newer in again.glob(f"checkpoints/*/step-{STEPS:08d}"):
        shutil.rmtree(newer)
    facts = json.loads(next(again.glob("checkpoints/replica-0/step-00000004/manifest.json")).read_text())
    assert "flights" in json.dumps(facts)
    run_in(again, Run.load(again / "run.toml"), resume=True)
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_threads_and_processes_train_the_same_bits(tmp_path: Path, text: str) -> None:
    for carrier in ("threads", "processes"):
        run_in(tmp_path / carrier, small_run(text, carrier=carrier))
    models = [(tmp_path / carrier / "model.safetensors").read_bytes() for carrier in ("threads", "processes")]
    assert models[0] == models[1]


def test_a_run_file_holds_the_edges_read_from_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "links.json"
    file.write_text("[[0, 1], [1, 2], [2, 3]]")
    given = small_run(text, strategy="d_psgd", topology=str(file))
    assert given.absolute().method.topology == "Listed(pairs_of_replicas=((0, 1), (1, 2), (2, 3)), one_way=False)"
    assert given.absolute().make_strategy() == given.make_strategy()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": 3}, "among 3 replicas: an even number is needed"),
        ({"outer_momentum": 0.9}, "grows by 1.098"),
        ({"topology": "rong"}, "did you mean Ring"),
        ({"topology": "E3M0"}, "is a E3M0; one of"),
        ({"topology": "Listed(((0, 1), (2, 3)))"}, "is in 2 parts"),
        ({"topology": "no.json"}, "no.json holds no edges"),
        ({"strategy": "diloco", "delay": None, "partition": None}, "takes no topology"),
    ],
    ids=str,
)
def test_invalid_gossip_runs_are_refused_before_anything_is_made(
    text: str, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        small_run(text, **changes)


def test_a_pairwise_run_resumes_bit_for_bit_and_saves_the_mean(tmp_path: Path, text: str) -> None:
    changes: dict[str, object] = dict(strategy="a2cid2", topology="ring", every=1, delay=None, partition=None)
    whole = tmp_path / "whole"
    run_in(whole, small_run(text, **changes))
    assert [event["of"] for event in events_of(whole, "eval")] == ["own", "mean"]
    ends = [events_of(whole, "end", rank)[-1]["summary"] for rank in range(4)]
    assert {end["eval_of"] for end in ends} == {"mean"} and len({end["weights"] for end in ends}) == 1
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    (again / "model.safetensors").unlink()
    for newer in again.glob(f"checkpoints/*/step-{STEPS:08d}"):
        shutil.rmtree(newer)
    run_in(again, Run.load(again / "run.toml"), resume=True)
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
