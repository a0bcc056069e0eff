"""The loop of an asynchronous replica: the order of operations around its inner steps.

When a fragment is due, its delta goes to the syncer (a thread of replica 0), and training continues. The syncer's estimate is applied after
the inner step during which it arrives:

    a ← outer step on the estimate                       the anchor: the same bits on every replica
    θ ← a + (θ − a_old)                                  the replica keeps its own progress
    θ ← a + (θ − (a_old − Δ))                            if its delta Δ was counted, because a contains Δ now

So each inner step counts once: progress that is not in an anchor is in θ, and is sent with the next delta. A fragment has at most one
delta in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group, GroupClaim, gather
from thinwire.drivers.attached import Attached
from thinwire.drivers.handshake import agree_on_start, check_start
from thinwire.drivers.module_state import clear
from thinwire.drivers.step_hooks import outermost
from thinwire.drivers.unequal.composition import Composition
from thinwire.drivers.unequal.host import Host
from thinwire.drivers.unequal.messages import (
    COUNTED,
    DELTA,
    END,
    LAST,
    MOVE,
    REST,
    Down,
    ReplicaReport,
    SyncerMessages,
    Up,
)
from thinwire.drivers.unequal.rounds import HeldRound, ReportPace, own_every
from thinwire.drivers.unequal.saved import Departed, load_syncer, resume, state_of, state_of_syncer
from thinwire.drivers.unequal.syncer import AgreedFragment, Syncer, decode_body, encode_delta, first_state
from thinwire.drivers.unequal.syncer_channel import SyncerChannel
from thinwire.drivers.unequal.timeline import Timeline
from thinwire.errors import ConfigurationError, DisagreementError
from thinwire.rng import Key
from thinwire.types import Observer

HOST = 0  # the replica that runs the syncer's thread


class Unequal(Attached):
    """The loop of `Decoupled` on one replica.

    ```python
    trained = decoupled_diloco(every=30).attach(model, optimizer, group)
    while trained.progress < steps and not trained.stopping:   # progress is the mean over all replicas
        model(next(batches)).loss.backward()
        optimizer.step()                                       # deltas depart, and rounds land here
        optimizer.zero_grad()
    trained.finish()                                           # all replicas have the same weights
    ```

    `tokens` is the number of tokens in an inner step; set it if replicas differ. In real time replicas may take any numbers of inner steps;
    in virtual time each trains until `progress` reaches the end. A lost or late replica does not delay the others; replica 0, which hosts
    the syncer, is needed to the end. Over gloo, silence for the group's `timeout` ends the whole group, so it must be longer than the time
    between two deltas.
    """

    own_steps = True
    server = HOST  # the rank of the replica that runs the syncer
    beyond = 0  # reports about others, beside those about the replicas of this syncer
    strategy: Composition  # type: ignore[assignment]  # the method that attached it

    def __init__(
        self, method: Composition, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group,
        observer: Observer, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        super().__init__(method, model, optimizer, group, None, observer, clock)  # type: ignore[arg-type]
        self._claim = GroupClaim(group)
        self.fragments, self.tokens = method.partition.fragments(model), 1.0
        self.introduce({})
        self._states = [first_state(method, fragment, index) for index, fragment in enumerate(self.fragments)]
        agree_on_start(group, [one.anchor for one in self._states], observer)
        check_start(self.fragments, [one.anchor for one in self._states])
        self._load_anchors()
        self._method, self._team = method, group = self._near(method, group)
        numels = [one.anchor.numel() for one in self._states]
        ups, downs = ([codec.fitted(f.shapes) for f in self.fragments] for codec in (method.codec, method.down))
        self._messages = SyncerMessages(group.size + self.beyond, HOST, numels, ups, downs)
        self._numbers, self._flying = [0] * len(numels), dict[int, Departed]()
        self._tokens_since = [0.0] * len(numels)
        self._pace, self._began_at, self._begun_total = ReportPace(method.every, len(numels)), 0, 0
        self._every, self._known = method.every, False
        self._reports: tuple[ReplicaReport, ...] = (ReplicaReport(),) * group.size
        self._heard_at = clock()  # when the newest reports came
        self._finish_announced = False  # the syncer said that a replica has taken all its steps, or that all must stop
        self._final_progress = 0  # the progress then; 0: not known
        self._finished = self._over = False
        self._marks = [(0.0, 0)] * len(numels)  # time and step of each fragment's last departure
        self._seconds = 0.0  # seconds of an inner step here; 0: not known
        self._line = method.timeline(len(numels), group.rank) if method.slow else None
        self._host: Host | None = None
        if group.rank == HOST:
            self._host = self._make_host(Syncer.of(method, self._states, self._messages))
        self._syncer = SyncerChannel(group, self._messages, self._host, self._lost)
        self._claim.take()
        self._hook = optimizer.register_step_post_hook(outermost(lambda *_: self._after_step()))

    def _near(self, method: Composition, group: Group) -> tuple[Composition, Group]:
        """The composition and the group of the replicas that share a syncer with this one."""
        return method, group

    def _make_host(self, syncer: Syncer) -> Host:
        return Host(self._team, self._messages, syncer, self._method, self._clock, self._say)

    def _say(self, event: str, **fields: Any) -> None:
        self._observe(event, self.step, **fields)

    def _lost(self) -> str:
        return f"the syncer on replica {self.server} is lost"

    # ---- progress

    @property
    def progress(self) -> int:
        """Mean number of inner steps of all replicas; in real time by the newest reports of the others."""
        size, own = self.group.size, self.step - self._began_at
        if self._line:
            done = self._begun_total + self._line.done(self._team.rank, own)
        else:
            passed = self._clock() - self._heard_at
            most, others = float(self._method.every * size), [*self._reports]
            del others[self._team.rank]
            done = int(self.step + sum(other.taken + min(other.speed * passed, most) for other in others))
        return max(self._final_progress, done // size)

    # ---- around an inner step

    @torch.no_grad()
    def _after_step(self) -> None:
        self.step += 1
        began = self._clock()
        if not self._marks[0][1]:  # leave out the compilation in the first step
            self._marks = [(began, self.step)] * len(self._marks)
        self._tokens_since = [tokens + self.tokens for tokens in self._tokens_since]
        if self._line and not self._finish_announced:
            self._follow(self._line)
        elif not self._line:
            self._go_on()
        self.seconds += self._clock() - began

    def _follow(self, line: Timeline) -> None:
        """After an inner step in virtual time: depart and land by the timeline."""
        actions = line.actions(self.step - self._began_at)
        for _, held in actions.before:
            self._await(held)
        for fragment in actions.departs:
            self._depart(fragment)
        for _, held in actions.after:
            self._await(held)

    def _await(self, held: HeldRound) -> None:
        """Wait for a round that lands now, and apply it; return without it if the run has ended."""
        began = self._clock()
        while not self._finish_announced:
            down = self._next()
            if down.kind != END:
                if down.fragment != held.fragment:
                    raise DisagreementError(
                        f"a round of fragment {down.fragment} came, one of {held.fragment} was expected."
                    )
                break
        self.stall_seconds += self._clock() - began

    def _go_on(self) -> None:
        """After an inner step in real time: send due deltas, and apply rounds that have arrived."""
        began, waited = self._clock(), False
        # After a stop the syncer may have ended.
        while not self.stopping and (not self._syncer.empty or self._cut_off()):
            waited |= self._syncer.empty
            self._next()
        self.stall_seconds += self._clock() - began if waited else 0.0
        for fragment in self._pace.due(self.step - self._began_at, set(self._flying)):
            self._depart(fragment)

    def _cut_off(self) -> bool:
        """Whether this replica must wait for the syncer, because all its fragments have been in flight for two of its periods or longer. Later
        training would be one long delta from an anchor that the others have left.
        """
        if self._finish_announced or len(self._flying) < len(self._states):
            return False
        return self.step - max(flight.step for flight in self._flying.values()) >= 2 * self._every

    # ---- up

    def _depart(self, index: int) -> None:
        one, began = self._states[index], self._clock()
        delta = one.delta(torch.empty_like(one.anchor))
        self._pace.departed(index, self.step - self._began_at, self._every)
        number, since, (marked, step) = self._numbers[index], one.since, self._marks[index]
        self._seconds = (began - marked) / (self.step - step) if self.step > step else self._seconds
        self._marks[index], before, tokens = (began, self.step), one.feedback, self._tokens_since[index]
        if self._up(DELTA, index, delta):
            self._flying[index] = Departed(number, delta, self.step, since, began, before, tokens)
        nbytes, spent = self._syncer.nbytes(index), self._clock() - began
        self._say("depart", fragment=index, round=number, nbytes=nbytes, seconds_spent=spent)

    def _up(self, kind: int, index: int, delta: Tensor) -> bool:
        """Send a delta; a delta that is not finite is refused, and this replica restarts from the anchors."""
        one, method, number = self._states[index], self._method, self._numbers[index]
        key = Key(method.seed, index, number, self._team.rank, kind)
        up = Up(
            kind, self._team.rank, index, number, one.rounds, self.step - one.since, self.step,
            self._tokens_since[index], self._seconds, self._stop_requested,
        )  # fmt: skip
        sound = bool(torch.isfinite(delta).all())
        if sound:
            body, one.feedback = encode_delta(one.codec, method.feedback, one.feedback, delta, key)
            up = replace(up, body=body)
        up = up if sound else replace(up, refused=True)
        self._numbers[index] += 1
        one.since, self._tokens_since[index] = self.step, 0.0
        self._syncer.send(up)
        if not sound:
            self._start_again()
        return sound

    def _start_again(self) -> None:
        self._say("warning", message="this replica's weights were not finite; it restarts from the anchors")
        for one in self._states:
            flight = self._flying.get(one.index)
            one.load_into_parameters(one.base - flight.delta if flight else one.anchor)
        clear(self.model, self.optimizer)

    # ---- down

    def _next(self) -> Down:
        """Wait for the syncer's next message and apply it. Raises `LinkError` if the syncer is lost."""
        down = self._syncer.receive()
        if down.kind == END:
            self._over = not down.stop
            self._finish_announced |= down.stop
            self._final_progress = max(self._final_progress, down.version)
            self.stopping |= down.stop and not down.version
            return down
        self._heard_at, self._reports = self._clock(), down.reports
        self._land(down)
        self._learn(down)
        return down

    def _land(self, down: Down) -> None:
        """Apply a round's estimate. A round that was dropped changes nothing, and ends the flight of this replica's delta. One that was left out
        is in the next delta, with its steps and what feedback had added to it.
        """
        one, began, report = self._states[down.fragment], self._clock(), down.reports[self._team.rank]
        flight = self._flying.pop(one.index, None) if report.outcome and down.kind != LAST else None
        if flight and report.outcome != COUNTED:
            one.feedback, one.since = flight.before, flight.since
            self._tokens_since[one.index] += flight.tokens
        if down.body is not None:
            known = AgreedFragment(one.anchor, one.state, one.rounds)
            if down.version != one.rounds or down.digest != known.digest():
                raise DisagreementError(
                    f"fragment {one.fragment.name!r}: the syncer continues from version {down.version} with digest {down.digest.hex()}, this replica "
                    f"has {one.rounds} with {known.digest().hex()}; resume all from checkpoints."
                )
            outer = self._method.outer if down.kind == MOVE else self._method.outer.last
            key = Key(self._method.seed, one.index, down.version, HOST, down.kind)
            known.step(outer, decode_body(self._messages.down[one.index], down.body, one.anchor.numel(), key))
            counted = flight is not None and report.outcome == COUNTED
            departed = one.base - flight.delta if flight and counted else one.base
            fresh = not counted or flight is None or flight.step < self.step
            one.anchor, one.state, one.rounds = known.anchor, known.state, known.version
            if down.kind != LAST:  # at the end all replicas take the anchors
                if fresh:
                    one.carry_over(departed)
                else:
                    one.load_into_parameters(one.anchor)
        if flight:
            self._report(one.index, flight, began)

    def _report(self, index: int, flight: Departed, began: float) -> None:
        fields = {"fragment": index, "round": flight.number}
        nbytes = self._syncer.nbytes(index)
        spent = {"begin": flight.begin, "end": began, "queued_seconds": 0.0, "transfer_seconds": 0.0}
        self._say("flight", **fields, nbytes=nbytes, **spent)
        self._say("land", **fields, begin=began, stall_seconds=0.0, seconds_spent=self._clock() - began)

    def _learn(self, down: Down) -> None:
        """In real time: set the number of inner steps between two reports, and how much later to report so that all arrive together."""
        if self._line or down.kind != MOVE:
            return
        own, seconds = down.reports[self._team.rank], self._seconds
        speeds = [other.speed for other in down.reports[: self._team.size] if other.speed]
        if own.speed and seconds:
            self._every, self._known = own_every(self._method.every, own.speed, speeds), True
        if own.outcome and seconds:
            self._pace.landed(down.fragment, round(own.waited / seconds))
        elif not self._known and not own.outcome and down.fragment not in self._flying:
            self._pace.next[down.fragment] = 0  # no replica knows this one's speed yet: it reports at once

    # ---- the end

    @torch.no_grad()
    def finish(self) -> None:
        """Send the training since the last deltas, apply the last rounds, and leave the agreed weights in the model."""
        if self._finished:
            return
        progress, self._finished = self.progress, True
        for one in self._states:
            if one.since < self.step:
                delta = one.delta(torch.empty_like(one.anchor))
                if flight := self._flying.get(one.index):
                    delta.sub_(flight.delta)
                self._up(REST, one.index, delta)
        self._syncer.send(Up(END, self._team.rank, number=progress, taken=self.step))
        while not self._over:
            self._next()
        self._load_anchors()
        self.close()

    def close(self) -> None:
        self._hook.remove()
        self._syncer.close(ended=self._over)
        self._claim.release(self._over)  # otherwise messages of this run may still come

    # ---- the agreed weights

    def anchors(self) -> list[Tensor]:
        return [one.anchor.clone() for one in self._states]

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """A context in which the model holds the anchors that this replica knows."""
        own = [one.snapshot(torch.empty_like(one.anchor)) for one in self._states]
        self._load_anchors()
        try:
            yield
        finally:
            for one, kept in zip(self._states, own):
                one.load_into_parameters(kept)

    def _load_anchors(self) -> None:
        for one in self._states:
            one.load_into_parameters(one.anchor)

    # ---- save and resume

    def meet(self, group: Group, names: Sequence[str] | None = None) -> None:
        raise ConfigurationError(
            "replicas of unequal speed keep their group; resume from checkpoints with another one."
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state with rounds in flight, and on replica 0 that of the syncer; saved.py explains how a run resumes."""
        tensors, facts = state_of(self._states, self._flying, self.step, self._numbers, self._tokens_since)
        if self._host:
            with self._host.lock:
                agreed, facts["agreed"] = state_of_syncer(self._host.syncer)
            tensors |= agreed
        return tensors, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Collective, before the first inner step. Raises `CheckpointError`, `LinkError`."""
        anew, syncer = self._load_host(tensors, facts), self._host.syncer if self._host else None
        found = resume(self._team, HOST, syncer, self._states, tensors, facts, self._method.outer, anew)
        self.step = self._began_at = found.step
        self._numbers, self._tokens_since = found.numbers, found.tokens
        self._begin_at([int(said) for said in gather(self.group, str(self.step).encode(), 32, "resume")])
        gather(self.group, b"", 0, "resume")  # a server that has not begun would take a delta for too long a one
        if found.gone:
            where = f"in replica {self.server}'s checkpoint"
            self._say("warning", message=f"{found.gone} rounds that this replica had seen are not {where} and are gone")

    def _load_host(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> list[int]:
        """Load the syncer, if it is here; return the fragments of which replicas drop their own training. Raises `CheckpointError`."""
        if self._host:
            load_syncer(self._host.syncer, self.server, tensors, facts.get("agreed"))
        return []

    def _begin_at(self, steps: list[int]) -> None:
        """Take the inner steps at which all replicas resume, in rank order."""
        self._begun_total, self._reports = sum(steps), tuple(ReplicaReport(taken=taken) for taken in steps)
        if self._host:
            self._host.taken = steps
