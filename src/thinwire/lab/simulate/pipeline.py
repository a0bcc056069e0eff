"""Pipeline parallelism over links: 1F1B simulated operation by operation, and closed forms of one step.

A stage does its passes in a fixed order: stage i of p first min(n, p − 1 − i) forward passes, then one forward and one
backward in turn, then the remaining backward passes. Sending is asynchronous: a stage continues at once, and its
message arrives `hop_seconds` later. A hop is a delay: messages on it do not queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import isfinite

from thinwire.errors import ConfigurationError

OPERATIONS = 2_000_000  # most forward passes of one step: some seconds of simulation


@dataclass(frozen=True)
class Pipeline:
    """p stages in a row and n micro-batches in a step.

    Args:
        micro_batches: number n of micro-batches.
        forward_seconds: seconds of each stage's forward pass over one micro-batch [p].
        backward_seconds: seconds of each stage's backward pass over one micro-batch [p].
        hop_seconds: seconds from one stage to the next [p − 1].

    Raises:
        ConfigurationError: the lengths do not fit, a time is negative or not finite, all times are 0, or a step has more
            than two million forward passes.

    >>> Pipeline(4, (1.0, 1.0), (2.0, 2.0), (0.5,)).work_seconds
    (12.0, 12.0)
    """

    micro_batches: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    hop_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        if stages < 1 or self.micro_batches < 1 or stages * self.micro_batches > OPERATIONS:
            raise ConfigurationError(
                f"{stages} stages, {self.micro_batches} micro-batches: at least 1 of each, and at most {OPERATIONS:,} forward passes in "
                "a step, are needed."
            )
        if len(self.backward_seconds) != stages or len(self.hop_seconds) != stages - 1:
            raise ConfigurationError(
                f"{stages} forward times, {len(self.backward_seconds)} backward times, {len(self.hop_seconds)} hops: "
                "as many of both, and one hop less, are needed."
            )
        for name, least in (("forward_seconds", 0.0), ("backward_seconds", 0.0), ("hop_seconds", 0.0)):
            for seconds in getattr(self, name):
                if not (isfinite(seconds) and least <= seconds <= 1e9):
                    raise ConfigurationError(f"{name}={seconds}: between 0 and 1e9 seconds are needed.")
        if not sum(self.forward_seconds) + sum(self.backward_seconds) > 0:
            raise ConfigurationError("passes of 0 seconds were given; some stage must take time.")

    @classmethod
    def of(
        cls, stages: int, micro_batches: int, forward: float, backward: float,
        hops: Sequence[float] = (0.0,), slower: Sequence[float] = (1.0,),
    ) -> Pipeline:  # fmt: skip
        """Equal stages, except for the factors `slower`. `slower` and `hops` are repeated as often as needed."""
        if not 1 <= stages <= OPERATIONS or not hops or not slower:
            raise ConfigurationError(
                f"{stages} stages, {len(hops)} hops, {len(slower)} factors: at least 1 of each is needed."
            )
        factors = tuple(islice(cycle(slower), stages))
        return cls(
            micro_batches, tuple(forward * f for f in factors), tuple(backward * f for f in factors),
            tuple(islice(cycle(hops), stages - 1)),
        )  # fmt: skip

    @property
    def stages(self) -> int:
        return len(self.forward_seconds)

    @property
    def even(self) -> bool:
        """Whether all stages are equal, and all hops, as the closed forms need."""
        return all(len(set(times)) <= 1 for times in (self.forward_seconds, self.backward_seconds, self.hop_seconds))

    @property
    def work_seconds(self) -> tuple[float, ...]:
        """Seconds of work of each stage in a step [p]."""
        pairs = zip(self.forward_seconds, self.backward_seconds, strict=True)
        return tuple(self.micro_batches * (forward + backward) for forward, backward in pairs)


def one_forward_one_backward(pipeline: Pipeline) -> float:
    """Seconds from the first forward pass to the last backward pass, simulated. Cost: 2·n·p operations.

    Args:
        pipeline: the stages and their times.

    >>> one_forward_one_backward(Pipeline.of(stages=8, micro_batches=32, forward=1.0, backward=2.0, hops=[1.0]))
    185.0
    """
    stages, count = pipeline.stages, pipeline.micro_batches
    clock = [0.0] * stages
    forward = [[0.0] * count] + [[] for _ in range(stages)]  # arrival of each activation, by stage and micro-batch
    backward: list[list[float]] = [[] for _ in range(stages)]  # arrival of each gradient
    turns = [iter(_order(stage, stages, count)) for stage in range(stages)]
    due = [next(turn, None) for turn in turns]
    hops = (*pipeline.hop_seconds, 0.0)
    last = stages - 1
    while any(turn is not None for turn in due):
        for stage in range(stages):
            while (turn := due[stage]) is not None:
                goes_back, number = turn
                arrivals = backward[stage] if goes_back and stage < last else forward[stage]
                if number >= len(arrivals):
                    break  # not sent yet, so the neighbours continue first
                begin = clock[stage] if goes_back and stage == last else max(clock[stage], arrivals[number])
                if goes_back:
                    clock[stage] = begin + pipeline.backward_seconds[stage]
                    if stage:
                        backward[stage - 1].append(clock[stage] + hops[stage - 1])
                else:
                    clock[stage] = begin + pipeline.forward_seconds[stage]
                    if stage < last:
                        forward[stage + 1].append(clock[stage] + hops[stage])
                due[stage] = next(turns[stage], None)
    return max(clock)


def _order(stage: int, stages: int, count: int) -> list[tuple[bool, int]]:
    """(backward?, micro-batch) in the order of 1F1B."""
    ahead = min(count, stages - 1 - stage)
    first = [(False, number) for number in range(ahead)]
    turns = [turn for number in range(count - ahead) for turn in ((False, ahead + number), (True, number))]
    return first + turns + [(True, number) for number in range(count - ahead, count)]


def pipeline_seconds(stages: int, micro_batches: int, compute_seconds: float, hop_seconds: float) -> float:
    """One step of 1F1B: T = (n/p)·(p·C + 2(p−1)·c) + (p−1)·C + 2(p−2)·c for p | n, with C forward and backward of a stage.

    `hop_seconds` is c: one activation, one way. *Range*: equal stages, equal hops, p | n; then it is exact. If p
    does not divide n, the hops of the last round are counted as of a whole one, and the result is too high or exact.

    Args:
        stages: number p of stages.
        micro_batches: number n of micro-batches.
        compute_seconds: seconds C of a stage's forward and backward pass over one micro-batch.
        hop_seconds: seconds c of one hop.

    >>> pipeline_seconds(stages=8, micro_batches=32, compute_seconds=3.0, hop_seconds=1.0)
    185.0
    """
    p, rounds = stages, -(-micro_batches // stages)
    if p == 1:
        return micro_batches * compute_seconds
    return (
        rounds * 2 * (p - 1) * hop_seconds
        + micro_batches * compute_seconds
        + (p - 1) * compute_seconds
        + 2 * (p - 2) * hop_seconds
    )


def pipette_seconds(stages: int, micro_batches: int, compute_seconds: float, hop_seconds: float) -> float:
    """Pipette's form (arXiv 2405.18093): T = (n/p)·(p·C + 2(p−1)·c) + (p−1)·C, without the last term. Too low for p > 2.

    Args:
        stages: number p of stages.
        micro_batches: number n of micro-batches.
        compute_seconds: seconds C of a stage's forward and backward pass over one micro-batch.
        hop_seconds: seconds c of one hop.

    >>> pipette_seconds(stages=8, micro_batches=32, compute_seconds=3.0, hop_seconds=1.0)
    173.0
    """
    if stages == 1:
        return micro_batches * compute_seconds
    return pipeline_seconds(stages, micro_batches, compute_seconds, hop_seconds) - 2 * (stages - 2) * hop_seconds


def amp_seconds(stages: int, micro_batches: int, compute_seconds: float, hop_seconds: float) -> float:
    """AMP's form: T = (n−1)·C + p·C + 2(p−1)·c. It counts each hop once, which is far too low if hops take time.

    Args:
        stages: number p of stages.
        micro_batches: number n of micro-batches.
        compute_seconds: seconds C of a stage's forward and backward pass over one micro-batch.
        hop_seconds: seconds c of one hop.

    >>> amp_seconds(stages=8, micro_batches=32, compute_seconds=3.0, hop_seconds=1.0)
    131.0
    """
    return (micro_batches - 1 + stages) * compute_seconds + 2 * (stages - 1) * hop_seconds
