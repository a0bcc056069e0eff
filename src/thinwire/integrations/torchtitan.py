"""torchtitan's `Trainer`, as a replica: each replica is a torchtitan world of its own, and thin links lie between the worlds.

    trainer = config.build()
    with attach(trainer, tw.streaming_diloco(every=100), group):
        trainer.train()

    --override.imports 'thinwire.integrations.torchtitan.own_share={"replica": 0, "replicas": 2}'

Needs the extra: pip install thinwire[torchtitan].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.override import override

from thinwire.comm import Group
from thinwire.errors import ConfigurationError
from thinwire.integrations.traffic import told
from thinwire.membership.rendezvous import Membership
from thinwire.replica import Replica
from thinwire.runtime.loop_warnings import silent
from thinwire.strategy import Strategy
from thinwire.types import Observer

STATE = "thinwire"  # among the states of the checkpointer


class Built(Protocol):
    """The attributes of torchtitan's `Trainer` that are used here, once it is built."""

    model_parts: list[nn.Module]
    optimizers: Any
    checkpointer: Any


def attach(
    trainer: Built,
    strategy: Strategy,
    group: Group | Membership,
    *,
    site: Group | None = None,
    observer: Observer = silent,
) -> Replica:
    """A Replica of what `trainer` trains, whose state is in the trainer's checkpoints. Use it as `with attach(...): trainer.train()`.

    Args:
        trainer: built, and not trained yet.
        strategy: of all replicas.
        group: the ranks with this rank's number in all worlds.
        site: the ranks of this world, if torchtitan shards the model over them.
        observer: called with each event, as that of `Replica`.

    Raises:
        ConfigurationError: several model parts (pipeline parallelism).
        ModelError, DisagreementError, LinkError: as `Replica`.
    """
    if len(trainer.model_parts) != 1:
        raise ConfigurationError(
            f"{len(trainer.model_parts)} model parts · one is needed, without pipeline parallelism · set "
            "parallelism.pipeline_parallel_degree to 1"
        )
    replica = Replica(strategy, trainer.model_parts[0], list(trainer.optimizers), group, site=site, observer=observer)
    states = getattr(trainer.checkpointer, "states", None)  # a checkpointer that is not enabled has none
    if states is not None:
        states[STATE] = replica
    if not isinstance(group, Membership) and group.rank == 0:
        print(f"thinwire: {told(strategy, replica, group.size)}", flush=True)
    return replica


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
            f"replica={replica} of replicas={replicas} · a number from 0 to {replicas - 1} is needed · give each replica its own"
        )
    return OwnShare.Config(of=config, replica=replica, replicas=replicas)
