"""What methods with a loop of their own need of a run."""

from __future__ import annotations

from thinwire.errors import ConfigurationError
from thinwire.lm.run import Run
from thinwire.methods import Attached, ControlVariates, JustOneByte, Method, ZerothOrder


def check_method(run: Run, method: Method) -> None:
    """Raise `ConfigurationError` where `method` cannot serve `run`."""
    if isinstance(method, ControlVariates) and (method.sampled or 1) > run.replicas:
        raise ConfigurationError(
            f"sampled={method.sampled} of {run.replicas} replicas: at most all can be; give more --replicas."
        )
    if run.accumulate > 1 and isinstance(method, JustOneByte):
        raise ConfigurationError(
            f"accumulate={run.accumulate} with {run.label}: its samples are its micro-batches; raise those instead."
        )


def micro_batches(run: Run, replica: object) -> float:
    """Of an inner step, in the mean over all replicas."""
    if isinstance(replica, ZerothOrder):
        return replica.samples
    return run.accumulate * (replica.share if isinstance(replica, Attached) else 1.0)
