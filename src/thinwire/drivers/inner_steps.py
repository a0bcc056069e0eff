"""Detects the inner steps of the user's loop by hooks on its optimizers, and refuses steps that would bypass the exchange."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from thinwire.drivers.base import Driver, Training, same_bits
from thinwire.drivers.step_hooks import OtherOptimizers, outermost
from thinwire.errors import ConfigurationError, DisagreementError, ModelError
from thinwire.pieces.partition import is_sharded

# By the id of an optimizer, whose hooks keep both alive.
_attached: WeakValueDictionary[int, InnerSteps] = WeakValueDictionary()
_STEPS_BETWEEN_LOOKS = 64  # at the parameters of the model, which take a while to list
_STEPS_BETWEEN_WALKS = 16  # at departures
_ANEW = "Call finish() on all replicas, then attach a new Replica."


def optimizers_of(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that the loop steps. Raises `ModelError` if there are none, or something else is among them, `ConfigurationError` if one has
    a Replica: both would exchange after every step.
    """
    given = optimizer.parts if isinstance(optimizer, Several) else optimizer
    several = list(given) if isinstance(given, Sequence) else [given]
    if not several:
        raise ModelError("an empty list of optimizers was given; give those that the loop steps.")
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise ModelError(
                f"optimizer: a {type(one).__name__} was given; a torch.optim.Optimizer, or a list of them, is needed."
            )
        if not hasattr(one, "_optimizer_step_pre_hooks"):
            raise ModelError(
                f"optimizer: a {type(one).__name__} was given, whose steps torch's hooks do not see; give the optimizer inside it "
                "(accelerate: from before prepare())."
            )
        if id(one) in _attached:
            raise ConfigurationError(
                "the optimizer has a Replica that was neither finished nor closed, and both would exchange its steps. Call finish() or close() of "
                "that one first, on all replicas; if no variable holds it, make another optimizer."
            )
    return several


class Several(torch.optim.Optimizer):
    """Several optimizers as one: all groups, all state, one state dict. Each keeps its own groups and state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # not a copy, because loading replaces the groups of a part
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures would return several losses
        """Step each once, in order."""
        for part in self.parts:
            part.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of each part, whatever it holds."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)


def as_one(several: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The only optimizer, or a view of several as one."""
    return several[0] if len(several) == 1 else Several(several)


