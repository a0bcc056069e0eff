"""Chooses the rounds of the default method for a link: H, codec and delay with the lowest loss after the same time. *Predicted*.

After as many steps rarer rounds and longer delays end higher, but wait less. docs/experiments.md has both:
for six kinds of model, and for the forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from thinwire.app.plan.cost import FragmentSeconds, follow
from thinwire.app.plan.expected import FORMS, cost_of_delay
from thinwire.app.plan.machine import RoundPrice
from thinwire.app.records.units import text_of_seconds
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.settings import recipe_name
from thinwire.comm import Link, parse_link
from thinwire.pieces.partition import Fragment
from thinwire.strategy import Strategy

MOST_DELAY = 10  # inner steps of a flight that are tried
# d ln(loss) / d ln(tokens) of data-parallel training, 500 to 2,000 steps: family.json, quality.json
_OF_TOKENS = -0.118


class _Tried(NamedTuple):
    run: Run
    cost: float  # its loss after as many steps, over that of the default
    utilization: float
    flight_seconds: float  # of the largest fragment


def follows_link(run: Run) -> bool:
    """Whether the link chooses: the run has the default method, gives no delay, and emulates a link."""
    named = recipe_name(run.method.strategy) == "streaming_sign" and run.method.delay is None
    return named and run.placement.replicas > 1 and parse_link(run.placement.link) is not None


def by_link(
    run: Run, model: nn.Module, step_seconds: float, word: str = "measured", threads: int = 0
) -> tuple[Run, str]:
    """`run`, of which `follows_link` is true, with the best rounds for inner steps of `step_seconds`; and one line that explains them, in
    which `word` says where `step_seconds` come from. The work of the rounds takes turns with training on `threads` cores; 0: it takes none of
    training's time, as on a GPU.

    A run that gives H, codec or offsets keeps them, and gets a delay.
    """
    link = parse_link(run.placement.link)
    assert link
    tried = [_try(given, cost, model, link, step_seconds, threads) for given, cost in _choices(run)]
    best, plain = min(tried, key=lambda one: one.utilization**_OF_TOKENS * one.cost), tried[0]
    said = (
        f"{_options(best.run)}{_kept(run)}: a round takes {text_of_seconds(best.flight_seconds)} at {run.placement.link} (predicted), "
        f"a step {text_of_seconds(step_seconds)} ({word}); at most {best.utilization:.0%} of the time is training"
    )
    if best is not plain:
        said += (
            f". --delay 1 would train at most {plain.utilization:.0%} of the time, and end about {1 - plain.cost / best.cost:.1%} lower "
            "after as many steps (predicted for a language model; other models may gain more)"
        )
    return best.run, said


def _choices(run: Run) -> Iterator[tuple[Run, float]]:
    """Runs with the rounds that are tried, the default's first, and their loss after as many steps, over that of the default."""
    forms = [(form.every, form.codec, form.above) for form in FORMS if form.steps <= run.optimizer.steps]
    if _given(run):
        forms = [(run.make_strategy().schedule.every, run.method.codec, 0.0)]
    for every, codec, above in forms:
        for delay in range(1, min(MOST_DELAY, every - 1) + 1):
            yield run.changed(every=every, codec=codec, delay=delay), (1 + above) * cost_of_delay(every, delay)


def _given(run: Run) -> list[str]:
    """The options that the run gives, of those with which another H would be another method."""
    return [f"--{name}" for name in ("every", "codec", "offsets") if getattr(run.method, name) is not None]


def _kept(run: Run) -> str:
    return f" (H and codec stay, because {' and '.join(_given(run))} is given)" if _given(run) else ""


def _options(run: Run) -> str:
    """The chosen rounds as options of `thinwire train`."""
    codec = f' --codec "{run.method.codec}"' if run.method.codec else ""
    return f"--every {run.method.every}{codec} --delay {run.method.delay}"


def _try(run: Run, cost: float, model: nn.Module, link: Link, step_seconds: float, threads: int) -> _Tried:
    strategy = run.make_strategy()
    traffic = _traffic(strategy, strategy.partition.fragments(model), run.placement.replicas, link, threads)
    flight = max(fragment.flight_seconds for fragment in traffic)
    return _Tried(run, cost, follow(strategy, step_seconds, traffic).utilization, flight)


def _traffic(
    strategy: Strategy, fragments: Sequence[Fragment], replicas: int, link: Link, threads: int
) -> list[FragmentSeconds]:
    """Wire and way of each fragment; the seconds of the codec are not counted."""
    found = []
    for fragment in fragments:
        codec, numel = strategy.coded(fragment.shapes)
        wire = link.serialisation_seconds(strategy.exchange.nbytes_sent(codec, numel, replicas))
        way = max(0.0, strategy.exchange.seconds(codec, numel, replicas, link) - wire)
        taken = RoundPrice().taken_seconds(len(fragment.shapes), numel, 0.0, threads) if threads else 0.0
        found.append(FragmentSeconds(0.0, wire, way, 0.0, taken))
    return found
