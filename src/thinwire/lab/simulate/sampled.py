"""Simulates peers that train in samples and come and go, in virtual time. Runs the real protocol (lab/samples/peer.py).

A peer that is away receives and sends nothing. It leaves without a message, and announces that it has joined when it is back. The model is
small: each peer pulls it towards a point of its own, and the best model is the mean of all points.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError
from thinwire.lab.samples.messages import WITH_MODEL, Kind, PeerMessage, SampleMessages
from thinwire.lab.samples.peer import SampledPeer
from thinwire.lab.samples.peer_view import PeerView
from thinwire.lab.samples.rules import Action, SampleRules, Send, Train, Wake
from thinwire.rng import derive

Point = NDArray[np.float64]
DIMENSIONS, PULL = 16, 0.5
MOST_PEERS = 4096  # peers: each draws from all
EVENTS = 5_000_000  # most messages, timers and changes of a run: some minutes of simulation
LATENCY, TRAINING, SETTLED = 0.05, (0.5, 1.5), 5.0  # seconds: of a message; of training; until a peer may leave


@dataclass(frozen=True)
class Sampled:
    """The result of a run.

    Args:
        rounds: number of rounds that were held.
        seconds: virtual time that they took, in seconds.
        asked: mean number of peers asked for a sample of participants.
        found: mean number of participants of a round.
        fewest, most: number of rounds in which a peer took part.
        pings: number of pings per round, including those for aggregators.
        apart: distance of the last model from the best one, as a share of the first model's distance.

    >>> Sampled(10, 20.0, asked=20.0, found=10.0, fewest=0, most=3, pings=25.0, apart=0.1).asked
    20.0
    """

    rounds: int
    seconds: float
    asked: float
    found: float
    fewest: int
    most: int
    pings: float
    apart: float


class Network:
    """Runs peers, the messages between them, and their clocks, in one order that follows from the seed.

    Args:
        peers: the number of peers.
        rules: the rules of the run.
        offline: mean share of the peers that are away, 0 to 1.
        away: mean duration of an absence in seconds.
        seed: seed of all random draws.
        drops: called with the number of a peer and a message from or to it; True: the message is lost.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> run = Network(10, SampleRules(sample=3), offline=0.0).run(rounds=20)
    >>> run.rounds, run.found, run.asked
    (20, 3.0, 3.0)
    """

    def __init__(
        self, peers: int, rules: SampleRules, offline: float, away: float = 100.0, seed: int = 0,
        drops: Callable[[int, PeerMessage], bool] = lambda peer, message: False,
    ) -> None:  # fmt: skip
        if not 1 <= peers <= MOST_PEERS or not 0 <= offline < 1 or not away > 0:
            raise ConfigurationError(
                f"{peers} peers, offline={offline}, away={away}: 1 to {MOST_PEERS:,} peers, a share from 0 to below 1, and a time above 0 are needed."
            )
        rules.check(peers)
        self.offline, self.away, self._drops = offline, away, drops
        self._random = np.random.default_rng(derive(seed, "sampled network"))
        self.points: Point = self._random.normal(size=(peers, DIMENSIONS)) + 3.0
        view = PeerView.of(range(peers))
        self.members = [SampledPeer(own, rules, view, _mean, seed) for own in range(peers)]
        self.seconds, self.pings, self.taken = 0.0, 0, [0] * peers
        self.there = [True] * peers
        self.newest: PeerMessage | None = None
        self.wire = SampleMessages(peers, DIMENSIONS)
        self.nbytes = 0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        for peer in range(peers):
            self._later(0.0, partial(self._start, peer))
            if self._random.random() < offline:
                self._later(SETTLED * self._random.random(), partial(self._toggle, peer))
            elif offline:
                self._later(self._session(True), partial(self._toggle, peer))

    def run(self, rounds: int, seconds: float = 1e6) -> Sampled:
        """Continue until so many rounds were held, or for so many seconds. Raises `ConfigurationError` for more than 5 million events."""
        if rounds < 1 or not seconds > 0:
            raise ConfigurationError(
                f"rounds={rounds}, seconds={seconds}: at least 1 round, and a time above 0, are needed."
            )
        events = 0
        while self._events and self.seconds < seconds and (self.newest is None or self.newest.round <= rounds):
            if events == EVENTS:
                held = self.newest.round - 1 if self.newest else 0
                raise ConfigurationError(
                    f"{held} rounds in {self.seconds:.6g} s were {EVENTS:,} messages and timers, and no more are simulated; fewer rounds or seconds, "
                    "or longer times of away and patience, are needed."
                )
            self.seconds, _, event = heapq.heappop(self._events)
            event()
            events += 1
        asked = np.array([both for one in self.members for both in one.asked] or [(0, 0)], float)
        held = self.newest.round - 1 if self.newest else 0
        best = self.points.mean(0)
        model = np.zeros(DIMENSIONS) if self.newest is None else self.newest.model
        return Sampled(
            held, self.seconds, float(asked[:, 0].mean()), float(asked[:, 1].mean()), min(self.taken), max(self.taken),
            self.pings / max(1, held), float(np.linalg.norm(model - best) / np.linalg.norm(best)),
        )  # fmt: skip

    def _later(self, seconds: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.seconds + seconds, next(self._number), event))

    def _start(self, peer: int) -> None:
        self.members[peer].start(1, 0, np.zeros(DIMENSIONS))
        self._carry_out(peer)

    def _session(self, there: bool) -> float:
        mean = self.away * (1 - self.offline) / self.offline if there else self.away
        return float(self._random.exponential(mean))

    def _toggle(self, peer: int) -> None:
        self.there[peer] = not self.there[peer]
        if self.there[peer]:
            self.members[peer].join()
            self._carry_out(peer)
        self._later(self._session(self.there[peer]), partial(self._toggle, peer))

    def _reaches(self, peer: int, message: PeerMessage) -> bool:
        return self.there[peer] and not self._drops(peer, message)

    def _carry_out(self, peer: int) -> None:
        for action in self.members[peer].take():
            self._do(peer, action)

    def _do(self, peer: int, action: Action) -> None:
        if isinstance(action, Send):
            if self._reaches(peer, action.message):
                self._count(action.message)
                delay = LATENCY * (0.5 + self._random.random())
                self._later(delay, lambda: self._deliver(action.to, action.message))
        elif isinstance(action, Wake):
            self._later(action.seconds, lambda: self._happens(peer, lambda one: one.woken(action.key)))
        elif isinstance(action, Train):
            self._train(peer, action.message)

    def _count(self, message: PeerMessage) -> None:
        self.pings += message.kind == Kind.PING
        known = len(message.view.entries) if message.view is not None and message.kind in WITH_MODEL else 0
        self.nbytes += self.wire.nbytes(message.kind, len(message.sample), known)

    def _deliver(self, to: int, message: PeerMessage) -> None:
        if self._reaches(to, message):
            self._happens(to, lambda one: one.heard(message))

    def _happens(self, peer: int, what: Callable[[SampledPeer], object]) -> None:
        what(self.members[peer])
        self._carry_out(peer)

    def _train(self, peer: int, message: PeerMessage) -> None:
        if self.newest is None or message.round > self.newest.round:
            self.newest = message
        self.taken[peer] += 1
        moved = message.model + PULL * (self.points[peer] - message.model)
        low, high = TRAINING
        seconds = low + (high - low) * float(self._random.random())
        done: Callable[[SampledPeer], Any] = lambda one: one.trained(message.round, message.step + 1, moved)  # noqa: E731
        self._later(seconds, lambda: self._happens(peer, done))


def _mean(models: Sequence[Point]) -> Point:
    return np.asarray(np.mean(models, axis=0))
