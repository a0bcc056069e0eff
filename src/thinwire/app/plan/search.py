"""Searches the settings for given links and machines, and predicts their cost and loss. *Predicted*.

Settings are methods × sets of sites × H × τ × codec × micro-batch. The best one has most useful tokens a second: tokens a second
times `expected.density`, which converts them to the tokens with which data-parallel training would reach the same loss. So a setting
that is faster but learns less from each token is compared fairly with a slower one.

A composition is made and checked once for all numbers of sites.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from thinwire.app.jobs.own import functions
from thinwire.app.plan import cost, expected, scaling
from thinwire.app.plan.compute import shape_of, skeleton
from thinwire.app.plan.machine import Machine
from thinwire.app.plan.memory import Memory, replica_memory
from thinwire.app.plan.scaling import FITTED, Outside, Prediction
from thinwire.app.plan.setting import SEARCHED, Candidate, Setting, Task
from thinwire.app.plan.sites import Floats, Places, Sites
from thinwire.app.records.units import text_of_count
from thinwire.app.trainer.run import Run
from thinwire.catalogue.methods import RECIPES
from thinwire.codecs import Codec, Shapes
from thinwire.comm import Link
from thinwire.drivers.fragment import stays_on_device
from thinwire.errors import ConfigurationError
from thinwire.strategy import Strategy

__all__ = ["SEARCHED", "Setting", "Task", "codecs", "fits", "ruled_out", "settings"]

# None: the recipe's codec
CODECS: dict[str, tuple[str | None, ...]] = {
    "data_parallel": (None, "Cast('bf16')"),
    "diloco": ("Cast('bf16')", "E3M0()"),
    "streaming_diloco": (None, "Cast('bf16')"),
}
EVERY = (15, 30, 50, 100, 200, 500)
DELAY = (1, 2, 5, 10)
SPARSE_DELAY = (1, 2, 4)
BY_LAW = ("diloco", "streaming_diloco")  # recipes whose outer learning rate depends on the number of replicas


def settings(task: Task) -> list[Setting]:
    """All settings, the most useful first; those that do not fit the memory are at the end."""
    if found := sorted(_priced(_Search(task)), key=_rank):
        return found
    raise ConfigurationError(
        f"exchange={task.base.method.exchange}: it fits no number of replicas from 1 to {len(task.links)}; give the sites of these, or leave it out."
    )


def codecs(base: Run) -> list[Codec]:
    """The codecs of all settings that a plan tries for `base`, each once: what a probed machine times."""
    return list({repr(strategy.codec): strategy.codec for _, strategy in _composed(base, SEARCHED, CODECS)[0]}.values())


def ruled_out(base: Run, methods: Sequence[str]) -> dict[str, str]:
    """The methods that cannot have the settings of `base`, and why."""
    return _composed(base, methods, CODECS)[1]


def fits(task: Task) -> bool:
    """Whether any setting fits the memory."""
    search = _Search(task)
    return any(search.has_room()) and any(setting.fits for setting in _priced(search))


def _priced(search: _Search) -> Iterator[Setting]:
    """Price the candidates on each set of sites."""
    for places in search.sets():
        group = _Group(search, places)
        for candidate in search.candidates(len(places)):
            yield group.price(candidate)


def _rank(setting: Setting) -> tuple[object, ...]:
    """Key to sort by. Ties within half a percent are broken: covered by the laws, fewer bytes, spare time in flight, shorter delay."""
    useful = round(math.log(setting.useful_tokens_per_second) * 200)
    sent = round(math.log(1 + setting.bits_per_second) * 20)
    delay = setting.candidate.run.method.delay or 0
    hurried = setting.flight_seconds > delay * setting.step_seconds / 2
    return not setting.fits, -useful, len(setting.loss.warnings), sent, hurried, delay, setting.label


def _composed(
    base: Run, methods: Sequence[str], tried: Mapping[str, tuple[str | None, ...]]
) -> tuple[list[tuple[Run, Strategy]], dict[str, str]]:
    """The base run with the settings of every method, each with its strategy; and the methods that cannot have its settings, with the
    reason."""
    made, refused = list[tuple[Run, Strategy]](), dict[str, str]()

    @contextmanager
    def refusals(method: str) -> Iterator[None]:
        try:
            yield
        except ConfigurationError as error:
            refused.setdefault(method, str(error))

    for method in methods:
        with refusals(method):
            run = base.with_strategy(method)
            outer_lr = None if method in BY_LAW else run.method.outer_lr
            for codec, every, delay in _rounds(base, method, tried.get(method, (None,))):
                with refusals(method):
                    one = run.changed(codec=codec, every=every, delay=delay, offsets=None, outer_lr=outer_lr)
                    made.append((one, one.make_strategy()))
    possible = {run.method.strategy for run, _ in made}
    return made, {method: why for method, why in refused.items() if method not in possible}


def _rounds(base: Run, method: str, tried: Sequence[str | None]) -> list[tuple[str | None, int | None, int | None]]:
    """Codec, H and τ of a method's settings; None: the recipe's. The base run's own method has its own codec, too."""
    taken = inspect.signature(RECIPES[method]).parameters
    own = base.method.codec if method == base.method.strategy else None
    if method == "streaming_sign":
        return [(own or form.codec, form.every, delay) for form in expected.FORMS for delay, _ in form.of_delay]
    if method == "streaming_sparse":
        return [(own, RECIPES[method]().schedule.every, delay) for delay in SPARSE_DELAY]
    return [
        (codec, every, delay)
        for codec in dict.fromkeys((*tried, *([own] if own else [])))
        for every in (EVERY if "every" in taken else (None,))
        for delay in (DELAY if "delay" in taken else (None,))
        if not (delay and every and 2 * delay > every)
    ]


