"""The job of a run, and its checks before any replica is started."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

from torch import nn

from thinwire import checkpoint
from thinwire.app.jobs.base import Job
from thinwire.app.jobs.own import OwnJob
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate
from thinwire.app.trainer.text_job import TextJob
from thinwire.data_ledger.layout import decode
from thinwire.drivers.token_weights import cannot_weigh, check_weighing
from thinwire.errors import CheckpointError, ConfigurationError, DataError
from thinwire.pieces.inner import highest_rate
from thinwire.pieces.own_files import taken_apart
from thinwire.pieces.schedule import Calendar


def open_job(run: Run, folder: Path | None = None, replica: int = 0) -> Job:
    """The job of `run` for one replica: the user's own file, or a language model on text. `folder`: the run's folder, which may hold its
    tokenizer.
    """
    if run.model.job:
        data, (_, batches) = run.data, run.data.evaluations(run.optimizer.steps)
        return OwnJob(run.model.job, run.seed, data.batch_of(replica), batches, data.largest_batch)
    return TextJob(run, folder, replica)


def check(run: Run) -> nn.Module:
    """Find errors that would stop every replica, before any is started: in data, model, loss and fragments. Raises the error. Returns the
    model (the largest, if replicas have different ones), whose values do not matter.
    """
    return check_and_weigh(run)[0]


def check_and_weigh(run: Run, folder: Path | None = None, goes_on: bool = False) -> tuple[nn.Module, Run, list[str]]:
    """Like `check`; if the run in `folder` `goes_on`, its data are compared, too. Also returns `run` with deltas weighed by their tokens, if
    replicas have unequal micro-batches or the job packs documents, and no other weights are set; and lines about that and the text.
    """
    if run.placement.carrier in ("secure", "secure-elastic"):
        from thinwire.net import Hub

        assert Hub is not None  # its import raises an error if the extra is not installed
    each = dict.fromkeys(run.of_replica(rank) for rank in range(run.placement.replicas))
    if run.model.models:
        told = {one.model.model: TextJob(one, folder).corpus.tokenizer.fingerprint for one in each}
        if len(set(told.values())) > 1:
            named = ", ".join(f"{model} {fingerprint}" for model, fingerprint in told.items())
            raise ConfigurationError(
                f"models={run.model.models} with different tokenizers ({named}): predictions are of tokens, so all need the same one; choose models "
                "that were trained with it, or give --tokenizer."
            )
    jobs = [open_job(one, folder) for one in each]
    models = [_check(one, job) for one, job in zip(each, jobs, strict=True)]
    if goes_on and folder and run.placement.elastic and not run.data.own_text:
        _check_data(folder, jobs[0])
    largest = max(models, key=lambda model: sum(p.numel() for p in model.parameters()))
    packs = any(job.packs for job in jobs)
    why = "micro-batches differ" if run.data.batches else "the job packs documents" if packs else ""
    run, weighed = _weighed(run, why) if why else (run, "")
    return (
        largest,
        run,
        [line for line in (weighed, *jobs[0].passed_over, f"learning rate: {_rates(run, jobs[0], models[0])}") if line],
    )


def _rates(run: Run, job: Job, model: nn.Module) -> str:
    """The learning rate that is used, and where it is from."""
    if not run.model.job or not (own := job.make_optimizer(model)):
        return run.rates
    each = [rate for rate in map(highest_rate, own) if not math.isnan(rate)]
    told = f"{', '.join(f'{rate:g}' for rate in each)} at the start, " if each else ""
    return f"{told}of optimizer(model) in {taken_apart(run.model.job)[0].name}; --lr, --warmup and --weight-decay are not used"


def _check_data(folder: Path, job: Job) -> None:
    """Raise `ConfigurationError` if the elastic run in `folder`, whose members divide the data among them, had other data."""
    for path in (path for own in folder.glob("checkpoints/*") for path in reversed(checkpoint.found_in(own))):
        with suppress(CheckpointError, DataError):
            manifest = checkpoint.read(path, hashes=False).manifest
            ledger, data = manifest["facts"].get("agreed", {}).get("ledger"), manifest["notes"].get("data", {})
            samples = decode(bytes.fromhex(ledger)).samples if ledger else None
            for there, given, told in (
                (samples, job.samples, "{:,} samples in an epoch there, {:,} given"),
                (data.get("text"), job.text, "a text with digest {} there, {} given"),
            ):
                if None not in (there, given) and there != given:
                    raise ConfigurationError(
                        f"{folder} was begun with other data: {told.format(there, given)}. Resume with the run's own, or start a new run in "
                        "another --out."
                    )
            return


def _weighed(run: Run, why: str) -> tuple[Run, str]:
    """See `check_and_weigh`. Gradients are already those of the loss over all tokens; a method with its own loop has its own weights."""
    if run.placement.weigh or run.make_method():
        return run, ""
    strategy = run.make_strategy()
    if strategy.exchanges_gradients:
        return run, ""
    if what := cannot_weigh(strategy):
        return run, f"deltas weigh 1, though packed batches have different numbers of tokens, because of {what}"
    told = f"the weight of a delta is its number of tokens, because {why}; --weigh alike: all weigh 1"
    return run.changed(weigh="tokens"), told


def _check(run: Run, job: Job) -> nn.Module:
    """Check one model."""
    placement = run.placement
    given = {"evict": placement.evict, "grace": placement.grace, "own_text": run.data.own_text}
    given = {name: value for name, value in given.items() if value}
    if given and not placement.elastic:
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigurationError(
            f"{named} with carrier={placement.carrier!r}: an elastic run is needed for that; add --elastic, or leave it out."
        )
    attack = run.method.liar()
    if run.model.job and attack and attack.flips_labels:
        raise ConfigurationError(
            f"attack={run.method.attack!r} with job={run.model.job!r}: the targets of a job are its own; choose another attack."
        )
    if run.data.batches:
        _check_batches(run)
    model = job.try_out(placement.replicas)
    if job.make_optimizer(model):
        _check_own_optimizer(run)
    weighs = placement.weigh == "tokens" and not placement.elastic
    if method := run.make_method():
        if weighs:
            raise ConfigurationError(
                f"weigh='tokens' with {run.method.label}, which weighs replicas itself: leave one of them out."
            )
        method.check_run(run, job)
        return model
    strategy = run.make_strategy()
    if weighs:
        check_weighing(strategy)
    Calendar(
        strategy.schedule, len(strategy.partition.fragments(model)), lambda step: learning_rate(run, step)
    ).departs(1)
    strategy.exchange.init(strategy.codec, 0, 0, run.placement.replicas)  # refuses the sites of another group
    strategy.aggregate.check(run.placement.replicas)  # refuses groups that are too small for the stated number of liars
    if strategy.privacy:
        strategy.privacy.check()
    return model


def _check_batches(run: Run) -> None:
    """Raise `ConfigurationError` if replicas cannot have micro-batches of different sizes in `run`."""
    given, method = f"batch={list(run.data.batches)} with", run.make_method()
    if method and not method.traits.weighs_samples:
        raise ConfigurationError(
            f"{given} {run.method.label}, which does not weigh replicas by their samples; give one --batch for all, or choose "
            "streaming_sign, streaming_diloco or decoupled_diloco."
        )
    strategy = None if method else run.make_strategy()
    if strategy and not strategy.exchanges_gradients and (what := cannot_weigh(strategy)):
        raise ConfigurationError(
            f"{given} {what}: deltas cannot be weighed by their samples there; give one --batch for all, or choose streaming_sign, "
            "streaming_diloco or decoupled_diloco."
        )


def _check_own_optimizer(run: Run) -> None:
    """Raise `ConfigurationError` if a job has its own optimizer and the run sets another."""
    made = run.method.composition(run.optimizer.clip)
    rival = f"optimizer={run.optimizer.optimizer!r}" if run.optimizer.optimizer else ""
    if run.make_method() or getattr(made, "inner", None) is not None:
        rival = f"strategy={run.method.label}, which has its own optimizer,"
    if rival:
        raise ConfigurationError(
            f"{rival} with job={run.model.job!r}, whose file has optimizer(model): only one can make the optimizer; leave one of them out."
        )
