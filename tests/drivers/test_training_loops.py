"""The training loop stays the user's: accumulation, closures, schedulers, compiled models, buffers, tied and frozen weights, evaluation."""

from __future__ import annotations

import pytest
import torch
from strategies import METHODS, each
from torch import nn

import thinwire as tw
from thinwire.testing.toy import Toy, batch, fill, inner_step, journey, own, same_bits, sgd, toy, weights

STREAM = tw.streaming_diloco(every=4, fragments=2, delay=1, codec=tw.codecs.Identity())


def attach(group, strategy=STREAM, model=None, optimizer=None, **options):
    model = toy() if model is None else model
    made = optimizer(model) if optimizer else own(strategy, model)
    return model, made, tw.Replica(strategy, model, made, group, **options)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def test_gradient_accumulation_counts_one_inner_step():
    """Only `optimizer.step` counts. Four micro-batches are one inner step, with the result of the mean loss."""

    def replica(group, micro):
        model, optimizer, attached = attach(group)
        with attached:
            for step in range(1, 9):
                x, y = batch(0, group.rank, step, size=8)
                optimizer.zero_grad()
                for part_x, part_y in zip(x.chunk(micro), y.chunk(micro)):
                    (loss_of(model, part_x, part_y) / micro).backward()
                optimizer.step()
            assert attached.step == 8
        return weights(model)

    once = tw.run_threads(2, lambda group: replica(group, 1))
    four = tw.run_threads(2, lambda group: replica(group, 4))
    assert same_bits(*once) and same_bits(*four)
    torch.testing.assert_close(once[0], four[0], rtol=1e-3, atol=1e-4)


def test_a_step_with_a_closure_is_one_inner_step():
    """LBFGS may call the closure many times in one `step(closure)`. SGD with a closure equals SGD without."""

    def replica(group, optimizer, closed):
        model, made, attached = attach(group, optimizer=optimizer)
        with attached:
            for step in range(1, 9):
                x, y = batch(0, group.rank, step)

                def closure(x=x, y=y):
                    made.zero_grad()
                    loss = loss_of(model, x, y)
                    loss.backward()
                    return loss

                if closed:
                    assert made.step(closure) is not None
                else:
                    closure()
                    made.step()
            assert attached.step == 8
        return weights(model)

    def lbfgs(model):
        return torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)

    with_closure, without = (tw.run_threads(2, lambda group, c=c: replica(group, sgd, c)) for c in (True, False))
    assert all(same_bits(a, b) for a, b in zip(with_closure, without))
    quasi_newton = tw.run_threads(2, lambda group: replica(group, lbfgs, True))
    assert same_bits(*quasi_newton) and not same_bits(quasi_newton[0], without[0])


def test_a_closure_is_refused_with_exchanged_gradients():
    """The closure would compute new gradients after the exchange, so replicas would silently diverge."""

    def replica(group):
        _, optimizer, attached = attach(group, tw.data_parallel())
        for call in (lambda: optimizer.step(lambda: None), lambda: optimizer.step(closure=lambda: None)):
            with pytest.raises(
                tw.ModelError,
                match=r"step\(closure\) with Gradients\(\).*call the closure first, then step\(\) without",
            ):
                call()
        attached.close()

    tw.run_threads(2, replica)


def test_learning_rate_schedulers_work_unchanged():
    """Schedulers wrap `step`. Each step counts once, and the rate is the scheduler's."""

    def replica(group):
        model, optimizer, attached = attach(group)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        with attached:
            for step in range(1, 10):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                scheduler.step()
            assert attached.step == 9
        return weights(model), optimizer.param_groups[0]["lr"]

    (a, lr), (b, _) = tw.run_threads(2, replica)
    plain = journey(STREAM, 2, steps=9)[0].final
    assert same_bits(a, b) and lr < 0.003 and not same_bits(a, plain)


def test_parameter_groups_keep_their_settings():
    """There may be any number of groups, each with its own settings; a frozen group stays."""

    def grouped(model):
        rest = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("layers")]
        return torch.optim.AdamW(
            [{"params": model.layers.parameters(), "lr": 0.0}, {"params": rest, "weight_decay": 0.5}], lr=0.01
        )

    journeys = journey(STREAM, 2, optimizer=grouped)
    assert same_bits(journeys[0].final, journeys[1].final)
    start, end = toy(), journeys[0].final
    assert not same_bits(end, weights(start))
    index = 0
    for name, p in start.named_parameters():
        if p.requires_grad:
            if name.startswith("layers"):
                torch.testing.assert_close(end[index : index + p.numel()], p.detach().reshape(-1), rtol=0, atol=0)
            index += p.numel()