class _Search:
    """Values that depend only on the number of sites."""

    def __init__(self, task: Task) -> None:
        self.task, self.shape = task, shape_of(task.base)
        job = task.base.model.job
        self.divisible = not job or "collate" in functions(job)
        # the law was fitted, or at least checked, at this size
        self.within = not job and FITTED[0] * 0.8 <= self.shape.parameters() <= 10e9 * 1.2
        self.kinds: list[Machine] = []
        for machine in task.machines:
            if machine not in self.kinds:
                self.kinds.append(machine)
        kinds = [self.kinds.index(machine) for machine in task.machines]
        self.kind_of = kinds if len(kinds) > 1 else kinds * len(task.links)
        model, shapes = skeleton(task.base), dict[str, tuple[Shapes, ...]]()

        def made(run: Run, strategy: Strategy) -> Candidate:
            if (partition := repr(strategy.partition)) not in shapes:
                shapes[partition] = tuple(fragment.shapes for fragment in strategy.partition.fragments(model))
            return Candidate(run, strategy, shapes[partition])

        of_many, refused = _composed(task.base, task.methods, CODECS)
        if not of_many:
            method, why = next(iter(refused.items()))
            raise ConfigurationError(f"no planned method can have the settings of this run, such as {method}: {why}")
        self._of_many = [made(*each) for each in of_many]
        self._of_one = [made(*each) for each in _composed(task.base, [m for m in task.methods if m == "diloco"], {})[0]]
        self._alone = [_Group(self, (self.kind_of.index(kind),)) for kind in range(len(self.kinds))]
        self._joining: dict[tuple[str, str, int], bool] = {}
        self._sent: dict[tuple[object, int], float] = {}
        self._elsewhere: dict[str, Candidate | None] = {}

    def elsewhere(self, candidate: Candidate, gpu: bool) -> Candidate | None:
        """The candidate with its anchors and outer state on disk, or on a GPU if its rounds run there; None: its method does not allow it, or
        its run names another place.
        """
        if (key := f"{gpu} {candidate.strategy!r}") not in self._elsewhere:
            self._elsewhere[key] = None
            if candidate.run.method.anchors is None and candidate.strategy.anchors == "host":
                with suppress(ConfigurationError):
                    run = candidate.run.changed(anchors="device" if gpu else "disk")
                    strategy = run.make_strategy()
                    if not gpu or stays_on_device(strategy):
                        self._elsewhere[key] = Candidate(run, strategy, candidate.shapes)
        return self._elsewhere[key]

    def candidates(self, replicas: int) -> list[Candidate]:
        """The candidates that so many replicas can run, and that are for runs of so few steps; one replica alone has only its outer step."""
        there = [c for c in (self._of_many if replicas > 1 else self._of_one) if self._joins(c, replicas)]
        return [c for c in there if self._steps(c, replicas) >= c.least_steps]

    def _steps(self, candidate: Candidate, replicas: int) -> float:
        return self.task.tokens / (replicas * self.batch(candidate, replicas)[0] * self.task.base.data.sequence)

    def _joins(self, candidate: Candidate, replicas: int) -> bool:
        """Whether the exchange fits this number of replicas: an exchange with sites determines its number."""
        exchange, codec, _ = candidate.sends
        if (key := (exchange, codec, replicas)) not in self._joining:
            try:
                with torch.device("meta"):
                    candidate.strategy.exchange.init(candidate.strategy.codec, 1 << 20, 0, replicas)
                self._joining[key] = True
            except ConfigurationError:
                self._joining[key] = False
        return self._joining[key]

    def has_room(self) -> list[bool]:
        """For each kind of machine, whether any setting fits."""
        return [group.has_room_for(self._of_many or self._of_one) for group in self._alone]

    def sets(self) -> list[Places]:
        """The sets of sites that are tried. A site on which nothing fits takes part only if there is no other."""
        everybody, room = tuple(range(len(self.kind_of))), self.has_room()
        able = tuple(place for place in everybody if room[self.kind_of[place]]) or everybody
        seconds = np.array([group.sequence_seconds() for group in self._alone])[self.kind_of]
        return Sites(self.task.links, seconds, self.kind_of).sets(able, self._worth)

    def _worth(self, replicas: int, machine: Floats, wire: Floats, way: Floats) -> Floats:
        """Useful tokens a second of the best candidate, if rounds did not delay each other: `sites.Worth`."""
        chosen = self.candidates(replicas)
        if not chosen:
            return np.zeros_like(machine)
        facts = [(*c.timing, self.batch(c, replicas)[0], self.expected(c, replicas)[1]) for c in chosen]
        every, delay, flights, nbytes, batch, density = np.array(facts).T[:, :, None]
        step = batch * machine  # [candidates, sets]
        late = np.maximum(nbytes / flights * wire + way - delay * step, 0.0)
        period = np.maximum(every * step + flights * late, nbytes * wire)
        found: Floats = (replicas * every * batch * density / period).max(axis=0)
        return found

    def batch(self, candidate: Candidate, replicas: int) -> tuple[int, tuple[Outside, ...]]:
        """Number of sequences of one replica in an inner step, and warnings."""
        task = self.task
        if task.batch_tokens:
            wanted: float = task.batch_tokens
            warnings: tuple[Outside, ...] = ()
        elif self.within:
            law = scaling.predict("batch_tokens", self.shape.parameters(), _law_replicas(candidate, replicas), "joint")
            wanted, warnings = law.value, law.warnings
        else:
            wanted = task.base.data.largest_batch * task.base.data.accumulate * task.base.data.sequence * replicas
            fitted = f"{text_of_count(FITTED[0])} to {text_of_count(10e9)} parameters"
            says = f"the batch law is for language models of {fitted}; the run file's batch is kept"
            warnings = (Outside("batch-outside-fit", says),)
        # the ranks of a replica read equally many
        each = round(wanted / replicas / task.base.data.sequence / task.ranks)
        return task.ranks * max(1, each), warnings

    def learning_rate(self, candidate: Candidate, replicas: int) -> float:
        """The joint law's learning rate if the law was fitted or checked there; otherwise the base run's."""
        if not self.within:
            return self.task.base.lr
        law = scaling.predict("learning_rate", self.shape.parameters(), _law_replicas(candidate, replicas), "joint")
        return float(f"{law.value:.3g}")

    def outer_lr(self, candidate: Candidate, replicas: int) -> float | None:
        """The law's outer learning rate for DiLoCo; otherwise the base run's, if the method takes one."""
        if candidate.run.method.strategy not in BY_LAW:
            return candidate.run.method.outer_lr
        return scaling.outer_lr(replicas).value if self.within else None

    def expected(self, candidate: Candidate, replicas: int) -> tuple[Prediction, float]:
        """Loss and density."""
        schedule = candidate.strategy.schedule
        given = candidate.run.method.strategy, float(self.shape.parameters()), replicas, schedule.every, schedule.delay
        loss, density = _expected(*given, self.task.tokens)
        more = expected.short_run(candidate.run.method.strategy, self._steps(candidate, replicas))
        if self.task.base.model.job:
            more += (Outside("not-a-language-model", "the laws of H and M are theirs"),)
        return replace(loss, warnings=loss.warnings + more), density

    def sent(self, candidate: Candidate, replicas: int) -> float:
        """Bytes that a replica sends in a period, the mean over all of them."""
        if (key := (candidate.sends, replicas)) not in self._sent:
            exchange = candidate.strategy.exchange
            alike = {
                shapes: sum(exchange.nbytes_of_each(codec, numel, replicas)) / replicas
                for shapes, (codec, numel) in dict(zip(candidate.shapes, candidate.coded)).items()
            }
            self._sent[key] = sum(alike[shapes] for shapes in candidate.shapes)
        return self._sent[key]


