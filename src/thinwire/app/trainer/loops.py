"""The parts of a run for methods with their own loop."""

from __future__ import annotations

import math
from pathlib import Path

from thinwire.app.jobs.base import Job
from thinwire.app.trainer.place import ElasticPlace, Place
from thinwire.app.trainer.placement import Placement
from thinwire.app.trainer.run import Run
from thinwire.drivers.unequal.composition import Composition
from thinwire.errors import ConfigurationError
from thinwire.lab.methods import Attached, Codistill, ControlVariates, Flasc, JustOneByte, Method, ZerothOrder
from thinwire.lab.methods.codistill import Talking
from thinwire.lab.pairs.composition import PairComposition
from thinwire.lab.samples.composition import SampleComposition
from thinwire.lab.samples.method import Plexus
from thinwire.replica import Replica


def check_method(run: Run, method: Method) -> None:
    """Raise `ConfigurationError` if `method` cannot train `run`."""
    if isinstance(method, Codistill):
        if run.model.job:
            raise ConfigurationError(
                f"{run.method.label} with job={run.model.job!r}: replicas tell each other which token follows, so a language model is needed; leave "
                "job out."
            )
        if method.probe % run.data.sequence:
            raise ConfigurationError(
                f"{run.method.label} with sequence={run.data.sequence}: the probe set is cut into such windows, and its {method.probe} positions "
                f"of a step need to be a multiple; write codistill(probe={run.data.sequence * max(1, method.probe // run.data.sequence)})."
            )
    if isinstance(method, ControlVariates | Flasc) and method.sampled is not None:
        _check_sampled(run.placement, run.method.label, method.sampled, method.every)
    if isinstance(method, Flasc) and method.down < 1 and run.model.lora is None:
        raise ConfigurationError(
            f"{run.method.label} without lora: values that the hub does not send count as zero, which works for adapters but not for whole weights; "
            "add --lora 8, or flasc(down=1)."
        )
    if isinstance(method, Plexus) and method.sample > run.placement.replicas:
        raise ConfigurationError(
            f"sample={method.sample} of {run.placement.replicas} replicas: at most all can be sampled; give more --replicas."
        )
    if run.data.accumulate > 1 and isinstance(method, JustOneByte):
        raise ConfigurationError(
            f"accumulate={run.data.accumulate} with {run.method.label}: its samples are its micro-batches; raise those instead."
        )


def _check_sampled(placement: Placement, label: str, sampled: int, every: int) -> None:
    if sampled > placement.replicas:
        raise ConfigurationError(
            f"sampled={sampled} of {placement.replicas} replicas: at most all can be; give more --replicas."
        )
    needed = 1 + math.ceil(every / placement.checkpoint_every) if placement.checkpoint_every else 1
    if placement.keep < needed:
        raise ConfigurationError(
            f"keep={placement.keep} with checkpoint_every={placement.checkpoint_every} and {label}: a replica that is not sampled is "
            f"up to {every} steps ahead of the others, and would delete checkpoints that they still need; give --keep {needed}."
        )


def has_own_steps(method: Method | None) -> bool:
    """Whether the replicas of `method` take unequal numbers of steps, so that each resumes from the newest of its own checkpoints. Before
    any is attached; see `Attached.own_steps`.
    """
    if isinstance(method, PairComposition):
        return len(set(method.slow)) > 1
    return isinstance(method, Composition | SampleComposition)


def evaluated_weights(replica: object) -> str:
    """The weights that are evaluated: the `anchors`, on which all agree; in gossip the replica's `own` weights, and at the end the `mean`
    over all replicas; `each` if every replica has another model; or the `start` of its round.
    """
    if isinstance(replica, Attached):
        return replica.evaluated
    if isinstance(replica, Replica) and not replica.strategy.exchange.agrees:
        return "mean" if replica.agreed else "own"
    return "anchors"


def model_folder(run: Run, job: Job, place: Place | ElasticPlace, replica: object) -> Path:
    """The folder of the trained model: the run's folder; or if replicas have different models, a folder for each, as a run."""
    if not isinstance(replica, Talking) or place.alone:
        return place.folder
    folder = place.folder / "models" / place.name
    folder.mkdir(parents=True, exist_ok=True)
    run.save(folder / "run.toml")
    job.keep(folder, place.name)
    return folder


def micro_batches(accumulate: int, replica: object) -> float:
    """Micro-batches of an inner step, as the mean over all replicas."""
    if isinstance(replica, ZerothOrder):
        return replica.samples
    return accumulate * (replica.share if isinstance(replica, Attached) else 1.0)


def own_micro_batches(accumulate: int, replica: object) -> int:
    """Micro-batches of this replica's next inner step; none if it does not train in it."""
    if isinstance(replica, ZerothOrder):
        return replica.samples
    return 0 if isinstance(replica, Attached) and replica.idle else accumulate


def passes_multiple(before: int, after: int, every: int) -> bool:
    """Whether there is a multiple of `every` after `before` and up to `after`; a replica that was behind may jump over several steps."""
    return bool(every) and after // every > before // every
