"""The task of a plan, and what it predicts for one setting. *Predicted*."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.app.plan import cost
from thinwire.app.plan.expected import FORMS
from thinwire.app.plan.links import Links
from thinwire.app.plan.machine import USABLE_MEMORY, Machine
from thinwire.app.plan.memory import Memory
from thinwire.app.plan.scaling import Outside, Prediction
from thinwire.app.plan.sites import Places
from thinwire.app.trainer.run import Run
from thinwire.codecs import Codec, Shapes, nested
from thinwire.errors import ConfigurationError
from thinwire.strategy import Strategy

SEARCHED = (
    *("data_parallel", "diloco", "streaming_diloco", "streaming_sign", "streaming_sparse", "eager_diloco"),
    "sparse_loco",
)
RANKS = 1024  # most ranks of a replica


@dataclass(frozen=True)
class Task:
    """The training to plan, and its sites: `ranks` of each site form one replica (FSDP2)."""

    base: Run
    links: Links
    machines: tuple[Machine, ...]
    tokens: float
    ranks: int = 1
    batch_tokens: int | None = None  # of all replicas together; default: the scaling law's, or the base's
    memory_nbytes: int | None = None  # of each rank; default: USABLE_MEMORY of the machine's
    methods: tuple[str, ...] = SEARCHED

    def __post_init__(self) -> None:
        if len(self.machines) not in (1, len(self.links)):
            raise ConfigurationError(
                f"{len(self.machines)} machines for {len(self.links)} replicas ({', '.join(self.links.names)}): one for all, or one for each in "
                "that order, is needed."
            )
        unknown = [method for method in self.methods if method not in SEARCHED]
        if unknown or not self.methods:
            raise ConfigurationError(
                f"methods {', '.join(unknown) or 'none'}: some of {', '.join(SEARCHED)} are needed."
            )
        if not (math.isfinite(self.tokens) and self.tokens > 0):
            raise ConfigurationError(f"tokens={self.tokens}: more than 0 is needed.")
        if not 1 <= self.ranks <= RANKS:
            raise ConfigurationError(
                f"ranks={self.ranks}: 1 to {RANKS} are needed; give the ranks of one site that form one replica."
            )

    def machine(self, place: int) -> Machine:
        return self.machines[place if len(self.machines) > 1 else 0]

    def limit_nbytes(self, machines: Sequence[Machine]) -> int:
        """Bytes that a rank may use on the smallest of these machines."""
        return self.memory_nbytes or int(USABLE_MEMORY * min(machine.memory_nbytes for machine in machines))


@dataclass(frozen=True)
class Candidate:
    """A method with its H, τ and codec, for any sites. The outer learning rate depends on the number of sites."""

    run: Run
    strategy: Strategy
    shapes: tuple[Shapes, ...]  # of the tensors of each fragment

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each fragment."""
        return tuple(sum(map(math.prod, shapes)) for shapes in self.shapes)

    @cached_property
    def sends(self) -> tuple[str, str, tuple[Shapes, ...]]:
        """A key: candidates with equal keys send the same bytes."""
        return repr(self.strategy.exchange), repr(self.strategy.codec), self.shapes

    @cached_property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codec and of the codecs inside it, as in a machine.toml."""
        return tuple(map(repr, nested(self.strategy.codec)))

    @cached_property
    def coded(self) -> tuple[tuple[Codec, int], ...]:
        """The codec of each fragment, and its number of elements."""
        return tuple(map(self.strategy.coded, self.shapes))

    @cached_property
    def timing(self) -> tuple[int, int, int, int]:
        """For a period: inner steps, steps that a flight may take, flights one after the other, and bytes for one peer."""
        schedule = self.strategy.schedule
        return schedule.every, schedule.delay, len(self.numels) if schedule.delay else 1, self.payload_nbytes

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of a packet of every fragment, without headers."""
        return sum(codec.nbytes(numel) for codec, numel in self.coded)

    @cached_property
    def least_steps(self) -> int:
        """Inner steps of the shortest run for which it is proposed: see `expected.Form`."""
        method = self.run.method
        forms = FORMS if method.strategy == "streaming_sign" else ()
        return next((form.steps for form in forms if (form.every, form.codec) == (method.every, method.codec)), 0)

    @cached_property
    def label(self) -> str:
        return self.run.method.label


@dataclass(frozen=True)
class Setting:
    """One row of a plan: a run, and what is predicted for it."""

    candidate: Candidate
    places: Places
    batch: int
    accumulate: int
    lr: float
    outer_lr: float | None
    step_seconds: float
    traffic: tuple[cost.FragmentSeconds, ...]  # of the fragments
    pace: cost.Pace
    period_nbytes: int  # sent in a period, the mean over all replicas
    memory_nbytes: int
    memory_limit: int
    memory: Memory
    loss: Prediction
    density: float
    tokens: float
    warnings: tuple[Outside, ...] = ()

    @cached_property
    def run(self) -> Run:
        """The run, made and checked at the first access, because most settings are only compared."""
        run = self.candidate.run
        steps = max(1, math.ceil(self.tokens / (self.replicas * self.batch * self.accumulate * run.data.sequence)))
        return run.changed(replicas=self.replicas, least=min(run.placement.least, self.replicas), batch=self.batch, accumulate=self.accumulate,
            steps=steps, lr=self.lr, outer_lr=self.outer_lr,
        )  # fmt: skip

    @property
    def strategy(self) -> Strategy:
        return self.candidate.strategy

    @property
    def method(self) -> str:
        return self.candidate.run.method.strategy

    @property
    def label(self) -> str:
        """Name of the method and its values, without the outer learning rate, which depends on the number of replicas."""
        return self.candidate.label

    @property
    def replicas(self) -> int:
        return len(self.places)

    @property
    def flight_seconds(self) -> float:
        """Seconds of a flight of the largest fragment."""
        return max(traffic.flight_seconds for traffic in self.traffic)

    @property
    def tokens_per_second(self) -> float:
        tokens = self.replicas * self.batch * self.accumulate * self.candidate.run.data.sequence
        return tokens * self.pace.utilization / self.step_seconds

    @property
    def useful_tokens_per_second(self) -> float:
        return self.tokens_per_second * self.density

    @property
    def seconds(self) -> float:
        """Seconds of the whole training."""
        return self.tokens / self.tokens_per_second

    @property
    def fits(self) -> bool:
        return self.memory_nbytes <= self.memory_limit

    @property
    def bits_per_second(self) -> float:
        """Bits a second that one replica sends, on average."""
        return 8 * self.period_nbytes / (self.strategy.schedule.every * self.step_seconds) * self.pace.utilization
