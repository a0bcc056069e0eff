"""Every setting worth a look on given links and machines, with what it should cost and give. *Predicted*.

Settings are methods × replicas × H × τ × codec × micro-batch. The best is the one with most useful tokens a second:
tokens a second times `expected.density`, that is, counted in the tokens with which data-parallel training would come as
far. So a setting that is faster and learns less from each token is compared fairly with one that is slower.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from thinwire.errors import ConfigurationError
from thinwire.lm.run import Run
from thinwire.plan import cost, expected, scaling
from thinwire.plan.compute import shape_of, skeleton
from thinwire.plan.links import Links
from thinwire.plan.machine import FREE, Machine
from thinwire.plan.memory import Memory, replica_memory
from thinwire.plan.outline import Shape
from thinwire.plan.scaling import FITTED, Outside, Prediction
from thinwire.recipes import RECIPES
from thinwire.simulate.replicas import delays
from thinwire.strategy import Strategy

METHODS = ("data_parallel", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco")
CODECS: dict[str, tuple[str | None, ...]] = {
    "data_parallel": (None, "Cast('bf16')"),
    "diloco": ("Cast('bf16')", "E3M0()"),
    "streaming_diloco": (None, "Cast('bf16')"),
}  # None: the recipe's own
EVERY = (15, 30, 50, 100, 200, 500)
DELAY = (1, 2, 5, 10)
_SUBSETS = 4096  # of replicas that are tried one by one


@dataclass(frozen=True)
class Task:
    """What is to be trained, and where: `ranks` of each site form one replica (FSDP2)."""

    base: Run
    links: Links
    machines: tuple[Machine, ...]
    tokens: float
    ranks: int = 1
    batch_tokens: int | None = None  # of all replicas together; without: the scaling law's, or the base's
    memory_nbytes: int | None = None  # of each rank; without: FREE of the machine's
    methods: tuple[str, ...] = METHODS

    def __post_init__(self) -> None:
        if len(self.machines) not in (1, len(self.links)):
            raise ConfigurationError(
                f"{len(self.machines)} machines for {len(self.links)} replicas ({', '.join(self.links.names)}): one for all, or one for each in "
                "that order, is needed."
            )
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or not self.methods:
            raise ConfigurationError(
                f"methods {', '.join(unknown) or 'none'}: some of {', '.join(METHODS)} are needed."
            )
        if not (math.isfinite(self.tokens) and self.tokens > 0) or self.ranks < 1:
            raise ConfigurationError(f"tokens={self.tokens}, ranks={self.ranks}: more than 0 of each is needed.")

    def machine(self, place: int) -> Machine:
        return self.machines[place if len(self.machines) > 1 else 0]

    def limit_nbytes(self, places: Sequence[int]) -> int:
        """What a rank may use on the smallest of these machines."""
        return self.memory_nbytes or int(FREE * min(self.machine(place).memory_nbytes for place in places))


@dataclass(frozen=True)
class Setting:
    """One row of a plan: a run, and what is predicted for it."""

    run: Run
    places: tuple[int, ...]
    step_seconds: float
    flight_seconds: float  # of the largest fragment
    pace: cost.Pace
    period_nbytes: int  # one replica's, sent in a period
    memory: Memory
    memory_limit: int
    loss: Prediction
    density: float
    tokens: float
    numels: tuple[int, ...] = ()  # of the fragments
    on_gpu: bool = False
    warnings: tuple[Outside, ...] = ()

    @property
    def method(self) -> str:
        return self.run.strategy

    @property
    def tokens_per_second(self) -> float:
        run = self.run
        return run.replicas * run.batch * run.accumulate * run.sequence * self.pace.utilization / self.step_seconds

    @property
    def useful_tokens_per_second(self) -> float:
        return self.tokens_per_second * self.density

    @property
    def seconds(self) -> float:
        """Of the whole training."""
        return self.tokens / self.tokens_per_second

    @property
    def memory_nbytes(self) -> int:
        """On a GPU its own; anchors may then lie in host memory, which is not limited here."""
        return self.memory.peak("device") if self.on_gpu else self.memory.peak()

    @property
    def fits(self) -> bool:
        return self.memory_nbytes <= self.memory_limit

    @property
    def bits_per_second(self) -> float:
        """Sent by one replica, on average."""
        every = self.run.make_strategy().schedule.every
        return 8 * self.period_nbytes / (every * self.step_seconds) * self.pace.utilization


def settings(task: Task) -> list[Setting]:
    """All of them, the most useful first; those that do not fit the memory too, at the end."""
    shape = shape_of(task.base)
    fragments = _Fragments(task.base)
    found = [
        setting
        for places in _groups(task)
        for strategy in _strategies(task, shape, len(places))
        for setting in _settled(task, shape, fragments, places, strategy)
    ]
    if not found:
        raise ConfigurationError(
            f"exchange={task.base.exchange}: it is for none of 1 to {len(task.links)} replicas; give the sites of these, or leave it out."
        )
    return sorted(found, key=_rank)


def _rank(setting: Setting) -> tuple[object, ...]:
    """Within half a percent: what the laws cover, what sends less, what has time to spare in the air, the shorter delay."""
    useful = round(math.log(setting.useful_tokens_per_second) * 200)
    sent = round(math.log(1 + setting.bits_per_second) * 20)
    delay = setting.run.delay or 0
    hurried = setting.flight_seconds > delay * setting.step_seconds / 2
    return not setting.fits, -useful, len(setting.loss.warnings), sent, hurried, delay, setting.run.label


def _groups(task: Task) -> Iterator[tuple[int, ...]]:
    """For each number of replicas the ones with the best worst uplink: all subsets, or by leaving the worst out in turn."""
    everybody = tuple(range(len(task.links)))

    def worst(places: tuple[int, ...]) -> float:
        seconds = cost.uplink_seconds(task.links.among(places), 1e6)
        return (
            seconds
            + max(task.machine(p).flops_per_second for p in places)
            / min(task.machine(p).flops_per_second for p in places)
            * 1e-6
        )

    best = everybody
    for count in range(len(everybody), 0, -1):
        few = math.comb(len(everybody), count) <= _SUBSETS
        candidates = combinations(everybody, count) if few else combinations(best, count)
        best = min(candidates, key=worst) if count < len(everybody) else everybody
        yield best


def _strategies(task: Task, shape: Shape, replicas: int) -> Iterator[Run]:
    """The base run with every method's settings; one replica has nothing to exchange but its own outer step."""
    outer = scaling.outer_lr(replicas).value if _within(shape) else None
    for method in task.methods if replicas > 1 else [m for m in task.methods if m == "diloco"]:
        taken = inspect.signature(RECIPES[method]).parameters
        for codec in CODECS.get(method, (None,)) if replicas > 1 else (None,):
            for every in EVERY if "every" in taken else (None,):
                for delay in DELAY if "delay" in taken else (None,):
                    if delay and every and 2 * delay > every:
                        continue
                    given: dict[str, object] = {"codec": codec, "every": every, "delay": delay, "offsets": None}
                    if method in ("diloco", "streaming_diloco"):
                        given["outer_lr"] = outer
                    run = task.base.with_strategy(method)
                    run = dataclasses.replace(run, replicas=replicas, **given)  # type: ignore[arg-type]
                    if _joins(run.make_strategy(), replicas):
                        yield run


