"""Trains the model of a job as one replica of a group.

It has AdamW, unless the method or the job has another optimizer, with warm-up and cosine, clipping, accumulation, autocast; evaluation of
the anchors; checkpoints; an exact resume; and an event for each of these.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire import checkpoint
from thinwire.app.jobs.base import Summed, mean_of
from thinwire.app.jobs.own import OwnJob
from thinwire.app.records.events import EventLog, Tail
from thinwire.app.trainer import final
from thinwire.app.trainer.job import open_job
from thinwire.app.trainer.loops import (
    evaluated_weights,
    micro_batches,
    model_folder,
    own_micro_batches,
    passes_multiple,
)
from thinwire.app.trainer.place import ElasticPlace, Place, device_of, shard
from thinwire.app.trainer.publish import Publisher, publishing
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.run_folder import resumed
from thinwire.app.trainer.setup import learning_rate, make_optimizer
from thinwire.app.trainer.start import start
from thinwire.app.trainer.tokens_mean import by_samples, descend
from thinwire.app.trainer.watch import watching
from thinwire.comm import CountedGroup, Group, Ledger, LinkedGroup, parse_link
from thinwire.data_ledger import Reader
from thinwire.drivers.attached import Attached, Method
from thinwire.drivers.handshake import digest
from thinwire.drivers.inner_steps import as_one
from thinwire.drivers.module_state import clip, evaluating
from thinwire.errors import CheckpointError, ConfigurationError, EndedError, LinkError, ThinwireError
from thinwire.files import HeldFolder
from thinwire.membership import Membership
from thinwire.pieces.inner import highest_rate
from thinwire.pieces.inner_optimizers import SharpnessAware, at_the_worst_point
from thinwire.pieces.partition import Fragment
from thinwire.replica import Replica
from thinwire.state_tree import pack
from thinwire.strategy import Strategy


@dataclass
class Clock:
    """The times of the loop's parts, without evaluation and checkpoints. `trained`: number of inner steps of this replica."""

    compute_seconds: float = 0.0
    loop_seconds: float = 0.0
    stall_seconds: float = 0.0
    trained: int = 0
    other_steps: int = 0  # inner steps of replicas that left when the number of replicas changed
    ledger: dict[str, Any] = field(default_factory=dict)  # the counts of earlier sessions


