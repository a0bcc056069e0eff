"""A loop of a user's own that a batch system stops by SIGTERM (docs/own-loop.md)."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from group_laws import run_processes

import thinwire as tw
from thinwire import checkpoint
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, toy, weights

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
