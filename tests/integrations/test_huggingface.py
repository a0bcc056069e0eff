"""The bridge to transformers' `Trainer`: one replica changes nothing, and two processes agree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from member_loop import LIMIT, beside, membership
from safetensors.torch import load_file
from torch import Tensor

import thinwire as tw
from thinwire.drivers.handshake import agree_on_resume, compare_settings
from thinwire.integrations.attached import newest_of_all, too_short
from thinwire.membership import Lighthouse
from thinwire.net import Hub, join
from thinwire.testing.toy import same_bits

if TYPE_CHECKING:
    from accelerate.state import PartialState
    from hf_trainer import (
        SAVED,
        STEPS,
        STREAMING,
        Normed,
        PowerCut,
        Swaps,
        Then,
        Tokens,
        arguments,
        losses,
        model,
        refused,
        train,
        weights,
    )
    from transformers import Trainer

    from thinwire.integrations.huggingface import ThinwireCallback
    from thinwire.integrations.huggingface_checks import ProcessPlace, found_place

pytestmark = pytest.mark.usefixtures("late_imports")
AVERAGE = tw.local_sgd(every=3)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"torch_compile": True, "torch_compile_backend": "eager"}],
    ids=["plain", "accumulating", "compiled"],
)
def test_one_replica_with_average_changes_nothing(tmp_path, options):
    """Law 11, also after a resume: the weights equal those of the trainer without Thinwire, bit for bit."""
    due = weights(train(tmp_path / "bare", None, **options))
    callback = ThinwireCallback(AVERAGE)
    assert same_bits(weights(train(tmp_path / "attached", callback, **options)), due) and callback.replica is None
    again = train(
        tmp_path / "attached", ThinwireCallback(AVERAGE), resume=str(tmp_path / "attached/checkpoint-4"), **options
    )
    assert same_bits(weights(again), due) and not same_bits(weights(again), torch.zeros_like(due))
    elsewhere = str(tmp_path / "attached/checkpoint-4")
    said = refused(tmp_path / "other", ThinwireCallback(AVERAGE), resume=elsewhere, **options)
    assert (
        said.startswith("CheckpointError: the trainer resumes at step 4, and ") and "copy all of checkpoint-4" in said
    )
    shutil.rmtree(tmp_path / "attached/checkpoint-4/thinwire")
    said = refused(tmp_path / "attached", ThinwireCallback(AVERAGE), resume=elsewhere, **options)
    assert said.endswith("Its save was cut off: delete checkpoint-4 and resume from the one before, on all replicas.")


@pytest.mark.parametrize("first", [True, False], ids=["thinwire first", "averages first"])
@pytest.mark.parametrize("back", ["on_evaluate", "on_save", "on_step_begin"])
def test_averages_that_are_swapped_in_for_evaluations_change_nothing(tmp_path, back, first):
    """Law 11, for the averages and for a resume from a checkpoint that is written beside an evaluation, too."""

    def trained(folder: Path, callback: ThinwireCallback | None, resume: object = None) -> tuple[Tensor, Tensor, Any]:
        swaps, data = Swaps(back), {"train_dataset": Tokens(), "eval_dataset": Tokens(8)}
        callbacks = [swaps] if not callback else [callback, swaps] if first else [swaps, callback]
        saves = {"save_steps": 3} if back != "on_step_begin" else {"save_strategy": "no"}
        given = arguments(folder, eval_strategy="steps", eval_steps=3, **saves)
        trainer = Trainer(model(), given, callbacks=callbacks, **data)
        trainer.train(resume_from_checkpoint=resume)
        averages = torch.cat([value.flatten() for value in swaps.average.values()])
        return weights(trainer), averages, losses(trainer)

    due, got = trained(tmp_path / "bare", None), trained(tmp_path / "attached", ThinwireCallback(tw.local_sgd(every=4)))
    assert same_bits(got[0], due[0]) and same_bits(got[1], due[1]) and got[2] == due[2]
    if back == "on_evaluate":
        resumed = str(tmp_path / "attached/checkpoint-6")
        assert same_bits(trained(tmp_path / "attached", ThinwireCallback(tw.local_sgd(every=4)), resumed)[0], due[0])


# AMP does not call the step of the first; the second skips by itself.
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_skipped_step_is_an_inner_step_that_trains_nothing(tmp_path, optim):
    def scaled(folder: Path, *callbacks: ThinwireCallback) -> Trainer:
        trainer = Trainer(model(), arguments(folder, optim=optim), train_dataset=Tokens(), callbacks=list(callbacks))
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        trainer.train()
        return trainer

    steps: list[int] = []

    def heard(event: str, step: int, **fields: object) -> None:
        if event == "depart":
            steps.append(step)

    due, got = scaled(tmp_path / "bare"), scaled(tmp_path / "attached", ThinwireCallback(AVERAGE, observer=heard))
    assert due.accelerator.scaler.get_scale() < 2.0**127  # the scaler skipped some steps
    assert same_bits(weights(got), weights(due)) and steps == [3, 6, 9, 12]


def over_a_hub(folder: Path, replica: Callable[[tw.Group], list[float]]) -> list[list[float]]:
    """What two replicas return that dial a hub."""
    with Hub(folder / "hub") as hub, ThreadPoolExecutor(2) as threads:
        token = str(hub.invite(2))

        def joined(name: str) -> list[float]:
            with join(token, name, size=2, folder=folder / "keys", timeout=LIMIT) as group:
                return replica(group)

        return list(threads.map(joined, ("lima", "oslo")))


def as_threads(folder: Path, replica: Callable[[tw.Group], list[float]]) -> list[list[float]]:
    return tw.run_threads(2, replica, timeout=LIMIT)


def beside_a_trainer(
    folder: Path, saves: str, run: Callable[[Path, Callable[[tw.Group], list[float]]], list[list[float]]] = as_threads
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The losses of the evaluations of a Trainer and of a loop, its only other replica, and what the loop would save at step 3."""
    held_out = {name: torch.stack([Tokens()[i][name] for i in (0, 1)]) for name in ("input_ids", "labels")}
    due: dict[str, Tensor] = {}

    def trainer(group: tw.Group) -> list[float]:
        options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}
        net, callback = Normed(), ThinwireCallback(AVERAGE, group, own_data=True)
        data = {"train_dataset": Tokens(), "eval_dataset": torch.utils.data.Subset(Tokens(), [0, 1])}
        Trainer(net, arguments(folder, **options), callbacks=[callback], **data).train()
        return net.losses

    def loop(group: tw.Group) -> list[float]:
        net = Normed()
        settings = {"the trainer's max_steps": 6, "evaluations": "every 2 steps, from 0"}
        compare_settings(group, settings | {"saves": saves})
        agree_on_resume(group, 0, bytes(16))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with tw.Replica(AVERAGE, net, optimizer, group) as replica:
            for step in range(1, 6):
                train(net, optimizer)
                if step in (2, 3, 4):
                    with replica.anchored(), replica.averaged_buffers():
                        evaluate(net)
                        if step == 3:
                            net.losses.pop()
                            due.update({name: one.clone() for name, one in net.state_dict().items()})
            train(net, optimizer)
        evaluate(net)
        return net.losses

    def train(net: Normed, optimizer: torch.optim.Optimizer) -> None:
        net(**held_out)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(net: Normed) -> None:
        net.eval()
        with torch.no_grad():
            net(**held_out)
        net.train()

    zero, one = run(folder, lambda group: (loop if group.rank else trainer)(group))
    return zero, one, due


