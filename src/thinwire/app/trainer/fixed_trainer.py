"""Training as one replica of a fixed group, whose replicas are the same from the first step to the last."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from thinwire import checkpoint
from thinwire.app.trainer.place import Place
from thinwire.app.trainer.resuming import steps_logged
from thinwire.app.trainer.run_folder import set_aside
from thinwire.app.trainer.text_job import TextJob, TextProbe
from thinwire.app.trainer.trainer import Trainer
from thinwire.comm import Group
from thinwire.comm.group import gather
from thinwire.drivers.attached import Attached
from thinwire.drivers.handshake import compare_settings
from thinwire.errors import CheckpointError, EndedError, LinkError, PacketError
from thinwire.replica import Replica

_RESUME = struct.Struct("=q?")  # inner steps that a rank has logged or saved; whether it can resume


class FixedTrainer(Trainer):
    """All replicas do the same inner steps, and stop and resume together."""

    who_stops = "all replicas stop"
    place: Place
    group: Group

    def _agree(self, facts: dict[str, Any]) -> None:
        self.group = self._wrapped(self.place.group)
        compare_settings(self.group, facts | {"resume": self.place.resume})

    def _attach(self, facts: dict[str, Any]) -> Replica | Attached:
        log, data = self.log, self.run.data
        tokens = float(self.batch * data.sequence * data.accumulate)
        if self.method and self.method.traits.one_model_each:
            assert isinstance(self.job, TextJob), "`check` refuses others"
            method: Any = self.method  # one with a probe set
            probe = TextProbe(self.job, self.model, method.probe, self.device, self.bf16)
            talking: Attached = method.attach(
                self.model, self.optimizer, self.group, probe=probe, observer=log.emit, clock=log.seconds
            )
            self._log_start(talking.strategy, talking.fragments)
            return talking
        if self.method:
            attached = self.method.attach(self.model, self.optimizer, self.group, observer=log.emit, clock=log.seconds)
            attached.tokens = tokens
            self._log_start(attached.strategy, attached.fragments)
            return attached
        strategy = self.run.make_strategy()
        self._log_start(strategy, strategy.partition.fragments(self.model))  # before the kernels are compiled
        return Replica(
            strategy, self.model, self.optimizer, self.group,
            tokens=tokens if self.run.placement.weigh == "tokens" else None,
            site=self.place.site, buffers=self.run.model.buffers, validation=self._validation, observer=self._hear,
            clock=log.seconds,
        )  # fmt: skip

    def _validation(self) -> Sequence[float]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self.job.validation(self.model, self.device)

    def _resume(self) -> None:
        if self._own_steps:
            found, skipped = checkpoint.newest(self.checkpoints)
        else:
            found, skipped = checkpoint.newest_common(self.checkpoints, self.group, self.place.site)
        lost, all_have = self._agreed_loss(found is not None)
        if not all_have and lost <= self.run.placement.checkpoint_every:
            # killed before all had saved for the first time: an automatic restart must not need a person for that
            set_aside(self.place.folder, self.place.name)
            if lost:
                said = f"no step has a complete checkpoint of every replica; the run begins again at the first step, after {lost} steps"
                self.log.emit("warning", 0, message=said)
            return
        if found is None:
            told = "; ".join(f"{one['path']}: {one['reason']}" for one in skipped)
            again = (
                "in another --out" if self.place.alone else "by --resume --from-start, which sets the checkpoints aside"
            )
            raise CheckpointError(
                f"--resume: no step has a complete checkpoint of every replica ({told}). Restore the missing ones, or begin again at the first "
                f"step {again}."
            )
        self._load(found)
        checkpoint.set_aside_later(self.checkpoints, found.step)
        path = str(found.path.relative_to(self.place.folder))
        self.log.emit("resume", found.step, from_step=found.step, path=path, skipped=skipped)

    def _newest_saved(self) -> int:
        return max(map(checkpoint.step_of, checkpoint.found_in(self.checkpoints)), default=0)

    def _agreed_loss(self, has: bool) -> tuple[int, bool]:
        """Inner steps that a beginning at the first step would lose, and whether every rank `has` a checkpoint to resume from. Collective."""
        lost = max(steps_logged(self.place.folder, self.place.name), self._newest_saved())
        for peers in (self.group, self.place.site):
            if peers is not None:
                told = gather(peers, _RESUME.pack(lost, has), _RESUME.size, "resume")
                try:
                    each = [_RESUME.unpack(one) for one in told]
                except struct.error as error:
                    raise PacketError(
                        f"a replica told {error} of its checkpoints; run the same version everywhere."
                    ) from None
                lost, has = max(steps for steps, _ in each), all(whole for _, whole in each)
        return lost, has

    def _at_risk(self) -> str:
        if self.run.placement.replicas * self.place.shards == 1 or self._own_steps:
            return ""
        saved = max(map(checkpoint.step_of, checkpoint.found_in(self.checkpoints)), default=None)
        if saved is None:
            return " It has no earlier one either: until it saves one, the run cannot resume."
        step, every, keep = self.replica.step, self.run.placement.checkpoint_every, self.run.placement.keep
        missed = step // every - saved // every + (step % every > 0) if every else 1  # what the others have saved since
        if missed >= keep:
            return (
                f" If the others could save, they have deleted step {saved} (--keep {keep}), and have no other in common with this replica: "
                "until it saves again, the run cannot resume."
            )
        more = f"{keep - missed} more checkpoint{'s' * (keep - missed > 1)}"
        return (
            f" The run can resume from step {saved} until the others have saved {more} (--keep {keep}; a stop saves one, too). Then no step "
            f"is left that all have: let this replica save before that, or copy the others' checkpoints of step {saved} to another folder."
        )

    @property
    def _own_steps(self) -> bool:
        return self.replica.own_loop and self.replica.own_steps

    def _survives(self, error: LinkError | EndedError) -> bool:
        return False

    def _summary(self, stopped: bool) -> dict[str, Any]:
        # If replicas have different speeds, no single position describes all.
        return super()._summary(stopped) | ({"samples": {}} if self._own_steps else {})

    @property
    def counted_steps(self) -> int:
        return self.progress

    @property
    def counted_replicas(self) -> int:
        return self.run.placement.replicas
