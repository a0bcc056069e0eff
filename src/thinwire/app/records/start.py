"""What the `start` event of a session tells, each part in its type: the file may be a stranger's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thinwire.app.records.events import Event
from thinwire.app.records.sessions import finite, number, whole
from thinwire.app.records.units import UNITS

CARRIER = "elastic"
MOST_FRAGMENTS = 4096  # most fragments in figures


@dataclass(frozen=True)
class Start:
    """The beginning of a session of one replica.

    Args:
        replica: number of the replica.
        replicas: number that the run asked for; 0 if it is not known.
        opened: when the log was opened, on the clock of `wall_time`.
        fragments: name and parameters of each, `MOST_FRAGMENTS` at most.
        run, link, machine: the settings, the emulated link and the machine; empty for what is no table.
        made_of: what the strategy is, with all that its recipe decides; empty for runs that do not say it.
    """

    replica: int
    replicas: int
    opened: float
    carrier: object
    strategy: str
    parameters: int
    fragments: tuple[tuple[str, int], ...]
    run: Mapping[str, Any]
    link: Mapping[str, Any]
    machine: Mapping[str, Any]
    made_of: Mapping[str, Any]

    @classmethod
    def of(cls, event: Event) -> Start:
        run = _table(event["run"])
        listed = event["fragments"][:MOST_FRAGMENTS] if isinstance(event["fragments"], list) else []
        fragments = [
            (str(item.get("name", index)), whole(item.get("numel"))) for index, item in enumerate(map(_table, listed))
        ]
        return cls(
            whole(event["replica"]),
            whole(event["replicas"]),
            finite(event["wall_time"]) - finite(event["seconds"]),  # `seconds` count from the opening
            event["carrier"],
            str(event["strategy"]),
            whole(event["parameters"]),
            tuple(fragments),
            run,
            _table(event["link"]),
            _table(event["machine"]),
            _table(run.get("made_of")),
        )

    @property
    def elastic(self) -> bool:
        return self.carrier == CARRIER

    @property
    def unit(self) -> str:
        """What the run counts its data in."""
        unit = self.run.get("unit")
        return unit if isinstance(unit, str) and unit in UNITS else UNITS[0]

    @property
    def bits_per_second(self) -> float:
        """The rate of the emulated link; NaN without one."""
        rate = number(self.link.get("bits_per_second"))
        return rate if 0 < rate < math.inf else math.nan

    @property
    def provenance(self) -> str:
        """The provenance of the run's numbers: "emulated" with a set rate or with replicas slowed down, "measured" with neither."""
        if self.carrier == "virtual time":
            return "simulated"
        rate = number(self.link.get("bits_per_second"))
        return "emulated" if math.isfinite(rate) or self.run.get("slow") else "measured"

    @property
    def uniform(self) -> float:
        """The loss of a language model that gives all tokens the same probability; NaN for a job of the user's own."""
        vocabulary = math.nan if self.run.get("job") else number(_table(self.run.get("corpus")).get("vocabulary"))
        return math.log(vocabulary) if 1 <= vocabulary < math.inf else math.nan

    def fragment_of(self, event: Event) -> int:
        """The number of the event's fragment; an elastic replica writes its name. -1: there is none."""
        given = event["fragment"]
        return (
            int(given) if isinstance(given, int | float) and math.isfinite(given) else self._names.get(str(given), -1)
        )

    @cached_property
    def _names(self) -> Mapping[str, int]:
        return {name: index for index, (name, _) in enumerate(self.fragments)}


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
