"""Train one language model as one replica of a group: the main job's loop.

AdamW, unless the method is one with another, with warm-up and cosine, clipping, accumulation, autocast; evaluation of the anchors on held-out text;
checkpoints; an exact resume; and an event for everything that happens.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire import checkpoint
from thinwire.comm import CountedGroup, Group, Ledger, LinkedGroup, parse_link
from thinwire.errors import CheckpointError, ConfigurationError, EndedError, LinkError, ThinwireError
from thinwire.lm.export import store
from thinwire.lm.loops import evaluated, micro_batches
from thinwire.lm.place import MemberSpec, Pace, Place, RetryReporter, join, membership, passing_on, shard
from thinwire.lm.releases import releases
from thinwire.lm.run import Run
from thinwire.lm.setup import learning_rate, make_model
from thinwire.lm.start import start
from thinwire.lm.tokenizer import keep_tokenizer, open_corpus
from thinwire.membership import Membership
from thinwire.methods import Attached, Method, ZerothOrder
from thinwire.pieces.partition import Fragment
from thinwire.records.events import EventLog
from thinwire.replica import Replica
from thinwire.runtime.handshake import agree, digest
from thinwire.runtime.module_state import clip_alike
from thinwire.strategy import Gradients, Strategy


@dataclass
class Clock:
    """Where the time of the loop went; evaluation and checkpoints are not part of it. `trained`: inner steps of this replica's own."""

    compute_seconds: float = 0.0
    loop_seconds: float = 0.0
    stall_seconds: float = 0.0
    trained: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)  # what earlier sessions counted


