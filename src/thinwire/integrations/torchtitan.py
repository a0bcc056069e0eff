"""Makes torchtitan's `Trainer` a replica: each replica is a separate torchtitan world, and thin links join the worlds.

    trainer = config.build()
    with attach(trainer, tw.streaming_diloco(every=100), group):
        trainer.train()

    --override.imports 'thinwire.integrations.torchtitan.own_share={"replica": 0, "replicas": 2}'

Needs the extra: pip install thinwire[torchtitan].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.override import override

from thinwire.comm import Group
from thinwire.errors import ConfigurationError, EndedError
from thinwire.integrations.members import keep_to_the_end, meet
from thinwire.integrations.traffic import told
from thinwire.membership.rendezvous import Membership
from thinwire.replica import Replica
from thinwire.runtime.loop_warnings import silent
from thinwire.strategy import Strategy
from thinwire.types import Observer

STATE = "thinwire"  # key in the states of the checkpointer
_TIMEOUT = 1800.0  # seconds that the first member waits for others, as torch.distributed's own


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
        EndedError: all steps of the run are trained.
    """
    if len(trainer.model_parts) != 1:
        raise ConfigurationError(
            f"{len(trainer.model_parts)} model parts: one is needed, without pipeline parallelism. Set "
            "parallelism.pipeline_parallel_degree to 1."
        )

    def attached() -> Replica:
        return Replica(
            strategy, trainer.model_parts[0], list(trainer.optimizers), group, site=site, observer=observer
        )  # fmt: skip

    states = getattr(trainer.checkpointer, "states", {})  # a checkpointer that is not enabled has none
    if not isinstance(group, Membership):
        with attached() as replica:
            states[STATE] = replica
            if group.rank == 0:
                print(f"thinwire: {told(strategy, replica, group.size)}", flush=True)
            yield replica
        return
    group.require({"torchtitan's training.steps": str(trainer.config.training.steps)})
    group.most_steps = group.most_steps or trainer.config.training.steps
    with meet(attached, _TIMEOUT) as replica:
        with _followed(trainer, replica) as follower:
            states[STATE] = follower
            print(f"thinwire: {told(strategy, replica, 1)}", flush=True)
            yield replica
        replica.finish(keep_seconds)
        keep_to_the_end(group, keep_seconds)


@contextmanager
def _followed(trainer: Built, replica: Replica) -> Iterator[_Follower]:
    """A context in which the trainer's step and learning rates follow the jumps of the replica's step. Raises `EndedError`."""
    if replica.step >= trainer.config.training.steps:  # torchtitan would load its checkpoint over the final weights
        raise EndedError(
            f"the run has ended at step {replica.step}, before this replica joined. Copy the model from another."
        )
    follower = _Follower(trainer, replica)
    before = trainer.optimizers.register_step_pre_hook(follower.before_step)
    after = trainer.optimizers.register_step_post_hook(follower.after_step)
    try:
        yield follower
    finally:
        before.remove()
        after.remove()


class _Follower:
    """Keeps torchtitan's step and learning rates at those of a replica whose step jumps to that of the others; its `Stateful`."""

    def __init__(self, trainer: Built, replica: Replica) -> None:
        self.trainer, self.replica = trainer, replica
        self._joined = replica.step
        self._move(replica.step)  # before the first step; loading a checkpoint may set it back

    def before_step(self, *_: object) -> None:
        """Called when torchtitan has counted the next step."""
        self._move(self.replica.step + 1)

    def after_step(self, *_: object) -> None:
        self._move(self.replica.step)

    def _move(self, step: int) -> None:
        while self.trainer.step < step:
            self.trainer.step += 1
            self.trainer.lr_schedulers.step()

    def state_dict(self) -> dict[str, Any]:
        return self.replica.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.replica.load_state_dict(saved)
        self.replica.step = max(self._joined, self.replica.step)  # DCP has stepped the optimizer, to make its state


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
