"""Law 6: a run that is saved, killed and resumed equals an uninterrupted run, bit for bit: every replica, every step, rounds in the air."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from strategies import IN_SITES, METHODS

import thinwire as tw
from thinwire import checkpoint
from thinwire.checkpoint import write_tree
from thinwire.pieces.inner_optimizers import SAM, SGD, Muon
from thinwire.state_tree import Packed
from thinwire.testing.strategies import load, resumed_run, save, whole_run
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, sgd, toy, weights

STEPS = 25

AT_EVERY_STEP = METHODS | {
    "plain, in the air": tw.Strategy(schedule=tw.pieces.schedule.Every(4, 3)),
    # the longest possible delay, with all fragments in the air at once
    "H − 1 in the air": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(7, 6),
        partition=tw.pieces.partition.Strided(3),
        codec=tw.codecs.E3M0(32),
        outer=tw.pieces.outer.Nesterov(0.7, 0.9),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "eager, five fragments": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(6, 6),
        partition=tw.pieces.partition.BySize(5),
        codec=tw.codecs.Cast(),
        outer=tw.pieces.outer.Nesterov(),
        merge=tw.pieces.merge.Eager(),
    ),
    "two sites": IN_SITES[1, 1],
}


# The two longest runs, and those that differ in kind. The others are slow only because there are many.
FAST = {
    "data_parallel",
    "feedback in the air",
    "streaming_diloco",
    "H − 1 in the air",
    "eager_diloco",
    "1-bit, both sides",
    "two sites",
    "qsr",  # the only schedule that stores when its round began
}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [(name, 1) for name in ("local_sgd", "plain, in the air", "eager_diloco")]
    + [pytest.param(name, 2, marks=() if name in FAST else pytest.mark.slow) for name in AT_EVERY_STEP],
)
def test_a_run_resumed_at_any_step_equals_an_uninterrupted_one(name, replicas):
    strategy = AT_EVERY_STEP[name]
    whole = tw.run_threads(replicas, lambda group: whole_run(strategy, group, STEPS), timeout=600.0)
    if strategy.schedule.delay > 1:
        assert whole[0][2] >= 1, "nothing was in the air"
    # After this many steps, all rounds that were in the air have landed, departed again and landed again.
    horizon = strategy.schedule.every + 2 * strategy.schedule.delay + 1
    # With a delay, what a save holds depends on the step of the period; without one, nothing is in the air at a save.
    every = strategy.schedule.every
    period = [0, *range(every + 1, 2 * every + 1), STEPS]
    for at in period if strategy.schedule.delay else range(0, STEPS + 1, 3):
        until = STEPS if at in (0, every + 1) or at % 8 == 1 else min(STEPS, at + horizon)
        again = tw.run_threads(
            replicas,
            lambda group, at=at, until=until: resumed_run(strategy, group, whole[group.rank][0][at], until, STEPS),
            timeout=600.0,
        )
        for rank in range(replicas):
            due = whole[rank][1][at:]
            assert len(again[rank]) == (len(due) if until == STEPS else until - at + 1)
            for later, ((tensors, facts), (due_tensors, due_facts)) in enumerate(zip(again[rank], due), at):
                same = all(same_bits(a, b) for a, b in zip(tensors, due_tensors, strict=True))
                assert same and facts == due_facts, f"saved at {at}, differs at {later}"


def test_strategies_under_test_have_several_fragments_in_the_air():
    for name, least in (("three in the air", 3), ("H − 1 in the air", 4), ("eager, five fragments", 5)):
        ((_, _, most),) = tw.run_threads(1, lambda group, name=name: whole_run(AT_EVERY_STEP[name], group, STEPS))
        assert most >= least, name


def test_saving_does_not_wait_for_a_round_in_the_air():
    """The round cannot land, because the peer has sent nothing; the state is saved all the same."""

    def replica(group):
        model = toy()
        optimizer = adamw(model)
        attached = tw.Replica(tw.Strategy(schedule=tw.pieces.schedule.Every(2, 1)), model, optimizer, group)
        for step in (1, 2) if group.rank == 0 else ():
            inner_step(model, optimizer, *batch(0, 0, step))
        if group.rank == 0:
            saved = save(attached)
            attached.close()
            return saved
        attached.close()
        return None

    saved, _ = tw.run_threads(2, replica, timeout=600.0)
    assert saved["facts"]["flights"] == {"0": [0, 2]} and "0.delta" in saved["tensors"]


def test_a_checkpoint_restores_the_generator_of_torch(tmp_path):
    def replica(group):
        model = toy()
        with tw.Replica(tw.local_sgd(every=2), model, adamw(model), group) as attached:
            inner_step(model, attached.optimizer, *batch(0, 0, 1))
            path = checkpoint.save(tmp_path, attached, notes={})
            due = torch.rand(4)
            checkpoint.load(checkpoint.read(path), attached)
            assert attached.step == 1 and same_bits(torch.rand(4), due)

    tw.run_threads(1, replica)


def lr_set(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model, lr: torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr)),
        lambda model, lr: torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), fused=True),
        lambda model, lr: lr_set(torch.optim.AdamW(model.parameters()), np.float32(lr)),
    ],
    ids=["tensor", "tensor, fused", "numpy"],
)
def test_a_learning_rate_that_is_no_plain_number_is_saved_and_trains_on(tmp_path, optimizer):
    """It keeps its type, so that its products round as before. The new optimizer's own rate, 0.5, does not count."""

    def train(group, first, last, lr):
        model = toy()
        made = optimizer(model, lr)
        with tw.Replica(tw.diloco(every=4), model, made, group) as attached:
            if first > 1:
                checkpoint.load(checkpoint.read(tmp_path / f"step-{first - 1:08d}"), attached)
            for step in range(first, last + 1):
                inner_step(model, made, *batch(0, group.rank, step))
                if step == 5 and first == 1:
                    checkpoint.save(tmp_path, attached, {})
        assert type(made.param_groups[0]["lr"]) is type(optimizer(model, lr).param_groups[0]["lr"])
        return float(made.param_groups[0]["lr"]), weights(model)

    (through,) = tw.run_threads(1, lambda group: train(group, 1, 10, 0.011))
    (resumed,) = tw.run_threads(1, lambda group: train(group, 6, 10, 0.5))
    assert through[0] == resumed[0] and same_bits(through[1], resumed[1])


