"""Four replicas that exchange in virtual time over links with faults, and the diagnosis of their records.

Exchange, carrier and records are the real ones; only links and clocks are simulated. Each replica's clock has its own offset and drift.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.app.diagnosis import Finding, Flow, Record, Rules, Seen, Watch, stuck
from thinwire.codecs import Identity
from thinwire.drivers.rounds import StepTimer
from thinwire.errors import LinkError
from thinwire.exchange import Direct, Exchange, Round, SendContext
from thinwire.membership.testing.cluster import SimulatedCluster, _ThreadGroup
from thinwire.membership.view import Presence
from thinwire.rng import Key

STEPS = 10  # inner steps in a round


@dataclass
class WanLinks:
    """The links: seconds and bits per second of each direction, and the faults."""

    delay: dict[tuple[str, str], float]
    rate: dict[tuple[str, str], float]
    jitter: float = 0.1
    # "*" stands for any: the sender's or the receiver's side
    slower: dict[tuple[str, str], float] = field(default_factory=dict)
    busy: dict[tuple[str, str], float] = field(default_factory=dict)  # until when a side is busy


class WanCluster(SimulatedCluster):
    """A simulated cluster with the links of `wan`. A message occupies its sender's uplink, then the link, then its receiver's downlink."""

    def __init__(self, wan: WanLinks, seed: int) -> None:
        super().__init__()
        self.wan, self.chance = wan, random.Random(seed)

    def carry(self, sender: str, receiver: str, message: Tensor, deliver: Callable[[Tensor], None]) -> None:
        message, wan = message.clone(), self.wan
        noise = 1 + wan.jitter * abs(self.chance.gauss(0, 1))
        serial = 8 * message.numel() / wan.rate[sender, receiver] * noise
        out, into = (serial * wan.slower.get(way, 1.0) for way in ((sender, "*"), ("*", receiver)))
        now = self.time.now
        left = wan.busy[sender, "out"] = max(now, wan.busy.get((sender, "out"), 0.0)) + out
        slow_link = serial * (wan.slower.get((sender, receiver), 1.0) - 1)

        def at_the_downlink() -> None:
            now = self.time.now
            there = wan.busy[receiver, "into"] = max(now, wan.busy.get((receiver, "into"), now)) + into
            self.time.after(there - now, arrive)

        def arrive() -> None:
            if frozenset((sender, receiver)) not in self.cuts:
                deliver(message)

        self.time.after(left - now + wan.delay[sender, receiver] * noise + slow_link, at_the_downlink)


@dataclass
class RecordedRounds:
    """The outcome of a run: the records of all rounds in order, and the last knowledge of each replica."""

    rounds: dict[tuple[int, int], list[Record]] = field(default_factory=dict)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def slow(self, rules: Rules | None = None) -> list[tuple[int, list[Finding]]]:
        """Returns the findings after each round."""
        watch = Watch(rules)
        return [(number, watch.add(records)) for number, records in enumerate(self.rounds.values())]

    def stuck(self) -> list[Finding]:
        return stuck([Seen(name, **known) for name, known in self.seen.items()])


def uniform(names: Sequence[str], seconds: float = 0.03, bits_per_second: float = 2e5) -> WanLinks:
    ways = [(a, b) for a in names for b in names if a != b]
    return WanLinks(dict.fromkeys(ways, seconds), dict.fromkeys(ways, bits_per_second))


def uneven(names: Sequence[str], seed: int) -> WanLinks:
    """Returns links with delays of 2 to 150 ms that differ by direction, and rates that differ by up to a factor of ten."""
    chance = random.Random(seed)
    ways = [(a, b) for a in names for b in names if a != b]
    rate = {name: 5e4 * 10 ** chance.uniform(0, 1) for name in names}
    return WanLinks(
        {way: chance.uniform(0.002, 0.15) for way in ways},
        {way: rate[way[0]] for way in ways},
        jitter=chance.uniform(0, 0.3),
    )


def train_rounds(
    wan: WanLinks,
    seed: int,
    rounds: int = 16,
    faults: dict[int, Callable[[WanCluster], None]] | None = None,
    own: Callable[[str, int], float] = lambda name, number: 1.0,
    overlap: float = 0.0,
    exchange: Exchange = Direct(),
    numel: int = 400,
) -> RecordedRounds:
    """Trains `rounds` rounds. A round of a replica takes `own(name, round)` seconds; `faults` happen before the round of their key.

    `overlap`: the share of the next round's training during which packets are in flight.
    """
    names = sorted({name for way in wan.delay for name in way})
    cluster, recorded = WanCluster(wan, seed), RecordedRounds()
    clocks = {name: (cluster.chance.uniform(-1e5, 1e5), 1 + cluster.chance.uniform(-1e-4, 1e-4)) for name in names}
    noise = {name: random.Random(f"{seed} {name}") for name in names}
    hub = cluster.room("rounds", [Presence(name, name, 0, address=f"thread:{name}") for name in names]).hub

    def own_clock(name: str, at: float) -> float:
        zero, drift = clocks[name]
        return zero + at * drift

    def told(record: Record) -> Record:
        def shifted(flow: Flow) -> Flow:
            at = {index: own_clock(record.name, when) for index, when in flow.at.items()}
            return replace(flow, begin=own_clock(record.name, flow.begin), at=at)

        moved = replace(record, sent=tuple(map(shifted, record.sent)), received=tuple(map(shifted, record.received)))
        return Record.of(moved.facts())  # as it is read from a file

    def replica(name: str) -> None:
        group = _ThreadGroup(cluster, name, hub, names.index(name), len(names), 60.0)
        air, step_timer, stalled = SendContext(group, lambda: cluster.time.now), StepTimer(), 0.0
        known: dict[str, Any] = {"began": {}, "over": {}, "failed": {}}
        recorded.seen[name] = known

        def train(seconds: float) -> None:
            with cluster.time:
                cluster.wait(name, lambda: False, seconds)
                known["now"] = own_clock(name, cluster.time.now)

        try:
            for number in range(rounds):
                if name == names[0] and number in (faults or {}):
                    (faults or {})[number](cluster)
                seconds = own(name, number) * noise[name].uniform(1.0, 1.15)
                train(seconds * (1 - overlap))
                speed = step_timer.departs(STEPS * number, cluster.time.now - stalled)
                known["began"][0, number] = own_clock(name, cluster.time.now)
                key = Key(0, 0, number, group.rank)
                round_ = Round(air, Identity(), numel, key, lambda begin, end: torch.ones(end - begin), 0, (number,))
                over, begun = False, cluster.time.now
                try:
                    for _ in exchange.arrive(exchange.depart(round_, {})):
                        pass
                    round_.close()
                    over = True
                finally:
                    with cluster.time:
                        cluster.check(name)  # a frozen replica writes nothing
                    record = told(round_.record(names, speed, over))
                    with cluster.time:
                        recorded.rounds.setdefault(record.key, []).append(record)
                        known["now"] = own_clock(name, cluster.time.now)
                    known["over" if over else "failed"][record.key] = known["now"] if over else record
                flown = cluster.time.now - begun
                stalled += max(0.0, flown - seconds * overlap)
                train(max(0.0, seconds * overlap - flown))
            train(1000.0)  # no replica leaves before all have received all messages
        except LinkError:
            pass
        finally:
            group.close()

    cluster.play(dict.fromkeys(names, replica))
    return recorded
