"""The numbers of a run, as its summary and its report show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.app.records.units import text_of_bits, text_of_loss, text_of_nbytes, text_of_seconds, text_of_share


@dataclass(frozen=True)
class Summary:
    """The numbers of a run: bytes, utilization and stalls are the replicas' means, wall is the slowest one's.

    `tokens` and `deltas_clipped` are all replicas' together. The fields are the keys of an `end` event's summary and of `summary.json`. The last
    six are of replicas that come and go (`participation.py`): means over the run, rounds, and sums over the replicas of this folder.
    """

    strategy: str
    replicas: int
    steps: int
    tokens: int
    parameters: int
    eval_loss: float | None
    wire_bytes_sent: int
    bits_per_parameter_per_step: float
    compute_utilization: float
    wall_seconds: float
    stall_seconds: float
    provenance: str
    uploaded: float | None = (
        None  # bytes that the carrier counted, if it does; a hub passes on to all what it gets once
    )
    wire_bytes_foreseen: int = 0
    deltas_clipped: int = 0
    living: float | None = None
    taking_part: float | None = None
    rounds_committed: int | None = None
    steps_trained: int | None = None
    steps_jumped: int | None = None
    steps_counted: int | None = None
    samples_trained: int | None = None
    samples_in_flight: int | None = None
    samples_lost: int | None = None
    samples_waiting: int | None = None  # of the present epoch, that nobody has trained
    samples_dropped: int | None = None  # trained and not in the weights: others train them, or have trained them
    # mean seconds of a replica: `elapsed` is the sum of the others; in the summary of the command that trained, of the whole command
    time: Mapping[str, float] = field(default_factory=dict)
    # by name, the first is `eval_loss`; where a job names several, or replicas have unlike models
    losses: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> list[tuple[str, str]]:
        """(what, value as text), in the order in which they are shown everywhere; all of them are `provenance`."""
        figures = [
            ("evaluation loss", text_of_loss(self.eval_loss)),
            ("sent per replica", text_of_nbytes(self.wire_bytes_sent)),
            ("bits per parameter and step", text_of_bits(self.bits_per_parameter_per_step)),
            ("compute utilization", text_of_share(self.compute_utilization)),
            ("training loop", text_of_seconds(self.wall_seconds)),
            ("stalled per replica", text_of_seconds(self.stall_seconds)),
        ]
        if len(self.losses) > 1:
            figures[:1] = [(f"evaluation: {name}", text_of_loss(one)) for name, one in self.losses.items()]
        if self.uploaded is not None:
            figures.insert(len(figures) - 4, ("uploaded per replica", text_of_nbytes(self.uploaded)))
        if self.wire_bytes_sent < self.wire_bytes_foreseen:  # sizes depend on the values
            figures.insert(len(figures) - 4, ("foreseen at most", text_of_nbytes(self.wire_bytes_foreseen)))
        if self.time:
            figures.append(("elapsed", text_of_seconds(self.time["elapsed"])))
        if self.deltas_clipped:
            figures.append(("deltas clipped", f"{self.deltas_clipped:,}"))
        if self.living is not None and self.taking_part is not None:
            figures += [("living", f"{self.living:.2f}"), ("taking part", f"{self.taking_part:.2f}")]
            figures += [("rounds committed", str(self.rounds_committed)), ("steps trained", f"{self.steps_trained:,}")]
            figures += [("steps jumped", f"{self.steps_jumped:,}"), ("steps counted", f"{self.steps_counted:,}")]
        if self.samples_trained is not None:
            told = {
                "trained": self.samples_trained, "in flight": self.samples_in_flight, "lost": self.samples_lost,
                "waiting": self.samples_waiting, "dropped, trained again": self.samples_dropped,
            }  # fmt: skip
            figures += [(f"samples {what}", f"{n:,}") for what, n in told.items() if n is not None]
        return figures

    def text_of_time(self) -> str:
        """Where the time went: 20.0 s elapsed = start 2.0 s + training 15.0 s + ...; empty if nobody knows it."""
        parts = [f"{what} {text_of_seconds(n)}" for what, n in self.time.items() if what != "elapsed"]
        return f"{text_of_seconds(self.time['elapsed'])} elapsed = {' + '.join(parts)}" if parts else ""
