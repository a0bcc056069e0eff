"""What methods with a loop of their own need of a run."""

from __future__ import annotations

import math

from thinwire.errors import ConfigurationError
from thinwire.lm.run import Run
from thinwire.lm.settings import Placement
from thinwire.methods import Attached, ControlVariates, Flasc, JustOneByte, Method, ZerothOrder
from thinwire.replica import Replica


def check_method(run: Run, method: Method) -> None:
    """Raise `ConfigurationError` where `method` cannot serve `run`."""
    if isinstance(method, ControlVariates | Flasc) and method.sampled is not None:
        _check_sampled(run.placement, run.method.label, method.sampled, method.every)
    if isinstance(method, Flasc) and method.down < 1 and run.model.lora is None:
        raise ConfigurationError(
            f"{run.method.label} without lora: values that the hub does not send count as zero, which works for adapters but not for whole weights; "
            "add --lora 8, or flasc(down=1)."
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
            f"keep={placement.keep} with checkpoint_every={placement.checkpoint_every} and {label}: who is not sampled is up to {every} "
            f"steps ahead of the others, and would have dropped the checkpoints that they still need; give --keep {needed}."
        )


def evaluated(replica: object) -> str:
    """What it holds while it is evaluated: `anchors`, which all agree on; in gossip its `own` weights, and at the end the `mean` over all
    replicas; or only `start`, where its round began.
    """
    if isinstance(replica, Attached):
        return replica.evaluated
    if isinstance(replica, Replica) and not replica.strategy.exchange.agrees:
        return "mean" if replica.agreed else "own"
    return "anchors"


def micro_batches(accumulate: int, replica: object) -> float:
    """Of an inner step, in the mean over all replicas."""
    if isinstance(replica, ZerothOrder):
        return replica.samples
    return accumulate * (replica.share if isinstance(replica, Attached) else 1.0)