@pytest.mark.parametrize("run", [as_threads, over_a_hub])
def test_evaluations_and_saved_models_have_the_mean_of_the_buffers(tmp_path, run):
    zero, one, due = beside_a_trainer(tmp_path, "every 3 steps", run)
    assert zero == one and len(zero) == 3
    saved = load_file(tmp_path / "checkpoint-3/model.safetensors")
    floats = [name for name in due if due[name].is_floating_point()]  # a count of batches stays each replica's own
    assert len(floats) == 6 and all(torch.equal(saved[name], due[name]) for name in floats)


def test_evaluations_and_saves_at_other_steps_are_refused_for_a_model_whose_buffers_are_averaged(tmp_path):
    """The replicas would wait for each other."""
    with pytest.raises(tw.DisagreementError, match="saves: every 4 steps there, every 3 steps on replica 0"):
        beside_a_trainer(tmp_path, "every 4 steps")


def test_the_best_model_is_the_best_of_the_mean_over_all_replicas(tmp_path):
    """Replica 1, a loop, says that the model of step 4 is the best; on the trainer's own data it is another."""

    def trainer(group: tw.Group) -> Trainer:
        options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
        callback, data = ThinwireCallback(AVERAGE, group, own_data=True), Tokens()
        given = arguments(tmp_path, max_steps=6, **options)
        trained = Trainer(model(), given, train_dataset=data, eval_dataset=Tokens(8), callbacks=[callback])
        trained.train()
        return trained

    def loop(group: tw.Group) -> None:
        settings = {"the trainer's max_steps": 6, "evaluations": "every 2 steps, from 0", "saves": "every 2 steps"}
        compare_settings(group, settings | {"metric_for_best_model": "loss"})
        agree_on_resume(group, 0, bytes(16))
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with tw.Replica(AVERAGE, net, optimizer, group) as replica:
            for step in range(1, 7):
                net(**{name: one[None] for name, one in Tokens()[0].items()}).loss.backward()
                optimizer.step()
                if step in (2, 4):
                    replica.mean(100.0 if step == 2 else 0.0)
        replica.mean(100.0)

    trained, _ = tw.run_threads(2, lambda group: (loop if group.rank else trainer)(group), timeout=LIMIT)
    own = losses(trained)
    assert min(own) != own[1] and trained.state.best_global_step == 4 and trained.state.best_metric == own[1] / 2
    saved = load_file(tmp_path / "checkpoint-4/model.safetensors")
    assert all(torch.equal(one, saved[name]) for name, one in trained.model.state_dict().items() if name in saved)


