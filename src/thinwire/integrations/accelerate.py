"""A training loop with accelerate, in which each process is a replica; it has the interface of accelerate's own `LocalSGD`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

In this context DistributedDataParallel exchanges no gradients. Needs the extra: pip install thinwire[accelerate].
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations.extras import needs

with needs("accelerate"):
    from accelerate import Accelerator, DistributedType

from thinwire import checkpoint
from thinwire.comm import Group
from thinwire.comm.group import TIMEOUT
from thinwire.drivers.handshake import compare_settings
from thinwire.drivers.loop_warnings import silent
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.attached import count_skipped, world
from thinwire.integrations.traffic import told
from thinwire.membership.rendezvous import Membership
from thinwire.recipes import local_sgd
from thinwire.replica import Replica
from thinwire.strategy import Strategy
from thinwire.types import Observer

FOLDER = "thinwire"  # in a state that accelerate saves
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class LocalSGD:
    """A `Replica` with the interface of accelerate's `LocalSGD`. At the end the model holds the outer weights.

    In the context, `accelerator.save_state` and `load_state` save and load each replica's own state, bit for bit: weights, inner optimizer,
    anchors and rounds in flight, in `thinwire/replica-r` of the folder. The other files are accelerate's: those of process 0, and random
    states.

    Args:
        accelerator: the one that has prepared `model` and its optimizers.
        model: as `prepare` returned it.
        local_sgd_steps: H, inner steps between two plain averages, as in accelerate's; or give `strategy`.
        enabled: False disables everything, as in accelerate's.
        strategy: any strategy, instead of `local_sgd_steps`.
        group: the replicas that exchange; None: accelerate's processes under gloo, or a single replica.
        timeout: without `group`, the most seconds that a replica waits for another.
        observer: called with each event, like that of `Replica`.

    Raises:
        ConfigurationError: on entry; DeepSpeed, FSDP, Megatron-LM, XLA, or an optimizer that was not prepared.
        ModelError, DisagreementError, LinkError: on entry, as `Replica`.
        CheckpointError: from `accelerator.load_state`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int | None = None,
        enabled: bool = True,
        *,
        strategy: Strategy | None = None,
        group: Group | None = None,
        timeout: float = TIMEOUT,
        observer: Observer = silent,
    ) -> None:
        if (local_sgd_steps is None) == (strategy is None):
            raise ConfigurationError(
                f"local_sgd_steps={local_sgd_steps}, strategy={strategy}: one of the two is needed. Give either."
            )
        if isinstance(group, Membership):
            raise ConfigurationError(
                "a Membership: members of an elastic run jump to the step of the others, which a loop over accelerate's batches does not see. "
                "Write `while replica.step < steps` around a Replica (docs/own-loop.md)."
            )
        if accelerator.distributed_type in _REFUSED:
            raise ConfigurationError(
                f"{accelerator.distributed_type}: each process needs the whole model. Leave it out, and give each replica one process."
            )
        self.accelerator, self.model, self.enabled = accelerator, model, enabled
        self.strategy = strategy or local_sgd(every=local_sgd_steps or 0)
        self._given, self._timeout, self._observer = group, timeout, observer
        self._within = ExitStack()
        self._folder = Path()
        self._counted = 0

    def __enter__(self) -> Self:
        if not self.enabled:
            return self
        with ExitStack() as within:
            if isinstance(self.model, DistributedDataParallel):
                within.enter_context(self.model.no_sync())
            group = self._given or world(self.accelerator.num_processes, self._timeout)
            if not self._given:
                within.callback(group.close)
            plain, self._optimizers = self.accelerator.unwrap_model(self.model), self._prepared()
            inner = [one.optimizer for one in self._optimizers]
            replica = Replica(self.strategy, plain, inner, group, observer=self._observer)
            within.callback(replica.close)
            if said := compare_settings(
                group, {}, {"number of batches": self._batches()}
            ):  # of loaders for evaluations too
                warnings.warn(f"{said}, and leave the loop at one step on all.", RuntimeWarning, stacklevel=2)
            self.replica, self._name = replica, f"replica-{group.rank}"
            for hook in (
                self.accelerator.register_save_state_pre_hook(self._save),
                self.accelerator.register_load_state_pre_hook(self._load),
            ):
                within.callback(hook.remove)
            self.accelerator.register_for_checkpointing(self)
            within.callback(self.accelerator._custom_objects.remove, self)
            self._within = within.pop_all()
        if group.rank == 0:
            print(f"thinwire: {told(self.strategy, replica, group.size)}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._within:
            if self.enabled and kind is None:
                self.replica.finish()

    def step(self) -> None:
        """Call it after the optimizer's step and `zero_grad`, or after every batch. It counts a step that a GradScaler skipped; the exchange itself
        needs no call."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        if self.replica.step == self._counted:
            if self._accumulates():
                return
            # of several, the scaler may have skipped some
            for optimizer in [one for one in self._optimizers if one.step_was_skipped] or self._optimizers:
                count_skipped(optimizer)
        self._counted = self.replica.step

    def _accumulates(self) -> bool:
        """Whether gradients are held, so no step was due. Zeros after a step that a GradScaler skipped are none: `zero_grad` has left them."""
        zeroed = any(optimizer.step_was_skipped for optimizer in self._optimizers)
        held = (p.grad for one in self._optimizers for group in one.param_groups for p in group["params"])
        return any(gradient is not None and not (zeroed and not gradient.any()) for gradient in held)

    def state_dict(self) -> dict[str, Any]:
        """For `accelerator.save_state`, which saves that of process 0: the inner step."""
        return {"step": self.replica.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For `accelerator.load_state`, which calls it last: resume from this replica's own state."""
        path = self._folder / FOLDER / self._name / f"step-{int(state['step']):08d}"
        if not path.is_dir():
            raise CheckpointError(
                f"{path} does not exist: the state of this replica is needed. Load a folder that the same number of replicas saved in LocalSGD."
            )
        checkpoint.load(checkpoint.read(path), self.replica)
        self._counted = self.replica.step

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        notes = {"replica": self._name}
        checkpoint.save(Path(folder) / FOLDER / self._name, self.replica, notes, keep=1, frozen=False)

    def _load(self, models: list[nn.Module], folder: str) -> None:
        self._folder = Path(folder)

    def _batches(self) -> str:
        """The lengths of the prepared data loaders that have one."""
        lengths = []
        for loader in self.accelerator._dataloaders:
            with suppress(TypeError):
                lengths.append(len(loader))
        return ", ".join(map(str, lengths)) or "unknown"

    def _prepared(self) -> list[Any]:
        """The prepared optimizers of the model."""
        own = {id(parameter) for parameter in self.model.parameters()}

        def holds(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

        found = [one for one in self.accelerator._optimizers if holds(one)]
        if not found:
            raise ConfigurationError(
                "the accelerator has prepared no optimizer of this model: one is needed. Call accelerator.prepare(model, optimizer, ...) first."
            )
        return found