class Decaying(torch.optim.AdamW):
    """A user's own."""


def of_two_groups(model):
    first, *others = (p for p in model.parameters() if p.requires_grad)
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


def several(model):
    first, *others = (p for p in model.parameters() if p.requires_grad)
    return [torch.optim.AdamW([first]), torch.optim.SGD(others, lr=0.01, momentum=0.9)]


def muon(model):
    return Muon().make(model, lr=0.01, weight_decay=0.1)


def of(kind, **settings):
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **settings)


SAVED_AND_GIVEN = [
    (of(torch.optim.SGD, momentum=0.9), adamw, "has the state of SGD, and AdamW was given"),
    (sgd, adamw, "has the state of SGD, and AdamW was given"),
    (adamw, sgd, "has the state of AdamW, and SGD was given"),
    (of(torch.optim.RAdam), adamw, "has the state of RAdam, and AdamW was given"),
    (muon, adamw, "has the state of Muon and AdamW, and AdamW was given"),
    (adamw, lambda model: SAM(Muon()).make(model, 0.01, 0.1), "of AdamW, and Muon and AdamW was given"),
    (several, adamw, "has the state of AdamW and SGD, and AdamW was given"),
    (adamw, of_two_groups, "state of AdamW .* does not fit .*different number of parameter groups"),
    (of_two_groups, of_two_groups, ""),
    (several, several, ""),
    (muon, muon, ""),
    (muon, lambda model: SAM(Muon()).make(model, 0.01, 0.1), ""),
    (adamw, of(Decaying), ""),
    (of(Decaying), adamw, ""),
    (of(torch.optim.AdamW, fused=True), of(torch.optim.AdamW, foreach=True), ""),
    (lambda model: SGD(0.9).make(model, 0.01, 0.1), of(torch.optim.SGD, momentum=0.9), ""),
]


@pytest.mark.parametrize(("saved", "given", "refusal"), SAVED_AND_GIVEN)
def test_a_checkpoint_of_another_inner_optimizer_is_refused_by_name(saved, given, refusal, tmp_path):
    """The same one, a subclass of it and its variants load."""

    def replica(group):
        model = toy()
        with tw.Replica(tw.local_sgd(every=2), model, saved(model), group) as one:
            inner_step(model, one.optimizer, *batch(0, 0, 1))
            folder = checkpoint.save(tmp_path, one, {})
        model = toy()
        fresh = weights(model)
        other = tw.Replica(tw.local_sgd(every=2), model, given(model), group)
        if refusal:
            with pytest.raises(tw.CheckpointError, match=refusal):
                checkpoint.load(checkpoint.read(folder), other)
            assert same_bits(weights(model), fresh) and not other.optimizer.state
        else:
            checkpoint.load(checkpoint.read(folder), other)
            assert other.step == 1 and other.optimizer.state
        other.close()

    tw.run_threads(1, replica)


