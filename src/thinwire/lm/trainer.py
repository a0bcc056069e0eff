"""Train one language model as one replica of a group: the main job's loop.

The inner optimizer with warm-up and cosine, clipping, accumulation, autocast; evaluation of the anchors on held-out text;
checkpoints; an exact resume; and an event for everything that happens.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import checkpoint
from thinwire.contact import agree
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.group import CountedGroup, Group, Ledger, LinkedGroup, parse_link
from thinwire.lm.adapters import attach
from thinwire.lm.data import Corpus
from thinwire.lm.huggingface import hugging_face
from thinwire.lm.loops import check_method, micro_batches
from thinwire.lm.model import SIZES, Transformer
from thinwire.lm.releases import releases
from thinwire.lm.run import Run
from thinwire.lm.stored import store, stored_model
from thinwire.lm.tokens import BPE, Bytes
from thinwire.methods import Attached, ZerothOrder
from thinwire.observe.events import EventLog
from thinwire.replica import Replica
from thinwire.schedule import Calendar
from thinwire.seeds import derive
from thinwire.strategy import Strategy
from thinwire.version import __version__

FLOOR = 0.05  # of the peak learning rate, where the cosine ends


@dataclass(frozen=True)
class Place:
    """Where a replica runs: what differs between replicas of one run."""

    group: Group
    folder: Path
    resume: bool = False
    site: Group | None = None
    shard: int = 0
    shards: int = 1
    gpu: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return f"replica-{self.group.rank}" + (f".shard-{self.shard}" if self.shards > 1 else "")


def open_corpus(run: Run) -> Corpus:
    """The run's text, tokenised (once on every machine)."""
    return Corpus.open(run.text, make_tokenizer(run), column=run.column)


def make_tokenizer(run: Run) -> Bytes | BPE:
    """The run's tokenizer; a BPE that is named by its size is not trained yet."""
    kind, _, what = run.tokenizer.partition(":")
    if kind not in ("bytes", "bpe") or (kind == "bpe") != bool(what):
        raise ConfigurationError(
            f"tokenizer={run.tokenizer!r}: bytes, bpe:SIZE such as bpe:8192, or bpe:FILE.json is needed."
        )
    if kind == "bytes":
        return Bytes()
    return BPE(int(what)) if what.isdigit() else BPE.load(what)


def make_model(run: Run, vocabulary: int) -> nn.Module:
    """The run's model; fresh weights and adapters depend on its seed only."""
    model = _bare_model(run, vocabulary)
    return model if run.lora is None else attach(model, run.lora, derive(run.seed, "adapters"))


def _bare_model(run: Run, vocabulary: int) -> nn.Module:
    seed = derive(run.seed, "weights")
    if run.model.endswith(".safetensors"):
        return stored_model(run.model, vocabulary, run.sequence)
    if run.model.startswith("hf:"):
        model = hugging_face(run.model.removeprefix("hf:"), vocabulary, seed % 2**31)
        if run.sequence > model.context:
            raise ConfigurationError(f"sequence={run.sequence}: {run.model} takes at most {model.context} tokens.")
        return model
    if run.model not in SIZES:
        raise ConfigurationError(
            f"model={run.model!r}: one of {', '.join(SIZES)}, RUN/model.safetensors or hf:NAME is needed."
        )
    size = SIZES[run.model]
    shape = dataclasses.replace(
        size, vocabulary=vocabulary, positions=run.positions, context=max(run.sequence, size.context)
    )
    return Transformer(shape, seed % 2**31)


def check(run: Run) -> None:
    """Find what would stop every replica, before any is started: text, tokenizer, model, fragments. Raises what it finds."""
    corpus = open_corpus(run)
    corpus.batch(run.seed, run.replicas - 1, run.replicas, 0, run.batch, run.sequence)  # the last has fewest windows
    corpus.held_out(run.batch, run.sequence, run.eval_batches)
    with torch.device("meta"):
        model = make_model(run, corpus.vocabulary)
    if method := run.make_method():
        return check_method(run, method)
    strategy = run.make_strategy()
    Calendar(
        strategy.schedule, len(strategy.partition.fragments(model)), lambda step: learning_rate(run, step)
    ).departs(1)
    strategy.exchange.init(strategy.codec, 0, 0, run.replicas)  # sites of another group are refused here
    if strategy.privacy:
        strategy.privacy.epsilon(1)  # an accountant that is missing is missed here


