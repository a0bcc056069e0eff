"""What an optimizer holds in its attributes: a resume needs it, and many state dicts lack it.

SAM keeps another optimizer in an attribute, others a generator, averages of weights, a counter. A checkpoint holds all of this and
restores it in place, into the live objects of the script that resumes, so nothing is constructed from a file but data:

    an optimizer                      its state dict, and its own attributes
    an object with a state dict       that
    a module that is not the model    its parameters and buffers
    another object, a list, a dict    what is in it
    a generator of random numbers     its state
    a tensor, an array                always
    a number, text, a flag            if it has changed since the Replica was attached: others are settings, which the script makes

A function, a stream or a process group stays as it is. What must be saved and cannot be, such as an iterator, is refused by its path.
"""

from __future__ import annotations

import collections
import copy
import io
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.pieces.training_state import (
    meshes_of,
    optimizer_state,
    parameters_of,
    restore_optimizer,
)
from thinwire.state_tree import Packed, is_data, pack, unpack

State = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # of a replica: its tensors, and facts for JSON
_FACT, _PREFIX = "optimizer", "optimizer."  # where they are in it
_DEPTH = 8  # of objects and containers in an attribute
_OBJECTS = 1 << 14  # most that are looked through
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "thinwire", "numpy", "builtins"}


class Stays(Enum):
    """In place of a value that is not saved: at the load the script's own stays."""

    STAYS = 0


class Absent(Enum):
    ABSENT = 0


STAYS, ABSENT = Stays.STAYS, Absent.ABSENT


@dataclass
class Nested:
    """An optimizer in an attribute."""

    classes: list[list[str]]
    state_dict: Any
    attributes: dict[str, Any]


@dataclass
class Stateful:
    """An object with `state_dict` and `load_state_dict`."""

    state_dict: Any


@dataclass
class Attributes:
    """An object without, or a module: its tensors."""

    attributes: dict[str, Any]


@dataclass
class Randomness:
    """A generator of numpy or Python."""

    state: Any


@dataclass(frozen=True, eq=False)
class Address:
    """A key that is the `id` of a parameter."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


_HELD = (Nested, Stateful, Attributes, Randomness)


@dataclass
class _Entry:
    """What `begin` remembers of an optimizer."""

    attributes: dict[str, Any]
    ties: list[Callable[[], None]]


_entries: WeakKeyDictionary[torch.optim.Optimizer, _Entry] = WeakKeyDictionary()


def begin(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Remember the settings in the attributes of `optimizer`, before it steps or loads anything; of several calls the first counts."""
    for part in parts_of(optimizer):
        if part not in _entries:
            settings = _Capture(model, [part], states=False).attributes(part, ("optimizer",), 0)
            _entries[part] = _Entry(settings, _ties(part))


def held_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    """What is to be saved of the attributes of `optimizer`, of each part.

    Raises:
        CheckpointError: something in them changes and cannot be saved; the message has its path.
    """
    parts = parts_of(optimizer)
    capture, found = _Capture(model, parts, states=True), []
    for path, part in _paths(parts):
        begun = _entries.get(part)
        now = capture.attributes(part, path, 0)
        found.append(capture.changed_attributes(part, now, begun.attributes if begun else None, path))
    return found


