"""Where a replica runs, and among whom: what differs between the replicas of one run."""

from __future__ import annotations

import re
import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from thinwire.codecs import Shapes
from thinwire.comm import Group, Link, parse_link
from thinwire.diagnosis import Rules
from thinwire.errors import LinkError
from thinwire.lm.run import Run
from thinwire.membership import Membership, Timeouts
from thinwire.membership.rendezvous import Rendezvous
from thinwire.membership.view import Observe
from thinwire.pieces.partition import Fragment
from thinwire.records.events import EventLog
from thinwire.rng import derive
from thinwire.strategy import Strategy

PATIENCE = 3.0  # seconds in which somebody may be late without a word
LOOK = 5.0  # seconds between two counts of the open files
FULL = 0.8  # of the files that may be open: told
_FILES = Path("/proc/self/fd")
AGAIN = 30.0  # seconds before the same hindrance is told again


@dataclass(frozen=True)
class MemberSpec:
    """One that comes and goes: where it meets the others, and a name that no other has, kept over restarts."""

    rendezvous: Rendezvous
    name: str
    secret: bytes = b""


@dataclass(frozen=True)
class Share:
    """What a replica reads of the text: the windows that are `index` of `count`, in an order that follows from `seed`."""

    seed: int
    index: int
    count: int

    @classmethod
    def of(cls, run: Run, name: str) -> Share:
        """replica-0, replica-1, ... have shares that never overlap; who has another name reads all of the text in an order of its own.

        >>> Share.of(Run(replicas=3), "replica-1")
        Share(seed=0, index=1, count=3)
        >>> Share.of(Run(replicas=3), "paris").count
        1
        """
        number = re.fullmatch(r"replica-(0|[1-9][0-9]*)", name)
        if number and int(number[1]) < run.replicas:
            return cls(run.seed, int(number[1]), run.replicas)
        return cls(derive(run.seed, f"order of {name}"), 0, 1)


@dataclass(frozen=True)
class Place:
    """Where a replica runs. `group`: those that it trains with from the first step to the last, or how it comes to them."""

    group: Group | MemberSpec
    folder: Path
    resume: bool = False
    site: Group | None = None
    shard: int = 0
    shards: int = 1
    gpu: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """Of its event file and its checkpoints."""
        if isinstance(self.group, MemberSpec):
            return self.group.name
        return f"replica-{self.group.rank}" + (f".shard-{self.shard}" if self.shards > 1 else "")

    @property
    def writes_the_model(self) -> bool:
        """All replicas hold the same one: in a fixed group the first writes it; one that comes and goes cannot know who is left."""
        return isinstance(self.group, MemberSpec) or (self.group.rank == 0 and self.shard == 0)

    def number(self, run: Run) -> int:
        """For the order in tables; those with names of their own come last."""
        share = self.share(run)
        return share.index if share.count == run.replicas else run.replicas

    def share(self, run: Run) -> Share:
        """Of the text."""
        if isinstance(self.group, MemberSpec):
            return Share.of(run, self.group.name)
        return Share(run.seed, self.group.rank, self.group.size)


def largest_round(strategy: Strategy, fragments: Sequence[int | Shapes], replicas: int) -> int:
    """Bytes that one replica sends for the largest fragment."""
    return max(strategy.nbytes_per_period([fragment], replicas) for fragment in fragments)


def timeouts(
    run: Run, strategy: Strategy, fragments: Sequence[int | Shapes], link: Link | None, step_seconds: float
) -> Timeouts:
    """The one time-out model, for `run`."""
    schedule, nbytes = strategy.schedule, largest_round(strategy, fragments, run.replicas)
    return Timeouts.of(schedule.every, schedule.delay, step_seconds, nbytes, link, run.grace)


def heartbeat_timeout(run: Run) -> float:
    """What a lighthouse for `run` is to be told. It depends on the link alone."""
    schedule = run.make_strategy().schedule
    return Timeouts.of(schedule.every, schedule.delay, 0.0, 0, parse_link(run.link)).heartbeat_timeout


def membership(
    member: MemberSpec,
    run: Run,
    facts: Mapping[str, Any],
    times: Timeouts,
    wrap: Callable[[Group], Group],
    observe: Observe,
    saved: Mapping[str, Any],
) -> Membership:
    """Those who are there, for `run`: `facts` must be alike on all, beside code, strategy and model. `saved`: what this replica's
    checkpoint says of it; empty if it has none.
    """
    times = replace(times, view=min(times.view, run.timeout))
    texts = {name: str(value) for name, value in {"replicas": run.replicas, **facts}.items()}
    return Membership(
        member.rendezvous,
        member.name,
        facts=texts,
        least=run.least,
        secret=member.secret,
        run=saved["agreed"].get("run", "") if saved else "",
        most_steps=max(run.steps, saved.get("step", 0)),
        timeouts=times,
        wrap=wrap,
        observe=observe,
        evict=Rules() if run.evict else None,
    )