def test_a_run_too_short_for_its_momentum_warns():
    said = too_short(tw.diloco(every=10), 12)
    assert "12 steps are 1 rounds of each fragment" in said and said.endswith("Take finetune(), or exchange more often")
    assert too_short(tw.finetune(every=10), 12).endswith("finetune.md). Exchange more often")
    assert not too_short(tw.diloco(every=10), 200) and not too_short(tw.finetune(every=10), 30)
    assert not too_short(tw.local_sgd(every=10), 12) and not too_short(tw.data_parallel(), 1)


def test_unsupported_settings_are_refused(tmp_path):
    said = refused(tmp_path, ThinwireCallback(AVERAGE), auto_find_batch_size=True)
    assert said.startswith("ConfigurationError: auto_find_batch_size")
    train(tmp_path / "bare", None, max_steps=4)
    said = refused(tmp_path / "bare", ThinwireCallback(AVERAGE), resume=True, max_steps=8)
    assert said.startswith("CheckpointError: the trainer resumes at step 4 from a checkpoint of a training without")
    with pytest.raises(tw.ConfigurationError, match="weights='best'"):
        ThinwireCallback(AVERAGE, weights="best")


def test_a_second_trainer_with_the_same_arguments_has_the_same_place(tmp_path):
    """The first has hidden the other processes from accelerate, and may have ended by an error."""
    given = arguments(tmp_path, save_on_each_node=False)
    trainer = Trainer(model(), given)
    PartialState._shared_state.update(num_processes=2, process_index=1, local_process_index=1)
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        given.output_dir = given.output_dir if folder == tmp_path else str(folder)
        callback = ThinwireCallback(AVERAGE)
        callback.on_init_end(given, trainer.state, trainer.control)
        assert callback._place == ProcessPlace(1, 2, local=1)
        assert given.output_dir == str(folder / "replica-1")
        callback._place.hide(shares=1)
        callback._place.show_each(given)
    callback._place.show_local(given)
    assert not given.save_on_each_node and PartialState().local_process_index == 1
    arguments(tmp_path).device  # noqa: B018  makes accelerate look again
    assert found_place(PartialState()) == (0, 1, 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    program = Path(__file__).parents[1] / "support/hf_trainer.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
        str(folder),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], done.stderr, folder


@pytest.mark.slow
def test_two_processes_agree_and_send_only_packets(world):
    (zero, one), said, _ = world
    assert same_bits(zero["weights"], one["weights"]) and zero["steps"] == one["steps"] == STEPS
    assert zero["unwrapped"] and one["unwrapped"] and zero["calls"] == one["calls"] == []
    assert (
        zero["packets"]
        == one["packets"]
        == STEPS // STREAMING.schedule.every * STREAMING.nbytes_per_period(zero["shapes"], 2)
    )
    assert said.count("thinwire: 2 replicas; each sends ") == 10  # once for each training


@pytest.mark.slow
def test_each_process_reads_its_share_of_the_samples(world):
    (zero, one), _, _ = world
    assert len(zero["seen"]) >= 2 * STEPS and not set(zero["seen"]) & set(one["seen"])