def learning_rate(run: Run, step: int) -> float:
    """Of inner step `step` (from 1): linear warm-up, then a cosine to 5 % of the peak at the last step."""
    warmup = min(1000, run.steps // 10) if run.warmup is None else run.warmup
    if step <= warmup:
        return run.lr * step / max(1, warmup)
    share = (step - warmup) / max(1, run.steps - warmup)
    return run.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


@dataclass
class Clock:
    """Where the time of the loop went; evaluation and checkpoints are not part of it."""

    compute_seconds: float = 0.0
    loop_seconds: float = 0.0
    stall_seconds: float = 0.0
    ledger: dict[str, Any] = field(default_factory=dict)  # what earlier sessions counted


class Trainer:
    """One replica's training. `train()` runs it from the first or the resumed step to the last."""

    def __init__(self, run: Run, place: Place, log: EventLog) -> None:
        self.run, self.place, self.log = run, place, log
        link = parse_link(run.link)
        self.ledger = Ledger()
        counted = CountedGroup(place.group, self.ledger)
        self.group: Group = LinkedGroup(counted, link, self.ledger) if link else counted
        self.corpus = open_corpus(run)
        agree(self.group, run.shared() | {"tokenizer": self.corpus.tokenizer.fingerprint, "resume": place.resume})
        self.device = torch.device("cuda", place.gpu) if torch.cuda.is_available() else torch.device("cpu")
        self.model = make_model(run, self.corpus.vocabulary).to(self.device)
        if place.shards > 1 and run.lora:
            raise ConfigurationError(
                f"lora={run.lora} on replicas of {place.shards} ranks: adapters need whole replicas; start one process a replica."
            )
        if place.shards > 1:
            _shard(self.model, run.replicas, place.shards, self.device)
        self.replica = self._attached()
        self.optimizer = self.replica.optimizer
        self.micros = micro_batches(run, self.replica)
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.clock = Clock()
        self.bf16 = run.precision == "bf16" or (
            run.precision == "auto" and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        self.eval_loss = math.nan
        self.checkpoints = place.folder / "checkpoints" / place.name
        self._log_start()

    def _attached(self) -> Replica | Attached:
        run, log = self.run, self.log
        if method := run.make_method():
            optimizer = method.optimizer(self.model, run.lr)
            return method.attach(self.model, optimizer, self.group, observer=log.emit, clock=log.seconds)
        optimizer = run.make_inner().make(self.model, run.lr, run.weight_decay)
        return Replica(
            run.make_strategy(), self.model, optimizer, self.group,
            site=self.place.site, observer=log.emit, clock=log.seconds,
        )  # fmt: skip

    def train(self) -> dict[str, Any]:
        """Run the loop and return the summary. Raises what `Replica` raises."""
        run, replica = self.run, self.replica
        if self.place.resume:
            self._resume()
        eval_every = run.eval_every or max(1, run.steps // 10)
        while replica.step < run.steps and not replica.stopping:
            if self.place.stop.is_set():
                replica.request_stop()
            self._inner_step()
            if replica.step % eval_every == 0 and replica.step < run.steps:
                self._evaluate()
            if run.checkpoint_every and replica.step % run.checkpoint_every == 0:
                self._save()
        stopped = replica.step < run.steps
        if stopped:
            self._save()
            self.log.emit("stop", replica.step, reason="asked to stop; all replicas stop after this step")
            replica.close()
        else:
            if run.checkpoint_every and replica.step % run.checkpoint_every:
                self._save()  # what a longer run goes on from, and a kill in the last round
            began = time.monotonic()
            replica.finish()
            self.clock.loop_seconds += time.monotonic() - began
            self._evaluate()
            self._export()
        summary = self._summary(stopped)
        self.log.emit("end", replica.step, summary=summary)
        return summary

    def _inner_step(self) -> None:
        run, replica = self.run, self.replica
        begin, begun = self.log.seconds(), time.monotonic()
        paused = replica.seconds
        lr = learning_rate(run, replica.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * (run.make_inner().lr_factor if isinstance(replica, Replica) else 1.0)
        if isinstance(replica, ZerothOrder):  # forward passes only: there is no gradient whose norm could be told
            self.model.eval()
            first, norm_value = replica.step * replica.samples, math.nan
            loss = replica.iterate(lambda sample: self._loss(first + sample))
        else:
            loss, norm_value = self._descend(replica)
        seconds = time.monotonic() - begun
        compute = seconds - (replica.seconds - paused)
        self.clock.loop_seconds += seconds
        self.clock.compute_seconds += compute
        tokens = round(run.batch * run.sequence * self.micros)
        self.log.emit(
            "step", replica.step, loss=loss, lr=lr, grad_norm=norm_value, tokens=tokens, begin=begin, compute_seconds=compute
        )  # fmt: skip

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
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        norm_value = float(getattr(norm, "full_tensor", lambda: norm)())
        if not math.isfinite(norm_value):
            self.optimizer.zero_grad()  # an inner step without update still counts: replicas keep in step
            self.log.emit("skip", replica.step + 1, reason=f"the gradient's norm is {norm_value}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm_value

    def _loss(self, micro: int) -> Tensor:
        run, place = self.run, self.place
        tokens, targets = self.corpus.batch(
            run.seed, place.group.rank, run.replicas, micro, run.batch, run.sequence, place.shard, place.shards
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss: Tensor = self.model(tokens.to(self.device), targets.to(self.device)).loss
        return loss

    def _evaluate(self) -> None:
        """The mean loss of the anchors on held-out text, the same on every replica."""
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
        self.eval_loss = sum(losses) / len(losses)
        self.log.emit(
            "eval", self.replica.step, loss=self.eval_loss, tokens=self._tokens(), seconds_spent=time.monotonic() - began,
            of="anchors",
        )  # fmt: skip

    def _save(self) -> None:
        """A checkpoint that cannot be written is reported and training goes on: the one before is still there."""
        began = time.monotonic()
        try:
            path = checkpoint.save(self.checkpoints, self.replica, dataclasses.asdict(self._totals()), self.run.keep)
        except CheckpointError as error:
            self.log.emit("warning", self.replica.step, message=str(error))
            return
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        relative = str(path.relative_to(self.place.folder))
        self.log.emit(
            "checkpoint", self.replica.step, path=relative, nbytes=nbytes, seconds_spent=time.monotonic() - began
        )

    def _resume(self) -> None:
        found, skipped = checkpoint.newest_common(self.checkpoints, self.group, self.place.site)
        if found is None:
            message = "no checkpoint that all replicas have; training starts from the first step"
            self.log.emit("warning", 0, message="; ".join([message, *(s["reason"] for s in skipped)]))
            self.log.emit("resume", 0, from_step=0, path="", skipped=skipped)
            return
        checkpoint.load(found, self.replica)
        notes = found.manifest["notes"]
        self.clock = Clock(**{item.name: notes[item.name] for item in dataclasses.fields(Clock) if item.name in notes})
        self.ledger.add(self.clock.ledger)
        self.log.emit(
            "resume",
            found.step,
            from_step=found.step,
            path=str(found.path.relative_to(self.place.folder)),
            skipped=skipped,
        )

    def _totals(self) -> Clock:
        return dataclasses.replace(
            self.clock,
            stall_seconds=self.clock.stall_seconds + self.replica.stall_seconds,
            ledger=self.ledger.as_dict(),
        )

    def _tokens(self) -> int:
        run = self.run
        return round(self.replica.step * run.batch * run.sequence * self.micros * run.replicas)

    def _summary(self, stopped: bool) -> dict[str, Any]:
        run, totals = self.run, self._totals()
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
            "bits_per_parameter_per_step": 8 * self.ledger.sent() / self.parameters / max(1, self.replica.step),
            "compute_utilization": totals.compute_seconds / max(totals.loop_seconds, 1e-9),
            "wall_seconds": totals.loop_seconds,
            "stall_seconds": totals.stall_seconds,
            "ledger": totals.ledger,
            "privacy": privacy and privacy.spent(releases(self.log, len(self.replica.fragments)), run.replicas),
            "link": None if parse_link(run.link) is None else run.link,
            "provenance": "emulated" if parse_link(run.link) else "measured",
        }

    def _export(self) -> None:
        """The outer weights, which are the trained model."""
        weights = self.replica.export()
        if self.place.group.rank == 0 and self.place.shard == 0:
            store(self.place.folder, self.run, self.corpus.vocabulary, self.model, weights)

    def _log_start(self) -> None:
        link, shapes = parse_link(self.run.link), [fragment.shapes for fragment in self.replica.fragments]
        strategy = self.replica.strategy
        chosen = strategy.choices(shapes, self.group.size) if isinstance(strategy, Strategy) else []
        self.log.emit(
            "start", self.replica.step, wall_time=time.time(), replica=self.place.group.rank, replicas=self.run.replicas,
            run=dataclasses.asdict(self.run) | {
                "composition": repr(strategy), "corpus": self.corpus.describe(), "exchanges": chosen,
            },
            strategy=self.run.label,
            parameters=self.parameters, fragments=[{"name": f.name, "numel": f.numel} for f in self.replica.fragments],
            link=link and {"bits_per_second": link.bits_per_second, "delay_seconds": link.delay_seconds},
            carrier=self.run.carrier, machine=machine(),
        )  # fmt: skip


def machine() -> Mapping[str, Any]:
    """What a number was measured on."""
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "thinwire": __version__,
        "commit": git.stdout.strip() or None,
    }


def _shard(model: nn.Module, replicas: int, shards: int, device: torch.device) -> None:
    """FSDP2 inside the replica: every block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replica", "shard"))["shard"]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
