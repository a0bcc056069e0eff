"""Laws of every method that has its own training loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from core_processes import UNLIKE, run_world
from loops import LOOPS, ToyRun, all_of_them, attach, train_toys, train_until

import thinwire as tw
from thinwire import checkpoint
from thinwire.app.trainer.run import Run
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.comm import CountedGroup, Ledger
from thinwire.lab.methods import METHODS, Averaged, Gain, Plain
from thinwire.testing.toy import Shuffled, same_bits, toy, weights

every_method = pytest.mark.parametrize("name", LOOPS)


def test_every_method_is_in_the_table():
    assert set(METHODS) <= set(LOOPS)


@every_method
def test_the_text_of_a_method_parses_to_an_equal_method(name):
    method = LOOPS[name]
    rules = {kind.__name__: kind for kind in (Averaged, Gain, Plain)}
    made = rules | {type(method).__name__: type(method)}
    again = parse(repr(method), PIECES | made)
    assert again == method and hash(again) == hash(method)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_makes_each_method_by_its_name(name):
    run = Run.of(strategy=name, seed=5)
    assert run.make_method().seed == 5
    with pytest.raises(tw.ConfigurationError, match="has its own loop"):
        run.make_strategy()


@every_method
def test_replicas_agree_bit_for_bit(name):
    replicas = train_toys(LOOPS[name], 3)
    assert all(same_bits(trained.final, replicas[0].final) for trained in replicas)
    assert all(same_bits(*trained.attached.anchors(), trained.final) for trained in replicas)
    assert bool(torch.isfinite(replicas[0].final).all()) and not same_bits(replicas[0].final, weights(toy()))


@every_method
def test_any_arrival_order_gives_the_same_bits(name):
    straight = train_toys(LOOPS[name], 3)
    for seed in (1, 2):
        shuffled = train_toys(LOOPS[name], 3, wrap=lambda group, seed=seed: Shuffled(group, seed))
        assert [same_bits(a.final, b.final) for a, b in zip(straight, shuffled)] == [True] * 3


@every_method
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_predicted_bytes_equal_sent_bytes(name, replicas):
    method, ledgers = LOOPS[name], [Ledger() for _ in range(replicas)]
    periods = 2
    all_trained = train_toys(
        method, replicas, steps=periods * method.every, wrap=lambda group: CountedGroup(group, ledgers[group.rank])
    )
    numel = sum(p.numel() for p in toy().parameters() if p.requires_grad)
    for rank, (trained, ledger) in enumerate(zip(all_trained, ledgers)):
        departed = [event["nbytes"] for event in trained.heard("depart")]
        assert ledger.sent("packet") == sum(departed)
        assert departed == [method.nbytes_per_period(numel, replicas, rank, period) for period in range(periods)]
    assert sum(ledger.sent("packet") for ledger in ledgers) > 0 or replicas == 1
    assert sum(ledger.sent("packet") for ledger in ledgers) == sum(ledger.received("packet") for ledger in ledgers)


@every_method
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, tmp_path: Path):
    method = LOOPS[name]
    whole = train_toys(method, 2, steps=8)
    run = ToyRun(method)
    at = 5  # within a period

    def first(group: tw.Group) -> None:
        trained = train_until(run, attach(run, group), group, at)
        checkpoint.save(tmp_path / str(group.rank), trained.attached, notes={})
        train_until(run, trained, group, at + 2)  # these steps are lost

    def second(group: tw.Group) -> torch.Tensor:
        trained = attach(run, group, toy(seed=99))
        found, _ = checkpoint.newest_common(tmp_path / str(group.rank), group)
        assert found and found.step == at
        checkpoint.load(found, trained.attached)
        assert trained.attached.step == at
        train_until(run, trained, group, 8).attached.finish()
        return weights(trained.attached.model)

    tw.run_threads(2, first)
    resumed = tw.run_threads(2, second)
    assert all(same_bits(a, b.final) for a, b in zip(resumed, whole))


@every_method
def test_replicas_begin_with_the_weights_of_replica_0(name):
    seeds = iter((7, 8))
    models = {0: toy(next(seeds)), 1: toy(next(seeds))}

    def replica(group: tw.Group) -> torch.Tensor:
        attach(ToyRun(LOOPS[name]), group, models[group.rank])
        return weights(models[group.rank])

    first, second = tw.run_threads(2, replica)
    assert same_bits(first, second) and same_bits(first, weights(toy(7)))


@every_method
def test_a_replica_with_other_settings_is_refused(name):
    import dataclasses

    def replica(group: tw.Group) -> None:
        attach(ToyRun(dataclasses.replace(LOOPS[name], seed=group.rank)), group)

    with pytest.raises(tw.DisagreementError, match="strategy"):
        tw.run_threads(2, replica)


@every_method
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_are_refused_and_training_continues(name, bad):
    replicas = train_toys(
        LOOPS[name], 3, steps=16, loss_scale=lambda rank, step: bad if rank == 1 and step > 1 else 1.0
    )
    assert all(same_bits(trained.final, replicas[0].final) for trained in replicas)
    assert bool(torch.isfinite(replicas[0].final).all())
    assert all(
        [e["by"] for e in trained.heard("refused")] == [[1]] * len(trained.heard("refused")) for trained in replicas
    )
    assert replicas[0].heard("refused") and not same_bits(replicas[0].final, weights(toy()))


@every_method
def test_losses_of_zero_change_nothing(name):
    replicas = train_toys(LOOPS[name], 2, loss_scale=lambda rank, step: 0.0)
    assert same_bits(replicas[0].final, weights(toy()))


@every_method
def test_a_stop_request_stops_all_at_the_same_step(name):
    run = ToyRun(LOOPS[name], steps=40)

    def replica(group: tw.Group) -> int:
        trained = attach(run, group)
        if group.rank == 1:
            train_until(run, trained, group, 3)
            trained.attached.request_stop()
        return train_until(run, trained, group, 40).attached.step

    steps = tw.run_threads(2, replica)
    assert steps[0] == steps[1] < 40


@every_method
def test_duplicate_names_are_refused(name):
    with pytest.raises(tw.ConfigurationError, match="one for each"):
        train_toys(LOOPS[name], 2, names=("a", "a"))


@every_method
def test_a_returned_replica_takes_over_the_state_of_the_others(name):
    """Three replicas train, one leaves, two train on, and the third returns with its old weights."""
    method = LOOPS[name]
    run, seen = ToyRun(method, names=("a", "b", "c")), {}

    def replica(groups: dict[str, list[tw.Group]], rank: int) -> None:
        trained = attach(run, groups["first"][rank])
        seen[rank] = trained
        train_until(run, trained, groups["first"][rank], 2 * method.every)
        if rank < 2:
            trained.attached.meet(groups["second"][rank], ("a", "b"))
            train_until(run, trained, groups["second"][rank], 4 * method.every)
        trained.attached.meet(groups["third"][rank], ("a", "b", "c"))
        train_until(run, trained, groups["third"][rank], 6 * method.every)

    groups = {which: tw.ThreadGroup.create(n, 20.0) for which, n in (("first", 3), ("second", 2), ("third", 3))}
    tw.run_threads(3, lambda group: replica(groups, group.rank))
    final = [weights(seen[rank].attached.model) for rank in range(3)]
    assert same_bits(final[0], final[1]) and same_bits(final[0], final[2])
    assert [e["event"] for e in seen[2].events if e["event"] in ("caught_up", "given")] == ["caught_up"]
    assert seen[2].attached.step == 6 * method.every


@pytest.mark.slow
def test_processes_with_different_instruction_sets_agree(tmp_path):
    """Four processes whose libraries each assume another processor generation have equal bits."""
    first, *others = run_world(all_of_them, tmp_path, machines=UNLIKE)
    for name, tensors in first.items():
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        assert all(same_bits(a, b) for other in others for a, b in zip(tensors, other[name], strict=True)), name