class RetryReporter:
    """Of what a membership tells, what keeps it from a view for longer than `PATIENCE`, as retry events: each reason once in `AGAIN` seconds.

    `step` says where training is.
    """

    def __init__(self, observe: Callable[..., None]) -> None:
        self.step: Callable[[], int] = lambda: 0
        self._observe, self._said = observe, dict[str, float]()
        self._since: float | None = None

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if kind == "view":
            self._since = None
        elif kind == "retry":
            self._since = now if self._since is None else self._since
            reason, at_once = str(fields["reason"]), fields["seconds"] == 0.0
            if (at_once or now - self._since >= PATIENCE) and now - self._said.get(reason, -AGAIN) >= AGAIN:
                self._said[reason] = now
                self._observe("retry", self.step(), reason=reason)


class Pace:
    """Timeouts for inner steps as they last now: the median of the last ones, taken ever more rarely."""

    def __init__(self, strategy: Strategy, run: Run, fragments: Sequence[Fragment], step_seconds: float) -> None:
        self._shapes, self._recent = [fragment.shapes for fragment in fragments], deque([step_seconds], maxlen=64)
        self._strategy, self._run, self._link = strategy, run, parse_link(run.link)
        self._steps, self._now = 0, self.timeouts()

    def timeouts(self) -> Timeouts:
        seconds = statistics.median(self._recent)
        return timeouts(self._run, self._strategy, self._shapes, self._link, seconds)

    def after_step(self, seconds: float) -> Timeouts:
        """The timeouts from here on."""
        self._steps += 1
        self._recent.append(seconds)
        if self._steps >= 8 and self._steps & (self._steps - 1) == 0:
            self._now = self.timeouts()
        return self._now


T = TypeVar("T")


def join(attach: Callable[[], T], stop: threading.Event, seconds: float) -> T:
    """What `attach` returns, which waits for the others: tried again for `seconds`. A stop ends the waiting (`KeyboardInterrupt`).

    Beside this thread, which would not hear a signal while it waits at a lighthouse.
    """
    until = time.monotonic() + seconds
    while True:
        attempt: Future[T] = Future()
        threading.Thread(target=_fulfil, args=(attempt, attach), name="thinwire-join", daemon=True).start()
        while not attempt.done():
            if stop.is_set():
                raise KeyboardInterrupt
            time.sleep(
                0.05
            )  # not stop.wait: a handler that sets it while this thread holds its lock would wait for itself
        try:
            return attempt.result()
        except LinkError as error:
            if time.monotonic() > until:
                raise LinkError(f"{error} Given up after {seconds:g} s; --timeout is how long.") from None


def _fulfil(promise: Future[T], attach: Callable[[], T]) -> None:
    try:
        promise.set_result(attach())
    except BaseException as error:
        promise.set_exception(error)


@contextmanager
def passing_on(stop: threading.Event, request_stop: Callable[[], object]) -> Iterator[None]:
    """Within, `request_stop` is called when `stop` is set: by a thread, for this one waits for others."""
    over = threading.Event()

    def pass_on() -> None:
        while not over.wait(0.05):
            if stop.is_set():
                request_stop()
                return

    thread = threading.Thread(target=pass_on, name="thinwire-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def watching_files(log: EventLog) -> Iterator[None]:
    """Within, this process may open as many files as the system lets it, and the log says once when most of them are open: at
    the limit gloo, which keeps every connection that a stranger makes, ends the process.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS says "no limit" and means another
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most, over = resource.getrlimit(resource.RLIMIT_NOFILE)[0], threading.Event()

    def watch() -> None:
        while True:
            try:
                number = len(list(_FILES.iterdir()))
            except OSError:  # the system does not list them
                return
            if 0 < FULL * most <= number:
                log.emit(
                    "warning", 0,
                    message=f"{number} of at most {most} files of this process are open, and at the limit it ends. Somebody "
                    "else may connect to its ports: let only the other replicas reach them (thinwire doctor --firewall "
                    "ADDRESS ...), and raise the limit (ulimit -Hn)",
                )  # fmt: skip
                return
            if over.wait(LOOK):
                return

    thread = threading.Thread(target=watch, name="thinwire-files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def shard(model: nn.Module, replicas: int, shards: int, device: torch.device) -> None:
    """FSDP2 inside the replica: every block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replica", "shard"))["shard"]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