def test_two_ranks_that_save_into_one_folder_are_told_so(tmp_path, monkeypatch):
    """Each clears what it takes for the remains of a writer that was killed."""

    def replica(group):
        model = toy()
        with tw.Replica(tw.local_sgd(every=2), model, adamw(model), group) as attached:
            with pytest.raises(tw.CheckpointError, match="that no other rank writes there"):
                checkpoint.save(tmp_path, attached, notes={})

    def beside(content, path):
        checkpoint._clear(tmp_path)  # of the other rank
        write_tree(content, path)

    monkeypatch.setattr(checkpoint, "write_tree", beside)
    tw.run_threads(1, replica)


def test_saving_recreates_a_deleted_folder_and_refuses_a_file_in_its_place(tmp_path):
    """A deleted folder is made again. A file in its place is named in the error, and stays."""
    folder = tmp_path / "checkpoints/replica-0"

    def replica(group):
        model = toy()
        with tw.Replica(tw.local_sgd(every=2), model, adamw(model), group) as attached:
            inner_step(model, attached.optimizer, *batch(0, 0, 1))
            checkpoint.save(folder, attached, notes={})
            shutil.rmtree(tmp_path / "checkpoints")
            assert checkpoint.read(checkpoint.save(folder, attached, notes={})).step == 1
            shutil.rmtree(folder)
            folder.touch()
            with pytest.raises(
                tw.CheckpointError, match=r"the checkpoint at step 1 was not written: .*not a lack of space"
            ):
                checkpoint.save(folder, attached, notes={})
            assert folder.is_file()

    tw.run_threads(1, replica)


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        (
            METHODS["streaming_diloco"],
            tw.streaming_diloco(every=6, fragments=1, delay=2),
            "the checkpoint has 3 fragments, this strategy makes 2; resume with the run's own strategy",
        ),
        (
            METHODS["streaming_diloco"],
            tw.streaming_diloco(every=6, fragments=2, delay=2, partition=tw.pieces.partition.BySize(3)),
            "elements in the checkpoint",
        ),
        (tw.diloco(outer_momentum=0.9), tw.diloco(outer_momentum=0.0), "outer state"),
        (tw.diloco(outer_momentum=0.0), tw.diloco(outer_momentum=0.9), "outer state"),
    ],
    ids=["fragments", "sizes", "outer state", "no outer state"],
)
def test_a_checkpoint_of_another_strategy_is_refused(own, other, message):
    def replica(group):
        model = toy()
        with tw.Replica(own, model, adamw(model), group) as first:
            saved = save(first)
        second = tw.Replica(other, model, adamw(model), group)
        with pytest.raises(tw.CheckpointError, match=message):
            load(second, saved | {"facts": saved["facts"] | {"strategy": repr(other)}})
        second.close()

    tw.run_threads(1, replica)


def of_two(strategy, folder):
    """Trains two replicas, and saves each in its folder."""

    def replica(group):
        model = toy()
        optimizer = strategy.inner.make(model, 0.01, 0.1) if strategy.inner else adamw(model)
        with tw.Replica(strategy, model, optimizer, group) as one:
            for step in range(1, 4):
                inner_step(model, optimizer, *batch(0, group.rank, step))
            checkpoint.save(folder / str(group.rank), one, {})
        return weights(model)

    return tw.run_threads(2, replica)


@pytest.mark.parametrize("strategy", [tw.diloco(every=2), tw.lab.recipes.dgc()], ids=["own training", "feedback"])
@pytest.mark.parametrize("ranks", [[0], [1, 0], [0, 1, 0]], ids=["fewer", "swapped", "more"])
def test_a_checkpoint_of_another_replica_or_number_is_refused(strategy, ranks, tmp_path):
    def replica(group):
        model = toy()
        saved = checkpoint.read(tmp_path / str(ranks[group.rank]) / "step-00000003")
        other = tw.Replica(
            strategy, model, strategy.inner.make(model, 0.01, 0.1) if strategy.inner else adamw(model), group
        )
        due = (
            f"that of replica-{ranks[group.rank]} of 2, and this is replica-{group.rank} of {len(ranks)}: it holds what"
        )
        with pytest.raises(tw.CheckpointError, match=due):
            checkpoint.load(saved, other)
        other.close()

    of_two(strategy, tmp_path)
    tw.run_threads(len(ranks), replica)


