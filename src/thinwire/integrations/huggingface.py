"""A callback that makes transformers' `Trainer`, and the trainers of TRL, replicas.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[ThinwireCallback(tw.streaming_diloco(every=100))])
    trainer.train()                       # under torchrun, or any launcher: each process is a replica

Under a launcher accelerate wraps the model in DistributedDataParallel, and averages gradients, losses and metrics over all processes at
every step. The callback tells accelerate, before anything is wrapped, that each process is alone, so that only Thinwire exchanges between
the processes. Training data are still divided among them. Needs the extra: pip install thinwire[trainer].
"""

from __future__ import annotations

import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset

from thinwire.integrations.extras import needs

with needs("trainer"):
    from accelerate.state import PartialState
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
    from transformers.optimization import GreedyLR
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from thinwire import checkpoint
from thinwire.comm import Group
from thinwire.drivers.handshake import agree_on_resume, compare_settings
from thinwire.drivers.loop_warnings import silent
from thinwire.drivers.model_buffers import floating
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.files import flush
from thinwire.integrations.attached import count_skipped, equalize, newest_of_all, sample, too_short
from thinwire.integrations.huggingface_checks import (
    ProcessPlace,
    check,
    check_hidden,
    check_member,
    check_share,
    evaluations,
    facts,
    found_place,
    set_folder,
)
from thinwire.integrations.members import Drawn, MemberSampler, keep_to_the_end, meet, refuse
from thinwire.integrations.traffic import told
from thinwire.membership.rendezvous import Membership
from thinwire.pieces.partition import trainable
from thinwire.replica import Replica
from thinwire.strategy import Strategy
from thinwire.types import Observer

FOLDER = "thinwire"  # in a checkpoint of the trainer