def test_a_compiled_model_trains_as_the_plain_one():
    """The backend is eager; a graph may add gradients in another order. The anchors end equal."""
    compiled = journey(STREAM, 2, steps=6, model=lambda: torch.compile(toy(), backend="eager"))
    plain = journey(STREAM, 2, steps=6)
    for a, b in zip(compiled, plain):
        for left, right in zip([*a.weights, a.final], [*b.weights, b.final]):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert same_bits(compiled[0].final, compiled[1].final)
    assert [e["fragment"] for e in compiled[0].heard("depart")] == [e["fragment"] for e in plain[0].heard("depart")]


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("buffers", ["mean", "local"])
def test_buffers_are_averaged_at_finish_unless_local(buffers):
    """Each replica has its own running statistics until it finishes. Then they become the mean, unless they are local."""

    def replica(group):
        model, optimizer, attached = attach(group, tw.diloco(every=3), fill(WithBatchNorm()), buffers=buffers)
        with attached:
            for step in range(1, 8):
                inner_step(model, optimizer, *batch(0, group.rank, step))
        return weights(model), model.layers[1].running_mean.clone(), int(model.layers[1].num_batches_tracked)

    (a, mean_a, count), (b, mean_b, _) = tw.run_threads(2, replica)
    assert same_bits(a, b) and same_bits(mean_a, mean_b) == (buffers == "mean") and count == 7


