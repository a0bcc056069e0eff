"""Makes torchtitan's `Trainer` a replica: each replica is a separate torchtitan world, and thin links join the worlds.

    trainer = config.build()
    with attach(trainer, tw.streaming_diloco(every=100), group):
        trainer.train()

    --override.imports 'thinwire.integrations.torchtitan.own_share={"replica": 0, "replicas": 2}'

Needs the extra: pip install thinwire[torchtitan].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from thinwire.integrations.extras import needs

with needs("torchtitan"):
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config.override import override

from thinwire.comm import Group
from thinwire.comm.group import TIMEOUT
from thinwire.drivers.loop_warnings import silent
from thinwire.errors import ConfigurationError
from thinwire.integrations.members import keep_to_the_end, meet
from thinwire.integrations.traffic import told
from thinwire.membership.rendezvous import Membership
from thinwire.replica import Replica
from thinwire.strategy import Strategy
from thinwire.types import Observer

STATE = "thinwire"  # key in the states of the checkpointer


class Built(Protocol):
    """The attributes of torchtitan's `Trainer` that are used here, once it is built."""

    config: Any
    step: int
    model_parts: list[nn.Module]
    optimizers: Any
    lr_schedulers: Any
    checkpointer: Any


@contextmanager
def attach(
    trainer: Built,
    strategy: Strategy,
    group: Group | Membership,
    *,
    site: Group | None = None,
    keep_seconds: float = 300.0,
    observer: Observer = silent,
) -> Iterator[Replica]:
    """A context with a `Replica` of the trainer's model, whose state is in the trainer's checkpoints: `with attach(...): trainer.train()`.

    With a `Membership` the trainer's step and learning rates follow the others, and its `training.steps` are those of the run.

    Args:
        trainer: a built trainer, before training.
        strategy: the strategy of all replicas.
        group: the ranks with this rank's number in all worlds.
        site: the ranks of this world, if torchtitan shards the model over them.
        keep_seconds: with a `Membership`: the seconds for which one member stays at the end, to give missing members the final state.
        observer: called with each event, like that of `Replica`.

    Raises:
        ConfigurationError: several model parts (pipeline parallelism).
        ModelError, DisagreementError, LinkError: like `Replica`.
        EndedError: the run has ended, and no member keeps its final state.
    """
    if len(trainer.model_parts) != 1:
        raise ConfigurationError(
            f"{len(trainer.model_parts)} model parts: one is needed, without pipeline parallelism. Set "
            "parallelism.pipeline_parallel_degree to 1."
        )
    if isinstance(group, Membership):
        group.require({"torchtitan's training.steps": str(trainer.config.training.steps)})
        group.most_steps = group.most_steps or trainer.config.training.steps
    with _loads(trainer) as resume:

        def attached() -> Replica:
            return Replica(
                strategy, trainer.model_parts[0], list(trainer.optimizers), group, site=site, resume=resume, observer=observer
            )  # fmt: skip

        states = getattr(trainer.checkpointer, "states", {})  # a checkpointer that is not enabled has none
        if not isinstance(group, Membership):
            with attached() as replica:
                states[STATE] = replica
                if group.rank == 0:
                    print(f"thinwire: {told(strategy, replica, group.size)}", flush=True)
                yield replica
            return
        with meet(group, attached, TIMEOUT) as replica:
            states[STATE] = replica
            print(f"thinwire: {told(strategy, replica, 1)}", flush=True)
            with _follows(trainer, replica):
                yield replica
            replica.finish(keep_seconds)
            keep_to_the_end(group, keep_seconds)


@contextmanager
def _loads(trainer: Built) -> Iterator[Callable[[Replica], None] | None]:
    """A context in which torchtitan's checkpoint is loaded once, before a replica meets the others: by the result, as `Replica(resume=...)`.

    Without a checkpoint the initial weights, if there are any, are loaded now, because they are the first anchors; then the result is None.
    `trainer.train()` would load both after the others' weights were taken over, so it loads nothing in this context.
    """
    keeper, step = trainer.checkpointer, trainer.config.checkpoint.load_step
    load = keeper.load

    def resume(replica: Replica) -> None:
        keeper.states[STATE] = replica
        load(step=step)

    found = keeper.enable and (step if step >= 0 else keeper._find_load_step()) > 0
    if not found:
        load(step=step)
    keeper.load = lambda step=-1: keeper.enable
    try:
        yield resume if found else None
    finally:
        del keeper.load


@contextmanager
def _follows(trainer: Built, replica: Replica) -> Iterator[None]:
    """A context in which torchtitan's step and learning rates follow those of a replica whose step jumps to that of the others."""

    def move(step: int) -> None:
        while trainer.step < step:
            trainer.step += 1
            trainer.lr_schedulers.step()

    move(replica.step)
    optimizers = trainer.optimizers
    # torchtitan has counted the next step
    before = optimizers.register_step_pre_hook(lambda *_: move(replica.step + 1))
    after = optimizers.register_step_post_hook(lambda *_: move(replica.step))
    try:
        yield
    finally:
        before.remove()
        after.remove()


class OwnShare(BaseDataLoader):
    """Builds a data loader for this replica's share, as if all replicas' ranks were one larger world."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        of: BaseDataLoader.Config
        replica: int = 0
        replicas: int = 1

    def __new__(cls, config: Config, *, dp_world_size: int, dp_rank: int, **given: Any) -> Any:
        world, rank = dp_world_size * config.replicas, config.replica * dp_world_size + dp_rank
        return config.of.build(dp_world_size=world, dp_rank=rank, **given)


@override(target=BaseDataLoader.Config, fqns=["dataloader"], description="each replica reads its own share of the data")
def own_share(config: BaseDataLoader.Config, *, replica: int, replicas: int) -> OwnShare.Config:
    """For `--override.imports`: replica number `replica` of `replicas`. Raises `ConfigurationError`."""
    if not 0 <= replica < replicas:
        raise ConfigurationError(
            f"replica={replica} of replicas={replicas}: a number from 0 to {replicas - 1} is needed. Give each replica its own."
        )
    return OwnShare.Config(of=config, replica=replica, replicas=replicas)