@pytest.mark.parametrize("ranks", [[0], [1, 0], [0, 1, 0]], ids=["fewer", "swapped", "more"])
def test_where_replicas_keep_nothing_for_themselves_any_number_resumes(ranks, tmp_path):
    def replica(group):
        model = toy()
        with tw.Replica(tw.data_parallel(), model, optimizer := adamw(model), group) as one:
            checkpoint.load(checkpoint.read(tmp_path / str(ranks[group.rank]) / "step-00000003"), one)
            resumed = weights(model)
            inner_step(model, optimizer, *batch(0, group.rank, 4))
        return resumed, weights(model), one.step

    before, _ = of_two(tw.data_parallel(), tmp_path)
    after = tw.run_threads(len(ranks), replica)
    assert all(same_bits(resumed, before) and step == 4 for resumed, _, step in after)
    assert all(same_bits(trained, after[0][1]) for _, trained, _ in after)


def test_replicas_that_resume_at_different_steps_are_refused():
    """Every replica refuses before it trains, and names the step."""

    def replica(group):
        model = toy()
        optimizer = adamw(model)
        saved = []
        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group) as first:
            for step in range(1, 5):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                saved.append(save(first))
        second = tw.Replica(tw.local_sgd(every=2), model, adamw(model), group)
        with pytest.raises(tw.DisagreementError, match=r"replica 1 resumes at step 4, .*choose one step for all"):
            load(second, saved[1 if group.rank == 0 else 3])
        second.close()

    tw.run_threads(2, replica)


FILES = ("manifest.json", "model.safetensors", "inner.safetensors", "outer.safetensors")


def written(folder, step, keep=3):
    """Writes a checkpoint of a few tensors, which no replica needs to have made."""
    contents = [Packed({"x": {"!tensor": "x"}}, {"x": torch.arange(3.0) + index}) for index in range(3)]
    manifest = {
        "format": checkpoint.FORMAT,
        "step": step,
        "strategy": "",
        "facts": {},
        "frozen": True,
        "notes": {"a": 1},
    }
    return checkpoint.write(folder, manifest, contents, keep)


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ((10, 20, 30), 2, {20, 30}),
        ((10, 20, 30), 3, {10, 20, 30}),
        ((30, 10), 1, {10, 30}),  # a resume from an earlier step: what it writes stays, and what others may still need
        ((10, 30, 20), 2, {10, 20, 30}),
        ((10, 10), 2, {10}),
        ((99_999_998, 99_999_999, 100_000_000), 2, {99_999_999, 100_000_000}),  # a digit more: first in the alphabet
    ],
)
def test_the_last_checkpoints_up_to_the_one_just_written_stay(steps, keep, left, tmp_path):
    (tmp_path / "step-notes").mkdir()
    for step in steps:
        assert checkpoint.read(written(tmp_path, step, keep)).step == step
    assert {checkpoint.step_of(path) for path in checkpoint.found_in(tmp_path)} - {-1} == left
    assert (tmp_path / "step-notes").is_dir()
    found, skipped = checkpoint.newest(tmp_path)
    assert found.step == max(left) and found.manifest["notes"] == {"a": 1}
    assert [one["path"] for one in skipped] == []


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_with_one_bit_changed_in_any_file_is_damaged(file, tmp_path):
    """Sizes alone are compared without `hashes`; one that is shorter or longer, or lacks the file, is refused then too."""
    path = written(tmp_path, 7) / file
    whole = path.read_bytes()
    for at in {*range(0, len(whole), max(1, len(whole) // 16)), len(whole) - 1}:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(tw.CheckpointError):
            checkpoint.read(path.parent)
    for content in (whole[:-1], whole + b" " * (file != "manifest.json"), None) if file != "manifest.json" else (None,):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(tw.CheckpointError):
            checkpoint.read(path.parent, hashes=False)
    assert checkpoint.newest(tmp_path)[0] is None
    path.write_bytes(whole)
    assert checkpoint.read(path.parent).step == 7


def test_one_of_another_step_or_format_is_refused(tmp_path):
    path = written(tmp_path, 7)
    path.rename(tmp_path / "step-00000008")
    with pytest.raises(tw.CheckpointError, match="another step, 7"):
        checkpoint.read(tmp_path / "step-00000008")
    manifest = tmp_path / "step-00000008/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(tw.CheckpointError, match="has format 2, this version reads 1"):
        checkpoint.read(tmp_path / "step-00000008")