def _joins(strategy: Strategy, replicas: int) -> bool:
    """Whether the exchange is for so many replicas: one with sites names its own."""
    try:
        with torch.device("meta"):
            strategy.exchange.init(strategy.codec, 1 << 20, 0, replicas)
    except ConfigurationError:
        return False
    return True


def _settled(task: Task, shape: Shape, fragments: _Fragments, places: tuple[int, ...], run: Run) -> Iterator[Setting]:
    """`run` with its batch, micro-batch, steps and learning rate, priced."""
    strategy = run.make_strategy()
    numels = fragments.numels(strategy)
    batch, warnings = _batch(task, shape, run)
    limit = task.limit_nbytes(places)
    micro, memory = _micro_batch(task, shape, strategy, numels, places, batch, limit)
    accumulate = max(1, round(batch / micro))
    machines = [task.machine(place) for place in places]
    step = max(m.inner_seconds(shape, run.sequence, micro, accumulate, task.ranks) for m in machines)
    links = task.links.among(places)
    traffic = [traffic_of(strategy, numel, links, machines) for numel in numels]
    pace = cost.follow(strategy, step, traffic)
    tokens_per_step = run.replicas * micro * accumulate * run.sequence
    lr = _learning_rate(task, shape, run)
    steps = max(1, math.ceil(task.tokens / tokens_per_step))
    run = dataclasses.replace(run, batch=micro, accumulate=accumulate, steps=steps, lr=lr)
    method, schedule, parameters = run.strategy, strategy.schedule, shape.parameters()
    own = {warning: None for m in machines for warning in m.warnings(shape, run.sequence)}
    yield Setting(
        run=run, places=places, step_seconds=step, pace=pace, memory=memory, memory_limit=limit, tokens=task.tokens,
        numels=numels,
        flight_seconds=max(t.flight_seconds for t in traffic),
        period_nbytes=strategy.nbytes_per_period(list(numels), run.replicas),
        loss=expected.loss(method, parameters, run.replicas, schedule.every, schedule.delay, task.tokens),
        density=expected.density(method, parameters, run.replicas, schedule.every, schedule.delay),
        on_gpu=_on_gpu(task, places), warnings=(*warnings, *own),
    )  # fmt: skip