def with_attributes(
    state: tuple[dict[str, Tensor], dict[str, Any]], optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The `state` of a replica with `held_by`, for whoever saves it beside the state dicts of model and optimizer: what these have is referred to.
    Raises `CheckpointError`."""
    tensors, facts = state
    held = held_by(optimizer, model)
    if not any(held):
        return state
    packed = pack(held, "optimizer", _apart(optimizer, model), _PREFIX, packages_of(optimizer))
    return {**tensors, **packed.tensors}, {**facts, _FACT: packed.json}


def without_attributes(state: State) -> tuple[State, Packed | None]:
    """The inverse: the state as it was, and what was added to it."""
    tensors, facts = state
    if _FACT not in facts:
        return state, None
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
    others = {name: tensor for name, tensor in tensors.items() if name not in own}
    return (others, {name: fact for name, fact in facts.items() if name != _FACT}), Packed(facts[_FACT], own)


def restore_from(state: State, optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """Restore what `with_attributes` has added, once the model and the state dict are loaded. Returns the rest. Raises `CheckpointError`."""
    rest, held = without_attributes(state)
    if held:
        referred, packages = _apart(optimizer, model), packages_of(optimizer)
        what = "the optimizer's attributes"
        restore(optimizer, model, unpack(held, what, referred, packages=packages, **places(model)))
    return rest


def places(model: nn.Module) -> dict[str, Any]:
    """The devices and the meshes of `model`, for `unpack`."""
    parameters = [*model.parameters()]
    return {"devices": {p.device for p in parameters}, "meshes": meshes_of(parameters)}


def known_to(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    """What an optimizer may refer to, and a checkpoint holds elsewhere."""
    return [*model.buffers(), *model.parameters(), *parameters_of(optimizer)]


def _apart(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    """Also the tensors that the optimizer's state dict has of its state, in an order that does not depend on who has loaded it."""
    found = known_to(optimizer, model)
    for part in parts_of(optimizer):
        saved = {id(tensor) for tensor in tensors_in(part.state_dict())}
        states = [state for parameter in parameters_of(part) if isinstance(state := part.state.get(parameter), dict)]
        entries = [state[name] for state in states for name in sorted(state, key=str)]
        found += [tensor for tensor in tensors_in(entries) if id(tensor) in saved]
    return found


def packages_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """The packages that define it and its parts, which may keep objects of their own in its state."""
    return {package_of(type(one)) for one in (optimizer, *nested_in(optimizer))} - {"torch", "builtins"}


def _paths(
    parts: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[tuple[Any, ...], torch.optim.Optimizer]]:
    for number, part in enumerate(parts):
        yield ("optimizer",) if len(parts) == 1 else ("optimizer", number), part


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that a collection of this package joins, which holds nothing itself; otherwise `optimizer`."""
    parts = getattr(optimizer, "parts", ()) if package_of(type(optimizer)) == "thinwire" else ()
    return [one for part in parts for one in parts_of(part)] or [optimizer]


class _Capture:
    """Reads attributes; without `states` for a comparison later, so without tensors and state dicts."""

    def __init__(self, model: nn.Module, parts: Sequence[torch.optim.Optimizer], *, states: bool) -> None:
        self._states = states
        known = [tensor for part in parts for tensor in known_to(part, model)]
        self._known = {id(tensor): tensor for tensor in known}
        self._memory = {memory for tensor in known if (memory := _memory(tensor))}
        self._modules = set(map(id, model.modules()))
        self._packages = {package_of(type(part)) for part in parts} | {"__main__"}
        self._seen: dict[int, Any] = {id(part): part for part in parts}  # alive, so that no id is used again
        self._raw: dict[int, tuple[Any, Any]] = {}  # by the id of what stands for it, which is kept, too

    def attributes(self, value: Any, path: tuple[Any, ...], depth: int) -> dict[str, Any]:
        held = {}
        for name, entry in _variables(value).items():
            if not _is_code(value, name, entry):
                held[name] = self._value(entry, (*path, name), depth + 1)
        if isinstance(value, torch.optim.Optimizer) and self._states and _loses_state(value):
            held["state"] = self._mapping(value.state, (*path, "state"), depth + 1)
        return held

    def _value(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        if isinstance(value, Tensor | torch.Generator):
            shares = isinstance(value, Tensor) and id(value) not in self._known and _memory(value) in self._memory
            return value if self._states and not shares else STAYS
        if is_data(value):
            return value if self._states else copy.copy(value)
        if id(value) in self._seen or depth > _DEPTH or len(self._seen) > _OBJECTS:
            return STAYS
        self._seen[id(value)] = value
        if type(value) in (list, tuple):
            return type(value)(self._value(one, (*path, number), depth + 1) for number, one in enumerate(value))
        if isinstance(value, MutableMapping):
            return self._mapping(value, path, depth)
        made = self._object(value, path, depth)
        if made is not STAYS:
            self._raw[id(made)] = value, made
        return made

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...], depth: int) -> dict[Any, Any]:
        return {
            Address(self._known[key]) if type(key) is int and key in self._known else key: self._value(
                entry, (*path, key), depth + 1
            )
            for key, entry in list(value.items())
        }

    def _object(self, value: Any, path: tuple[Any, ...], depth: int) -> Any:
        kind, package = type(value), package_of(type(value))
        if isinstance(value, np.random.Generator):
            return Randomness(value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            return Randomness(value.get_state(legacy=False))
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            return Randomness(value.getstate())
        if isinstance(value, torch.optim.Optimizer):
            held = optimizer_state(value) if self._states else {"classes": [], "state": None}
            return Nested(held["classes"], held["state"], self.attributes(value, path, depth))
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Iterator) and package in _FOREIGN and not isinstance(value, io.IOBase):
            if not self._states:
                return STAYS
            raise CheckpointError(
                f"{spelled(path)}: a {kind.__qualname__} cannot be saved in a checkpoint, because nobody can read where an iterator is; keep "
                "the number of its steps in its place."
            )
        if package == "thinwire" or isinstance(value, type) or not self._is_own(kind, value):
            return STAYS
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return Stateful(value.state_dict() if self._states else None)
        return Attributes(self.attributes(value, path, depth))

    def _is_own(self, kind: type, value: Any) -> bool:
        """Whether objects of this class may be the optimizer's: not a trainer or a logger that it merely knows."""
        if isinstance(value, types.SimpleNamespace) or hasattr(value, "load_state_dict"):
            return True
        package = package_of(kind)
        if package in _FOREIGN or not hasattr(value, "__dict__") or isinstance(value, types.FunctionType):
            return False
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return package in self._packages or "site-packages" not in file

    def _module(self, module: nn.Module) -> Any:
        """The tensors of a module that are not the model's."""
        if id(module) in self._modules:
            return STAYS
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return Attributes({name: tensor for name, tensor in named if id(tensor) not in self._known})

    def changed_attributes(
        self, value: Any, now: dict[str, Any], before: Mapping[str, Any] | None, path: tuple[Any, ...]
    ) -> dict[str, Any]:
        """Those of `now` that are to be saved."""
        if before is None:
            return {name: entry for name, entry in now.items() if entry is not STAYS}
        after = {name: self.changed(entry, before.get(name, ABSENT), (*path, name)) for name, entry in now.items()}
        # A flag may say that something was made which no checkpoint holds, such as a stream: a resumed run must make it anew.
        made = any(
            after[name] is STAYS and before.get(name, None) is None and entry is not None for name, entry in now.items()
        )
        return {
            name: entry
            for name, entry in after.items()
            if entry is not STAYS and not (made and isinstance(entry, bool))
        }

    def changed(self, now: Any, before: Any, path: tuple[Any, ...]) -> Any:
        """What is to be saved of `now`, a value that was `before` when the Replica was attached."""
        if isinstance(now, Nested | Attributes) and type(before) is type(now):
            held = self._raw[id(now)][0]
            attributes = self.changed_attributes(held, now.attributes, before.attributes, path)
            if isinstance(now, Attributes):
                return Attributes(attributes) if attributes else STAYS
            return Nested(now.classes, now.state_dict, attributes)
        if isinstance(now, _HELD):
            return now if type(before) is type(now) else self._gained(now, path)
        if type(now) in (list, tuple) and type(before) is type(now) and len(now) == len(before):
            made: Any = type(now)(self.changed(one, old, (*path, n)) for n, (one, old) in enumerate(zip(now, before)))
            return STAYS if all(one is STAYS for one in made) else made
        if type(now) is dict and type(before) is dict and now.keys() == before.keys():
            pairs = {key: self.changed(entry, before[key], (*path, key)) for key, entry in now.items()}
            return STAYS if all(one is STAYS for one in pairs.values()) else pairs
        if type(now) in (list, tuple, dict):
            return self._gained(now, path)
        mutable = isinstance(now, np.ndarray | torch.Generator | collections.deque)
        if mutable or now is STAYS or any(True for _ in tensors_in(now)):
            return now
        return STAYS if _equal(now, before) else now

    def _gained(self, now: Any, path: tuple[Any, ...]) -> Any:
        """What was made since the Replica was attached, and may not be there when a resumed run loads."""
        if isinstance(now, Attributes) and not isinstance(self._raw[id(now)][0], nn.Module):
            return self._raw[id(now)][0]  # which the checkpoint can make anew if it is plain data
        if isinstance(now, _HELD):
            raise CheckpointError(
                f"{spelled(path)}: a {type(self._raw[id(now)][0]).__qualname__} that the optimizer has made after the Replica was attached "
                "cannot be saved, because a resumed run has none yet to load it into; make it before."
            )
        entries: Iterable[Any] = (
            now.items() if isinstance(now, dict) else enumerate(now) if type(now) in (list, tuple) else ()
        )
        made = [(key, self._gained(entry, (*path, key))) for key, entry in entries]
        if any(entry is STAYS for _, entry in made):
            return STAYS
        return dict(made) if isinstance(now, dict) else type(now)(entry for _, entry in made) if made else now


def restore(optimizer: torch.optim.Optimizer, model: nn.Module, saved: Any) -> None:
    """Put what `held_by` gave into the attributes of `optimizer`, whose state is loaded, and join again what was shared in it at `begin`:
    groups and states, of which a load makes several.

    Raises:
        CheckpointError: this optimizer has nothing where the saved one had an optimizer or another object.
    """
    parts = parts_of(optimizer)
    if not isinstance(saved, list) or len(saved) != len(parts) or not all(isinstance(one, dict) for one in saved):
        raise CheckpointError(
            "the checkpoint has attributes of another number of optimizers; give as many as were saved."
        )
    restored = _Restore(known_to(optimizer, model), parts)
    for (path, part), attributes in zip(_paths(parts), saved):
        restored.attributes(part, attributes, path)
    for part in parts:
        for tie in _entries[part].ties if part in _entries else ():
            tie()


class _Restore:
    def __init__(self, known: Iterable[Tensor], parts: Sequence[torch.optim.Optimizer]) -> None:
        self._known = set(map(id, known))
        self._loaded: set[int] = set()
        for part in parts:
            self._note(part)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """The tensors of a state that was loaded: where an attribute had one of them, it has it again, and not a copy."""
        self._loaded |= {id(tensor) for tensor in tensors_in(optimizer.state)}

    def attributes(self, value: Any, saved: Mapping[Any, Any], path: tuple[Any, ...]) -> None:
        live = _variables(value) | ({"state": value.state} if isinstance(value, torch.optim.Optimizer) else {})
        for name, entry in saved.items():
            allowed = (
                isinstance(name, str) and not name.startswith("__") and (name in live or not _is_of_torch(value, name))
            )
            if not allowed or _is_code(value, name, live.get(name)):
                raise CheckpointError(
                    f"{spelled((*path, name))} in the checkpoint is no attribute of a {type(value).__name__}."
                )
            now = live.get(name, ABSENT)
            made = self._value(now, entry, (*path, name))
            if made is not now:
                try:
                    setattr(value, name, made)
                except AttributeError:  # frozen, or a property
                    raise CheckpointError(
                        f"{spelled((*path, name))} cannot be set to what the checkpoint has."
                    ) from None

    def _value(self, live: Any, saved: Any, path: tuple[Any, ...]) -> Any:
        """The value to put in the place of `live`, which is changed in place if it can be."""
        if saved is STAYS:
            return self._there(live, "something", path)
        if isinstance(saved, _HELD):
            return self._object(live, saved, path)
        if type(saved) is list and type(live) is list:
            live[:] = self._items(live, saved, path)
            return live
        if type(saved) is tuple and (live is ABSENT or type(live) is tuple):
            made = self._items(() if live is ABSENT else live, saved, path)
            return live if live is not ABSENT and len(made) == len(live) and all(map(is_, made, live)) else tuple(made)
        if type(saved) is dict and isinstance(live, MutableMapping):
            return self._mapping(live, saved, path)
        if type(saved) is dict:
            return self._mapping({}, saved, path)
        if (
            isinstance(saved, torch.Generator)
            and isinstance(live, torch.Generator)
            and saved.device.type == live.device.type
        ):
            live.set_state(saved.get_state())
            return live
        return self._tensor(live, saved) if isinstance(saved, Tensor) else saved

    def _items(self, live: Sequence[Any], saved: Sequence[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self._value(live[n] if n < len(live) else ABSENT, entry, (*path, n)) for n, entry in enumerate(saved)]

    def _mapping(self, live: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        made = {}
        for key, entry in saved.items():
            own = id(key.tensor) if isinstance(key, Address) else key
            made[own] = self._value(live.get(own, ABSENT), entry, (*path, own))
        for key in [key for key in live if key not in made]:
            del live[key]
        for key, entry in made.items():
            if live.get(key, ABSENT) is not entry:
                live[key] = entry
        return live

    def _tensor(self, live: Any, saved: Tensor) -> Any:
        if id(saved) in self._known or id(saved) in self._loaded or type(live) is not type(saved):
            return saved
        if (live.shape, live.dtype, live.layout) != (saved.shape, saved.dtype, saved.layout):
            return saved.to(live.device)
        try:
            with torch.no_grad():
                live.copy_(saved)
        except RuntimeError:  # its elements share memory
            return saved.to(live.device)
        return live

    def _there(self, live: Any, what: str, path: tuple[Any, ...]) -> Any:
        if live is ABSENT or live is None:
            raise CheckpointError(
                f"the checkpoint has {what} at {spelled(path)}, and this optimizer has nothing there; resume with an optimizer that is made as "
                "the saved one was."
            )
        return live

    def _object(self, live: Any, saved: Any, path: tuple[Any, ...]) -> Any:
        self._there(live, "the state of an optimizer" if isinstance(saved, Nested) else "the state of an object", path)
        try:
            if isinstance(saved, Nested) and isinstance(live, torch.optim.Optimizer):
                restore_optimizer(live, {"classes": saved.classes, "state": saved.state_dict})
                self._note(live)
                self.attributes(live, saved.attributes, path)
            elif isinstance(saved, Attributes) and isinstance(live, nn.Module):
                own = dict(
                    [*live.named_parameters(remove_duplicate=False), *live.named_buffers(remove_duplicate=False)]
                )
                for name, values in saved.attributes.items():
                    with torch.no_grad():
                        own[name].copy_(values)
            elif isinstance(saved, Attributes):
                self.attributes(live, saved.attributes, path)
            elif isinstance(saved, Stateful):
                live.load_state_dict(saved.state_dict)
            elif isinstance(live, np.random.Generator):
                live.bit_generator.state = saved.state
            elif isinstance(live, np.random.RandomState):
                live.set_state(saved.state)
            else:
                live.setstate(saved.state)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {spelled(path)} in the checkpoint does not fit the {type(live).__name__} there ({type(error).__name__}: {error}); "
                "resume with an optimizer that is made as the saved one was."
            ) from error
        return live


def nested_in(value: Any, depth: int = 0, seen: set[int] | None = None) -> list[torch.optim.Optimizer]:
    """The optimizers in the attributes of `value`, in lists and dicts there, and in those."""
    seen = {id(value)} if seen is None else seen
    found: list[torch.optim.Optimizer] = []
    entries: Iterable[Any] = _variables(value).values() if isinstance(value, torch.optim.Optimizer) else value
    for entry in entries if depth <= _DEPTH else ():
        if id(entry) in seen or isinstance(entry, Tensor):
            continue
        if isinstance(entry, torch.optim.Optimizer):
            seen.add(id(entry))
            found += [entry, *nested_in(entry, depth + 1, seen)]
        elif isinstance(entry, list | tuple | dict):
            seen.add(id(entry))
            found += nested_in(entry.values() if isinstance(entry, dict) else entry, depth + 1, seen)
    return found


def _ties(optimizer: torch.optim.Optimizer) -> list[Callable[[], None]]:
    """Functions that join again what `optimizer` and those in it share now."""
    first: dict[int, tuple[Any, Any]] = {}  # by the id of what is shared: where it is
    tied: list[Callable[[], None]] = []

    def note(value: Any, holder: Any, key: Any) -> None:
        source = first.setdefault(id(value), (ref(holder), key))
        if source[0]() is not holder:
            tied.append(partial(_tie, *source, ref(holder), key))

    # the innermost gives to the others: it has loaded its state itself, where those around it may have passed theirs on to it
    for one in reversed((optimizer, *nested_in(optimizer))):
        for name in ("param_groups", "state"):
            if name in vars(one):
                note(vars(one)[name], one, name)
        for number, group in enumerate(one.param_groups):
            note(group, one, number)
    return tied


def _tie(
    source: ref[torch.optim.Optimizer], from_: str | int, holder: ref[torch.optim.Optimizer], key: str | int
) -> None:
    """Give the holder the groups, the state or the group that the source has."""
    giver, taker = source(), holder()
    if giver is None or taker is None:  # the script has replaced it
        return
    if isinstance(from_, int) and isinstance(key, int):
        taker.param_groups[key] = giver.param_groups[from_]
    elif isinstance(key, str) and getattr(taker, key) is not (shared := getattr(giver, str(from_))):
        setattr(taker, key, shared)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Those in dicts, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth <= _DEPTH:
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(entry, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type) and depth <= _DEPTH:
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)], depth + 1)


