"""Sequential gradient coding: codes over several rounds, so that bursts of stragglers cost less work than with a `GradientCode`. Pure.

Source: Krishnan, Ebrahimi, Khisti (arXiv 2211.13802). Job t is one batch of one model; its gradient is decoded by round t + T at the
latest. With T > 0, T + 1 independent models take turns. Rounds, jobs and replicas count from 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, Protocol

from thinwire.errors import ConfigurationError
from thinwire.lab.methods.bursty import Bursty, Late
from thinwire.lab.methods.gradient_codes import GradientCode, gradient_code, load


class JobPart(NamedTuple):
    """Part `number` of a job, as `replica` computes it."""

    number: int
    replica: int


class CodedTask(NamedTuple):
    """One vector that a replica computes in a round."""

    job: int
    part: JobPart


Delivered = dict[int, set[JobPart]]  # by job


class Scheme(Protocol):
    """What each replica computes in a round, and which replicas may be late."""

    @property
    def replicas(self) -> int: ...

    @property
    def delay(self) -> int:
        """T: the gradient of job t is decoded by round t + T."""

    @property
    def load(self) -> Fraction:
        """The share of a batch that one replica computes in a round."""

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The chunks of a job, each as a share of its batch."""

    def assign(self, round_: int, jobs: int, delivered: Delivered) -> list[list[CodedTask]]:
        """What each replica computes in a round of a run of `jobs`."""

    def burden(self, round_: int, tasks: Sequence[Sequence[CodedTask]], late: Late) -> Late:
        """The replicas of `late` whose work later rounds must repeat."""

    def allows(self, burdens: Sequence[Late]) -> bool:
        """Whether all jobs are decoded in time after such rounds, provided it was so before the last one."""

    def factors(self, part: JobPart) -> dict[int, float]:
        """The chunks of a part, each with its factor."""

    def decodes(self, parts: Collection[JobPart]) -> bool:
        """Whether the sum over a job follows from these parts."""

    def weights(self, parts: Collection[JobPart]) -> dict[JobPart, float]:
        """The factors of parts in the sum over a job. Raises `ConfigurationError` if they do not suffice."""


@dataclass(frozen=True)
class Coded:
    """A gradient code by itself: every job in its round, with at most s replicas late. T = 0, load (s + 1) / n.

    >>> Coded(gradient_code(8, 1)).load
    Fraction(1, 4)
    """

    code: GradientCode

    @property
    def replicas(self) -> int:
        return self.code.replicas

    @property
    def delay(self) -> int:
        return 0

    @property
    def load(self) -> Fraction:
        return load(self.code)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        return (Fraction(1, self.replicas),) * self.replicas

    def assign(self, round_: int, jobs: int, delivered: Delivered) -> list[list[CodedTask]]:
        return [[CodedTask(round_, JobPart(0, replica))] if round_ < jobs else [] for replica in range(self.replicas)]

    def burden(self, round_: int, tasks: Sequence[Sequence[CodedTask]], late: Late) -> Late:
        return Late() if self.code.decodes(frozenset(range(self.replicas)) - late) else late

    def allows(self, burdens: Sequence[Late]) -> bool:
        return not burdens[-1]

    def factors(self, part: JobPart) -> dict[int, float]:
        return self.code.factors(part.replica)

    def decodes(self, parts: Collection[JobPart]) -> bool:
        return self.code.decodes([part.replica for part in parts])

    def weights(self, parts: Collection[JobPart]) -> dict[JobPart, float]:
        return {JobPart(0, replica): a for replica, a in self.code.weights([part.replica for part in parts]).items()}


@dataclass(frozen=True)
class _AgainstBursts:
    replicas: int
    burst: int
    window: int
    stragglers: int

    def __post_init__(self) -> None:
        self.pattern.check(self.replicas)

    @property
    def pattern(self) -> Bursty:
        return Bursty(self.burst, self.window, self.stragglers)


