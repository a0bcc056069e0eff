"""Saving and loading the state of fragments; state that does not fit is refused by name. tests/test_checkpoint.py tests whole runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from strategies import METHODS

import thinwire as tw
from thinwire import recipes
from thinwire.drivers.fragment import first_state
from thinwire.drivers.saved_state import passing, restore, tensors_to_save
from thinwire.lab import recipes as lab_recipes
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.partition import Whole
from thinwire.testing.strategies import Saved, fingerprint, frozen, save
from thinwire.testing.toy import batch, inner_step, own, same_bits, toy, validation, weights


def test_a_checkpoint_without_its_anchor_is_refused() -> None:
    """This includes a fragment of one value."""
    strategy = tw.diloco(every=2)
    model = torch.nn.Linear(1, 1, bias=False)
    one = first_state(strategy, Whole().fragments(model)[0], 0, 0, 1)
    tensors, facts = tensors_to_save([one]), {"rounds": [3], "since": [2]}
    restore([one], tensors, facts, strategy.outer)
    assert (one.rounds, one.since) == (3, 2)
    del tensors["0.anchor"]
    with pytest.raises(tw.CheckpointError, match="has 0 elements in the checkpoint, 1 in this model"):
        restore([one], tensors, facts, strategy.outer)
    with pytest.raises(tw.CheckpointError, match="the checkpoint has 2 fragments, this strategy makes 1"):
        restore([one], tensors, {"rounds": [3, 3], "since": [2, 2]}, strategy.outer)


KINDS = {
    "outer": "outer state",
    "feedback": "feedback",
    "exchange": "memory of the exchange",
    "aggregate": "memory of the aggregate",
    "filter": "memory of a filter",
    "policy": "choices of the policy",
    "guard": "norms of the guard",
}


def test_all_state_of_every_method_is_saved_and_loaded() -> None:
    """A state of another size is refused by its name."""
    names = set()
    for strategy in METHODS.values():
        one, other = (
            [
                first_state(strategy, fragment, i, 0, 2)
                for i, fragment in enumerate(strategy.partition.fragments(toy(seed)))
            ]
            for seed in (0, 1)
        )
        for fragment in one:
            for memory in (
                fragment.state,
                fragment.feedback,
                fragment.exchange,
                fragment.aggregate,
                fragment.policy,
                fragment.guard,
                *fragment.filtered,
            ):
                for value in memory.values():
                    value.fill_(7)
        restore(other, tensors_to_save(one), {"rounds": [3] * len(one), "since": [2] * len(one)}, strategy.outer)
        due, found = tensors_to_save(one), tensors_to_save(other)
        assert due.keys() == found.keys() and all(same_bits(found[name], due[name]) for name in due), strategy
        assert not any(fragment.disk for fragment in other)
        for name in due:
            kind = name.split(".")[1]
            if kind not in names and kind in KINDS:
                wrong = {**due, name: torch.zeros(due[name].numel() + 1)}
                with pytest.raises(tw.CheckpointError, match=f" has the {KINDS[kind]} .* in the checkpoint, .* keeps "):
                    restore(other, wrong, {"rounds": [3] * len(one), "since": [2] * len(one)}, strategy.outer)
            names.add(kind)
    assert names == {"anchor", "outer", "feedback", "exchange", "aggregate", "filter", "policy", "guard"}


def test_state_that_exists_at_times_is_saved_and_loaded() -> None:
    """A delta in flight that is the replica's own is saved once. Older checkpoints have no norms of a guard."""
    strategy = tw.diloco(every=2)
    one, other = (first_state(strategy, Whole().fragments(toy(seed))[0], 0, 0, 2) for seed in (0, 1))
    one.deviation, one.own, one.deviation_state = one.anchor + 1, one.anchor + 2, {"momentum": one.anchor + 3}
    for delta, more in ((one.own, set()), (one.anchor + 4, {"delta"})):
        one.flight = SimpleNamespace(round=SimpleNamespace(delta=delta))  # type: ignore[assignment]
        tensors = tensors_to_save([one])
        passed = {"deviation", "own", "deviation_outer.momentum", "guard.norms"} | more
        assert {name for name in tensors if passing(name)} == {f"0.{name}" for name in passed}
        assert all(same_bits(tensors[f"0.{name}"], delta) for name in more)
    assert not passing("0.anchor") and not passing("0.outer.own")
    del tensors["0.guard.norms"]
    restore([other], tensors, {"rounds": [3], "since": [2]}, strategy.outer)
    found = tensors_to_save([other])
    assert not other.flight and found.keys() - tensors.keys() == {"0.guard.norms"}
    assert not found["0.guard.norms"].any()
    for name in tensors.keys() - {"0.delta"}:
        assert same_bits(found[name], tensors[name]), name

    kept = first_state(replace(strategy, feedback=Feedback()), Whole().fragments(toy())[0], 0, 0, 2)
    with pytest.raises(tw.CheckpointError, match="has the feedback nothing in the checkpoint, this strategy keeps "):
        restore([kept], tensors, {"rounds": [3], "since": [2]}, strategy.outer)


