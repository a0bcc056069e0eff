"""The parts of a run for methods with their own loop."""

from __future__ import annotations

from pathlib import Path

from thinwire.app.jobs.base import Job
from thinwire.app.trainer.place import ElasticPlace, Place
from thinwire.app.trainer.run import Run
from thinwire.drivers.attached import Attached
from thinwire.replica import Replica


def evaluated_weights(replica: Replica | Attached) -> str:
    """The weights that are evaluated: the `anchors`, on which all agree; in gossip the replica's `own` weights, and at the end the `mean`
    over all replicas; `each` if every replica has another model; or the `start` of its round.
    """
    if replica.own_loop:
        return replica.evaluated
    if not replica.strategy.exchange.traits.agrees:
        return "mean" if replica.agreed else "own"
    return "anchors"


def model_folder(run: Run, job: Job, place: Place | ElasticPlace, replica: Replica | Attached) -> Path:
    """The folder of the trained model: the run's folder; or if replicas have different models, a folder for each, as a run."""
    if not replica.own_loop or not replica.strategy.traits.one_model_each or place.alone:
        return place.folder
    folder = place.folder / "models" / place.name
    folder.mkdir(parents=True, exist_ok=True)
    run.save(folder / "run.toml")
    job.keep(folder, place.name)
    return folder


def micro_batches(accumulate: int, replica: Replica | Attached) -> float:
    """Micro-batches of an inner step, as the mean over all replicas."""
    if not replica.own_loop:
        return accumulate
    return replica.samples or accumulate * replica.share


def own_micro_batches(accumulate: int, replica: Replica | Attached) -> int:
    """Micro-batches of this replica's next inner step; none if it does not train in it."""
    if not replica.own_loop:
        return accumulate
    return replica.samples or (0 if replica.idle else accumulate)


def passes_multiple(before: int, after: int, every: int) -> bool:
    """Whether there is a multiple of `every` after `before` and up to `after`; a replica that was behind may jump over several steps."""
    return bool(every) and after // every > before // every
