"""Finds hangs: rounds that began and do not end, and the replica or link that holds them up.

Rounds have numbers, so no clock is needed. At the first round that has not ended everywhere, either a replica never began it, and
the others wait for it; or all began it, and the missing messages show between which replicas it hangs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from thinwire.app.diagnosis.attribute import attribute
from thinwire.app.diagnosis.findings import Finding, Side, Syndrome
from thinwire.exchange.record import Record

LEAST_SECONDS = 5.0  # a round in flight hangs after at least so many seconds, and
TIMES = 5.0  # after so many times the seconds that a round takes

Key = tuple[int, int]  # fragment and round


@dataclass(frozen=True)
class Seen:
    """What is known of one replica's rounds. A round is named by its fragment and its number.

    Args:
        name: name of the replica.
        began: seconds, on the replica's own clock, at which it began each round, in order.
        over: seconds at which each round ended.
        failed: its records of rounds that failed.
        now: seconds on its clock.
        ended: whether it has ended its run.

    >>> Seen("0", began={(0, 0): 1.0, (0, 1): 3.0}, over={(0, 0): 2.0}, now=9.0).waits((0, 1))
    6.0
    """

    name: str
    began: Mapping[Key, float]
    over: Mapping[Key, float]
    failed: Mapping[Key, Record] = field(default_factory=dict)
    now: float = 0.0
    ended: bool = False

    def waits(self, key: Key) -> float | None:
        """Seconds in which no round has ended here while this one was in flight. None if it ended or never began, or if it failed and
        later ones did not.
        """
        if key not in self.began or key in self.over:
            return None
        began = list(self.began)
        if any(later in self.over for later in began[began.index(key) + 1 :]):
            return None
        return self.now - max([self.began[key], *(at for at in self.over.values() if at <= self.now)])


def stuck(replicas: Sequence[Seen]) -> list[Finding]:
    """Find what holds up the first round that has not ended everywhere; nothing if the round began only lately.

    Args:
        replicas: what is known of each.

    >>> came = Seen("0", began={(0, 0): 1.0}, over={}, now=60.0)
    >>> [str(finding) for finding in stuck([came, Seen("1", began={}, over={}, now=60.0)])]
    ['non-communication hang: replica 1; round 0 of fragment 0: 1 of 2 replicas began it, this one did not']
    """
    order = max((list(seen.began) for seen in replicas), key=len, default=[])
    for number, key in enumerate(order):
        waiting = {seen.name: wait for seen in replicas if (wait := seen.waits(key)) is not None}
        if waiting:
            failed = [seen.failed[key] for seen in replicas if key in seen.failed]
            usual = [seen.over[k] - seen.began[k] for seen in replicas for k in seen.over if k in seen.began]
            limit = max(LEAST_SECONDS, TIMES * median(usual)) if usual else LEAST_SECONDS
            if failed or max(waiting.values()) > limit:
                return _blame(replicas, key, number, failed, max(waiting.values()), median(usual) if usual else 0.0)
    return []


def _blame(
    replicas: Sequence[Seen], key: Key, number: int, failed: Sequence[Record], seconds: float, usual: float
) -> list[Finding]:
    def finding(syndrome: Syndrome, side: Side, who: tuple[str, ...], detail: str, both: bool = False) -> Finding:
        text = f"round {key[1]} of fragment {key[0]}: {detail}"
        began = max(seen.began[key] for seen in replicas if seen.waits(key) is not None)
        return Finding(syndrome, side, who, both, number, number, seconds, usual, text, began)

    names = sorted(seen.name for seen in replicas)
    absent = sorted(seen.name for seen in replicas if key not in seen.began and not seen.ended)
    if len(absent) == 1 or (absent and seconds > 2 * usual):
        came = f"{len(names) - len(absent)} of {len(names)} replicas began it"
        return [finding(Syndrome.HUNG_REPLICA, Side.REPLICA, (name,), f"{came}, this one did not") for name in absent]
    dark = sorted(seen.name for seen in replicas if seen.waits(key) is not None and key not in seen.failed)
    # Messages that a broken connection left unsent were not due yet: they show which replica left, not which link is slow.
    waits = {seen.name: seen.waits(key) or 0.0 for seen in replicas}
    cells = _missing([record for record in failed if waits[record.name] > 2 * usual])
    lone = [name for name in dark if not cells or all(name in cell for cell in cells)]
    if len(names) > 2 and len(lone) == 1:
        return [
            finding(
                Syndrome.HUNG_LINK, Side.REPLICA, (lone[0],), "all began it, and this one has not said how it ended"
            )
        ]
    return [
        finding(
            Syndrome.HUNG_LINK, cause.side, cause.who,
            f"nothing, or not all, came {', '.join(f'from {a} to {b}' for a, b in cause.cells)}", cause.both,
        )
        for cause in attribute(cells, names)
    ]  # fmt: skip


def _missing(failed: Sequence[Record]) -> set[tuple[str, str]]:
    """The ways on which messages of the first unfinished stage are missing. Later stages wait for this one."""
    came = [(flow.stage, (flow.peer, record.name), flow) for record in failed for flow in record.received]
    left = [(flow.stage, (record.name, flow.peer), flow) for record in failed for flow in record.sent]
    short = [(stage, cell) for stage, cell, flow in came + left if flow.there < flow.parts]
    first = min((stage for stage, _ in short), default=0)
    return {cell for stage, cell in short if stage == first}
