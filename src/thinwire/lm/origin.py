"""Weights of another run to begin with, and what methods with a loop of their own need of a run."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.lm.run import Run
from thinwire.methods import Attached, ControlVariates, JustOneByte, Method, ZerothOrder


def start_weights(run: Run, model: nn.Module) -> dict[str, Tensor]:
    """What `start_from` names. Raises `CheckpointError` if it is not of this model."""
    path = Path(run.start_from or "")
    path = path / "model.safetensors" if path.is_dir() else path
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"start_from={run.start_from!r}: {path} cannot be read ({error}); the folder of a run that has ended is needed."
        ) from None
    own = {name: value.shape for name, value in model.state_dict().items()}
    other = {name: value.shape for name, value in weights.items()}
    if differing := [name for name in [*own, *other] if own.get(name) != other.get(name)]:
        raise CheckpointError(
            f"start_from={run.start_from!r} is of another model: {', '.join(differing[:3])} do not fit; give its --model and --tokenizer."
        )
    return weights


def begin_with(run: Run, model: nn.Module) -> nn.Module:
    """`model`, with the weights that `start_from` names, if it names any."""
    if run.start_from:
        model.load_state_dict(start_weights(run, model))
    return model


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
