"""The offsets between the clocks of a run's machines, from the messages between its replicas.

With t the sender's clock at a message's departure and t' the receiver's at its arrival, t' − t is the message's time plus the offset of
the receiver's clock. A message's time is not negative. So the two directions of one round bound the difference of
two clocks from both sides, for any offset. The interval d ± w on which most rounds agree is used (Marzullo's algorithm, as in NTP:
a round that was paired wrongly, or came after a clock was set, is outvoted).

The offsets θ of all clocks follow from all pairs by robust least squares, with that of the first replica 0:

    min Σ ρ((θ_j − θ_i − d_ij) / w_ij),  ρ(x) = x² / (1 + x²/9)  (Geman and McClure), from the least sum of deviations on

It is GNNSync's problem (arXiv 2303.00393) for times, which unlike angles do not wrap. The error bar of an offset is the standard
error with each w as one deviation, more if pairs contradict each other. Clocks are assumed to run evenly: drift widens the bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.app.diagnosis.measure import SHORTEST, stamps
from thinwire.app.records.units import text_of_seconds
from thinwire.exchange.record import Record

ITERATIONS = 50
TRUSTED = 3.0  # deviation of a pair, in units of its own error, at which its weight is a quarter


class Offset(NamedTuple):
    """A clock is `seconds` ahead of the first replica's, give or take `error`."""

    seconds: float
    error: float


class Timed(NamedTuple):
    """A record of a round, and when its log was opened, on the clock of `wall_time`."""

    opened: float
    record: Record


class Bounds(NamedTuple):
    """The bounds of the difference of two clocks from one round, in seconds."""

    least: float
    most: float


@dataclass(frozen=True)
class Pair:
    """Clock `other` is `seconds` ahead of clock `one`, give or take `error`."""

    one: str
    other: str
    seconds: float
    error: float


def common_bounds(bounds: Sequence[Bounds]) -> Bounds | None:
    """The interval that most of `bounds` share; the narrowest, if there are several. None if there are no bounds."""
    ends = sorted(
        [(least, 0) for least, most in bounds if least <= most] + [(m, 1) for least, m in bounds if least <= m]
    )
    found: list[Bounds] = []
    best, here, begin = 0, 0, 0.0
    for at, is_end in ends:
        if not is_end:
            here, begin = here + 1, at
            continue
        if here > best:
            best, found = here, []
        if here == best:
            found.append(Bounds(begin, at))
            begin = at
        here -= 1
    return min(found, key=lambda one: one.most - one.least, default=None)


def solve(pairs: Sequence[Pair], first: str) -> dict[str, Offset]:
    """The offsets of all clocks that pairs join to `first`'s, which is 0."""
    names, new = {first}, {first}
    while new:
        new = {n for pair in pairs for n in (pair.one, pair.other) if {pair.one, pair.other} & names} - names
        names |= new
    place = {name: index for index, name in enumerate(sorted(names - {first}))}
    pairs = [pair for pair in pairs if pair.one in names]
    if not pairs:
        return {first: Offset(0.0, 0.0)}
    design = np.zeros((len(pairs), len(place)))
    for row, pair in enumerate(pairs):
        for name, sign in ((pair.one, -1.0), (pair.other, 1.0)):
            if name != first:
                design[row, place[name]] += sign
    seconds = np.array([pair.seconds for pair in pairs])
    precise = 1 / np.maximum(SHORTEST, [pair.error for pair in pairs])
    root: NDArray[np.float64] = np.ones(len(pairs))
    theta: NDArray[np.floating[Any]] = np.zeros(len(place))
    off: NDArray[np.floating[Any]] = root
    for iteration in range(2 * ITERATIONS):
        theta = np.linalg.lstsq(design * root[:, None], seconds * root, rcond=None)[0]
        off = np.abs(design @ theta - seconds)
        if iteration < ITERATIONS:  # least sums of deviations first, so that pairs with small errors do not dominate
            root = 1 / np.sqrt(np.maximum(SHORTEST, off))
        else:
            root = precise / (1 + (off * precise / TRUSTED) ** 2)
    weighed = design * root[:, None]
    contradiction = max(1.0, 1.4826 * float(np.median(off * precise)))
    errors = contradiction * np.sqrt(np.diag(np.linalg.pinv(weighed.T @ weighed)))
    return {first: Offset(0.0, 0.0)} | {
        name: Offset(float(theta[index]), float(errors[index])) for name, index in place.items()
    }


def text_of_clocks(clocks: Mapping[str, Offset]) -> str:
    """The offsets of the clocks in a line; empty for fewer than two."""
    told = [
        f"{name} {text_of_seconds(abs(clock.seconds))} {'ahead' if clock.seconds >= 0 else 'behind'} (± {text_of_seconds(clock.error)})"
        for name, clock in clocks.items()
    ]
    return (
        f"Clocks compared with that of {next(iter(clocks))}, by the times of messages: {', '.join(told[1:])}."
        if told[1:]
        else ""
    )


def offsets_of(files: Mapping[str, Sequence[Timed]]) -> dict[str, Offset]:
    """The offsets of the clocks of replicas, from their records: of replicas that exchanged messages, both ways, with others whose
    records are here. The first replica is the reference. The clocks are those of `wall_time`.
    """
    told: dict[tuple[int, int], list[tuple[str, float, Record]]] = {}
    for name, timed in files.items():
        for opened, record in timed:
            told.setdefault(record.key, []).append((name, opened, record))
    found: dict[tuple[str, str], list[Bounds]] = {}
    for same in told.values():
        # of a round done again, the last
        by_name = {record.name: (name, opened, record) for name, opened, record in same}
        took = {
            way: min(stamp.apparent for stamp in seen) + by_name[way[1]][1] - by_name[way[0]][1]
            for way, seen in stamps(record for _, _, record in by_name.values()).items()
            if seen
        }
        for (sender, receiver), seconds in took.items():
            one, other = by_name[sender][0], by_name[receiver][0]
            if one < other and (receiver, sender) in took:
                found.setdefault((one, other), []).append(Bounds(-took[receiver, sender], seconds))
    pairs = []
    for (one, other), bounds in sorted(found.items()):
        if common := common_bounds(bounds):
            pairs.append(Pair(one, other, (common.least + common.most) / 2, (common.most - common.least) / 2))
    return solve(pairs, pairs[0].one) if pairs else {}
