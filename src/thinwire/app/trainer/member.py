"""A replica's membership in an elastic run: its name, its timeouts, and reports while it waits for the others."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from thinwire.app.diagnosis import Rules
from thinwire.app.trainer.placement import Placement
from thinwire.codecs import Shapes
from thinwire.comm import Group, Link, parse_link
from thinwire.errors import LinkError
from thinwire.membership import Membership, Timeouts
from thinwire.membership.rendezvous import Rendezvous
from thinwire.membership.view import Observe
from thinwire.pieces.partition import Fragment
from thinwire.pieces.schedule import Adaptive, Schedule
from thinwire.strategy import Strategy

if TYPE_CHECKING:
    from thinwire.net.upload import HubUploader

QUIET_SECONDS = 3.0  # seconds that a member may be late before it is reported
REPEAT_SECONDS = 30.0  # before the same reason is reported again


@dataclass(frozen=True)
class MemberSpec:
    """An elastic member: its rendezvous, and a unique name that it keeps over restarts. `uploader`: see `lm.place.Place`."""

    rendezvous: Rendezvous
    name: str
    secret: bytes = b""
    uploader: Callable[[], HubUploader] | None = None


def largest_round(strategy: Strategy, fragments: Sequence[int | Shapes], replicas: int) -> int:
    """The most bytes that one replica sends for the largest fragment."""
    return max(strategy.nbytes_per_period([fragment], replicas) for fragment in fragments)


def timeouts(
    placement: Placement, strategy: Strategy, fragments: Sequence[int | Shapes], link: Link | None, step_seconds: float
) -> Timeouts:
    """The timeouts of a run with this `placement`."""
    schedule, nbytes = strategy.schedule, largest_round(strategy, fragments, placement.replicas)
    return Timeouts.of(schedule.every, schedule.delay, step_seconds, nbytes, link, placement.grace)


def heartbeat_timeout(schedule: Schedule | Adaptive, link: str) -> float:
    """The heartbeat timeout of a lighthouse for a run. It depends on the link only."""
    return Timeouts.of(schedule.every, schedule.delay, 0.0, 0, parse_link(link)).heartbeat_timeout


def make_membership(
    member: MemberSpec,
    placement: Placement,
    facts: Mapping[str, Any],
    times: Timeouts,
    wrap: Callable[[Group], Group],
    observe: Observe,
    steps: int,
    saved: Mapping[str, Any],
) -> Membership:
    """The membership of one replica: `facts` must be equal on all, like code, strategy and model. A run has `steps` steps. `saved`:
    the facts of this replica's checkpoint; empty if it has none.
    """
    times = replace(times, view=min(times.view, placement.timeout))
    texts = {name: str(value) for name, value in {"replicas": placement.replicas, **facts}.items()}
    return Membership(
        member.rendezvous,
        member.name,
        facts=texts,
        least=placement.least,
        secret=member.secret,
        run=saved["agreed"].get("run", "") if saved else "",
        most_steps=max(steps, saved.get("step", 0)),
        timeouts=times,
        wrap=wrap,
        observe=observe,
        evict=Rules() if placement.evict else None,
    )


class RetryReporter:
    """Reports reasons that delay a view for longer than `QUIET_SECONDS` as retry events: each reason once in `REPEAT_SECONDS`.

    `step` returns the present inner step.
    """

    def __init__(self, observe: Callable[..., None]) -> None:
        self.step: Callable[[], int] = lambda: 0
        self._observe, self._reported = observe, dict[str, float]()
        self._since: float | None = None

    def __call__(self, kind: str, fields: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if kind == "view":
            self._since = None
        elif kind == "retry":
            self._since = now if self._since is None else self._since
            reason, at_once = str(fields["reason"]), fields["seconds"] == 0.0
            if (at_once or now - self._since >= QUIET_SECONDS) and now - self._reported.get(
                reason, -REPEAT_SECONDS
            ) >= REPEAT_SECONDS:
                self._reported[reason] = now
                self._observe("retry", self.step(), reason=reason)


class AdaptiveTimeouts:
    """Timeouts for the present duration of inner steps: from the median of the last 64, computed after 8, 16, 32, ... steps."""

    def __init__(
        self, strategy: Strategy, placement: Placement, fragments: Sequence[Fragment], step_seconds: float
    ) -> None:
        self._shapes, self._recent = [fragment.shapes for fragment in fragments], deque([step_seconds], maxlen=64)
        self._strategy, self._placement, self._link = strategy, placement, parse_link(placement.link)
        self._steps, self._now = 0, self.timeouts()

    def timeouts(self) -> Timeouts:
        seconds = statistics.median(self._recent)
        return timeouts(self._placement, self._strategy, self._shapes, self._link, seconds)

    def after_step(self, seconds: float) -> Timeouts:
        """The timeouts from here on."""
        self._steps += 1
        self._recent.append(seconds)
        if self._steps >= 8 and self._steps & (self._steps - 1) == 0:
            self._now = self.timeouts()
        return self._now


T = TypeVar("T")


def join(attach: Callable[[], T], leave: Callable[[], object], stop: threading.Event, seconds: float) -> T:
    """Call `attach`, which waits for the others, and again after a `LinkError`, for `seconds`; returns its result.

    It runs in a thread, because a thread that waits at a lighthouse does not handle signals. When `stop` is set, `leave`
    is called, which must end the waiting; the thread has ended before `KeyboardInterrupt` is raised.
    """
    until = time.monotonic() + seconds
    while True:
        attempt: Future[T] = Future()
        thread = threading.Thread(target=_fulfil, args=(attempt, attach), name="thinwire-join", daemon=True)
        thread.start()
        while thread.is_alive():
            if stop.is_set():
                leave()
                thread.join()
                raise KeyboardInterrupt
            thread.join(0.05)  # not stop.wait: a signal handler that sets it in this thread would wait for its lock
        try:
            return attempt.result()
        except LinkError as error:
            if time.monotonic() > until:
                raise LinkError(f"{error} Gave up after {seconds:g} s; --timeout sets this time.") from None


def _fulfil(promise: Future[T], attach: Callable[[], T]) -> None:
    try:
        promise.set_result(attach())
    except BaseException as error:
        promise.set_exception(error)