def package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def spelled(path: Sequence[Any]) -> str:
    """`optimizer.base.rng`, `optimizer.averages[3]`"""
    name, *keys = path
    return f"{name}" + "".join(
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{'a tensor' if isinstance(key, Tensor) else repr(key)}]"
        for key in keys
    )  # fmt: skip


@cache
def _names_of_torch() -> frozenset[str]:
    """The attributes that every optimizer has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called"}  # by learning rate schedulers


def _is_of_torch(value: Any, name: str) -> bool:
    return isinstance(value, torch.optim.Optimizer) and name in _names_of_torch()


def _variables(value: Any) -> dict[str, Any]:
    names = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):  # which may have slots
        names |= {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    if isinstance(value, torch.optim.Optimizer):
        names = {name: entry for name, entry in names.items() if not _is_of_torch(value, name)}
    return names


def _is_code(value: Any, name: str, entry: Any) -> bool:
    """Whether the attribute is a method that was replaced, as learning rate schedulers replace `step`."""
    return callable(getattr(type(value), name, None)) or isinstance(entry, types.FunctionType | types.MethodType)


def _loses_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state dict of an optimizer with one of its own leaves out tensors of its state."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict or "state" not in vars(optimizer):
        return False
    saved = {id(tensor) for tensor in tensors_in(optimizer.state_dict())}
    return any(id(tensor) not in saved for tensor in tensors_in(optimizer.state))


def _memory(tensor: Tensor) -> int | None:
    """The address of a plain tensor's storage."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel()
    return tensor.untyped_storage().data_ptr() or None if plain else None


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other) or (one != one and other != other)  # not a number
    except (TypeError, ValueError, RuntimeError):
        return False
