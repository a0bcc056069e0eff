"""Errors in a loop around a Replica are named: unequal numbers of steps, wrappers, and forgotten calls."""

from __future__ import annotations

import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.testing.toy import adamw, batch, inner_step, sgd, toy, weights


def train(group, strategy, steps, observer=None, model=None):
    model = model or toy()
    optimizer = adamw(model)
    heard = {} if observer is None else {"observer": observer}
    with tw.Replica(strategy, model, optimizer, group, **heard):
        for step in range(1, steps + 1):
            inner_step(model, optimizer, *batch(0, group.rank, step))
    return model


UNEQUAL = {
    "another round of the same number": ((20, 17), tw.diloco(every=10)),
    "one step was skipped": ((19, 20), tw.diloco(every=10)),
    "the other has ended": ((20, 21), tw.diloco(every=10)),
    "the other has ended long ago": ((20, 45), tw.diloco(every=20)),
    "in the air": ((9, 12), tw.streaming_diloco(every=6, fragments=2, delay=2)),
    "a whole period in the air": ((12, 13), tw.lab.recipes.co2(every=4)),
    "gradients": ((6, 5), tw.data_parallel()),
    "two hops": ((8, 7), tw.diloco(every=4, exchange=tw.exchange.TwoShot())),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_numbers_of_steps_are_named(name):
    """The error names the replica that took fewer steps, and the difference if known, at once and without a timeout."""
    counts, strategy = UNEQUAL[name]
    with pytest.raises(tw.DisagreementError, match=r"Every replica must take the same number") as caught:
        tw.run_threads(2, lambda group: train(group, strategy, counts[group.rank]), timeout=600.0)
    said = [int(word.strip(",.")) for word in str(caught.value).split() if word.strip(",.").isdigit()]
    assert min(counts) in said and any(min(counts) < number <= max(counts) for number in said)


def test_a_failing_replica_is_not_blamed_for_unequal_steps():
    """The failing replica raises its own error. The others' error remains a link error, whatever their counts."""

    def replica(group):
        model = toy()
        optimizer = adamw(model)
        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group):
            for step in range(1, 5):
                if group.rank == 1 and step == 4:
                    raise ValueError("no more batches")
                try:
                    inner_step(model, optimizer, *batch(0, group.rank, step))
                except tw.LinkError as error:
                    return str(error)
        return ""

    with pytest.raises(ValueError, match="no more batches"):
        tw.run_threads(2, replica, timeout=600.0)


def heard_by(action):
    gc.freeze()  # what other tests have left is not destroyed here, nor looked through
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
        gc.collect()
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


def test_running_statistics_warn_once():
    def action():
        (group,) = tw.ThreadGroup.create(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        train(group, tw.local_sgd(every=2), 4, model=model)
        with tw.Replica(tw.diloco(every=1), model, adamw(model), group, buffers="local") as replica:
            replica.step = 1

    (group,), norm = tw.ThreadGroup.create(1), nn.BatchNorm1d(3)
    with pytest.warns(RuntimeWarning, match="running statistics") as caught:
        tw.Replica(tw.diloco(), norm, adamw(norm), group, buffers="local").close()
    assert caught[0].filename == __file__, "the line that makes the Replica"
    (said,) = heard_by(action)
    assert "2 layers keep running statistics (1, ...)" in said and "GroupNorm" in said


def test_a_codec_that_moves_untouched_rows_warns():
    """The warning is true: under signs such rows move, under codecs with a zero they do not."""

    def action(codec, **heard):
        (group,) = tw.ThreadGroup.create(1)
        table = nn.Embedding(64, 4, sparse=True)
        before, optimizer = table.weight.detach().clone(), torch.optim.SGD(table.parameters(), lr=0.1)
        with tw.Replica(
            tw.local_sgd(every=1, codec=codec), nn.Sequential(table, nn.Flatten()), optimizer, group, **heard
        ):
            table(torch.tensor([3, 5])).sum().backward()
            optimizer.step()
        moved.append(set((table.weight != before).any(1).nonzero()[:, 0].tolist()))

    moved, told = [], []
    (said,) = heard_by(lambda: action(tw.codecs.Sign(block=64)))
    assert "1 embeddings have sparse gradients" in said and "Sign(" in said and "E3M0(32)" in said
    assert heard_by(lambda: action(tw.codecs.E3M0(32))) == heard_by(lambda: action(tw.codecs.TopK(0.1))) == []
    assert moved[0] > {3, 5} and moved[1] == {3, 5}
    assert heard_by(lambda: action(tw.lab.codecs.OverSenders(tw.codecs.TopK(0.1)))) == [] and moved[-1] == {3, 5}
    (said,) = heard_by(lambda: action(tw.lab.codecs.OverSenders(tw.codecs.Sign(block=64))))
    assert "OverSenders(" in said and moved[-1] > {3, 5}
    for codec in (
        tw.codecs.Sign(block=2),
        tw.lab.codecs.Each(tw.codecs.Sign()),
    ):  # the next value; those of a matrix alone
        (said,) = heard_by(partial(action, codec))
        assert str(codec) in said
    action(tw.codecs.Sign(block=64), observer=lambda kind, step, **fields: told.append((kind, step)))
    assert ("warning", 0) in told


@pytest.mark.parametrize("steps", [0, 3])
def test_a_replica_that_is_never_finished_warns(steps):
    def action():
        (group,) = tw.ThreadGroup.create(1)
        model = toy()
        optimizer = adamw(model)
        replica = tw.Replica(tw.local_sgd(every=2), model, optimizer, group)
        for step in range(1, steps + 1):
            inner_step(model, optimizer, *batch(0, 0, step))
        assert replica.step == steps
        replica._driver.close()  # ends its threads

    (said,) = heard_by(action)
    assert "neither finished nor closed" in said and "with Replica" in said


def test_weights_that_unseen_steps_have_trained_are_kept():
    """The given optimizer has taken no step: its anchors would overwrite what another one has trained."""
    (group,) = tw.ThreadGroup.create(1)
    model, bare = toy(), toy()
    inner_step(bare, adamw(bare), *batch(0, 0, 1))
    with (
        pytest.raises(tw.ModelError, match="has seen no step of its optimizer"),
        tw.Replica(tw.local_sgd(every=2), model, adamw(model), group),
    ):
        inner_step(model, adamw(model), *batch(0, 0, 1))
    assert torch.equal(weights(model), weights(bare))

    def action():
        with tw.Replica(tw.local_sgd(every=2), model, adamw(model), group):
            pass

    (said,) = heard_by(action)
    assert "taken none; step it in the loop, or give the one that the loop steps" in said


def test_a_restart_from_the_anchors_warns():
    """Without an observer, too: the training since the last round is lost. Different first weights are not worth a warning."""

    def replica(group):
        model = toy(group.rank)
        optimizer = adamw(model)
        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group):
            for step in range(1, 5):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                if step == 1 and group.rank == 1:
                    model.gain.data.fill_(float("nan"))

    (said,) = heard_by(lambda: tw.run_threads(2, replica, timeout=600.0))
    assert "it restarts from the anchors" in said