class Trainer:
    """One replica's training. `train()` runs it from the first or the resumed step to the last."""

    def __init__(self, run: Run, place: Place, log: EventLog) -> None:
        self.run, self.place, self.log = run, place, log
        self.ledger, self.clock, self.eval_loss = Ledger(), Clock(), math.nan
        self.corpus, self.share = open_corpus(run, place.folder), place.share(run)
        facts = run.shared() | {"tokenizer": self.corpus.tokenizer.fingerprint}
        if not isinstance(place.group, MemberSpec):
            self.group: Group | Membership = self._wrapped(place.group)
            agree(self.group, facts | {"resume": place.resume})
        keep_tokenizer(place.folder, run, self.corpus.tokenizer, place.name)
        self.device = torch.device("cuda", place.gpu) if torch.cuda.is_available() else torch.device("cpu")
        self.bf16 = run.precision == "bf16" or (
            run.precision == "auto" and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        self.model = make_model(run, self.corpus.vocabulary).to(self.device)
        if place.shards > 1 and run.lora:
            raise ConfigurationError(
                f"lora={run.lora} on replicas of {place.shards} ranks: adapters need whole replicas; start one process a replica."
            )
        if place.shards > 1:
            shard(self.model, run.replicas, place.shards, self.device)
        self.method, self.inner = run.make_method(), run.make_inner()
        self.lr_factor = 1.0 if self.method else self.inner.lr_factor
        if self.method:
            self.optimizer = self.method.optimizer(self.model, run.lr)
        else:
            self.optimizer = self.inner.make(self.model, run.lr, run.weight_decay)
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.checkpoints = place.folder / "checkpoints" / place.name
        self.replica: Replica | Attached
        if isinstance(place.group, MemberSpec):
            self._come(place.group, facts)
        else:
            strategy = None if self.method else run.make_strategy()
            if strategy:  # before kernels are compiled and the others are met, which may take long
                self._log_start(strategy, strategy.partition.fragments(self.model))
            self.replica = self._attached()
            if not strategy:
                self._log_start(self.replica.strategy, self.replica.fragments)
        self.micros = micro_batches(run, self.replica)

    def _come(self, member: MemberSpec, facts: dict[str, Any]) -> None:
        """Be one of those who are there now."""
        run, log, strategy = self.run, self.log, self.run.make_strategy()
        fragments = strategy.partition.fragments(self.model)
        self._log_start(strategy, fragments)  # before the first contact, which may take long
        self.pace = Pace(strategy, run, fragments, self._time_a_step())
        hear = RetryReporter(log.emit)
        saved: dict[str, Any] = {}
        if self.place.resume:
            self._found, self._passed_over = checkpoint.newest(self.checkpoints)
            saved = self._found.manifest["facts"] if self._found else {}
        self.group = membership(member, run, facts, self.pace.timeouts(), self._wrapped, hear, saved)
        try:
            self.replica = join(self._attached, self.place.stop, run.timeout)
        except (KeyboardInterrupt, EndedError) as error:
            log.emit("stop", 0, reason=str(error) or "asked to stop while it waited for the others")
            self.group.close()
            raise
        hear.step = lambda: self.replica.step

    def _wrapped(self, group: Group) -> Group:
        """Counted, and on the emulated link."""
        link, counted = parse_link(self.run.link), CountedGroup(group, self.ledger)
        return LinkedGroup(counted, link, self.ledger) if link else counted

    def _attached(self) -> Replica | Attached:
        log = self.log
        if self.method:
            assert not isinstance(
                self.group, Membership
            )  # a run with such a method and comers is refused when it is made
            return self.method.attach(self.model, self.optimizer, self.group, observer=log.emit, clock=log.seconds)
        run, strategy = self.run, self.run.make_strategy()
        tokens = run.batch * run.sequence * run.accumulate if run.weigh == "tokens" else None
        return Replica(
            strategy, self.model, self.optimizer, self.group,
            site=self.place.site, tokens=tokens, observer=log.emit, clock=log.seconds,
        )  # fmt: skip

    def _time_a_step(self) -> float:
        """Seconds of an inner step, about; the first one, which allocates and compiles, is not counted."""
        torch.autograd.backward(self._loss(0))
        began = time.monotonic()
        torch.autograd.backward(self._loss(0))
        self.optimizer.zero_grad()
        return self.run.accumulate * (time.monotonic() - began)

    def train(self) -> dict[str, Any]:
        """Run the loop and return the summary. Raises what `Replica` raises."""
        run = self.run
        gone: LinkError | EndedError | None = None
        failed: ThinwireError | None = None
        if self.place.resume:
            self._resume()
        try:
            self._loop()
            whole = self.replica.step >= run.steps
            if whole:
                self._finish()
        except (LinkError, EndedError) as error:
            if not isinstance(self.group, Membership):
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
        while isinstance(self.group, Membership) and not self.group.closed and not self.place.stop.is_set():
            time.sleep(0.05)  # it keeps the final state for who is missing
        return summary

    def _loop(self) -> None:
        run, replica = self.run, self.replica
        eval_every = run.eval_every or max(1, run.steps // 10)
        while replica.step < run.steps and not replica.stopping:
            if self.place.stop.is_set():
                replica.request_stop()
            before = replica.step
            self._inner_step()
            if _passed(before, replica.step, eval_every) and replica.step < run.steps:
                self._evaluate()
            if _passed(before, replica.step, run.checkpoint_every):
                self._save()

    def _finish(self) -> None:
        """The last rounds. A stop that comes now ends the waiting for the others."""
        run, replica = self.run, self.replica
        if run.checkpoint_every and replica.step % run.checkpoint_every:
            self._save()  # what a longer run goes on from, and a kill in the last round
        began = time.monotonic()
        with passing_on(self.place.stop, replica.request_stop):
            if isinstance(replica, Replica):
                replica.finish(keep_seconds=run.timeout)
            else:
                replica.finish()
        self.clock.loop_seconds += time.monotonic() - began

    def _stop(self, gone: LinkError | EndedError | None) -> ThinwireError | None:
        """Leave what this run, or this replica, goes on from. What is to be raised: the others were not heard, or have ended without it;
        or what was trained since the checkpoint before is lost.
        """
        replica, asked = self.replica, gone is None or self.place.stop.is_set()
        unsaved = None if isinstance(gone, EndedError) else self._save()
        if isinstance(gone, LinkError) and not asked:
            path = self._export(".stale")
            gone = LinkError(
                f"{gone} They are in {path} and are not the final model: --resume when the others are there."
            )
        self.log.emit("stop", replica.step, reason=self._why_stopped() if asked else str(gone))
        replica.close()
        return unsaved if asked else gone

    def _why_stopped(self) -> str:
        who = "this replica stops" if isinstance(self.group, Membership) else "all replicas stop"
        return f"asked to stop; {who} after this step"

    def _inner_step(self) -> None:
        run, replica = self.run, self.replica
        begin, begun = self.log.seconds(), time.monotonic()
        paused = replica.seconds
        lr = learning_rate(run, replica.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.lr_factor
        if isinstance(replica, ZerothOrder):  # forward passes only: there is no gradient whose norm could be told
            self.model.eval()
            first, norm_value = replica.step * replica.samples, math.nan
            loss = replica.iterate(lambda sample: self._loss(first + sample))
        else:
            loss, norm_value = self._descend(replica)
        seconds = time.monotonic() - begun
        compute = seconds - (replica.seconds - paused)
        self.clock.trained += 1
        self.clock.loop_seconds += seconds
        self.clock.compute_seconds += compute
        tokens = round(run.batch * run.sequence * self.micros)
        self.log.emit(
            "step", replica.step, loss=loss, lr=lr, grad_norm=norm_value, tokens=tokens, begin=begin, compute_seconds=compute
        )  # fmt: skip
        if isinstance(self.group, Membership):
            self.group.use_timeouts(self.pace.after_step(compute))

    def _descend(self, replica: Replica | Attached) -> tuple[float, float]:
        """Backward, and the optimizer's step: the loss, and the gradient's norm."""
        run, loss = self.run, 0.0
        if isinstance(replica, Attached) and replica.idle:
            replica.skip()
            return math.nan, math.nan
        for micro in range(run.accumulate):
            part = self._loss(replica.step * run.accumulate + micro) / run.accumulate
            torch.autograd.backward(part)
            loss += float(part.detach())
        replica.exchange_gradients()
        # filters clip by themselves, before the exchange
        by_filters = isinstance(replica, Replica) and bool(replica.strategy.filters)
        most = math.inf if by_filters else run.clip or math.inf
        if isinstance(replica, Replica) and isinstance(replica.strategy.signal, Gradients) and self.place.shards == 1:
            norm_value = clip_alike(self.model.parameters(), most)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
            norm_value = float(getattr(norm, "full_tensor", lambda: norm)())
        if not math.isfinite(norm_value):
            self.optimizer.zero_grad()  # an inner step without update still counts: replicas keep in step
            self.log.emit("skip", replica.step + 1, reason=f"the gradient's norm is {norm_value}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm_value

    def _loss(self, micro: int) -> Tensor:
        run, place, share = self.run, self.place, self.share
        tokens, targets = self.corpus.batch(
            share.seed, share.index, share.count, micro, run.batch, run.sequence, place.shard, place.shards
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss: Tensor = self.model(tokens.to(self.device), targets.to(self.device)).loss
        return loss

    def _evaluate(self) -> None:
        """The mean loss of the anchors on held-out text, the same on every replica that knows them."""
        began = time.monotonic()
        self.model.eval()
        losses = []
        with (
            self.replica.anchored(),
            torch.no_grad(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16),
        ):
            for tokens, targets in self.corpus.held_out(self.run.batch, self.run.sequence, self.run.eval_batches):
                losses.append(float(self.model(tokens.to(self.device), targets.to(self.device)).loss))
        self.model.train()
        loss, of = sum(losses) / len(losses), evaluated(self.replica)
        self.eval_loss = loss if of == "anchors" else math.nan
        self.log.emit(
            "eval",
            self.replica.step,
            loss=loss,
            tokens=self._tokens(),
            seconds_spent=time.monotonic() - began,
            of=of,
        )

    def _save(self) -> CheckpointError | None:
        """A checkpoint that cannot be written is reported and training goes on: the one before is still there."""
        began = time.monotonic()
        try:
            path = checkpoint.save(self.checkpoints, self.replica, dataclasses.asdict(self._totals()), self.run.keep)
        except CheckpointError as error:
            self.log.emit("warning", self.replica.step, message=str(error))
            return error
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        relative = str(path.relative_to(self.place.folder))
        self.log.emit(
            "checkpoint", self.replica.step, path=relative, nbytes=nbytes, seconds_spent=time.monotonic() - began
        )
        return None

    def _resume(self) -> None:
        if isinstance(self.group, Membership):
            self._come_back()
            return
        found, skipped = checkpoint.newest_common(self.checkpoints, self.group, self.place.site)
        if found is None:
            told = "; ".join(f"{one['path']}: {one['reason']}" for one in skipped)
            raise CheckpointError(
                f"--resume: there is no step of which all replicas have a whole checkpoint ({told}). Bring back what is missing, or begin "
                "again at the first step by --resume --from-start, which sets the checkpoints aside."
            )
        self._load(found)
        path = str(found.path.relative_to(self.place.folder))
        self.log.emit("resume", found.step, from_step=found.step, path=path, skipped=skipped)

    def _come_back(self) -> None:
        """Go on from the newest sound checkpoint of this replica's own, at the step where the others are."""
        found, skipped = self._found, self._passed_over
        joined, turn, path = self.replica.step, 0, ""
        if found is not None:
            self._load(found)
            self.replica.step = max(joined, found.step)
            turn, path = found.manifest["facts"]["agreed"]["turn"], str(found.path.relative_to(self.place.folder))
        self.log.emit("back", self.replica.step, turn=turn, path=path, skipped=skipped)

    def _load(self, found: checkpoint.Checkpoint) -> None:
        checkpoint.load(found, self.replica)
        notes = found.manifest["notes"]
        self.clock = Clock(**{item.name: notes[item.name] for item in dataclasses.fields(Clock) if item.name in notes})
        self.ledger.add(self.clock.ledger)

    def _totals(self) -> Clock:
        return dataclasses.replace(
            self.clock,
            stall_seconds=self.clock.stall_seconds + self.replica.stall_seconds,
            ledger=self.ledger.as_dict(),
        )

    def _tokens(self) -> int:
        """Of all replicas; of one that comes and goes, its own."""
        run = self.run
        own = self.clock.trained if isinstance(self.group, Membership) else self.replica.step * run.replicas
        return round(own * run.batch * run.sequence * self.micros)

    def _summary(self, stopped: bool) -> dict[str, Any]:
        run, totals = self.run, self._totals()
        steps = totals.trained if isinstance(self.group, Membership) else self.replica.step
        privacy = self.replica.strategy.privacy if isinstance(self.replica, Replica) else None
        return {
            "strategy": run.strategy,
            "replicas": run.replicas,
            "steps": self.replica.step,
            "stopped": stopped,
            "seed": run.seed,
            "tokens": self._tokens(),
            "parameters": self.parameters,
            "eval_loss": self.eval_loss,
            "wire_bytes_sent": self.ledger.sent(),
            "bits_per_parameter_per_step": 8 * self.ledger.sent() / self.parameters / max(1, steps),
            "compute_utilization": totals.compute_seconds / max(totals.loop_seconds, 1e-9),
            "wall_seconds": totals.loop_seconds,
            "stall_seconds": totals.stall_seconds,
            "ledger": totals.ledger,
            "privacy": privacy and privacy.spent(releases(self.log, len(self.replica.fragments)), run.replicas),
            "weights": digest(self.replica.anchors()).hex(),  # of the outer ones: equal on all replicas
            "link": None if parse_link(run.link) is None else run.link,
            "provenance": "emulated" if parse_link(run.link) else "measured",
        }

    def _export(self, mark: str = "") -> Path:
        """RUN/model.safetensors: the outer weights, which are the trained model; with a `mark`, those that may not be the last."""
        weights, path = self.replica.export(), self.place.folder / f"model{mark}.safetensors"
        if self.place.writes_the_model:
            store(self.place.folder, self.run, self.corpus.tokenizer, self.model, weights, self.place.name, mark)
        if not mark:
            path.with_name("model.stale.safetensors").unlink(missing_ok=True)
        return path

    def _log_start(self, composition: Strategy | Method, fragments: Sequence[Fragment]) -> None:
        self.log.emit("start", 0, **start(self.run, self.place, composition, fragments, self.corpus))


def _passed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies after `before`, up to `after`: a replica that was behind jumps ahead."""
    return bool(every) and after // every > before // every