@pytest.mark.slow
def test_evaluation_uses_the_anchors_or_the_own_weights(world):
    """By default the anchors, which are equal on both replicas; on request each replica's own weights."""
    (zero, one), _, _ = world
    assert zero["losses"] == one["losses"] and len(zero["losses"]) == STEPS // 4
    # after training both have the same weights
    assert zero["own"][0] != one["own"][0] and zero["own"][-1] == one["own"][-1]


@pytest.mark.slow
def test_checkpoints_are_saved_rotated_and_resumed(world):
    (zero, one), _, folder = world
    assert zero["rotated"] == one["rotated"] == [f"checkpoint-{STEPS}"]
    flights = (folder / "whole/replica-1/checkpoint-8/thinwire/step-00000008/manifest.json").read_text()
    assert '"flights": {}' not in flights  # a round was in the air
    assert same_bits(zero["resumed"], zero["weights"]) and same_bits(one["resumed"], one["weights"])
    for replica, other in ((zero, 1), (one, 0)):
        assert replica["of another"].startswith(
            f"CheckpointError: the trainer resumes at step 8 from a checkpoint of {{'replica': {other}"
        )
        assert "max_steps" in replica["other steps"] and replica["other steps"].startswith("DisagreementError")
    for replica in (zero, one):
        assert [name for name, _ in replica["restarts"]] == [None, "checkpoint-8", "checkpoint-4"]
        assert all(same_bits(got, zero["restarts"][0][1]) for _, got in replica["restarts"])
    assert same_bits(zero["own data"], one["own data"]) and SAVED == 4
    assert zero["twice"] == [str(folder / "twice")] * 2 and one["twice"] == [str(folder / "twice/replica-1")] * 2


def test_a_trainer_that_joins_late_starts_at_the_step_of_the_others(tmp_path):
    """It takes their weights, their step and their learning rate, and trains samples that no other replica trains."""
    facts = {"the trainer's max_steps": str(STEPS)}
    with beside(STREAMING, model(), facts=facts, steps=STEPS, alone=6, samples=512) as (other, trained):
        callback = ThinwireCallback(STREAMING, membership(other.address, "trainer"))
        data = Tokens(512)
        given = arguments(tmp_path, save_steps=5)
        trainer = Trainer(model(), given, train_dataset=callback.share(data), callbacks=[callback, Then(other.go)])
        trainer.train()
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in trained.result(600).parameters()])
    steps = trainer.optimizer.optimizer.state_dict()["state"][0]["step"].item()
    assert trainer.state.global_step == trainer.lr_scheduler.last_epoch == STEPS and 0 < steps <= STEPS - 6
    assert same_bits(weights(trainer), whole)
    assert not set(data.seen[: 2 * int(steps)]) & set(other.seen)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged and all(2.5 < loss < 5 for loss in logged)  # the loss is not divided by steps that others trained
    saved = sorted(path.name for path in (tmp_path / "trainer").glob("checkpoint-*/thinwire"))
    assert saved and not list(tmp_path.glob("checkpoint-*"))


def test_a_trainer_that_returns_takes_only_what_has_moved(tmp_path):
    """It resumes from the trainer's own checkpoint before it meets the others: two of three fragments have moved since."""

    def begin(*callbacks: object, resume: bool = False) -> Trainer:
        callback = ThinwireCallback(STREAMING, membership(other.address, "trainer"))
        data, given = callback.share(Tokens(512)), arguments(tmp_path, save_steps=7)
        trainer = Trainer(model(), given, train_dataset=data, callbacks=[callback, *callbacks])
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            callback.close()
        return trainer

    facts = {"the trainer's max_steps": str(STEPS)}
    with beside(STREAMING, model(), facts=facts, steps=STEPS, alone=6, away=9, samples=512) as (other, trained):
        with pytest.raises(OSError, match="the power is cut"):
            begin(PowerCut())
        other.go.set()
        assert other.moved.wait(LIMIT)
        trainer = begin(Then(other.back), resume=True)
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in trained.result(LIMIT).parameters()])
    assert trainer.state.global_step == STEPS and same_bits(weights(trainer), whole)
    assert 0 < sum(other.given[1:]) < other.given[0]


