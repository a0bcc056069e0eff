"""The guard: its test of norms, and how it clips the delta of a replica that is far larger than the deltas before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from thinwire.app.trainer.settings import MethodSpec
from thinwire.catalogue.parsing import parse
from thinwire.pieces.guard import Guard, norm_of
from thinwire.testing.strategies import all_agree
from thinwire.testing.toy import adamw, batch, inner_step, journey, same_bits, toy

FAR = 1e4


def scales_of(guard: Guard, norms: list[float], periods: float = 1.0) -> list[float]:
    """The scale of each norm."""
    state, scales = guard.init(), []
    for norm in norms:
        _, scale, state = guard.judged(norm, periods, state)
        scales.append(scale)
    return scales


def test_a_norm_is_compared_with_the_norms_before_it():
    assert scales_of(Guard(warm_up=3), [1.0, 1.0, 50.0, 1.0, 1.0]) == [1.0] * 5, "what is learned first is not clipped"
    assert scales_of(Guard(warm_up=3), [1.0, 1.0, 1.0, 3.0, 1.0]) == [1.0] * 5, "the deviation counts half of the mean"
    assert scales_of(Guard(z=0.5, warm_up=2), [1.0, 1.0, 1.25, 1.4])[2:] == [1.0, 0.5], "a strict one"
    scales = scales_of(Guard(warm_up=3), [1.0, 1.0, 1.0, 3.1, 300.0])
    assert scales[3] == 0.25 and 0 < scales[4] < 1 / 128, "down to the mean, by a power of two"
    falling = [0.9**k for k in range(20)]
    assert scales_of(Guard(), [*falling, 10 * falling[-1]])[-1] < 1, "it follows norms that fall"
    assert scales_of(Guard(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == [1.0] * 8, "and a warm-up"
    wild = [1.0, 6.0, 0.5, 3.0, 8.0, 0.2, 5.0, 7.0, 9.0]
    assert scales_of(Guard(), wild) == [1.0] * 9, "norms that differ much are let differ"
    assert scales_of(Guard(), [1.0] * 5 + [10.0] * 12)[-1] == 1.0, "a lasting change is followed"
    assert scales_of(Guard(), [0.0, 0.0, 0.0, 0.0, 5.0]) == [1.0] * 5, (
        "where nothing was trained there is no proportion"
    )


def test_rounds_without_training_do_not_count():
    assert scales_of(Guard(), [1.0] * 5 + [0.0] * 100 + [1.0] * 3) == [1.0] * 108


def test_training_goes_on_after_a_rest():
    """With a learning rate of 0 for 60 rounds. The deltas after it were clipped to nothing."""

    def trained(guard):
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            [parameter.zero_() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (group,) = tw.ThreadGroup.create(1)
        with tw.Replica(replace(tw.recipes.local_sgd(every=1), guard=guard), model, optimizer, group):
            for rate in [0.1] * 5 + [0.0] * 60 + [0.1] * 5:
                optimizer.param_groups[0]["lr"] = rate
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert same_bits(trained(Guard()), trained(None))


def test_the_limit_grows_with_the_number_of_inner_steps():
    _, _, state = Guard(warm_up=2).judged(1.0, 1.0, Guard().init())
    _, _, state = Guard(warm_up=2).judged(3.0, 3.0, state)
    limits = [Guard(warm_up=2).judged(1.0, periods, state).limit for periods in (0.1, 1.0, 4.0)]
    assert limits == [3.0, 3.0, 12.0]


def test_deltas_of_a_few_steps_do_not_make_one_of_a_whole_period_look_large():
    """As those of an elastic replica, whose rounds follow each other after an outage."""
    state = Guard().init()
    for steps in [1] * 8 + [4, 1, 1, 8, 4]:
        _, scale, state = Guard().judged(float(steps), steps / 4, state)
        assert scale == 1.0, steps
    assert Guard().judged(100.0, 0.25, state).scale < 1.0, "a broken batch is clipped in them, too"


@pytest.mark.parametrize(
    ("norms", "periods", "rounds", "mean", "variance"),
    [
        ([1.0, 3.0, 5.0], 1.0, 3, 3.0, 8 / 3),  # at first each norm counts as much
        ([2.0, 6.0, 10.0], 2.0, 3, 3.0, 8 / 3),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 6.0], 1.0, 6, 2.0, 4.0),  # later the newest a fifth
    ],
)
def test_mean_and_variance_match_values_by_hand(norms, periods, rounds, mean, variance):
    state = Guard().init()
    for norm in norms:
        state = Guard(warm_up=9).judged(norm, periods, state).state
    assert state["norms"].tolist() == pytest.approx([rounds, mean, variance])


def test_a_clipped_norm_counts_as_the_limit():
    """Of a mean and deviation of 1 and a half: four periods have a limit of 12, and 16 is brought to their mean of 4."""
    state = {"norms": torch.tensor([9.0, 1.0, 0.0], dtype=torch.float64)}
    limit, scale, state = Guard().judged(16.0, 4.0, state)
    assert (limit, scale) == (12.0, 0.25)
    assert state["norms"].tolist() == pytest.approx([10.0, 1.4, 0.8 * 0.2 * 4])
    known = {"norms": torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)}
    assert Guard(warm_up=3).judged(4.0, 1.0, known).limit == 4.0, (
        "the deviation, where it is more than half of the mean"
    )


def test_norms_are_taken_in_fp64():
    assert norm_of(torch.full((4,), 1e30)) == pytest.approx(2e30) and norm_of(torch.tensor([3.0, 4.0])) == 5.0
    assert not norm_of(torch.tensor([1.0, float("nan")])) < float("inf")
    many = torch.ones(1).expand(1 << 27)  # a sum of so many squares in fp32 stops to grow
    assert norm_of(many) == pytest.approx(2**13.5, rel=1e-2) and norm_of(torch.empty(0)) == 0.0


@pytest.mark.parametrize("wrong", [{"z": 0.0}, {"z": float("inf")}, {"warm_up": 1}, {"warm_up": 2.5}])
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(tw.ConfigurationError, match="Guard"):
        Guard(**wrong)


# ---- in a run

EVERY, KICKED = 2, 13
SHORT = Guard(warm_up=2)
RUNS = {
    "mean": tw.local_sgd(every=EVERY),
    "signs, feedback, kept flight": tw.streaming_sign(every=EVERY, delay=1, fragments=2),
    "4 bits, mixed": tw.streaming_diloco(every=EVERY, delay=1, fragments=2),
    "owners": tw.local_sgd(every=EVERY, exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()), codec=tw.codecs.E3M0(4)),
    "sites": tw.local_sgd(every=EVERY, exchange=tw.exchange.Hierarchy(((0, 1), (2,)))),
    "eager": tw.recipes.eager_diloco(every=EVERY),
    "median": replace(tw.local_sgd(every=EVERY), aggregate=tw.lab.robust.coordinates.Median()),
}  # fmt: skip


def kick(replica: tw.Replica, step: int) -> None:
    """Before step `KICKED`, add `FAR` to all weights of replica 1."""
    if step == KICKED and replica.group.rank == 1:
        with torch.no_grad():
            for parameter in replica.model.parameters():
                parameter.add_(FAR)


@pytest.mark.parametrize("name", RUNS)
def test_a_delta_far_above_the_norms_before_is_clipped(name):
    strategy = replace(RUNS[name], guard=SHORT)
    spiked = journey(strategy, 3, steps=20, before_step=kick)
    all_agree(spiked)
    heard = [one.heard("clipped") for one in spiked]
    assert heard[1] and not heard[0] and not heard[2]
    assert all(event["norm"] > event["limit"] > 0 and event["step"] >= KICKED for event in heard[1])
    warning = spiked[1].heard("warning")[0]  # another is about frozen parameters, which the kick has changed too
    assert "it is clipped" in warning["message"] and warning["step"] == heard[1][0]["step"]
    bare = journey(replace(strategy, guard=None), 3, steps=20, before_step=kick)
    whole = journey(strategy, 3, steps=20)
    assert not any(one.heard("clipped") for one in whole)
    off, left = ((one[0].final - whole[0].final).norm() for one in (bare, spiked))
    assert left < 10 and (off > 100 * left or name == "median")


def test_a_delta_is_judged_by_the_steps_since_the_last_one():
    """After a refused round this number is not known, so the next delta is not judged. A checkpoint says so by -1."""
    told, since = list[float](), dict[int, list[int]]()

    class Noting(Guard):
        def judged(self, norm, periods, state):
            told.append(periods)
            return super().judged(norm, periods, state)

    def poison(replica: tw.Replica, step: int) -> None:
        since[step] = replica.state()[1]["since"]
        if step == 2 and replica.group.rank == 1:
            next(replica.model.parameters()).grad.fill_(float("nan"))

    journey(replace(tw.diloco(every=4), guard=Noting()), 2, steps=14, before_step=poison)
    assert [since[step] for step in (4, 5, 8, 9, 13)] == [[0], [-1], [-1], [8], [12]]
    assert sorted(told) == [0.5, 0.5, 1.0, 1.0, 1.0]


def test_a_clipped_delta_warns_without_an_observer():
    (group,), model = tw.ThreadGroup.create(1), toy()
    with (
        pytest.warns(RuntimeWarning, match="it is clipped") as caught,
        tw.Replica(replace(tw.diloco(every=EVERY), guard=SHORT), model, adamw(model), group) as replica,
    ):
        for step in range(1, 17):
            inner_step(model, replica.optimizer, *batch(0, 0, step))
            if step in (KICKED, KICKED + EVERY):
                with torch.no_grad():
                    model.gain += FAR * step
    assert len(caught) == 1


def test_norms_are_saved_and_an_older_checkpoint_without_them_is_read():
    strategy = replace(tw.streaming_sign(every=EVERY, delay=1, fragments=2), guard=SHORT)

    def replica(group: tw.Group) -> None:
        model = toy()
        with tw.Replica(strategy, model, adamw(model), group) as first:
            for step in range(1, 12):
                inner_step(model, first.optimizer, *batch(0, group.rank, step))
            state, facts = first.state()
            tensors = {name: t.clone() for name, t in state.items()}
        known = tensors["0.guard.norms"]
        for older in (False, True):
            kept = {name: t.clone() for name, t in tensors.items() if not older or ".guard." not in name}
            with tw.Replica(strategy, model, adamw(model), group) as second:
                second.load_state(kept, facts)
                now = second.state()[0]["0.guard.norms"]
                told = second._driver.training
                assert not any([told.trained, *(one.counted for one in told.fragments)]), "no tokens"
                assert same_bits(now, torch.zeros(3, dtype=torch.float64) if older else known)
        assert known[0] > SHORT.warm_up and known[1] > 0

    tw.run_threads(2, replica, timeout=600.0)


def test_only_strategies_that_send_deltas_have_a_guard():
    for strategy in (tw.lab.recipes.power_sgd(), tw.lab.recipes.noloco(), replace(tw.diloco(), guard=None)):
        assert not strategy.guards and "guard: off" in strategy.describe(toy(), 2)
    assert tw.diloco().guards and "guard" not in tw.diloco().describe(toy(), 2) + repr(tw.diloco())
    strict = replace(tw.diloco(), guard=Guard(z=9.0))
    assert parse(repr(strict)) == strict != tw.diloco() and parse(repr(replace(strict, guard=None))).guard is None


def test_the_guard_option_is_parsed():
    for text, guard in ((None, Guard()), ("off", None), ("Guard(z=9)", Guard(z=9))):
        made = MethodSpec(guard=text).composition(0.0)
        assert isinstance(made, tw.Strategy) and made.guard == guard
    with pytest.raises(tw.ConfigurationError, match="guard='off'"):
        MethodSpec(strategy="just_one_byte", guard="off").composition(0.0)
