"""A loop of a user's own that SIGTERM of a batch system stops (docs/own-loop.md), or Ctrl-C interrupts."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from group_laws import run_processes

import thinwire as tw
from thinwire import checkpoint
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, sgd, toy, weights

STEPS, SIGNALLED = 14, 5


def loop(rank: int, size: int) -> list[Any]:
    """Replica 1 gets the signal after step 5. Both stop, resume, and end as without the signal. Returns the step of the stop."""
    group, folder, strategy = (
        tw.TorchGroup.from_world(size, timeout=600.0),
        Path(tempfile.mkdtemp()),
        tw.diloco(every=4),
    )

    def train(signalled: int = STEPS, resume: Path | None = None) -> Any:
        model = toy()
        optimizer = adamw(model)
        with tw.Replica(strategy, model, optimizer, group) as replica:
            signal.signal(signal.SIGTERM, lambda *_: replica.request_stop())
            if resume:
                checkpoint.load(checkpoint.newest_common(resume, group)[0], replica)
            while replica.step < STEPS and not replica.stopping:
                if replica.step == signalled and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                inner_step(model, optimizer, *batch(0, rank, replica.step + 1))
            if replica.stopping:
                checkpoint.save(folder, replica, {"step": replica.step})
                raise SystemExit(143)
        return weights(model)

    with pytest.raises(SystemExit):
        train(SIGNALLED)
    stopped = checkpoint.newest_common(folder, group)[0].step
    return [stopped, same_bits(train(resume=folder), train())]


def test_a_signal_to_one_replica_stops_all_at_one_step_and_nothing_is_lost(tmp_path: Path) -> None:
    """They stop after the next landing, that of the round that departs after step 8."""
    assert run_processes(loop, 2, tmp_path, timeout=600.0) == [[8, True], [8, True]]


@pytest.mark.parametrize("strategy", [tw.diloco(every=2), tw.data_parallel()], ids=["deltas", "gradients"])
def test_a_replica_that_was_interrupted_in_an_exchange_does_not_continue(strategy: tw.Strategy) -> None:
    """As in a notebook, when the loop's cell is run again. Its step would leave out what the other replica has taken over."""

    def replica(group: tw.Group) -> None:
        def interrupt(event: str, step: int, **_: Any) -> None:
            if (event, step >= 2, group.rank) == ("depart", True, 0):
                raise KeyboardInterrupt

        model = toy()
        optimizer = sgd(model)
        attached = tw.Replica(strategy, model, optimizer, group, observer=interrupt)
        with pytest.raises(KeyboardInterrupt if group.rank == 0 else tw.LinkError):
            for step in range(1, 5):
                inner_step(model, optimizer, *batch(0, group.rank, step))
        if group.rank == 0:
            for go_on in (optimizer.step, attached.finish):
                with pytest.raises(tw.DisagreementError, match=r"was interrupted, in which .*attach a new Replica"):
                    go_on()
        attached.close()

    tw.run_threads(2, replica, timeout=600.0)


@pytest.mark.parametrize(("strategy", "goes_on"), [(tw.diloco(every=2), True), (tw.data_parallel(), False)])
def test_an_optimizer_that_is_interrupted_after_its_gradients_were_exchanged_does_not_step_again(
    strategy: tw.Strategy, goes_on: bool
) -> None:
    """The other replicas have taken that step. Where replicas exchange deltas, it is no inner step yet."""

    class Interrupted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if next(numbers) == 2:
                raise KeyboardInterrupt
            super().step()

    numbers, model, (group,) = itertools.count(1), toy(), tw.ThreadGroup.create(1)
    optimizer = Interrupted([p for p in model.parameters() if p.requires_grad], lr=0.1)
    replica = tw.Replica(strategy, model, optimizer, group)
    inner_step(model, optimizer, *batch(0, 0, 1))
    with pytest.raises(KeyboardInterrupt):
        inner_step(model, optimizer, *batch(0, 0, 2))
    with nullcontext() if goes_on else pytest.raises(tw.DisagreementError, match="was interrupted"):
        inner_step(model, optimizer, *batch(0, 0, 2))
    assert replica.step == 1 + goes_on
    replica.close()