@pytest.mark.parametrize(
    "strategy",
    [
        tw.streaming_diloco(every=4, fragments=2, delay=2),
        recipes.eager_diloco(every=4),
        lab_recipes.co2(every=4),
        lab_recipes.d_psgd(every=4, delay=2),
    ],
)
def test_a_replica_at_work_goes_back_to_a_saved_state(strategy: tw.Strategy) -> None:
    """Flights that departed after the saved step never land, and the saved tensors stay as they are, so the same state can be loaded twice."""

    def replica(group: tw.Group, turns: list[int]) -> tuple[list[torch.Tensor], str]:
        model = toy()
        optimizer = own(strategy, model)
        with tw.Replica(strategy, model, optimizer, group, validation=validation(model)) as replica:

            def go_back(saved: Saved) -> None:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(frozen(saved["optimizer"]))
                replica.load_state(saved["tensors"], saved["facts"])

            saved: Saved | None = None
            for until in turns:
                if saved is not None:
                    go_back(saved)
                while replica.step < until:
                    inner_step(model, optimizer, *batch(0, group.rank, replica.step + 1))
                saved = saved or save(replica)
        return fingerprint(replica)

    for begin, far, end in ((3, 5, 4), (6, 9, 8)):
        straight = tw.run_threads(2, lambda group, end=end: replica(group, [end]), timeout=600.0)
        back = tw.run_threads(2, lambda group, turns=(begin, far, far, end): replica(group, list(turns)), timeout=600.0)
        for (tensors, facts), (due, said) in zip(back, straight, strict=True):
            assert facts == said and all(same_bits(a, b) for a, b in zip(tensors, due, strict=True))


@pytest.mark.parametrize(
    "strategy",
    [
        tw.streaming_diloco(every=8, fragments=2, delay=3),
        tw.streaming_sign(every=8, fragments=2, delay=3),
        recipes.eager_diloco(every=4),
    ],
    ids=["streaming_diloco", "streaming_sign", "eager_diloco"],
)
def test_loading_the_present_state_changes_nothing_and_keeps_no_memory(strategy: tw.Strategy) -> None:
    """Its tensors are the replica's own, with the deltas in flight. After step 31 none is in flight, but of `Eager`."""

    def replica(group: tw.Group, loads: bool) -> torch.Tensor:
        model = toy()
        optimizer = own(strategy, model)
        with tw.Replica(strategy, model, optimizer, group) as replica:
            for step in range(1, 32):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                if loads:
                    replica.load_state(*replica.state())
            tensors, facts = replica.state()
            replica.load_state({name: value.clone() for name, value in tensors.items()}, facts)
            pool = replica._driver._flights.buffers  # type: ignore[attr-defined]
            assert replica.in_flight or not pool._lent, "the pool keeps what the fragments held before"
        return weights(model)

    straight, loaded = (tw.run_threads(2, lambda group, loads=loads: replica(group, loads)) for loads in (False, True))
    assert all(same_bits(a, b) for a, b in zip(straight, loaded, strict=True))


@pytest.mark.parametrize(
    "strategy", [tw.streaming_diloco(every=4, fragments=1, delay=2), lab_recipes.d_psgd(every=4, delay=2)]
)
@pytest.mark.parametrize("numel", [0, 3])
def test_a_flight_without_its_whole_delta_is_refused(strategy: tw.Strategy, numel: int) -> None:
    """As if a user's own code saved some of the tensors."""

    def replica(group: tw.Group) -> None:
        model = toy()
        optimizer = own(strategy, model)
        with tw.Replica(strategy, model, optimizer, group, validation=validation(model)) as replica:
            while replica.step < 9 and not (replica.step > 3 and replica.in_flight):
                inner_step(model, optimizer, *batch(0, group.rank, replica.step + 1))
            tensors, facts = replica.state()
            flying = next(name for name in tensors if name.endswith(".delta"))
            fewer = {name: value for name, value in tensors.items() if name != flying}
            if numel:
                fewer[flying] = torch.zeros(numel)
            with pytest.raises(
                tw.CheckpointError, match=rf"a round in flight .* whose delta has {numel} elements there"
            ):
                replica.load_state(fewer, facts)
            replica.load_state(tensors, facts)

    tw.run_threads(2, replica, timeout=600.0)


def test_the_state_of_another_strategy_is_refused() -> None:
    """Also where its tensors have the same names and sizes."""
    (group,) = tw.ThreadGroup.create(1)
    model = toy()
    optimizer = own(tw.diloco(every=4), model)
    replica = tw.Replica(tw.diloco(every=4), model, optimizer, group)
    tensors, facts = replica.state()
    replica.close()
    replica = tw.Replica(tw.diloco(every=8), model, optimizer, group)
    with pytest.raises(tw.CheckpointError, match=r"made by .*every=4.*, this run uses .*every=8.*; resume with"):
        replica.load_state(tensors, facts)
    replica.close()