class ThinwireCallback(TrainerCallback, ExportableState):
    """Makes each process of a `Trainer` a replica under `strategy`; an optimizer step of the trainer is an inner step.

    Each replica writes its own whole checkpoints: replica 0 in `output_dir`, replica r in `output_dir/replica-r`. The folder `thinwire/`
    beside the trainer's files has the replica's own weights, moments, anchors and rounds in flight.
    `trainer.train(resume_from_checkpoint=callback.newest())` starts, and resumes from it, bit for bit, all replicas at one step. Only replica 0
    logs. When training ends all models are equal, and only replica 0 saves.

    A step that a GradScaler skips trains nothing and counts as an inner step, so that all replicas keep to the same steps.

    With a `Membership` replicas may die, return and join late. Each is started separately, writes into `output_dir/NAME`, and continues at
    the step of the others: the trainer's step and learning rate move there, and evaluations and saves of the skipped steps are done once.

    Args:
        strategy: the strategy of all replicas.
        group: the replicas that exchange, or a `Membership`; None: the launcher's processes under gloo, or a single replica.
        weights: the weights that the trainer evaluates and saves: the "anchors", on which all replicas agree, or the replica's "own".
        own_data: True: every process has its own training data; False: all have the same, and each trains on a share.
        keep_seconds: with a `Membership`: the seconds for which one member stays at the end, to give missing members the final state.
        observer: called with each event, like that of `Replica`.

    Raises:
        ConfigurationError: when the trainer is made or begins: a setting that cannot work; the message says what to do.
        CheckpointError: the trainer resumes from a checkpoint without this replica's state.
        ModelError, DisagreementError, LinkError: when training begins, like `Replica`.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group | Membership | None = None,
        *,
        weights: Literal["anchors", "own"] = "anchors",
        own_data: bool = False,
        keep_seconds: float = 300.0,
        observer: Observer = silent,
    ) -> None:
        if weights not in ("anchors", "own"):
            raise ConfigurationError(f"weights={weights!r}: 'anchors' or 'own' is needed. Choose one.")
        self.strategy, self.weights, self.own_data, self.keep_seconds = strategy, weights, own_data, keep_seconds
        self.replica: Replica | None = None
        self._given, self._group, self._observer = group, group, observer
        self._member = group if isinstance(group, Membership) else None
        self._sampler: MemberSampler | None = None
        self._jumped = self._logged = 0  # skipped steps since the last logged loss, and the step of that loss
        self._place = ProcessPlace(0, 1)
        self._args: TrainingArguments | None = None
        self._anchored = ExitStack()
        self._ended = self._evaluates = self._made = self._warned = False
        self._checked = False  # whether the state after the first step can be saved
        self._yielded = self._unsaved = (
            False  # whether another callback's weights are in the model: in an evaluation, in a save
        )
        self._handler: CallbackHandler | None = None  # of the trainer, during a training
        self._trained: Tensor | None = None  # a sample of the weights after this step, if they are evaluated or saved
        self._mean: float | None = None  # over all replicas, of the metric of this evaluation

    def share(self, data: Dataset[Any], *, seed: int = 0) -> IterableDataset[Any]:
        """For `train_dataset=`, with a `Membership`: the samples of `data` for this replica; all replicas together train each once per epoch."""
        if self._member is None:
            raise ConfigurationError(
                "share() in a fixed group: a Membership is needed. Give train_dataset=data: the trainer divides it among the replicas."
            )
        samples: Any = data
        self._sampler = MemberSampler(len(samples), seed, self._member, self._anchored.close)
        return Drawn(samples, self._sampler)

    def newest(self) -> str | None:
        """For `trainer.train(resume_from_checkpoint=callback.newest())`, which starts a training and resumes it. Collective in a fixed group.

        Returns:
            The checkpoint of this replica at the newest step of which every replica has a whole one; None at the first start. Later ones, and
            torn ones, are renamed to passed-over-checkpoint-N: they belong to another future of this run.

        Raises:
            ConfigurationError: no Trainer was made with this callback.
            CheckpointError: no step is common to all replicas, and more than the first save would be lost.
            LinkError: another replica was lost, or has not called it.
        """
        if self._args is None:
            raise ConfigurationError(
                "newest() before the Trainer was made: it has the folder of this replica. Write Trainer(..., callbacks=[callback]) first."
            )
        folder = Path(str(self._args.output_dir))
        found = {
            int(path.name[11:]): path for path in folder.glob("checkpoint-*") if re.fullmatch(r"[0-9]+", path.name[11:])
        }
        torn = {step: _torn(path, step) for step, path in sorted(found.items())}
        whole, skipped = [(step,) for step, why in torn.items() if not why], [why for why in torn.values() if why]
        try:
            common = newest_of_all(whole, skipped, None if self._member else self._meet(self._args), folder)
        except BaseException:
            self.close()
            raise
        newest = common[0] if common else 0
        for step, path in found.items():
            if step > newest:
                aside = path.with_name(f"passed-over-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        return str(found[newest]) if common else None

    def _meet(self, args: TrainingArguments) -> Group:
        """The replicas of a fixed group."""
        if not isinstance(self._group, Group):
            self._group = self._place.group(args.ddp_timeout)
        return self._group

    def state(self) -> dict[str, Any]:
        """For `trainer_state.json`: the replica whose checkpoint it is."""
        return {"args": {}, "attributes": self._whose()}

    def _whose(self) -> dict[str, Any]:
        if self._member:
            return {"replica": self._member.name}
        return {"replica": self._place.rank, "replicas": self._place.size}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let accelerate see one process, except when it divides the data."""
        self._made, self._args = True, args
        rank, size, local = found_place(PartialState())
        if isinstance(self._given, Group):
            rank, size = self._given.rank, self._given.size
        elif self._member:
            rank, size = 0, 1
            check_member(args, self._member, self._sampler)
        self._place = ProcessPlace(rank, size, local)
        check(args, size, self.own_data, self.weights)
        self._place.hide(shares=1 if self.own_data else size)
        set_folder(args, self._member.name if self._member else f"replica-{rank}" if rank else "")
        if size > 1:
            args.log_on_each_node = args.average_tokens_across_devices = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Meet the other replicas. If the trainer resumes, resume from this replica's own state."""
        if not self._made:
            raise ConfigurationError(
                "the callback was added after the Trainer was made, which has then found the other processes: it is needed before. Write "
                "Trainer(..., callbacks=[callback])."
            )
        if sum(isinstance(one, ThinwireCallback) for one in _handler().callbacks) > 1:
            raise ConfigurationError("two ThinwireCallbacks in one Trainer: one is needed. Leave the other out.")
        check_hidden()
        if state.is_hyper_param_search:
            raise ConfigurationError(
                "a hyperparameter search: the callback needs one training that all replicas share. Search with one process, without the callback."
            )
        found = self._found(args, state)
        place, model, optimizer, loader = (self._place, given["model"], given["optimizer"], given["train_dataloader"])
        if getattr(optimizer, "scaler", None) is not None and self.strategy.exchanges_gradients:
            raise ConfigurationError(
                "fp16 with a strategy that exchanges gradients: each replica scales its gradients by its own number, so bf16 or deltas are "
                "needed. Give bf16=True, or another strategy."
            )
        inner = getattr(optimizer, "optimizer", optimizer)
        if found and not (found.path.parents[1] / "scheduler.pt").exists():
            _load_schedule(found, given["lr_scheduler"], getattr(optimizer, "scaler", None))
        resume = partial(_load, found) if found else None
        self._ended, self._jumped, self._logged = False, 0, state.global_step
        if self._member:
            if hasattr(args, "num_generations"):  # TRL seeds sampling by the process, and each member is process 0
                set_seed((args.seed + zlib.crc32(self._member.name.encode())) % 2**32)
            self.replica = self._join(args, state, loader, model, inner, resume)
            self._catch_up(args, state, TrainerControl(), given["lr_scheduler"])
            # the run has ended, and a member has kept the final state for this one
            if state.global_step >= state.max_steps:
                self._end()
        else:
            if not self.own_data:
                check_share(loader, place)
            group = self._meet(args)
            told_of = facts(state, loader, self.own_data) | {"metric_for_best_model": args.metric_for_best_model}
            # all average them at the same steps
            if args.metric_for_best_model or (self.weights == "anchors" and floating(model)):
                told_of |= evaluations(args, state, loader)
            compare_settings(group, told_of)
            agree_on_resume(group, state.global_step, bytes(16))
            if found:  # zeros are equal on all replicas, so no weights are sent; the saved ones are loaded afterwards
                with torch.no_grad():
                    for _name, parameter in trainable(model):
                        parameter.zero_()
            self.replica = Replica(self.strategy, model, inner, group, resume=resume, observer=self._observer)
        place.hide(shares=1)
        place.show_each(args)
        model.should_save_on_this_rank = bool  # as the trainer decides, for any rank of torch.distributed
        state.is_local_process_zero = place.rank == 0  # only replica 0 prints
        if place.rank == 0:
            print(f"thinwire: {told(self.strategy, self.replica, place.size)}", file=sys.stderr, flush=True)
            if short := too_short(self.strategy, state.max_steps):
                print(f"thinwire: {short}", file=sys.stderr, flush=True)
        self._take_place()

    def _take_place(self) -> None:
        """Come before all callbacks but the trainer's own flow, with a helper behind all: others update averages of weights, and exchange weights, in
        the same events, and the two exchanges must not cross."""
        handler = _handler()
        others = [one for one in handler.callbacks if one is not self]
        flow = sum(isinstance(one, DefaultFlowCallback) for one in others[:1])
        handler.callbacks.append(
            last := _Last(self)
        )  # of the list that is being called, so that its `on_train_begin` is, too
        handler.callbacks = [*others[:flow], self, *others[flow:], last]
        self._handler = handler

    def _join(
        self, args: TrainingArguments, state: TrainerState, loader: Any, model: Any, optimizer: Any,
        resume: Callable[[Replica], object] | None,
    ) -> Replica:  # fmt: skip
        """Attach the replica of a member, when enough others have joined; it waits for them for `ddp_timeout`."""
        member, sampler = self._member, self._sampler
        assert member is not None
        drawn = isinstance(set_ := getattr(loader, "dataset", None), Drawn) and set_.sampler is sampler
        unshared = {"training data that other members read too": (
            not (self.own_data or drawn),
            "give train_dataset=callback.share(data), or ThinwireCallback(..., own_data=True) if each has data of its own, as with TRL's "
            "trainers, which prepare their data themselves",
        )}  # fmt: skip
        refuse(member, unshared)
        batch = args.train_batch_size * args.gradient_accumulation_steps
        member.require(
            {"the trainer's max_steps": str(state.max_steps)} | (sampler.facts(batch) if sampler and drawn else {})
        )
        reader = sampler.open(batch) if sampler and drawn else None
        member.most_steps = member.most_steps or state.max_steps
        return meet(
            member,
            lambda: Replica(
                self.strategy, model, optimizer, member, reader=reader, resume=resume, observer=self._observer
            ),
            args.ddp_timeout,
        )

    def _catch_up(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, schedule: Any) -> None:
        """Move the trainer to the replica's step, which has jumped if the others were ahead; evaluations and saves of skipped steps are done now."""
        jump = self._attached().step - state.global_step
        self._jumped += jump
        for _ in range(jump):
            state.global_step += 1
            DefaultFlowCallback().on_step_end(args, state, control)
            if not isinstance(schedule, ReduceLROnPlateau | GreedyLR):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the warning that the optimizer has not stepped before
                    schedule.step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Divide the sum of losses by the number of trained steps, without skipped ones."""
        logs = given["logs"]
        if "train_runtime" in logs:  # the last, before the trainer loads the best model
            self._anchored.close()
        self._average_metric(args, logs)  # before the on_evaluate of any callback, because one may stop the training
        if "loss" not in logs:
            return
        steps = state.global_step - self._logged
        if self._jumped:
            logs["loss"] *= steps / max(1, steps - self._jumped)
            state.log_history[-1]["loss"] = logs["loss"]
        self._jumped, self._logged = 0, state.global_step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Let a step change nothing if its samples belong to others now, or the run has ended."""
        sampler, samples = self._sampler, args.train_batch_size * args.gradient_accumulation_steps
        if self._ended or (sampler and (sampler.ended or not sampler.trains(samples))):
            given["model"].zero_grad()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Count a skipped step, and end after the last step, before any other callback sees the weights."""
        replica = self._attached()
        if self._ended:
            state.global_step = state.max_steps
            return
        if replica.step < state.global_step:
            count_skipped(given["optimizer"])
        if self._member:
            self._catch_up(args, state, control, given["lr_scheduler"])
        if replica.step != state.global_step:
            raise ConfigurationError(
                f"the optimizer has taken {replica.step} steps, the trainer {state.global_step}: the two numbers must be equal. Let the trainer "
                "alone step the optimizer."
            )
        if not self._checked and args.save_strategy.value != "no":  # now, not at the first save
            self._checked = True
            checkpoint.check(replica, frozen=False)
        control.should_training_stop |= replica.stopping
        if state.global_step >= state.max_steps:
            self._end()
        self._remember(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._anchored.close()
        self._remember(control)

    def on_prediction_step(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Warn, once, of an evaluation for which the anchors were not put into the model."""
        unknown = self.replica and not (self._ended or self._evaluates)
        if unknown and not self._warned and (self.weights == "anchors" or args.metric_for_best_model):
            self._warned = True
            warnings.warn(
                "an evaluation that ThinwireCallback did not know of, so it has this replica's own weights and its own metric: let a callback "
                "set control.should_evaluate instead of calling trainer.evaluate()",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Let all replicas choose the same best model, and change their learning rates alike, whatever their evaluation data."""
        if self._average_metric(args, given["metrics"]):
            self._evaluates, self._mean = False, None

    def _average_metric(self, args: TrainingArguments, metrics: dict[str, float]) -> bool:
        """Replace the metric of the best model by its mean over all replicas, exchanged once an evaluation. Returns whether it is there."""
        name = args.metric_for_best_model or ""
        name = name if name.startswith("eval_") else f"eval_{name}"
        if not self._evaluates or name not in metrics:
            return False
        if self._mean is None:
            self._mean = self._attached().mean(metrics[name])
        metrics[name] = self._mean
        return True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write this replica's state into the checkpoint that the trainer has just written, or when other callbacks have put back its weights."""
        self._anchored.close()
        self._unsaved = self._swapped()
        if not self._unsaved:
            self._save(args, state)

    def saved(self, args: TrainingArguments, state: TrainerState) -> None:
        """Write what `on_save` could not write."""
        if not self._unsaved:
            return
        if self._swapped():
            raise ConfigurationError(
                f"the checkpoint of step {state.global_step}: another callback has put other weights into the model than those that are trained, "
                "which a resume needs. Let it put them back in `on_evaluate`, or in `on_save`."
            )
        self._save(args, state)

    def _save(self, args: TrainingArguments, state: TrainerState) -> None:
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        files = [path for path in folder.iterdir() if path.is_file()]
        for path in (*files, folder):  # before Thinwire's part, which says that they are whole
            flush(path)
        notes = self._whose() | {"files": {path.name: path.stat().st_size for path in files}}
        if args.save_only_model:
            notes |= self._unsaved_by_trainer()
        checkpoint.save(folder / FOLDER, self._attached(), notes, frozen=False)

    def _unsaved_by_trainer(self) -> dict[str, Any]:
        """What a trainer with `save_only_model` leaves out and a resume needs."""
        assert self._handler is not None
        scaler = getattr(self._handler.optimizer, "scaler", None)
        return {"schedule": self._handler.lr_scheduler.state_dict(), "scaler": scaler.state_dict() if scaler else None}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the outer weights in the model, or the best ones if the trainer has loaded these."""
        self._anchored.close()
        replica = self._attached()
        if not self._ended:
            best = args.load_best_model_at_end and state.best_model_checkpoint is not None
            kept = [(p, p.detach().clone()) for _, p in trainable(replica.model)] if best else []
            self._end()
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)
        self._trained = sample(replica.model)

    def leave(self, args: TrainingArguments) -> None:
        """Make what other callbacks have left in the model, such as averages of weights, equal on all replicas, and leave the group."""
        model = self._attached().model
        if isinstance(self._group, Group) and self._trained is not None:
            equalize(model, self._group, self._trained)
        del model.should_save_on_this_rank
        if self._member:
            keep_to_the_end(self._member, self.keep_seconds)
        self.close()
        self._place.show_local(args)

    def close(self) -> None:
        """Detach and leave the group, after an error too. Idempotent; a group that was given stays open."""
        self._anchored.close()
        if self._handler:
            self._handler.callbacks = [one for one in self._handler.callbacks if not isinstance(one, _Last)]
        if self.replica:
            self.replica.close()
        self.replica = self._handler = self._trained = None
        if isinstance(self._group, Group) and not self._given:
            self._group.close()
        self._group = self._given

    def _attached(self) -> Replica:
        if self.replica is None:
            raise ConfigurationError("no training has begun: `trainer.train()` is needed first. Call it.")
        return self.replica

    def _end(self) -> None:
        self._attached().finish(self.keep_seconds)
        self._ended = True
        if self._sampler:
            self._sampler.ended = True

    def _remember(self, control: TrainerControl) -> None:
        """Take a sample of the weights, before other callbacks exchange them to evaluate or save others."""
        due = control.should_evaluate or control.should_save
        self._trained = sample(self._attached().model) if due else None

    def _swapped(self) -> bool:
        """Whether another callback has put other weights into the model than those that are trained."""
        return self._trained is not None and not torch.equal(sample(self._attached().model), self._trained)

    def show(self, evaluates: bool, saves: bool) -> None:
        """Let the trainer evaluate and save the anchors, and the mean of all replicas' buffers, unless another callback has put weights of its own
        there. Collective in a fixed group."""
        self._evaluates = evaluates
        if self.weights == "own" or self._ended or not (evaluates or saves):
            return
        self._yielded = self._swapped()
        if self._yielded:
            with self._attached().averaged_buffers():  # other replicas may be without that callback
                return
        self._anchored.enter_context(self._attached().anchored())
        self._anchored.enter_context(self._attached().averaged_buffers())

    def hide(self) -> None:
        """Put the replica's own weights and buffers back."""
        self._anchored.close()

    def evaluated(self) -> None:
        """Let the trainer save the anchors, if another callback's weights were evaluated and it has put back the trained ones."""
        if self._yielded and not self._swapped():
            self.show(self._evaluates, saves=True)

    def _found(self, args: TrainingArguments, state: TrainerState) -> checkpoint.Checkpoint | None:
        """This replica's state at the step at which the trainer resumes; None if it begins."""
        if state.global_step == 0:
            return None
        step, place = state.global_step, self._place
        own = self._member.name if self._member else f"{place.rank} of {place.size}"
        callbacks: Any = state.stateful_callbacks or {}
        told: Any = callbacks.get(type(self).__name__)
        if not isinstance(told, Mapping) or told.get("attributes") != self.state()["attributes"]:
            whose = told.get("attributes") if isinstance(told, Mapping) else "a training without this callback"
            raise CheckpointError(
                f"the trainer resumes at step {step} from a checkpoint of {whose}: one of replica {own} is needed. "
                f"Call trainer.train(resume_from_checkpoint=True), which takes the newest in {args.output_dir}."
            )
        path = Path(str(args.output_dir)) / f"checkpoint-{step}" / FOLDER / f"step-{step:08d}"
        if not path.is_dir():  # a trainer does not tell its callbacks the path from which it resumes
            advice = f"Set output_dir to the folder of that checkpoint, or copy all of checkpoint-{step} into {args.output_dir}."
            if path.parents[1].is_dir():
                others = "" if self._member else ", on all replicas"
                advice = f"Its save was cut off: delete checkpoint-{step} and resume from the one before{others}."
            raise CheckpointError(
                f"the trainer resumes at step {step}, and {path} does not exist: the state of replica {own} is needed there. {advice}"
            )
        return checkpoint.read(path)


def _handler() -> CallbackHandler:
    """The handler of the trainer that calls the present `on_train_begin`."""
    frame = sys._getframe(1)
    while not isinstance(handler := frame.f_locals.get("self"), CallbackHandler):
        assert frame.f_back is not None, "only a trainer calls on_train_begin"
        frame = frame.f_back
    return handler


def _load(found: checkpoint.Checkpoint, replica: Replica) -> None:
    checkpoint.load(found, replica)


def _load_schedule(found: checkpoint.Checkpoint, schedule: Any, scaler: Any) -> None:
    """Restore the schedule and the scaler of a trainer with `save_only_model`."""
    notes = found.manifest["notes"]
    if "schedule" not in notes:
        raise CheckpointError(
            f"{found.path.parents[1]} has no scheduler.pt: without it the learning rate would begin anew. Restore that file."
        )
    schedule.load_state_dict(notes["schedule"])
    if scaler is not None and notes["scaler"]:
        scaler.load_state_dict(notes["scaler"])


def _torn(path: Path, step: int) -> str:
    """Why a checkpoint of the trainer is not whole; empty if it is."""
    own = path / FOLDER / f"step-{step:08d}"
    if not own.is_dir():
        return (
            f"{path} has no {own.relative_to(path)}: its save was cut off, or it is of a training without this callback"
        )
    try:
        files = checkpoint.read(own).manifest["notes"].get("files", {})
    except CheckpointError as error:
        return str(error)
    for name, size in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size < size:
            return f"{file} is missing, or shorter than it was written"
    return ""


class _Last(TrainerCallback):
    """Does behind all other callbacks what `bridge` must do after they have updated, exchanged and put back weights."""

    def __init__(self, bridge: ThinwireCallback) -> None:
        self.bridge = bridge

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self.bridge.show(args.eval_on_start, saves=False)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.bridge.hide()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bridge.show(control.should_evaluate, control.should_save)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bridge.show(control.should_evaluate, control.should_save)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.bridge.evaluated()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bridge.saved(args, state)

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        self.bridge.leave(args)