@pytest.mark.parametrize("strategy", [tw.local_sgd(every=4), tw.data_parallel()])
def test_an_optimizer_that_replaces_the_given_one_warns(strategy):
    """Once, and no longer when the Replica is closed."""

    def action():
        (group,) = tw.ThreadGroup.create(1)
        model = toy()
        optimizer = adamw(model)
        with tw.Replica(strategy, model, optimizer, group) as replica:
            for step in range(1, 7):
                optimizer = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1) if step == 3 else optimizer
                inner_step(model, optimizer, *batch(0, 0, step))
            assert replica.step == 2
        for step in range(2):
            inner_step(model, optimizer, *batch(0, 0, step))

    (said,) = heard_by(action)
    assert "(SGD) that this Replica was not given" in said and "attach a new Replica" in said


def test_parameters_that_replace_others_warn():
    def action():
        (group,) = tw.ThreadGroup.create(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = adamw(model)
        with tw.Replica(tw.local_sgd(every=4), model, optimizer, group):
            for step in range(1, 4):
                inner_step(model, optimizer, *batch(0, 0, step))
            model[1] = nn.Linear(4, 1)

    (said,) = heard_by(action)
    assert "has 2 parameters (1.weight, ...) that it did not have" in said and "between two Replicas" in said


def assigned(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replaced(model):
    model[-1].weight = nn.Parameter(model[-1].weight.detach().clone())


def module_replaced(model):
    model[-1] = nn.Linear(model[-1].in_features, model[-1].out_features)


@pytest.mark.parametrize(
    ("change", "refused", "words"),
    [
        (assigned, 3, "is no longer the model's"),
        (replaced, 3, "is no longer the model's"),
        (module_replaced, 3, "is no longer the model's"),
        (nn.Module.bfloat16, 1, "is now of torch.bfloat16"),
        (nn.Module.double, 1, "is now of torch.float64"),
    ],
)
def test_parameters_that_are_replaced_or_converted_are_named_where_a_round_would_use_them(change, refused, words):
    """A model that is converted before the next step, which torch's optimizer would refuse in words of its own."""
    (group,) = tw.ThreadGroup.create(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = adamw(model)
    replica = tw.Replica(tw.local_sgd(every=4), model, optimizer, group)
    for step in range(8):
        if step == 1:
            change(model)
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=model[0].weight.dtype)).square().mean().backward()
        if step == refused:
            with pytest.raises(tw.ModelError, match=words) as raised:
                optimizer.step()
            replica.close()
            assert "weight" in str(raised.value) and "attach a new Replica" in str(raised.value)
            return
        optimizer.step()
    pytest.fail("not refused")


def test_parameters_that_were_replaced_are_refused_without_a_departure():
    def replaced_after(steps):
        (group,) = tw.ThreadGroup.create(1)
        model = toy()
        optimizer = sgd(model)
        replica = tw.Replica(tw.local_sgd(every=500), model, optimizer, group)
        for step in range(100):
            if step == steps:
                assigned(model)
            try:
                inner_step(model, optimizer, *batch(0, 0, step))
            except tw.ModelError as error:
                replica.close()
                return step, str(error)

    for steps, refused in ((0, 0), (1, 64), (64, 64)):
        step, said = replaced_after(steps)
        assert step == refused and "(and 10 others) that the Replica exchanges is no longer the model's" in said


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_around_or_inside_the_given_one_does_not_warn(inside):
    class Around(torch.optim.Optimizer):
        def __init__(self, *inner):
            self.inner = inner
            super().__init__(inner[0].param_groups[0]["params"], {})

        def step(self, closure=None):
            for one in self.inner:
                one.step(closure)

    def action():
        (group,) = tw.ThreadGroup.create(1)
        model = toy()
        optimizer = Around(*[adamw(model) for _ in range(3 if inside else 1)])
        given = optimizer if inside else optimizer.inner[0]
        with tw.Replica(tw.local_sgd(every=4), model, given, group) as replica:
            for step in range(1, 7):
                inner_step(model, optimizer, *batch(0, 0, step))
            assert replica.step == 6

    assert heard_by(action) == []


def test_a_correct_loop_gets_no_warning():
    def action():
        (group,) = tw.ThreadGroup.create(1)
        assert torch.isfinite(weights(train(group, tw.local_sgd(every=2), 3))).all()

    assert heard_by(action) == []