class Trainer(ABC):
    """One replica's training. `train()` runs it from the first or the resumed step to the last."""

    who_stops: ClassVar[str]  # the replicas that stop if this one is asked to, for a message
    group: Group | Membership

    def __init__(self, run: Run, place: Place | ElasticPlace, log: EventLog) -> None:
        self.run, self.place, self.log = run, place, log
        self.ledger, self.clock, self.losses = Ledger(), Clock(), dict[str, float]()
        self._publisher: Publisher | None = None
        self._landed = False  # whether a round has landed since the last version was published
        self.share = place.share(run)
        self.job, self.batch = open_job(run, place.folder, self.share.index), run.data.batch_of(self.share.index)
        self.reader: Reader = self.share.reading
        self.share = dataclasses.replace(self.share, reader=self.reader)
        facts = run.shared() | dict(self.job.facts)
        self._agree(facts)
        self.job.keep(place.folder, place.name)
        self.device = device_of(place.gpu)
        self.bf16 = run.model.precision == "bf16" or (
            run.model.precision == "auto" and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        self.model = self.job.make_model().to(self.device)
        if place.shards > 1 and run.model.lora:
            raise ConfigurationError(
                f"lora={run.model.lora} on replicas of {place.shards} ranks: adapters need whole replicas; start one process per replica."
            )
        if place.shards > 1:
            shard(self.model, run.placement.replicas, place.shards, self.device)
        self.job.begin(self.share, place.shard, place.shards)
        self.method, self.inner = run.make_method(), run.plan.inner
        self.lr_factor = 1.0 if self.method else self.inner.lr_factor
        own = self.job.make_optimizer(self.model)
        self.own_rates = bool(own)
        self.optimizer = as_one(own) if own else make_optimizer(run, self.model)
        if isinstance(self.job, OwnJob) and isinstance(self.optimizer, SharpnessAware):
            self.job.held = run.data.accumulate
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.checkpoints, self._held = place.folder / "checkpoints" / place.name, HeldFolder(place.folder)
        self.replica = self._attach(facts)
        # once the others have let it in, and before it trains: a run folder deleted from then on is not made anew by a checkpoint
        self.checkpoints.parent.mkdir(exist_ok=True)
        self.micros = micro_batches(run.data.accumulate, self.replica)

    def _agree(self, facts: dict[str, Any]) -> None:
        """Compare `facts` with the other replicas', if these are known before the model is made."""
        return

    @abstractmethod
    def _attach(self, facts: dict[str, Any]) -> Replica | Attached:
        """Log the start, meet the other replicas, and attach the method to the model. Sets `group`."""

    @abstractmethod
    def _resume(self) -> None:
        """Resume from a checkpoint."""

    def _after_step(self, compute_seconds: float) -> None:
        """Called after an inner step with its time."""
        return

    @abstractmethod
    def _survives(self, error: LinkError | EndedError) -> bool:
        """Whether this replica writes a checkpoint and a summary when it has lost the others by `error`."""

    def _wait_for_others(self) -> None:
        """Called after the end of the run."""
        return

    @property
    @abstractmethod
    def counted_steps(self) -> int:
        """Inner steps for which this replica counts tokens and bytes."""

    @property
    @abstractmethod
    def counted_replicas(self) -> int:
        """Number of replicas that are known to have trained the same number of steps."""

    def _wrapped(self, group: Group) -> Group:
        """`group` with a counter of bytes, on the emulated link."""
        link, counted = parse_link(self.run.placement.link), CountedGroup(group, self.ledger)
        return LinkedGroup(counted, link, self.ledger) if link else counted

    def train(self) -> dict[str, Any]:
        """Run the loop and return the summary. Raises what `Replica` raises."""
        run = self.run
        gone: LinkError | EndedError | None = None
        failed: ThinwireError | None = None
        if self.place.resume:
            self._resume()
        resumed(self.place.folder)
        try:
            with publishing(run, self.place, self.job, self.model, self.replica, log=self.log) as self._publisher:
                self._loop()
                whole = self.progress >= run.optimizer.steps
                self.place.stop.heed()
                if whole:
                    self._finish()
        except (LinkError, EndedError) as error:
            if not self._survives(error):
                raise
            whole, gone = False, error
        if whole:
            self._evaluate()
            self._export()
        else:
            failed = self._stop(gone)
        summary = self._summary(stopped=not whole)
        self.log.emit("end", self.replica.step, summary=summary)
        if failed:
            raise failed
        self._wait_for_others()
        return summary

    def _hear(self, event: str, step: int, **fields: Any) -> None:
        """Take an event of the replica, on any thread."""
        self.log.emit(event, step, **fields)
        self._landed = self._landed or event in ("land", "round")

    def _loop(self) -> None:
        run, replica = self.run, self.replica
        eval_every = run.data.evaluations(run.optimizer.steps)[0]
        unchecked = bool(run.placement.checkpoint_every)
        while self.progress < run.optimizer.steps and not replica.stopping:
            if self.place.stop.is_set():
                replica.request_stop()
            before, began = replica.step, self.progress
            self._inner_step()
            self.place.stop.heed()
            if self._publisher and self._landed and self._publisher.idle:
                self._landed = False
                self._publisher.offer(replica.step, replica.anchors())
            if passes_multiple(began, self.progress, eval_every) and self.progress < run.optimizer.steps:
                self._evaluate()
            if unchecked:  # now, not at the first checkpoint
                unchecked = False
                checkpoint.check(replica)
                pack(self.job.state(), "batches(share).state_dict()")
            if passes_multiple(before, replica.step, run.placement.checkpoint_every):
                self._save()

    @property
    def progress(self) -> int:
        """Inner steps of the run: this replica's own, or the mean over all if replicas have different speeds."""
        replica = self.replica
        return replica.progress if replica.own_loop else replica.step

    def _finish(self) -> None:
        """The last rounds. A stop request in this phase ends the wait for the others."""
        run, replica = self.run, self.replica
        if run.placement.checkpoint_every and replica.step % run.placement.checkpoint_every:
            self._save()  # for a longer run, and for a kill in the last round
        began = time.monotonic()
        with watching(self._pass_on_a_stop, 0.05, "thinwire-stop"):  # because this thread waits for others
            if replica.own_loop:
                replica.finish()
            else:
                replica.finish(keep_seconds=run.placement.timeout)
        self.clock.loop_seconds += time.monotonic() - began

    def _pass_on_a_stop(self) -> bool:
        if self.place.stop.is_set():
            self.replica.request_stop()
        return self.place.stop.is_set()

    def _stop(self, gone: LinkError | EndedError | None) -> ThinwireError | None:
        """Save a checkpoint for a resume. Returns the error to raise, if the other replicas were lost or have ended without this one, or if
        the training since the last checkpoint is lost.
        """
        replica, asked = self.replica, gone is None or self.place.stop.is_set()
        unsaved = None if isinstance(gone, EndedError) else self._save()
        if isinstance(gone, LinkError) and not asked:
            path = self._export(".stale")
            gone = LinkError(
                f"{gone} They are in {path} and are not the final model; resume when the others are there."
            )
        self.log.emit(
            "stop", replica.step, reason=f"asked to stop; {self.who_stops} after this step" if asked else str(gone)
        )
        replica.close()
        return unsaved if asked else gone

    def _inner_step(self) -> None:
        run, replica = self.run, self.replica
        begin, begun = self.log.seconds(), time.monotonic()
        paused = replica.seconds
        lr = self._set_rates()
        tokens = self.batch * run.data.sequence * own_micro_batches(run.data.accumulate, replica)
        if replica.own_loop and replica.samples:  # forward passes only, so there is no norm of a gradient
            self.model.eval()
            first, norm_value = replica.step * replica.samples, math.nan
            loss = replica.iterate(lambda sample: mean_of(self._loss(first + sample)))
        else:
            loss, norm_value = self._descend(replica)
        seconds = time.monotonic() - begun
        compute = seconds - (replica.seconds - paused)
        self.clock.trained += 1
        self.clock.loop_seconds += seconds
        self.clock.compute_seconds += compute
        self.log.emit(
            "step", replica.step, loss=loss, lr=lr, grad_norm=norm_value, tokens=tokens, begin=begin, compute_seconds=compute,
            progress=self.progress, sent=self.ledger.sent(),
        )  # fmt: skip
        self._after_step(compute)

    def _set_rates(self) -> float:
        """Set the learning rate of the next step in the optimizer; those of a job's own optimizer do not change."""
        if self.own_rates:
            return highest_rate(self.optimizer)
        lr = learning_rate(self.run, self.progress + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.lr_factor
        return lr

    def _descend(self, replica: Replica | Attached) -> tuple[float, float]:
        """Do the backward passes and the optimizer's step. Returns the loss and the gradient's norm."""
        run, begun = self.run, time.monotonic()
        if replica.own_loop and replica.idle:
            replica.skip()
            return math.nan, math.nan
        loss = at_the_worst_point(self.optimizer, lambda: descend(self.model, replica, self._loss, run.data.accumulate))
        replica.exchange_gradients()
        strategy = None if replica.own_loop else replica.strategy
        by_filters = strategy and strategy.filters  # filters clip before the exchange
        most = math.inf if by_filters else run.optimizer.clip or math.inf
        alike = strategy is not None and strategy.exchanges_gradients and self.place.shards == 1
        norm_value = clip(list(self.model.parameters()), most, alike)
        if not math.isfinite(norm_value):
            self.optimizer.zero_grad()  # an inner step without update still counts, so that replicas stay at the same step
            self.log.emit("skip", replica.step + 1, reason=f"the gradient's norm is {norm_value}")
        if run.placement.slow and self.share.index < len(run.placement.slow):
            time.sleep((run.placement.slow[self.share.index] - 1) * (time.monotonic() - begun))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm_value

    def _loss(self, micro: int) -> Tensor | Summed:
        self.place.stop.check()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            part = self.job.loss(self.model, micro, self.device)
            return by_samples(part, self.batch) if self.run.data.batches else part

    def _evaluate(self) -> None:
        """Evaluate the anchors on the held-out text. The loss is the same on every replica that has the anchors."""
        began = time.monotonic()
        with (
            evaluating(self.model),
            self.replica.anchored(),
            self.replica.averaged_buffers(),
            torch.no_grad(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16),
        ):
            losses = self.job.evaluation(self.model, self.device)
        loss, of = next(iter(losses.values())), evaluated_weights(self.replica)
        self.losses = dict(losses) if of in ("anchors", "mean", "each") else {}
        spent = time.monotonic() - began
        told = {"tokens": self._tokens(), "seconds_spent": spent, "of": of, "samples": self.reader.facts()}
        self.log.emit("eval", self.replica.step, loss=loss, **told, progress=self.progress, sent=self.ledger.sent())

    def _find_folder(self) -> None:
        """Go on in the run folder where it is now. Raises `CheckpointError` and stops all if it was deleted: a new one could not be resumed."""
        place = self._held.where()
        if place is None:
            self.place.stop.set()
            raise CheckpointError(
                f"the run folder {self.place.folder} was deleted while the run trained; nothing is written there."
            )
        if place != self.place.folder.absolute():
            moved = f"the run folder {self.place.folder} was renamed to {place} while the run trained, and the run goes on there"
            self.log.emit("warning", self.replica.step, message=moved)
            self.place = dataclasses.replace(self.place, folder=place)
            self.checkpoints = place / "checkpoints" / self.place.name

    def _save(self) -> CheckpointError | None:
        """Write a checkpoint. If it cannot be written, this is reported and training continues, because the previous one still exists."""
        began = time.monotonic()
        try:
            self._find_folder()
            path = checkpoint.save(
                self.checkpoints,
                self.replica,
                dataclasses.asdict(self._totals()) | {"data": self.job.state(), "samples": self.reader.notes()},
                self.run.placement.keep,
                parents=False,
            )
        except CheckpointError as error:
            self.log.emit("warning", self.replica.step, message=f"{error}{self._at_risk()}")
            return error
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        told = {"path": str(path.relative_to(self.place.folder)), "seconds_spent": time.monotonic() - began}
        self.log.emit("checkpoint", self.replica.step, nbytes=nbytes, **told)
        return None

    def _at_risk(self) -> str:
        """What a resume loses because this replica cannot save, in sentences after a space; or ""."""
        return ""

    def _load(self, found: checkpoint.Checkpoint) -> None:
        checkpoint.load(found, self.replica)
        self._load_notes(found)

    def _load_notes(self, found: checkpoint.Checkpoint) -> None:
        """Resume all but the replica."""
        notes = found.manifest["notes"]
        self.clock = Clock(**{item.name: notes[item.name] for item in dataclasses.fields(Clock) if item.name in notes})
        self.ledger.add(self.clock.ledger)
        for told in (self.reader.load_notes(notes.get("samples", {})), self.job.load_state(notes.get("data", {}))):
            if told:
                self.log.emit("warning", found.step, message=told)

    def _totals(self) -> Clock:
        return dataclasses.replace(
            self.clock,
            stall_seconds=self.clock.stall_seconds + self.replica.stall_seconds,
            ledger=self.ledger.as_dict(),
        )

    def _tokens(self) -> int:
        """Tokens that all replicas have trained; for an elastic member only its own."""
        steps = self.counted_steps * self.counted_replicas + self.clock.other_steps
        return round(steps * self.run.data.mean_batch * self.run.data.sequence * self.micros)

    def _summary(self, stopped: bool) -> dict[str, Any]:
        run, totals, link = self.run, self._totals(), parse_link(self.run.placement.link)
        privacy = None if self.replica.own_loop else self.replica.strategy.privacy
        return {
            "strategy": run.method.strategy,
            "replicas": run.placement.replicas,
            "steps": self.progress,
            "stopped": stopped,
            "seed": run.seed,
            "tokens": self._tokens(),
            "parameters": self.parameters,
            "eval_loss": next(iter(self.losses.values()), None),
            "eval_of": evaluated_weights(self.replica),
            "losses": self.losses,
            "wire_bytes_sent": self.ledger.sent(),
            "bits_per_parameter_per_step": 8 * self.ledger.sent() / self.parameters / max(1, self.counted_steps),
            "compute_utilization": totals.compute_seconds / max(totals.loop_seconds, 1e-9),
            "wall_seconds": totals.loop_seconds,
            "stall_seconds": totals.stall_seconds,
            "uploaded": self.ledger.uploaded() or None,
            "ledger": totals.ledger,
            "samples": self.reader.facts(),
            "privacy": privacy and privacy.spent(self._releases(), run.placement.replicas),
            "weights": digest(self.replica.anchors()).hex(),  # digest of the anchors, equal on all replicas
            "link": run.placement.link if link else None,
            "provenance": "emulated" if link or run.placement.slow else "measured",
        }

    def _releases(self) -> int:
        """An upper bound of the departures in all sessions of the run, for the account of privacy.

        A round that was repeated after a kill counts twice. For each kill, one departure of each fragment may be missing in the log, and so
        may events for which the log had no room: these are added.
        """
        told = Counter(event["event"] for event in Tail(self.log.path).events())
        return told["depart"] + len(self.replica.fragments) * (told["start"] - 1) + self.log.lost

    def _export(self, mark: str = "") -> Path:
        """Write RUN/model.safetensors: the anchors, which are the trained model. With a `mark`, they may not be the final ones."""
        self._find_folder()
        folder = model_folder(self.run, self.job, self.place, self.replica)
        weights, path = self.replica.export(), folder / f"model{mark}.safetensors"
        if self.place.writes_the_model or folder != self.place.folder:
            final.store(self.run, self.job, self.model, weights, folder, self.place.name, mark)
        if not mark:
            path.with_name("model.stale.safetensors").unlink(missing_ok=True)
        return path

    def _log_start(self, composition: Strategy | Method, fragments: Sequence[Fragment]) -> None:
        self.log.emit("start", 0, **start(self.run, self.share, composition, fragments, self.job))
