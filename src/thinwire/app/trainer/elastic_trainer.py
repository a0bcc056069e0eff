"""Training as one member of an elastic run, which replicas may join and leave."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from thinwire import checkpoint
from thinwire.app.jobs.base import mean_of
from thinwire.app.trainer.member import AdaptiveTimeouts, RetryReporter, join, make_membership
from thinwire.app.trainer.place import ElasticPlace
from thinwire.app.trainer.trainer import Trainer
from thinwire.data_ledger import LeasedReader
from thinwire.errors import EndedError, LinkError
from thinwire.membership import Membership
from thinwire.replica import Replica

MOST_NAMED = 1000  # most ranges of samples in a summary


class ElasticTrainer(Trainer):
    """Trains a member of an elastic run, at its own speed, from its own newest checkpoint."""

    who_stops = "this replica stops"
    place: ElasticPlace
    group: Membership
    replica: Replica

    def _attach(self, facts: dict[str, Any]) -> Replica:
        run, log, strategy = self.run, self.log, self.run.make_strategy()
        self._named: dict[str, list[list[Any]]] = {"lost": [], "returned": []}
        self._dropped = {"trained": 0.0, "samples": 0}
        fragments = strategy.partition.fragments(self.model)
        self._log_start(strategy, fragments)  # before the first contact, which may take a long time
        self._timeouts = AdaptiveTimeouts(strategy, run.placement, fragments, self._time_a_step())
        reader = self._lease()
        if reader:
            facts |= {"samples": f"{reader.samples} in an epoch, {reader.step} in an inner step"}
            facts |= {"text": self.job.text} if self.job.text else {}
        reporter = RetryReporter(log.emit)
        saved, times = dict[str, Any](), self._timeouts.timeouts()
        if self.place.resume:
            self._found, self._passed_over = checkpoint.newest(self.checkpoints)
            saved = self._found.manifest["facts"] if self._found else {}
        self.group = make_membership(
            self.place.member, run.placement, facts, times, self._wrapped, reporter, run.optimizer.steps, saved
        )
        tokens = run.data.tokens if run.placement.weigh == "tokens" else None

        def attach() -> Replica:
            return Replica(
                strategy, self.model, self.optimizer, self.group,
                tokens=tokens, reader=reader, resume=self._load_replica, observer=self._hear, clock=log.seconds,
            )  # fmt: skip

        try:
            replica = join(attach, self.group.close, self.place.stop, run.placement.timeout)
        except (KeyboardInterrupt, EndedError) as error:
            log.emit("stop", 0, reason=str(error) or "asked to stop while it waited for the others")
            self.group.close()
            raise
        reporter.step = lambda: replica.step
        return replica

    def _time_a_step(self) -> float:
        """Approximate seconds of an inner step; the first one, which allocates and compiles, is not counted."""
        torch.autograd.backward(mean_of(self._loss(0)))
        began = time.monotonic()
        torch.autograd.backward(mean_of(self._loss(0)))
        self.optimizer.zero_grad()
        return self.run.data.accumulate * (time.monotonic() - began)

    def _hear(self, event: str, step: int, **fields: Any) -> None:
        if event == "data":
            for kind, named in self._named.items():
                named += fields[kind][: MOST_NAMED - len(named)]
        elif event == "dropped":
            self._dropped["trained"] += fields["trained"]
            self._dropped["samples"] += fields["samples"]
        super()._hear(event, step, **fields)

    def _summary(self, stopped: bool) -> dict[str, Any]:
        summary = super()._summary(stopped) | {"dropped": self._dropped}
        if isinstance(self.reader, LeasedReader):
            summary["samples"] |= {"lost_with": self._named["lost"], "returned_by": self._named["returned"]}
        return summary | ({} if isinstance(self.reader, LeasedReader) else {"samples": {}})

    def _lease(self) -> LeasedReader | None:
        """A reader that follows the agreed data ledger, from the beginning; None if each replica reads independently."""
        tried, run = self.reader, self.run
        if tried.samples is None or run.data.own_text:
            return None
        step = tried.count * run.data.accumulate  # one micro-batch was tried
        reader = LeasedReader(run.seed, run.placement.replicas, step, tried.samples)
        self.reader = reader
        self.share = dataclasses.replace(self.share, reader=reader)
        self.job.begin(self.share)
        return reader

    def _load_replica(self, replica: Replica) -> None:
        """Load this replica's newest whole checkpoint, before it meets the others."""
        if self.place.resume and self._found is not None:
            checkpoint.load(self._found, replica)

    def _resume(self) -> None:
        """Resume from the notes of the checkpoint; its replica has been loaded, and continues at the step of the other members."""
        found, skipped = self._found, self._passed_over
        number, path = 0, ""
        if found is not None:
            self._load_notes(found)
            checkpoint.set_aside_later(self.checkpoints, found.step)
            number, path = found.manifest["facts"]["agreed"]["round"], str(found.path.relative_to(self.place.folder))
        self.log.emit("back", self.replica.step, round=number, path=path, skipped=skipped)

    def _after_step(self, compute_seconds: float) -> None:
        self.group.use_timeouts(self._timeouts.after_step(compute_seconds))

    def _survives(self, error: LinkError | EndedError) -> bool:
        return True

    def _wait_for_others(self) -> None:
        """Keep the final state for missing members, until they have it, the time is over or a stop is requested."""
        while not self.group.closed and not self.place.stop.is_set():
            time.sleep(0.05)  # not stop.wait: see `join` in app/trainer/member.py

    @property
    def counted_steps(self) -> int:
        return self.clock.trained

    @property
    def counted_replicas(self) -> int:
        return 1
