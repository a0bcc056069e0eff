"""Chooses the delay for a link: the one with the lowest loss after the same time. *Predicted*.

After as many steps a shorter delay ends lower, but waits more. docs/log.md (2026-11-23) has both, for six kinds of model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thinwire.comm import Link, parse_link
from thinwire.lm.run import Run
from thinwire.lm.settings import recipe_name
from thinwire.pieces.partition import Fragment
from thinwire.plan.cost import FragmentSeconds, follow
from thinwire.plan.expected import cost_of_delay
from thinwire.records.units import text_of_seconds
from thinwire.strategy import Strategy

MOST = 10  # inner steps of a flight that are tried
# d ln(loss) / d ln(tokens) of data-parallel training, 500 to 2,000 steps: family.json, quality.json
_OF_TOKENS = -0.118


def follows_link(run: Run) -> bool:
    """Whether the delay is chosen by the link: the run has the default method, gives no delay, and emulates a link."""
    named = recipe_name(run.method.strategy) == "streaming_sign" and run.method.delay is None
    return named and run.placement.replicas > 1 and parse_link(run.placement.link) is not None


def with_delay(run: Run, model: nn.Module, step_seconds: float) -> tuple[Run, str]:
    """`run`, of which `follows_link` is true, with the best delay for inner steps of `step_seconds`; and one line that explains it."""
    link = parse_link(run.placement.link)
    assert link
    tried, every = [], run.make_strategy().schedule.every
    for delay in range(1, min(MOST, every - 1) + 1):
        given = run.changed(delay=delay)
        strategy = given.make_strategy()
        traffic = _traffic(strategy, strategy.partition.fragments(model), run.placement.replicas, link)
        tried.append((follow(strategy, step_seconds, traffic).utilization, given, traffic))
    utilization, given, traffic = min(
        tried, key=lambda one: one[0] ** _OF_TOKENS * cost_of_delay(every, one[1].method.delay or 1)
    )
    steps = "1 step" if given.method.delay == 1 else f"{given.method.delay} steps"
    flight = text_of_seconds(max(fragment.flight_seconds for fragment in traffic))
    said = (
        f"{steps}: a round takes {flight} at {run.placement.link} (predicted), a step {text_of_seconds(step_seconds)} (measured); "
        f"at most {utilization:.0%} of the time is training"
    )
    if given.method.delay != 1:
        lower = 1 - 1 / cost_of_delay(every, given.method.delay or 1)
        said += (
            f". --delay 1 would train at most {tried[0][0]:.0%} of the time, and end about {lower:.1%} lower after as many steps "
            "(predicted for a language model; other models may gain more)"
        )
    return given, said


def _traffic(strategy: Strategy, fragments: Sequence[Fragment], replicas: int, link: Link) -> list[FragmentSeconds]:
    """Wire and way of each fragment; the seconds of the codec are not counted."""
    found = []
    for fragment in fragments:
        codec, numel = strategy.coded(fragment.shapes)
        wire = link.serialisation_seconds(strategy.exchange.nbytes_sent(codec, numel, replicas))
        way = max(0.0, strategy.exchange.seconds(codec, numel, replicas, link) - wire)
        found.append(FragmentSeconds(0.0, wire, way, 0.0))
    return found