@dataclass(frozen=True)
class SelectiveRepeat(_AgainstBursts):
    """SR-SGC: an (n, s)-gradient code with s = ⌈B·λ / (W − 1 + B)⌉, less than λ. If v > s results of a job are missing and it does not
    decode, v − s of these replicas compute it B rounds later, in place of the job that is then due. T = B, load (s + 1) / n.

    A round in which no replica repeats and whose job decodes at once does not count in the pattern: later rounds need not repeat anything.

    Args:
        replicas: number n of replicas.
        burst, window, stragglers: numbers B, W and λ of `Bursty`; B divides W − 1.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> scheme = SelectiveRepeat(replicas=256, burst=2, window=3, stragglers=23)
    >>> scheme.code.stragglers, float(scheme.load)
    (12, 0.05078125)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.window - 1) % self.burst:
            raise ConfigurationError(
                f"{self}: burst={self.burst} must divide window - 1 = {self.window - 1}; a window of "
                f"{self.burst * max(1, round((self.window - 1) / self.burst)) + 1} would do."
            )
        if self._missing >= self.replicas:
            raise ConfigurationError(
                f"{self}: {self._missing} of {self.replicas} results would be missing; at most {self.replicas - 1} may be."
            )

    @property
    def _missing(self) -> int:
        return -(-self.burst * self.stragglers // (self.window - 1 + self.burst))

    @cached_property
    def code(self) -> GradientCode:
        return gradient_code(self.replicas, self._missing)

    @property
    def delay(self) -> int:
        return self.burst

    @property
    def load(self) -> Fraction:
        return load(self.code)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        return Coded(self.code).shares

    def assign(self, round_: int, jobs: int, delivered: Delivered) -> list[list[CodedTask]]:
        old, tasks = round_ - self.burst, Coded(self.code).assign(round_, jobs, delivered)
        if 0 <= old < jobs and not self.decodes(delivered[old]):
            there = {part.replica for part in delivered[old]}
            missing = [replica for replica in range(self.replicas) if replica not in there]
            for replica in missing[: max(0, len(missing) - self._missing)]:
                tasks[replica] = [CodedTask(old, JobPart(0, replica))]
        return tasks

    def burden(self, round_: int, tasks: Sequence[Sequence[CodedTask]], late: Late) -> Late:
        repeats = any(task.job != round_ for own in tasks for task in own)
        return late if repeats else Coded(self.code).burden(round_, tasks, late)

    def allows(self, burdens: Sequence[Late]) -> bool:
        return self.pattern.allows(burdens)

    def factors(self, part: JobPart) -> dict[int, float]:
        return self.code.factors(part.replica)

    def decodes(self, parts: Collection[JobPart]) -> bool:
        return Coded(self.code).decodes(parts)

    def weights(self, parts: Collection[JobPart]) -> dict[JobPart, float]:
        return Coded(self.code).weights(parts)


@dataclass(frozen=True)
class Multiplexed(_AgainstBursts):
    """M-SGC: most of a job is computed once, and again only where it failed; the rest is protected by (n, λ)-gradient codes.

    A job has (W − 1)·n chunks of x, each of one replica alone, and B·n chunks of y = x / (λ + 1), in B groups with a code each; all
    together are the batch. In round j + k a replica computes for job j: for k < W − 1 its k-th own chunk; then, while own chunks
    are missing, one of these; otherwise its part of group k − W + 1. T = W − 2 + B;
    load (λ + 1)(W − 1 + B) / (n·(B + (W − 1)(λ + 1))). With λ = n there are no groups, and it is (W − 1 + B) / (n·(W − 1)).

    On the wire: one message a replica and round, with up to W − 1 + B vectors.

    Args:
        replicas: number n of replicas.
        burst, window, stragglers: numbers B, W and λ of `Bursty`.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> scheme = Multiplexed(replicas=256, burst=1, window=2, stragglers=27)
    >>> scheme.delay, round(float(scheme.load), 5)
    (1, 0.00754)
    """

    @property
    def _own(self) -> int:
        return self.window - 1

    @cached_property
    def code(self) -> GradientCode | None:
        """The code of each group; None if there are no groups, because every chunk can be computed again."""
        return gradient_code(self.replicas, self.stragglers) if self.stragglers < self.replicas else None

    @property
    def delay(self) -> int:
        return self.window - 2 + self.burst

    @property
    def load(self) -> Fraction:
        return (self._own + self.burst) * self.shares[0]

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        n, large = self.replicas, self.stragglers + 1
        if self.code is None:
            return (Fraction(1, n * self._own),) * (n * self._own)
        small = Fraction(1, n * (self.burst + self._own * large))
        return (large * small,) * (n * self._own) + (small,) * (n * self.burst)

    def assign(self, round_: int, jobs: int, delivered: Delivered) -> list[list[CodedTask]]:
        tasks: list[list[CodedTask]] = [[] for _ in range(self.replicas)]
        for job in range(max(0, round_ - self.delay), min(round_ + 1, jobs)):
            for replica in range(self.replicas):
                number = self._number(replica, round_ - job, delivered[job])
                if number is not None:
                    tasks[replica].append(CodedTask(job, JobPart(number, replica)))
        return tasks

    def _number(self, replica: int, slot: int, there: set[JobPart]) -> int | None:
        if slot < self._own:
            return slot
        for number in range(self._own):
            if JobPart(number, replica) not in there:
                return number
        return slot if self.code is not None else None

    def burden(self, round_: int, tasks: Sequence[Sequence[CodedTask]], late: Late) -> Late:
        return late

    def allows(self, burdens: Sequence[Late]) -> bool:
        return self.pattern.allows(burdens)

    def factors(self, part: JobPart) -> dict[int, float]:
        if part.number < self._own:
            return {part.replica * self._own + part.number: 1.0}
        assert self.code is not None
        first = self.replicas * part.number  # that of the first group comes after n·(W − 1) others
        return {first + chunk: factor for chunk, factor in self.code.factors(part.replica).items()}

    def decodes(self, parts: Collection[JobPart]) -> bool:
        there = self._by_number(parts)
        whole = all(len(there[number]) == self.replicas for number in range(self._own))
        return whole and (self.code is None or all(self.code.decodes(group) for group in there[self._own :]))

    def weights(self, parts: Collection[JobPart]) -> dict[JobPart, float]:
        if not self.decodes(parts):
            raise ConfigurationError(f"{self}: {len(set(parts))} parts of a job do not suffice for its sum.")
        there = self._by_number(parts)
        found = {JobPart(number, replica): 1.0 for number in range(self._own) for replica in there[number]}
        if self.code is not None:
            for number in range(self._own, self._own + self.burst):
                found |= {JobPart(number, replica): a for replica, a in self.code.weights(there[number]).items()}
        return found

    def _by_number(self, parts: Collection[JobPart]) -> list[set[int]]:
        there: list[set[int]] = [set() for _ in range(self._own + self.burst)]
        for number, replica in parts:
            there[number].add(replica)
        return there


class Master:
    """Assigns tasks and records results in a run of `jobs`, round by round: `tasks()`, then `finish(late)`.

    >>> master = Master(Coded(gradient_code(4, 1)), jobs=1)
    >>> master.allows(frozenset({3})), master.allows(frozenset({2, 3}))
    (True, False)
    """

    def __init__(self, scheme: Scheme, jobs: int) -> None:
        self.scheme, self.jobs, self.round = scheme, jobs, 0
        self.delivered: Delivered = {job: set() for job in range(jobs)}
        self._burdens: list[Late] = []
        self._tasks = self._assign()

    @property
    def rounds(self) -> int:
        """The number of rounds of the run."""
        return self.jobs + self.scheme.delay

    def tasks(self) -> list[list[CodedTask]]:
        """The tasks of each replica in this round."""
        return self._tasks

    def burden(self, late: Late) -> Late:
        """The replicas of `late` whose work later rounds must repeat. A replica without a task is not late."""
        busy = frozenset(replica for replica in late if self._tasks[replica])
        return self.scheme.burden(self.round, self._tasks, busy)

    def allows(self, late: Late) -> bool:
        """Whether this round may end without the replicas in `late`."""
        return self.scheme.allows([*self._burdens, self.burden(late)])

    def finish(self, late: Late) -> None:
        """End the round with all results except those of `late`. Raises `ConfigurationError` if that is not allowed."""
        if not self.allows(late):
            raise ConfigurationError(
                f"round {self.round} without replicas {sorted(late)}: a job would not be in time; wait for more of them."
            )
        self._burdens.append(self.burden(late))
        for replica, tasks in enumerate(self._tasks):
            for job, part in tasks:
                if replica not in late:
                    self.delivered[job].add(part)
        self.round += 1
        self._tasks = self._assign()

    def _assign(self) -> list[list[CodedTask]]:
        return self.scheme.assign(self.round, self.jobs, self.delivered)