class InnerSteps:
    """Calls `driver` around each inner step of the loop that steps `optimizers`, and counts the step in `training`.

    One step of the optimizer is one inner step; with several optimizers, one step of each in any order. A step that a `GradScaler` skips
    does not count; if it skips that of some of several optimizers, the inner step ends when one steps again.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], training: Training, driver: Driver) -> None:
        self.seconds = 0.0  # of the main thread in departures and landings, with stalls
        self._training, self._driver = training, driver
        self._exchanged = False  # whether the gradients of the next step are exchanged
        self._stepping = self._interrupted = False  # see `check_whole`
        self._early: list[Tensor | None] = []  # those gradients, if that was before the step
        self._gradients = training.strategy.exchanges_gradients
        self._optimizers, self._count = optimizers, _count(optimizers)
        self._taken = 0  # inner steps seen here; `training.step` also counts those before a resume
        # The loop may step the optimizer inside a given one itself, as `second_step` of the usual SAM does.
        families = [(one, *_wrapped(one)) for one in optimizers]
        self._outer = {id(inside): one for one, *wrapped in families for inside in wrapped}
        self._all = frozenset(map(id, optimizers))
        self._due = set(self._all)  # the optimizers that have not stepped since the last inner step
        exchanged = [p for fragment in training.fragments for _, p in fragment.fragment.parameters]
        # by their hooks: Fabric's wrapper has those of the optimizer inside it, and its own step runs none
        hooked = {id(_hooks_of(member)): (member, family) for family in families for member in family}.values()
        self._others = OtherOptimizers([member for family in families for member in family], exchanged, training.warn)
        self._ids = set(map(id, exchanged))
        self._frozen = [p for p in _held(optimizers) if id(p) not in self._ids]
        self._hooks = [one.register_step_pre_hook(outermost(self._steps, family)) for one, family in hooked]
        self._hooks += [one.register_step_post_hook(outermost(self._stepped, family)) for one, family in hooked]
        self._places = _Places(training.model, self._ids)
        self._counting, self._looked = (
            False,
            -1,
        )  # whether the driver works after a step; the step of its last look at the places
        for fragment in training.fragments:
            fragment.touched = partial(self._touched, fragment.touched)
        _attached.update((id(one), self) for one in optimizers)

    def exchange_early(self) -> None:
        """As `exchange_gradients`, before the optimizer's step. Raises `ModelError` if the gradients of an earlier call were not stepped."""
        if any(one.grad is not before for one, before in zip(_held(self._optimizers), self._early)):
            raise ModelError(
                "exchange_gradients() was called for new gradients, but the optimizer has not stepped since the last call, so these would not "
                "be exchanged. Step after each call. To leave out a step, clear the gradients on all replicas and step; with a GradScaler "
                "that has unscaled, call optimizer.step() in place of scaler.step(optimizer)."
            )
        self.exchange_gradients()
        if self._gradients:
            self._early = [parameter.grad for parameter in _held(self._optimizers)]

    def finish(self, keep_seconds: float) -> bool:
        """As the driver's. Raises `ModelError` if the weights were trained by steps that were not seen; they stay as they are."""
        self.check_whole()
        training = self._training
        unseen = self._others.stepped_since_start or (training.step == 0 and not training.at_anchors(same_bits))
        if not self._taken and unseen:
            raise ModelError(
                "the weights have changed, but the Replica has seen no step of its optimizer, so nothing was exchanged: another optimizer or the "
                "loop itself has moved them. The model keeps its weights. Give the Replica the optimizer that the loop steps, or all in a list."
            )
        self._places.warn_of_new(training.warn, dict(training.model.named_parameters()))
        return self._driver.finish(keep_seconds)

    def exchange_gradients(self, closure: bool = False) -> None:
        """Run the driver's work before the optimizer's step now, and not again in the step."""
        self.check_whole()
        self._exchanged = True
        self._drive(lambda: self._driver.before_inner_step(closure))

    def check_whole(self) -> None:
        """Raise `DisagreementError` if an earlier step did not end: it may have left out what the other replicas did."""
        if self._interrupted:
            raise DisagreementError(
                "an earlier inner step was interrupted, in which the replicas exchange, so this one may differ from the others now. Close it, and on "
                "all replicas attach a new Replica to the model, or resume from a checkpoint."
            )

    def close(self) -> None:
        """Remove the hooks."""
        self._others.close()
        for one in self._optimizers:
            _attached.pop(id(one), None)
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Raise `ModelError` if the optimizer would train parameters that are not exchanged."""
        if _count(self._optimizers) != self._count:
            raise ModelError(
                f"the optimizer held {self._count} tensors when the Replica was attached and holds {_count(self._optimizers)} now; the "
                f"added ones would be trained but not exchanged. {_ANEW}"
            )
        if any(parameter.requires_grad for parameter in self._frozen):
            shape = next(tuple(p.shape) for p in self._frozen if p.requires_grad)
            raise ModelError(
                f"a parameter of shape {shape} was frozen when the Replica was attached and is trained now; it would not be exchanged. "
                + _ANEW
            )
        self._places.check_one()
        if self._training.step % _STEPS_BETWEEN_LOOKS == 0:
            if self._training.frozen.elastic:
                self._training.frozen.warn(self._training.frozen.changed(), self._training.warn)
            self._places.check()
            self._places.walk(self._training.warn)

    def _steps(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        optimizer = self._outer.get(id(optimizer), optimizer)
        self.check()
        self._interrupted |= self._stepping
        if id(optimizer) not in self._due:
            if self._gradients or not _scaled():
                raise ModelError(
                    "one optimizer has stepped twice while another has not stepped once; of several that are given to a Replica each must step "
                    "once in an inner step. Step them equally often, or give one optimizer."
                )
            self._end_step()  # the scaler has skipped the step of another one, of which no hook tells
        if self._driver.uses_gradients and getattr(optimizer, "grad_scale", None) is not None:
            raise ModelError(
                "a GradScaler leaves the gradients scaled for a fused optimizer, and this strategy, which exchanges gradients, would add those of "
                "unlike scales; call scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        if self._gradients and len(self._optimizers) > 1 and not self._exchanged:
            raise ModelError(
                f"{len(self._optimizers)} optimizers with Gradients(), which exchanges all gradients at once: call "
                "replica.exchange_gradients() when all are there and none has stepped, or give a strategy that exchanges deltas."
            )
        self._others.steps(within=True)
        if not self._skipped(optimizer):
            self.exchange_gradients(any(map(callable, args[1:])) or kwargs.get("closure") is not None)
        self._stepping = self._gradients  # such a step must end, because the others take it

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer = self._outer.get(id(optimizer), optimizer)
        self._others.steps(within=False)
        self._stepping = False
        if self._skipped(optimizer):
            return
        self._due.discard(id(optimizer))
        if not self._due:
            self._end_step()

    def _end_step(self) -> None:
        """Count the inner step that has ended."""
        self._due, self._exchanged, self._early = set(self._all), False, []
        if not self._taken:  # most optimizers make their state in the first step
            self._training.copies.find(self._training.anchor_of_each())
        self._drive(self._count_step)

    def _count_step(self) -> None:
        self._taken += 1
        self._training.step += 1
        self._counting = True
        try:
            self._driver.after_inner_step()
        finally:
            self._counting = False

    def _touched(self, then: Callable[[], None]) -> None:
        """Called before a round reads or writes parameters: those that it would use must still be the model's, as they were."""
        if self._counting and self._looked != self._training.step:
            self._looked = self._training.step
            self._places.check()
            if self._looked - self._places.looked >= _STEPS_BETWEEN_WALKS:
                self._places.looked = self._looked
                self._places.walk(self._training.warn)
        then()

    def _drive(self, work: Callable[[], None]) -> None:
        """Do the driver's `work` of a step, measure it, and notice a Ctrl-C."""
        began = self._training.clock()
        try:
            if self._training.copies.active:
                with self._training.copies.following():
                    work()
            else:
                work()  # contexts take a while, and this is called in every step
        except BaseException as error:
            self._interrupted |= not isinstance(error, Exception)
            raise
        self.seconds += self._training.clock() - began

    def _skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a `GradScaler` skipped this step. If gradients are exchanged, all replicas have refused the step, and count it."""
        found = getattr(optimizer, "found_inf", None)
        return found is not None and not self._gradients and bool(found.item())


class _Places:
    """Where the model has its exchanged parameters, of these `ids`, and how they were when training began. Sharding replaces them all the time."""

    def __init__(self, model: nn.Module, ids: Collection[int]) -> None:
        self._model, self.looked = model, -_STEPS_BETWEEN_WALKS  # the step of the last walk at a departure
        self._sharded = any(map(is_sharded, model.parameters()))
        self._known = set(map(id, model.parameters()))
        self._places = [
            (f"{prefix}.{name}" if prefix else name, module, name, parameter, parameter.dtype, parameter.shape)
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in ids and not self._sharded
        ]

    def check_one(self) -> None:
        """`check`, if the first parameter has another dtype: conversions change all. Called at every step."""
        if self._places and self._places[0][3].dtype != self._places[0][4]:
            self.check()

    def check(self) -> None:
        """Raise `ModelError` if a parameter is no longer the model's, or of another dtype or shape."""
        for number, (place, module, name, parameter, dtype, shape) in enumerate(self._places):
            now: Any = getattr(module, name, None)
            if now is not parameter:
                if any(one is parameter for one in self._model.parameters()):  # under another name, as pruning has it
                    continue
                self._refuse(
                    place, sum(getattr(m, n, None) is not p for _, m, n, p, *_ in self._places[number + 1 :]), now
                )
            if parameter.dtype != dtype or parameter.shape != shape:
                raise ModelError(
                    f"the parameter {place} is now of {parameter.dtype} and shape {tuple(parameter.shape)}, and was of {dtype} and shape "
                    f"{tuple(shape)} when the Replica was attached, as after model.half() or model.to(dtype): the optimizer's state and the other "
                    f"replicas still have the latter. Convert it back; or convert it between two Replicas: {_ANEW[0].lower()}{_ANEW[1:]}"
                )

    def walk(self, warn: Callable[[str], None]) -> None:
        """As `check`, for modules that were replaced as a whole; and warn of new parameters."""
        present = dict(self._model.named_parameters(remove_duplicate=False))
        ids = set(map(id, present.values()))
        if gone := [place for place, _, _, parameter, *_ in self._places if id(parameter) not in ids]:
            self._refuse(gone[0], len(gone) - 1, present.get(gone[0]))
        self.warn_of_new(warn, present)

    def _refuse(self, place: str, others: int, now: object) -> NoReturn:
        what = (
            f"a {type(now).__name__} of {now.dtype} and shape {tuple(now.shape)}"
            if isinstance(now, Tensor)
            else "nothing"
        )
        raise ModelError(
            f"the parameter {place}{f' (and {others} others)' * bool(others)} that the Replica exchanges is no longer the model's: {what} is in its "
            "place, as after `module.weight = ...` or load_state_dict(assign=True). The optimizer holds the one before, which is exchanged in "
            f"vain. {_ANEW}"
        )

    def warn_of_new(self, warn: Callable[[str], None], present: Mapping[str, Tensor]) -> None:
        """Warn, once, of parameters that the model had not when the Replica was attached."""
        new = [] if self._sharded else [name for name, p in present.items() if id(p) not in self._known]
        if new:
            self._known |= set(map(id, present.values()))
            warn(
                f"the model has {len(new)} parameters ({new[0]}, ...) that it did not have when the Replica was attached: they are not exchanged, "
                "and hold no outer weights. Change the model's parameters between two Replicas"
            )


def _scaled() -> bool:
    """Whether a `GradScaler` calls the present step of an optimizer."""
    frame: FrameType | None = sys._getframe(1)
    while frame and not isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
        frame = frame.f_back
    return frame is not None


def _wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that `optimizer` has in its attributes and that hold all its parameters: those inside SAM, Lookahead and the like."""
    from thinwire.pieces.optimizer_attributes import nested_in  # needed once there is an optimizer

    held = set(map(id, _held([optimizer])))
    inside = [one for one in nested_in(optimizer) if set(map(id, _held([one]))) == held]
    return [one for one in inside if hasattr(one, "_optimizer_step_pre_hooks")]


def _hooks_of(optimizer: torch.optim.Optimizer) -> object:
    return optimizer._optimizer_step_pre_hooks


def _held(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def _count(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Number of tensors that they hold; called at every step."""
    return sum(len(group["params"]) for one in optimizers for group in one.param_groups)