def test_members_that_sample_completions_have_seeds_of_their_own(tmp_path):
    """TRL's trainers that do have `num_generations`, and seed each process by its number, which is 0 on all members."""
    seeds = set()
    for name in ("paris", "oslo"):
        lighthouse = Lighthouse("127.0.0.1", 0, 5.0, b"", lambda _: None)
        member = membership(lighthouse.address, name)
        callback, given = (
            ThinwireCallback(AVERAGE, member, own_data=True, keep_seconds=0.0),
            arguments(tmp_path, max_steps=1),
        )
        given.num_generations = 2
        Trainer(model(), given, train_dataset=Tokens(), callbacks=[callback]).train()
        seeds.add(torch.initial_seed())
        member.close()
        lighthouse.close()
    assert len(seeds) == 2


def test_unsupported_settings_of_an_elastic_member_are_refused(tmp_path):
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, b"", lambda _: None)
    member = membership(lighthouse.address, "a")
    said = refused(tmp_path, ThinwireCallback(AVERAGE, member))
    assert "training data that other members read too" in said and "callback.share(data)" in said
    said = refused(tmp_path, ThinwireCallback(AVERAGE, member), load_best_model_at_end=True, eval_strategy="steps")
    assert said.startswith("ConfigurationError: load_best_model_at_end")
    with pytest.raises(tw.ConfigurationError, match="a Membership is needed"):
        ThinwireCallback(AVERAGE).share(Tokens())
    member.close()
    lighthouse.close()


def test_one_form_starts_and_resumes_from_the_newest_whole_checkpoint(tmp_path):
    """Law 11 holds over it; a newer checkpoint whose save was cut off, or whose files are torn, is set aside."""

    def trained() -> tuple[str | None, Tensor]:
        callback = ThinwireCallback(AVERAGE)
        trainer = Trainer(model(), arguments(tmp_path / "a"), train_dataset=Tokens(), callbacks=[callback])
        found = callback.newest()
        trainer.train(resume_from_checkpoint=found)
        return found, weights(trainer)

    due = weights(train(tmp_path / "bare", None))
    assert trained()[0] is None
    shutil.rmtree(tmp_path / "a/checkpoint-12/thinwire")
    os.truncate(tmp_path / "a/checkpoint-8/optimizer.pt", 100)
    found, got = trained()
    assert found == str(tmp_path / "a/checkpoint-4") and same_bits(got, due)
    assert {path.name for path in (tmp_path / "a").glob("passed-over-*")} == {
        f"passed-over-checkpoint-{step}" for step in (8, 12)
    }
    with pytest.raises(tw.ConfigurationError, match="before the Trainer was made"):
        ThinwireCallback(AVERAGE).newest()


@pytest.mark.parametrize(
    ("held", "due"),
    [
        (([], []), "None"),
        (([(4,)], []), "None"),  # killed between the first saves of the two
        (([(4,), (8,)], [(4,)]), "(4,)"),
        (([(8, 0), (8, 1)], [(8, 0)]), "(8, 0)"),
        (([(8,)], [(4,)]), "no step has a whole checkpoint of every replica (steps of replica 0: 8; replica 1: 4;"),
        (
            ([(4,), (8,)], []),
            "no step has a whole checkpoint of every replica (steps of replica 0: 4, 8; replica 1: none",
        ),
    ],
)
def test_replicas_agree_on_the_newest_checkpoint_and_lose_no_more_than_the_first(tmp_path, held, due):
    def replica(group: tw.Group) -> str:
        try:
            return str(newest_of_all(held[group.rank], [], group, tmp_path))
        except tw.CheckpointError as error:
            return str(error)

    zero, one = tw.run_threads(2, replica, timeout=LIMIT)
    assert zero == one and zero.startswith(due)


def test_a_resume_with_the_models_alone_continues_the_schedule(tmp_path):
    """With `save_only_model` the trainer leaves it out, and begins it anew in silence."""
    seen: list[list[float]] = []
    for resume in (None, str(tmp_path / "checkpoint-8")):
        trainer = train(tmp_path, ThinwireCallback(AVERAGE), resume=resume, save_only_model=True, logging_steps=1)
        seen.append([entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry][-4:])
    assert seen[0] == seen[1] and not (tmp_path / "checkpoint-8/scheduler.pt").exists()


def test_the_callback_given_twice_is_refused(tmp_path):
    one = ThinwireCallback(AVERAGE)
    for pair in ([one, one], [one, ThinwireCallback(AVERAGE)]):
        trainer = Trainer(model(), arguments(tmp_path), train_dataset=Tokens(), callbacks=pair)
        with pytest.raises(tw.ConfigurationError, match="two ThinwireCallbacks in one Trainer"):
            trainer.train()