@lru_cache(maxsize=1 << 16)
def _expected(
    method: str, parameters: float, replicas: int, every: int, delay: int, tokens: float
) -> tuple[Prediction, float]:
    """Loss and density."""
    given = method, parameters, replicas, every, delay
    return expected.loss(*given, tokens), expected.density(*given)


def _law_replicas(candidate: Candidate, replicas: int) -> int:
    """The number of replicas for DiLoCo's joint laws; data-parallel training is nearest to M = 1, whatever its replicas."""
    return 1 if candidate.run.method.strategy == "data_parallel" else replicas


class _Group:
    """A set of sites, and the values that they share."""

    def __init__(self, search: _Search, places: Places) -> None:
        task = search.task
        self.search, self.task, self.places, self.size = search, task, places, len(places)
        self.machines = [search.kinds[kind] for kind in sorted({search.kind_of[place] for place in places})]
        self.gpu = all(machine.device == "cuda" for machine in self.machines)
        self.base = max(machine.base_nbytes for machine in self.machines)
        self.limit = task.limit_nbytes(self.machines)
        self.wire_seconds = cost.wire_seconds(task.links, 1.0, places)  # for a byte to each other site
        self.way_seconds = cost.way_seconds(task.links, places)
        given = [machine.warnings(search.shape, task.base.data.sequence) for machine in self.machines]
        self.warnings = tuple(dict.fromkeys(warning for one in given for warning in one))
        self._traffic: dict[object, tuple[cost.FragmentSeconds, ...]] = {}
        self._ways: dict[int, list[tuple[int, int, float]]] = {}

    def price(self, candidate: Candidate) -> Setting:
        """The setting of a candidate, with its batch, micro-batch and learning rate."""
        search, strategy = self.search, candidate.strategy
        batch, warnings = search.batch(candidate, self.size)
        micro, accumulate, memory = self._micro_batch(candidate, batch)
        if self.gpu or self._needed(memory) > self.limit:  # or host memory is short even for the smallest micro-batch
            other = search.elsewhere(candidate, self.gpu)
            found = self._micro_batch(other, batch) if other else None
            if other and found and (not self.gpu or self._needed(found[2]) <= self.limit):
                candidate, strategy, (micro, accumulate, memory) = other, other.strategy, found
        step = self._inner_seconds(micro, accumulate)
        traffic = self._traffic_of(candidate)
        loss, density = search.expected(candidate, self.size)
        return Setting(
            candidate=candidate, places=self.places, batch=micro, accumulate=accumulate,
            lr=search.learning_rate(candidate, self.size), outer_lr=search.outer_lr(candidate, self.size),
            step_seconds=step, traffic=traffic, pace=cost.follow(strategy, step, traffic),
            period_nbytes=round(search.sent(candidate, self.size)),
            memory_nbytes=self._needed(memory), memory_limit=self.limit, memory=memory,
            loss=loss, density=density, tokens=self.task.tokens, warnings=(*warnings, *self.warnings),
        )  # fmt: skip

    def has_room_for(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one of the candidates fits the memory, in host memory or on disk."""
        on_disk = [] if self.gpu else [self.search.elsewhere(candidate, gpu=False) for candidate in candidates]
        ways = [*candidates, *filter(None, on_disk)]
        return any(self._needed(self._memory(c, self.task.ranks, 1)) <= self.limit for c in ways)

    def sequence_seconds(self) -> float:
        """Seconds for one sequence, in the best of a few micro-batches."""
        sizes = [self.task.ranks << i for i in range(7)]
        return min(self._inner_seconds(micro, 1) / micro for micro in sizes)

    def _inner_seconds(self, micro: int, accumulate: int) -> float:
        shape, sequence, ranks = self.search.shape, self.task.base.data.sequence, self.task.ranks
        return max(machine.inner_seconds(shape, sequence, micro, accumulate, ranks) for machine in self.machines)

    def _memory(self, candidate: Candidate, micro: int, accumulate: int) -> Memory:
        precision = self.task.base.model.precision
        return replica_memory(
            self.search.shape, candidate.strategy, candidate.numels, self.size, batch=micro,
            sequence=self.task.base.data.sequence, accumulate=accumulate,
            bf16=precision == "bf16" or (precision == "auto" and self.gpu), ranks=self.task.ranks,
            payload_nbytes=candidate.payload_nbytes if candidate.strategy.codec.needs_shapes else None,
        )  # fmt: skip

    def _needed(self, memory: Memory) -> int:
        """Bytes that count against the limit: on a GPU those of the GPU; anchors may be in host memory, which is not limited here."""
        return memory.peak("device") if self.gpu else memory.process_nbytes(self.base)

    def _micro_batch(self, candidate: Candidate, batch: int) -> tuple[int, int, Memory]:
        """The fastest micro-batch of 1, 2, 4, … and `batch` that fits, how many of it make a step, and its memory; the smallest one if none fits."""
        if batch not in self._ways:
            sizes = sorted({min(batch, self.task.ranks << i) for i in range(12)} | {batch})
            sizes = sizes if self.search.divisible else [1]
            of = [(micro, max(1, round(batch / micro))) for micro in sizes]
            # corrects for the rounding of `batch` to whole micro-batches
            self._ways[batch] = [(m, a, self._inner_seconds(m, a) * batch / (m * a)) for m, a in of]
        ways = self._ways[batch]
        gain = 0.99 if all(machine.steps for machine in self.machines) else 1.01  # not measured: take the largest
        while True:
            best = 0
            for index, (_, _, seconds) in enumerate(ways):
                best = index if seconds < gain * ways[best][2] else best
            micro, accumulate, _ = ways[best]
            memory = self._memory(candidate, micro, accumulate)
            if not best or self._needed(memory) <= self.limit:
                return micro, accumulate, memory
            ways = ways[:best]

    def _traffic_of(self, candidate: Candidate) -> tuple[cost.FragmentSeconds, ...]:
        """Seconds of each fragment: those of packets from the exchange, codec times from the measured speeds."""
        if self.size < 2:
            return (cost.FragmentSeconds(0.0, 0.0, 0.0, 0.0),) * len(candidate.numels)
        there = self.gpu and stays_on_device(candidate.strategy)
        if (key := (there, candidate.sends)) not in self._traffic:
            names, exchange, found = candidate.codecs, candidate.strategy.exchange, dict[object, cost.FragmentSeconds]()
            link = Link(8 * (self.size - 1) / self.wire_seconds, self.way_seconds)  # the slowest uplink
            for shapes, (codec, numel) in dict(zip(candidate.shapes, candidate.coded)).items():
                encode = max(machine.codec_seconds(names, numel, 0, there) for machine in self.machines)
                decode = (
                    max(machine.codec_seconds(names, numel, self.size, there) for machine in self.machines) - encode
                )
                wire = link.serialisation_seconds(exchange.nbytes_sent(codec, numel, self.size))
                way = max(0.0, exchange.seconds(codec, numel, self.size, link) - wire)
                taken = max(
                    machine.taken_seconds(len(shapes), numel, machine.codec_seconds(names, numel, self.size, there))
                    for machine in self.machines
                )
                found[shapes] = cost.FragmentSeconds(encode, wire, way, decode, taken)
            self._traffic[key] = tuple(found[shapes] for shapes in candidate.shapes)
        return self._traffic[key]