def test_tied_weights_travel_once_and_frozen_ones_stay():
    """Tied weights remain one tensor. Frozen parameters, and those never trained, stay as they are."""

    class Tied(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight

    def replica(group):
        model, optimizer, attached = attach(group, model=fill(Tied()))
        with attached:
            for step in range(1, 8):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                assert model.layers[2].weight is model.layers[0].weight
        return weights(model), model.frozen.detach().clone(), sum(f.numel for f in attached.fragments)

    (a, frozen, numel), (b, _, _) = tw.run_threads(2, replica)
    assert same_bits(a, b) and same_bits(frozen, torch.ones(5))
    assert numel == sum(f.numel for f in tw.pieces.partition.Whole().fragments(toy())) - 25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_anchors_are_fp32_for_models_of_other_precisions(dtype):
    """Finishing leaves the anchors in the model, rounded to its dtype and equal on all replicas."""

    def replica(group):
        model, optimizer, attached = attach(group, model=toy().to(dtype), optimizer=sgd)
        with attached:
            for step in range(1, 9):
                x, y = batch(0, group.rank, step)
                inner_step(model, optimizer, x.to(dtype), y.to(dtype))
        assert all(anchor.dtype == torch.float32 for anchor in attached.anchors())
        for fragment, anchor in zip(attached.fragments, attached.anchors()):
            held = torch.cat([p.detach().reshape(-1) for _, p in fragment.parameters])
            assert held.dtype == dtype and torch.equal(held, anchor.to(dtype))
        return weights(model)

    assert same_bits(*tw.run_threads(2, replica))


@pytest.mark.parametrize("name", each(METHODS))
def test_anchored_gives_the_anchors_and_restores_the_weights(name):
    """Inside `anchored` the model has the anchors, equal on all replicas; afterwards its own weights, bit for bit, also after an error."""

    def replica(group):
        model, optimizer, attached = attach(group, METHODS[name])
        seen = []
        with attached:
            for step in range(1, 11):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                own = weights(model)
                assert len(attached.anchors()) == len(attached.fragments)
                with attached.anchored():
                    for fragment, anchor in zip(attached.fragments, attached.anchors()):
                        assert same_bits(torch.cat([p.detach().reshape(-1) for _, p in fragment.parameters]), anchor)
                    seen.append(weights(model))
                with pytest.raises(ZeroDivisionError), attached.anchored():
                    _ = 1 / 0
                exported = attached.export()
                assert same_bits(weights(model), own), "the replica's own weights are back"
                fresh = toy(seed=5)
                fresh.load_state_dict(exported)
                assert same_bits(weights(fresh), seen[-1])
                kept = {key: value.clone() for key, value in exported.items()}
            inner_step(model, optimizer, *batch(0, group.rank, 11))
            assert all(same_bits(kept[key], value) for key, value in exported.items()), "a copy, not a view"
        return seen

    for a, b in zip(*tw.run_threads(2, replica)):
        assert same_bits(a, b)


def test_evaluation_export_and_state_change_no_training():
    """They are called at every step."""

    def look(replica, step):
        with replica.anchored():
            pass
        replica.export()
        replica.state()

    for name in ("three in the air", "eager_diloco"):
        watched, alone = journey(METHODS[name], 2, before_step=look), journey(METHODS[name], 2)
        assert all(same_bits(a, b) for one, other in zip(watched, alone) for a, b in zip(one.weights, other.weights))


@pytest.mark.parametrize("name", each(METHODS))
def test_all_replicas_stop_at_the_same_step(name):
    """One replica requests a stop. All stop within a period and a delay, and finish together."""

    def ask(replica, step):
        if step == 5 and replica.group.rank == 1:
            replica.request_stop()

    journeys = journey(METHODS[name], 3, steps=60, before_step=ask)
    stopped = {one.stopped_at for one in journeys}
    schedule = METHODS[name].schedule
    assert len(stopped) == 1 and 5 <= stopped.pop() <= 5 + schedule.every + schedule.delay + 1
    assert all(same_bits(one.final, journeys[0].final) for one in journeys)


@pytest.mark.parametrize(
    "strategy", [STREAM, tw.data_parallel(), tw.lab.recipes.d_psgd()], ids=["deltas", "gradients", "gossip"]
)
def test_finish_detaches_the_optimizer(strategy):
    """No hook is left, the group still belongs to the caller, and a second finish does nothing."""

    def replica(group):
        model, optimizer, attached = attach(group, strategy)
        with attached:
            for step in range(1, 4):
                inner_step(model, optimizer, *batch(0, group.rank, step))
            attached.finish()
            left = weights(model)
            attached.finish()
            assert same_bits(weights(model), left)
            inner_step(model, optimizer, *batch(0, group.rank, 9))
        assert attached.step == 3 and attached.in_flight == []
        with tw.Replica(tw.local_sgd(every=1), model, optimizer, group) as again:  # the group serves another replica
            inner_step(model, optimizer, *batch(0, group.rank, 10))
        assert again.step == 1
        return weights(model)

    assert same_bits(*tw.run_threads(2, replica))


def test_an_error_in_the_loop_propagates_unchanged():
    """Nothing lands or is sent on the way out."""

    def replica(group):
        model, optimizer, attached = attach(group)
        with pytest.raises(ZeroDivisionError), attached:
            inner_step(model, optimizer, *batch(0, group.rank, 1))
            _ = 1 / 0
        inner_step(model, optimizer, *batch(0, group.rank, 2))
        assert attached.step == 1

    tw.run_threads(2, replica)


def test_every_departure_has_flight_and_landing_events():
    """The events are in that order, and each replica reports the bytes that it sends."""
    for name, strategy in METHODS.items():
        one = journey(strategy, 2)[0]
        departed = [(e["fragment"], e["round"]) for e in one.heard("depart")]
        assert sorted(departed) == sorted((e["fragment"], e["round"]) for e in one.heard("land")), name
        assert sorted(departed) == sorted((e["fragment"], e["round"]) for e in one.heard("flight"))
        assert len(set(departed)) == len(departed) and not one.heard("refused") and not one.heard("warning")
        for fragment in {f for f, _ in departed}:
            assert [r for f, r in departed if f == fragment] == list(range(sum(f == fragment for f, _ in departed)))
        for e in one.heard("land"):
            assert e["stall_seconds"] >= 0 and e["seconds_spent"] >= 0
        for e in one.heard("flight"):
            assert e["begin"] <= e["end"]


def test_unequal_weights_start_from_replica_zeros_with_one_warning():
    """Replicas with equal weights get no warning and send no weights."""
    journeys = tw.run_threads(2, lambda group: start_with(group, seed=group.rank))
    for begun, warnings in journeys:
        assert same_bits(begun, weights(toy(0)))
        assert warnings == ["replicas began with different weights; all start from replica 0's"]
    assert all(warnings == [] for _, warnings in tw.run_threads(2, lambda group: start_with(group, seed=3)))


def start_with(group, seed):
    heard = []
    model, _, attached = attach(
        group,
        model=toy(seed),
        observer=lambda event, step, **fields: heard.append(fields["message"]) if event == "warning" else None,
    )
    begun = weights(model)
    attached.close()
    return begun, heard


def test_export_of_a_compiled_model_loads_into_the_plain_one():
    (group,) = tw.ThreadGroup.create(1)
    _, _, attached = attach(group, model=torch.compile(toy(), backend="eager"))
    exported = attached.export()
    attached.close()
    toy().load_state_dict(exported)


def test_an_update_can_be_skipped_with_exchanged_gradients():
    """`Replica` documents it: a loop skips an update by calling `step` with gradients set to None. All replicas do so here."""

    def skip(replica, step):
        if step == 4:
            replica.optimizer.zero_grad(set_to_none=True)

    one = journey(tw.data_parallel(), 2, steps=5, before_step=skip)[0]
    assert same_bits(one.weights[3], one.weights[2])


def test_buffers_recover_from_nan_values():
    def replica(group):
        model, optimizer, attached = attach(group, tw.local_sgd(every=2), fill(WithBatchNorm()))
        with attached:
            for step in range(1, 9):
                x, y = batch(0, group.rank, step)
                if (step, group.rank) == (3, 1):
                    x = x * float("nan")
                inner_step(model, optimizer, x, y)
        assert torch.isfinite(weights(model)).all()
        return model.layers[1].running_mean

    assert all(torch.isfinite(mean).all() for mean in tw.run_threads(2, replica))