def _batch(task: Task, shape: Shape, run: Run) -> tuple[int, tuple[Outside, ...]]:
    """Sequences of one replica in an inner step."""
    if task.batch_tokens:
        wanted: float = task.batch_tokens
        warnings: tuple[Outside, ...] = ()
    elif _within(shape):
        law = scaling.predict("batch_tokens", shape.parameters(), _law_replicas(run), "joint")
        wanted, warnings = law.value, law.warnings
    else:
        of_base = task.base.batch * task.base.accumulate * task.base.sequence * run.replicas
        says = f"the batch law is for {FITTED[0]:.3g} to 1e+10 parameters; the run file's batch is kept"
        wanted, warnings = of_base, (Outside("batch-outside-fit", says),)
    return max(task.ranks, round(wanted / run.replicas / run.sequence)), warnings


def _micro_batch(
    task: Task,
    shape: Shape,
    strategy: Strategy,
    numels: Sequence[int],
    places: Sequence[int],
    batch: int,
    limit: int,
) -> tuple[int, Memory]:
    """The fastest of 1, 2, 4, … and `batch` itself that fits; the smallest if none does."""
    sizes = sorted({min(batch, task.ranks << i) for i in range(12)} | {batch})
    best: tuple[float, int, Memory] | None = None
    machines, gpu = [task.machine(place) for place in places], _on_gpu(task, places)
    gain = 0.99 if all(m.steps for m in machines) else 1.01  # without measured steps: the largest
    for micro in sizes:
        accumulate = max(1, round(batch / micro))
        memory = replica_memory(
            shape, strategy, numels, len(places), batch=micro, sequence=task.base.sequence, accumulate=accumulate,
            bf16=task.base.precision == "bf16" or (task.base.precision == "auto" and gpu), ranks=task.ranks,
        )  # fmt: skip
        if best and (memory.peak("device") if gpu else memory.peak()) > limit:
            break
        seconds = max(m.inner_seconds(shape, task.base.sequence, micro, accumulate, task.ranks) for m in machines)
        seconds *= batch / (micro * accumulate)  # what rounding has left out or added
        if best is None or seconds < gain * best[0]:
            best = seconds, micro, memory
    assert best is not None
    return best[1], best[2]


def _learning_rate(task: Task, shape: Shape, run: Run) -> float:
    """The joint law's where it was fitted or checked; else the base run's."""
    if not _within(shape):
        return task.base.lr
    return float(f"{scaling.predict('learning_rate', shape.parameters(), _law_replicas(run), 'joint').value:.3g}")


def _law_replicas(run: Run) -> int:
    """Joint laws are DiLoCo's; data-parallel training on any number of replicas is nearest to M = 1."""
    return 1 if run.strategy == "data_parallel" else run.replicas


def _within(shape: Shape) -> bool:
    """Whether the laws were fitted or at least checked at this size."""
    return FITTED[0] * 0.8 <= shape.parameters() <= 10e9 * 1.2


def _on_gpu(task: Task, places: Sequence[int]) -> bool:
    return all(task.machine(place).device == "cuda" for place in places)


def traffic_of(strategy: Strategy, numel: int, links: Links, machines: Sequence[Machine]) -> cost.Traffic:
    """One fragment: packets as the exchange counts them, codecs as they were measured."""
    size = len(links)
    if size < 2:
        return cost.Traffic(0.0, 0.0, 0.0, 0.0)
    packet = strategy.exchange.nbytes_sent(strategy.codec, numel, size) / (size - 1)
    name = repr(strategy.codec)
    encode = max(m.codec_seconds(name, numel, 0) for m in machines)
    decode = max(m.codec_seconds(name, numel, size) for m in machines) - encode
    ways = delays(strategy.exchange, strategy.codec, numel, size) * cost.way_seconds(links)
    return cost.Traffic(encode, cost.uplink_seconds(links, packet), ways, decode)


class _Fragments:
    """What a strategy's partition makes of the model: asked once for each partition."""

    def __init__(self, base: Run) -> None:
        self._model = skeleton(base)
        self._made: dict[str, tuple[int, ...]] = {}

    def numels(self, strategy: Strategy) -> tuple[int, ...]:
        partition = strategy.partition
        if repr(partition) not in self._made:
            self._made[repr(partition)] = tuple(f.numel for f in partition.fragments(self._model))
        return self._made[repr(partition)]
