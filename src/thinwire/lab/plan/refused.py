"""What `thinwire plan` says of a pipeline over the links: what the entry point `thinwire.plans` names."""

from __future__ import annotations

from thinwire.app.plan import cost
from thinwire.app.plan.compute import shape_of
from thinwire.app.plan.setting import Setting, Task
from thinwire.app.records.units import text_of_seconds
from thinwire.lab.plan import stage_order
from thinwire.lab.simulate.pipeline import pipeline_seconds


def pipeline(task: Task, best: Setting, micro: float) -> list[cost.Refusal]:
    """Stages at the places of the best setting, with `micro` seconds of a micro-batch."""
    shape, run = shape_of(task.base), best.run
    places = best.places if len(best.places) > 1 else range(len(task.links))
    order, chain = stage_order.best_chain(
        task.links, places, 4 * run.data.largest_batch * run.data.sequence * shape.width
    )
    stages, micros = len(places), max(len(places), run.data.accumulate)
    step = pipeline_seconds(stages, micros, micro / stages, chain / 2 / max(1, stages - 1))
    share = micros * micro / stages / step
    path = " → ".join(task.links.names[place] for place in order) if order else f"through {stages} sites"
    # equal hops are assumed, and whole rounds of micro-batches, which may be too many
    best_of = "the best of all orders takes about" if order else "every order takes about"
    return [
        cost.Refusal(
            f"a pipeline {path}",
            f"{stages} stages, {micros} micro-batches: {best_of} {text_of_seconds(step)} for "
            f"{text_of_seconds(micros * micro / stages)} of work a stage (1F1B); `thinwire train` has no pipelines",
            share,
        )
    ]
