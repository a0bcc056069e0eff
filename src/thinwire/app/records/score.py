"""One score of a run, the product of named parts, as XRBench (arXiv 2211.08675) makes one of deadlines, accuracy and energy.

    deadline      rounds that landed in time, of all: those for which training waited 10 ms or less. Where replicas come and go:
                  rounds that were committed, of all that were held
    quality       exp(L* − L), the perplexity beside the best one: L is the evaluation loss, L* the least of the runs side by side;
                  0 where L is NaN or infinite, and for a run that has diverged
    bytes         1 − b / (64 (M − 1)/M): bits per parameter and step beside those of data-parallel fp32 by a ring, not below 0
    availability  inner steps that count, of all that were computed. Where replicas come and go: replicas that take part, of those
                  that were asked for, in the mean

Each is between 0 and 1. A part that was not measured is left out, and named; scores of unlike parts are not to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.app.records.replica_record import ReplicaRecord
from thinwire.exchange.record import RESOLUTION


@dataclass(frozen=True)
class Score:
    """The parts by name; None for a part that was not measured."""

    parts: Mapping[str, float | None]

    @property
    def value(self) -> float | None:
        """The product of the parts that were measured; None where none was."""
        measured = [part for part in self.parts.values() if part is not None]
        return math.prod(measured) if measured else None

    def text(self) -> str:
        """Value and parts, for people."""
        if self.value is None:
            return "not measured"
        parts = " × ".join(f"{name} {part:.3f}" for name, part in self.parts.items() if part is not None)
        missing = [name for name, part in self.parts.items() if part is None]
        return f"{self.value:.3f} = {parts}" + (f", without {', '.join(missing)}" if missing else "")

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {"value": self.value, "parts": dict(self.parts)}


def score_of(
    replicas: Sequence[ReplicaRecord], bits: float, taking_part: float | None, loss: float | None, best: float | None
) -> Score:
    """The score of a run. `bits`: per parameter and step; `taking_part`: replicas, where they come and go; `loss`: at the end; `best`: the
    least of the runs side by side, None for a run alone.
    """
    asked = replicas[0].start.replicas
    return Score(
        {
            "deadline": _deadline(replicas, taking_part is not None),
            "quality": None if loss is None or best is None else _quality(loss, best),
            "bytes": max(0.0, 1 - bits / (64 * (asked - 1) / asked)) if asked > 1 and math.isfinite(bits) else None,
            "availability": _availability(replicas, None if taking_part is None else taking_part / max(1.0, asked)),
        }
    )


def _quality(loss: float, best: float) -> float:
    return min(1.0, math.exp(best - loss)) if math.isfinite(loss) else 0.0


def _deadline(replicas: Sequence[ReplicaRecord], elastic: bool) -> float | None:
    if elastic:
        held = {
            seen.number: seen.committed is True for replica in replicas for seen in replica.rounds if seen.fragment >= 0
        }
        return sum(held.values()) / len(held) if held else None
    rounds = sum(sum(of.values()) for replica in replicas for of in (replica.landed, replica.refused))
    late = sum(int((replica.stalls.seconds > RESOLUTION).sum()) for replica in replicas)
    refused = sum(sum(replica.refused.values()) for replica in replicas)
    return max(0, rounds - late - refused) / rounds if rounds else None


def _availability(replicas: Sequence[ReplicaRecord], share: float | None) -> float | None:
    if share is not None:
        return min(1.0, share)
    count, lost = (sum(len(r.step) for r in replicas), sum(lost.steps for r in replicas for lost in r.lost))
    return count / (count + lost) if count else None
