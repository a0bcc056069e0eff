"""Any state dict as JSON and tensors, with its types, and back. Nothing is pickled, and reading runs no code that a file names.

    {"lr": 0.1, "betas": {"!tuple": [0.9, 0.99]}, "exp_avg": {"!tensor": "state.0.exp_avg"}}

An object of JSON with a key that begins with "!" is a value that JSON does not have. `pack` writes dicts with any keys, lists, tuples, sets,
numbers of Python and numpy, arrays, bytes, dates, paths, enumerations, dataclasses, and tensors of any dtype, layout, device and subclass.
Tensors that overlap in memory are written once, and overlap again; a list, dict or object that stands in several places is one again.
`unpack` finds classes only among those that are imported.
What cannot be written is refused by its path: `optimizer.state[3]["hook"]: a function ...`.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import struct
import sys
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path as LocalPath
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.errors import CheckpointError
from thinwire.types import compact

Path = tuple[Any, ...]  # keys and indices from the root to a value, its name first

_LONG = 1024  # bytes and text above this length are stored as tensors, out of the JSON
_WHOLE = 1 << 63  # integers of more bits are written in hexadecimal
_VALUES = (
    1 << 24
)  # most values of a tree that is read; shared ones count in each of their places, because others walk through all
_MUTABLE = (list, dict, set, collections.deque, bytearray, np.ndarray, torch.Generator)
# dtypes that every safetensors >= 0.4.5 stores; others are stored as their bytes
_NATIVE = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    }
)  # fmt: skip
_SPARSE = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "path": (LocalPath().__class__, str, LocalPath),
    "posix path": (PurePosixPath, str, PurePosixPath),
    "windows path": (PureWindowsPath, str, PureWindowsPath),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "device": (torch.device, str, torch.device),
}
_TEXT_NAMES = {kind: name for name, (kind, _, _) in _TEXTS.items()}
_SEQUENCES: dict[type, str] = {
    tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "Size", types.MappingProxyType: "mappingproxy",
}  # fmt: skip
_DATA = (
    bool, int, float, complex, str, bytes, bytearray, range, slice, set, frozenset, collections.deque, np.ndarray, np.generic,
    enum.Enum, datetime.timedelta, torch.dtype, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, bool, str, bytes, list, dict, set, tuple, complex)
} | {"None": None}  # of a defaultdict


_PLACED = ("dim", "split_factor", "reduce_op")  # of the placements of a DTensor
_SPECIAL = (
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__del__",
    "__setattr__",
    "__call__",
)


class Unlike(Exception):
    """The cause of a `CheckpointError` where the file is sound, and the script that reads it differs from the one that wrote it."""


class Packed(NamedTuple):
    """A tree as JSON, and its tensors by name."""

    json: Any
    tensors: dict[str, Tensor]


def pack(
    tree: object, name: str, parameters: Sequence[Tensor] = (), prefix: str = "", packages: Collection[str] = ()
) -> Packed:
    """`tree` as JSON and tensors.

    Args:
        tree: of dicts, lists, numbers, tensors and so on.
        name: what the tree is, for messages.
        parameters: tensors that are saved elsewhere; in the tree a reference to one of them stays a reference, also as the key of a dict.
        prefix: of the names of its tensors.
        packages: whose objects are saved by their attributes, such as the preconditioners in the state of an optimizer of that package.

    Raises:
        CheckpointError: a value cannot be written; the message has its path.
    """
    (json,), tensors = pack_together([tree], name, parameters, prefix, packages)
    return Packed(json, tensors)


def pack_together(
    trees: Sequence[object],
    name: str,
    parameters: Sequence[Tensor] = (),
    prefix: str = "",
    packages: Collection[str] = (),
) -> Packed:
    """As `pack` a list of `trees`, which may share values, and each of which begins at `name` in messages."""
    writer = _Writer(parameters, packages)
    try:
        json = writer.shared([writer.write(tree, (name,)) for tree in trees])
    except RecursionError:
        raise CheckpointError(f"{name} is nested too deeply to be saved; give a flatter state.") from None
    return Packed(json, writer.place(prefix))


def unpack(
    packed: Packed, name: str, parameters: Sequence[Tensor] = (), *, devices: Iterable[torch.device] = (), meshes: Sequence[Any] = (),
    packages: Collection[str] = (), copied: bool = True,
) -> Any:  # fmt: skip
    """The tree that was packed.

    Args:
        packed: its JSON may come from a stranger.
        name: what the tree is, for messages.
        parameters: in the order of `pack`.
        devices: where tensors go that were on a device of the same type; others go to the current one of their type, or to the CPU.
        meshes: of this process, one of which the saved shards fit.
        packages: as in `pack`.
        copied: whether tensors get memory of their own. That of a file is not aligned as torch's is, and some sums round otherwise then.

    Raises:
        CheckpointError: it is damaged, or needs a class, parameter or mesh that is not here.
    """
    by_type = {device.type: device for device in devices}
    reader = _Reader(packed.tensors, parameters, by_type, meshes, packages, copied)
    try:
        return reader.read(packed.json)
    except Unlike as unlike:
        raise CheckpointError(f"{name} in the checkpoint: it {unlike}.") from unlike
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError, struct.error,
    ) as error:  # fmt: skip
        raise CheckpointError(
            f"{name} in the checkpoint cannot be read ({type(error).__name__}: {error}); it is damaged, or another version wrote it."
        ) from error


def is_data(value: object) -> bool:
    """Whether `value` is written whole: no container whose entries somebody may want to see one by one, and no object of a class of its own."""
    kind = type(value)
    frozen = dataclasses.is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]
    return (
        value is None
        or isinstance(value, _DATA)
        or kind in _TEXT_NAMES
        or frozen
        or (isinstance(value, tuple) and kind is not tuple)
    )


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A strided tensor of the tree, and the JSON that will say where it is stored."""

    value: Tensor
    json: dict[str, Any]
    path: Path

    @property
    def geometry(self) -> tuple[Any, ...]:
        value = self.value
        return value.storage_offset(), value.shape, value.stride(), value.dtype

    @property
    def span(self) -> tuple[int, int]:
        """Its first byte in the storage, and the one after its last."""
        value = self.value
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
        begin, item = int(value.storage_offset()), value.element_size()
        return begin * item, (begin + last + 1) * item


class _Writer:
    def __init__(self, parameters: Sequence[Tensor], packages: Collection[str]) -> None:
        self._packages = packages
        self._parameters = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._leaves: list[_Leaf] = []
        self._within: set[int] = set()  # ids of the containers around the present value
        self._written: dict[
            int, tuple[Any, Any]
        ] = {}  # by id: what may change and stand in several places, and its JSON
        self._shared: dict[int, int] = {}  # by the id of the JSON of those that do: their numbers

    def write(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if len(value) <= _LONG else {"!text": self._data(value.encode("utf-8", "surrogatepass"), path)}
        if kind is int:
            return value if -_WHOLE <= value < _WHOLE else {"!int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic):
            return self._numpy(value, path)
        if kind in _TEXT_NAMES:
            name = _TEXT_NAMES[kind]
            return {f"!{name}": _TEXTS[name][1](value)}
        return self._container(value, path) if id(value) not in self._within else self._refuse(value, path, "itself")

    def shared(self, json: Any) -> Any:
        """`json`, with a number at each value that stands in several places."""
        if not self._shared:
            return json
        for key, item in json.items() if isinstance(json, dict) else enumerate(json) if isinstance(json, list) else ():
            json[key] = self.shared(item)
        return {"!shared": self._shared[id(json)], "value": json} if id(json) in self._shared else json

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self._written:
            return {"!again": self._shared.setdefault(id(self._written[id(value)][1]), len(self._shared))}
        self._within.add(id(value))
        try:
            written = self._collection(value, path)
            written = self._object(value, path) if written is None else written
        finally:
            self._within.discard(id(value))
        if isinstance(value, _MUTABLE) or hasattr(value, "__dict__"):
            self._written[id(value)] = value, written
        return written

    def _collection(self, value: Any, path: Path) -> Any:
        """A collection of values; None if it is none."""
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            plain = all(type(key) is str and not key.startswith("!") for key in value)
            return (
                {k: self.write(v, (*path, k)) for k, v in value.items()}
                if plain
                else {"!dict": self._pairs(value, path)}
            )
        if kind is collections.OrderedDict:  # torch's state dicts have an attribute, `_metadata`
            pairs = {"!OrderedDict": self._pairs(value, path)}
            return pairs | ({"attributes": self.write(vars(value), path)} if getattr(value, "__dict__", None) else {})
        if kind is collections.defaultdict:
            names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
            if not names:
                return self._refuse(value.default_factory, (*path, "default_factory"))
            return {"!defaultdict": self._pairs(value, path), "factory": names[0]}
        if kind is collections.Counter:
            return {"!Counter": self._pairs(value, path)}
        if kind is collections.deque:
            return {"!deque": self._items(value, path), "maxlen": value.maxlen}
        if kind is types.MappingProxyType:
            return {"!mappingproxy": self._pairs(value, path)}
        if kind in _SEQUENCES:
            return {f"!{_SEQUENCES[kind]}": self._items(value, path)}
        return None

    def _object(self, value: Any, path: Path) -> Any:
        """A value of another type."""
        kind = type(value)
        if isinstance(value, np.ndarray):
            return self._numpy(value, path)
        if kind in (bytes, bytearray):
            return {f"!{kind.__name__}": self._data(value, path)}
        if kind is complex:
            return {"!complex": [self.write(value.real, path), self.write(value.imag, path)]}
        if kind in (range, slice):
            return {f"!{kind.__name__}": self._items((value.start, value.stop, value.step), path)}
        if kind is datetime.timedelta:
            return {"!timedelta": [value.days, value.seconds, value.microseconds]}
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return {f"!{kind.__name__}": str(value).removeprefix("torch.")}
        if kind is torch.Generator:
            return {"!Generator": self.write(value.get_state(), path), "device": value.device.type}
        if kind is types.SimpleNamespace:
            return {"!namespace": self.write(vars(value), path)}
        if isinstance(value, enum.Enum) and value.name in kind.__members__:
            return {"!enum": self._class(value, path), "member": value.name}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"!namedtuple": self._class(value, path), "items": self._items(value, path)}
        if dataclasses.is_dataclass(kind):
            held = {
                field.name: getattr(value, field.name)
                for field in dataclasses.fields(kind)
                if hasattr(value, field.name)
            }
            return {
                "!dataclass": self._class(value, path),
                "fields": self.write(held | getattr(value, "__dict__", {}), path),
            }
        if _is_plain(kind, self._packages):
            return {"!object": self._class(value, path), "attributes": self.write(vars(value), path)}
        return self._refuse(value, path)

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self.write(value, (*path, number)) for number, value in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[Any]:
        return [[self.write(key, (*path, key)), self.write(item, (*path, key))] for key, item in value.items()]

    def _data(self, data: bytes | bytearray, path: Path) -> Any:
        if len(data) <= _LONG:
            return base64.b64encode(data).decode()
        return self._tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), path)

    def _numpy(self, value: Any, path: Path) -> Any:
        dtype = value.dtype
        if (
            dtype.hasobject
            or dtype.names
            or dtype.kind == "V"
            or type(value) not in (np.ndarray, np.memmap, dtype.type)
        ):
            return self._refuse(value, path)
        if isinstance(value, np.generic):
            return {"!numpy": dtype.str, "data": value.tobytes().hex()}
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        data = self._data(value.tobytes(order), path)
        return {"!array": dtype.str, "shape": list(value.shape), "order": order, "data": data}

    def _tensor(self, value: Tensor, path: Path) -> Any:
        if id(value) in self._parameters:
            return {"!reference": self._parameters[id(value)]}
        try:
            written = self._values(value.detach() if type(value) is nn.Parameter else value, path)
        except (AttributeError, RuntimeError, TypeError):  # its class lacks what torch's own tensors have
            written = self._refuse(value, path)
        if isinstance(value, nn.Parameter):
            return {"!Parameter": written, "requires_grad": value.requires_grad}
        return {"!leaf": written} if value.requires_grad and value.is_leaf else written

    def _values(self, value: Tensor, path: Path) -> Any:
        size = {"size": list(value.shape), "stride": list(value.stride()) if value.layout == torch.strided else None}
        if (distributed := sys.modules.get("torch.distributed.tensor")) and isinstance(value, distributed.DTensor):
            held: Any = value
            mesh = [list(held.device_mesh.mesh_dim_names or ()), list(held.device_mesh.shape)]
            placements = [
                [type(one).__name__, {n: getattr(one, n) for n in _PLACED if hasattr(one, n)}]
                for one in held.placements
            ]
            return {
                "!DTensor": self._values(held.to_local(), path),
                "mesh": mesh,
                "placements": self.write(placements, path),
            } | size
        if type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            parts = {name: self._tensor(getattr(value, name), (*path, name)) for name in names}
            return {"!subclass": self._class(value, path), "parts": parts, "context": self.write(context, path)} | size
        if type(value) is not Tensor:
            plain, attributes = value.as_subclass(Tensor), self.write(dict(vars(value)), path)
            return {"!as": self._class(value, path), "tensor": self._values(plain, path), "attributes": attributes}
        if value.is_meta:
            return {"!meta": str(value.dtype).removeprefix("torch.")} | size
        if value.is_quantized:
            return self._quantized(value, path)
        if value.layout == torch.sparse_coo:
            parts = {
                "indices": self._values(value._indices(), (*path, "indices")),
                "values": self._values(value._values(), (*path, "values")),
            }
            return {"!sparse_coo": parts, "coalesced": value.is_coalesced()} | size
        if value.layout in _SPARSE:
            names = (*_SPARSE[value.layout], "values")
            parts = {name: self._values(getattr(value, name)(), (*path, name)) for name in names}
            return {"!sparse": str(value.layout).removeprefix("torch."), "parts": list(parts.values())} | size
        if value.layout != torch.strided:
            return self._refuse(value, path)
        leaf = _Leaf(value.detach().resolve_conj().resolve_neg(), {}, path)
        self._leaves.append(leaf)
        return leaf.json

    def _quantized(self, value: Tensor, path: Path) -> Any:
        held = {"!quantized": self._values(value.int_repr(), path)}
        if value.qscheme() == torch.per_tensor_affine:
            return held | {"scale": value.q_scale(), "zero": value.q_zero_point()}
        scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        return held | {
            "scale": self._values(scales, (*path, "scale")), "zero": self._values(zeros, (*path, "zero")),
            "axis": value.q_per_channel_axis(),
        }  # fmt: skip

    def _class(self, value: Any, path: Path) -> str:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if _found(name) is not type(value) or hasattr(type(value), "__del__"):
            return str(self._refuse(value, path, "a class that a later process cannot find by its name"))
        return name

    def place(self, prefix: str) -> dict[str, Tensor]:
        """Name the tensors to store. Those that overlap are stored as one."""
        tensors: dict[str, Tensor] = {}
        by_storage: dict[int, list[_Leaf]] = {}
        for leaf in self._leaves:
            by_storage.setdefault(
                leaf.value.untyped_storage()._cdata if leaf.value.numel() else -1 - id(leaf), []
            ).append(leaf)
        for leaves in by_storage.values():
            for overlapping in _overlapping(leaves):
                name = free = prefix + ".".join(str(key)[:100] for key in overlapping[0].path[1:])
                number = 1
                while free in tensors:
                    free, number = f"{name}~{number + 1}", number + 1
                tensors[free] = _store(overlapping, free)
        return tensors

    def _refuse(self, value: object, path: Path, inside: str = "") -> Any:
        raise CheckpointError(f"{_spelled(path)}: {_what(value)}{f', inside {inside},' * (inside == 'itself')} cannot be saved in a checkpoint"
                              f"{f': it is of {inside}' * (inside not in ('', 'itself'))}; {_advice(value)}.")  # fmt: skip


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of {value.dtype}, layout {value.layout}"
    name = getattr(value, "__name__", "")
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {where}{kind.__qualname__}{f' ({name})' if name else ''}"


def _advice(value: object) -> str:
    if hasattr(value, "state_dict"):
        return "give its state_dict()"
    if isinstance(value, np.random.Generator):
        return "give its bit_generator.state"
    if callable(value):
        return "only data can be saved, without code: leave it out of the state"
    return "numbers, text, bytes, None, tensors, arrays, and lists, tuples, sets, dicts and dataclasses of these can be saved"


def _spelled(path: Path) -> str:
    """`optimizer.state[3]["hook"]`"""
    name, *keys = path
    first = f".{keys[0]}" if keys and isinstance(keys[0], str) and keys[0].isidentifier() else ""
    rest = keys[1:] if first else keys
    return f"{name}{first}" + "".join(f'["{key}"]' if isinstance(key, str) else f"[{_key(key)}]" for key in rest)


def _key(key: object) -> str:
    return f"a {type(key).__name__}" if isinstance(key, Tensor) else f"{key!r:.80}"


def _overlapping(leaves: list[_Leaf]) -> Iterable[list[_Leaf]]:
    """The leaves of one storage, in groups of which no two overlap."""
    if len(leaves) == 1:
        return [leaves]
    groups: list[list[_Leaf]] = []
    end = -1
    for leaf in sorted(leaves, key=lambda leaf: leaf.span):
        begin, until = leaf.span
        if begin >= end:
            groups.append([])
        groups[-1].append(leaf)
        end = max(end, until)
    return groups


def _store(leaves: list[_Leaf], name: str) -> Tensor:
    """The tensor that stores them all; writes into the JSON of each how it is read back."""
    first = leaves[0].value
    device = {} if first.device.type == "cpu" else {"device": first.device.type}
    own, begin = compact(first), leaves[0].span[0]
    end = max(leaf.span[1] for leaf in leaves)
    if len({leaf.geometry for leaf in leaves}) > 1 or own.numel() * own.element_size() > end - begin > 0:
        dtypes = {leaf.value.dtype for leaf in leaves}
        held = torch.empty(0, dtype=torch.uint8, device=first.device)
        held = held.set_(first.untyped_storage(), begin, (end - begin,), (1,))
        for leaf in leaves:
            value, item = leaf.value, leaf.value.element_size()
            leaf.json.update(
                {"!view": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            )
            leaf.json.update({"stride": list(value.stride()), "offset": (leaf.span[0] - begin) // item} | device)
            if (leaf.span[0] - begin) % item:
                raise CheckpointError(
                    f"{_spelled(leaf.path)}: it overlaps another tensor, unaligned; give a copy of it."
                )
        return held.view(first.dtype) if len(dtypes) == 1 and first.dtype in _NATIVE else held
    json: dict[str, Any] = {"!tensor": name} | device
    if own.shape != first.shape:
        json["expand"] = list(first.shape)
    if not own.is_contiguous():  # the order of its dimensions in memory, such as channels_last
        strides = own.stride()
        order = sorted(range(own.ndim), key=lambda dim: (-strides[dim], dim))
        own, json["order"] = own.contiguous(), order
    if own.dtype not in _NATIVE:
        json |= {"dtype": str(own.dtype).removeprefix("torch."), "shape": list(own.shape)}
        own = own.contiguous().reshape(-1).view(torch.uint8) if own.numel() else torch.empty(0, dtype=torch.uint8)
    for leaf in leaves:
        leaf.json.update(json)
    return own


def _found(name: str) -> Any:
    """The class of this name, if its module is imported; runs no code."""
    module, _, qualname = name.partition(":")
    place: Any = sys.modules.get(module)
    for part in qualname.split("."):
        place = vars(place).get(part) if hasattr(place, "__dict__") else None
    return place


def _is_plain(kind: type, packages: Collection[str]) -> bool:
    """Whether objects of this class of one of the `packages` are their attributes, and nothing happens when one is made or deleted."""
    return (
        kind.__module__.partition(".")[0] in packages
        and not issubclass(kind, nn.Module | torch.optim.Optimizer)
        and all(base is object or (type(base) is type and "__slots__" not in vars(base)) for base in kind.__mro__)
        and not any(name in vars(base) for base in kind.__mro__ if base is not object for name in _SPECIAL)
    )


def _attribute(name: str, kind: type) -> Any:
    """A value of torch of the type `kind`, such as torch.float32."""
    value = vars(torch).get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name!r:.80} is no {kind.__name__} of this torch")
    return value


class _Reader:
    def __init__(
        self, tensors: Mapping[str, Tensor], parameters: Sequence[Tensor], devices: Mapping[str, torch.device], meshes: Sequence[Any],
        packages: Collection[str], copied: bool,
    ) -> None:  # fmt: skip
        self._tensors, self._parameters, self._devices, self._meshes = tensors, parameters, devices, meshes
        self._packages, self._copied = packages, copied
        self._made: dict[str, Tensor] = {}
        self._shared: dict[int, tuple[Any, int]] = {}  # by number, with the number of values in it
        self._count = 0

    def read(self, json: Any) -> Any:
        self._count += 1
        if isinstance(json, list):
            return [self.read(item) for item in json]
        if not isinstance(json, dict):
            return json
        tag = next((key for key in json if key.startswith("!")), None)
        if tag is None:
            return {key: self.read(value) for key, value in json.items()}
        kind, value = tag[1:], json[tag]
        if kind in _TEXTS:
            return _TEXTS[kind][2](value)
        readers: tuple[Callable[[str, Any, dict[str, Any]], Any], ...] = (
            self._plain,
            self._collection,
            self._object,
            self._tensor,
        )
        for reader in readers:
            found = reader(kind, value, json)
            if found is not None:
                return found
        raise ValueError(f"{tag!r:.80} is no kind of value that this version knows")

    def _plain(self, kind: str, value: Any, json: dict[str, Any]) -> Any:
        match kind:
            case "shared":
                before, made = self._count, self.read(json["value"])
                self._shared[value] = made, self._count - before
                return made
            case "again":
                made, count = self._shared[value]
                self._count += count
                if self._count > _VALUES:
                    raise ValueError(f"it has more than {_VALUES} values")
                return made
            case "int":
                return int(value, 16)
            case "float":
                return struct.unpack(">d", bytes.fromhex(value))[0]
            case "text":
                return bytes(self._data(value)).decode("utf-8", "surrogatepass")
            case "bytes":
                return bytes(self._data(value))
            case "bytearray":
                return self._data(value)
            case "complex":
                return complex(*map(self.read, value))
            case "range":
                return range(*map(self.read, value))
            case "slice":
                return slice(*map(self.read, value))
            case "timedelta":
                return datetime.timedelta(*value)
            case "dtype" | "layout" | "memory_format":
                return _attribute(value, getattr(torch, kind))
            case "numpy":
                return _array(value, (), bytearray.fromhex(json["data"]))[()]
            case "array":
                return _array(value, json["shape"], self._data(json["data"]), json["order"])
        return None

    def _collection(self, kind: str, value: Any, json: dict[str, Any]) -> Any:
        match kind:
            case "dict" | "Counter" | "mappingproxy" | "OrderedDict" | "defaultdict":
                pairs = [(self.read(key), self.read(item)) for key, item in value]
                if kind == "defaultdict":
                    return collections.defaultdict(_FACTORIES[json["factory"]], pairs)
                if kind == "OrderedDict":
                    ordered = collections.OrderedDict(pairs)
                    vars(ordered).update(self.read(json.get("attributes", {})))
                    return ordered
                return {
                    "dict": dict,
                    "Counter": collections.Counter,
                    "mappingproxy": lambda d: types.MappingProxyType(d),
                }[kind](dict(pairs))  # type: ignore[operator]
            case "deque":
                return collections.deque(map(self.read, value), maxlen=json["maxlen"])
            case "tuple" | "set" | "frozenset" | "Size":
                return {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}[kind](
                    map(self.read, value)
                )
        return None

    def _object(self, kind: str, value: Any, json: dict[str, Any]) -> Any:
        match kind:
            case "namespace":
                return types.SimpleNamespace(**self.read(value))
            case "Generator":
                generator = torch.Generator(self._device(json["device"]))
                return generator.set_state(self.read(value))
            case "enum":
                return self._class(value, enum.Enum).__members__[json["member"]]
            case "namedtuple":
                return tuple.__new__(self._class(value, tuple), map(self.read, json["items"]))
            case "dataclass":
                made = object.__new__(self._class(value, object))
                if not dataclasses.is_dataclass(made) or hasattr(made, "__del__"):
                    raise ValueError(f"{value:.80} is no dataclass")
                for name, item in self.read(json["fields"]).items():
                    if name.startswith("__"):
                        raise ValueError(f"{name:.80} is no field")
                    object.__setattr__(made, name, item)
                return made
            case "object":
                found = self._class(value, object)
                if not _is_plain(found, self._packages):
                    raise ValueError(f"a {value:.80} is no plain object of {', '.join(self._packages)}")
                made = object.__new__(found)
                vars(made).update(self.read(json["attributes"]))
                return made
        return None

    def _tensor(self, kind: str, value: Any, json: dict[str, Any]) -> Any:
        match kind:
            case "reference":
                if type(value) is not int or value < 0:
                    raise ValueError(f"parameter {value!r:.40}")
                if value >= len(self._parameters):
                    raise Unlike(
                        f"refers to parameter or buffer {value} of the model, which has {len(self._parameters)} here; resume with the run's own model"
                    )
                return self._parameters[value]
            case "Parameter":
                return nn.Parameter(self.read(value), bool(json["requires_grad"]))
            case "leaf":
                return self.read(value).requires_grad_()
            case "tensor":
                if value not in self._made:
                    self._made[value] = self._strided(self._tensors[value], json)
                return self._made[value]
            case "view":
                return self._view(value, json)
            case "meta":
                return torch.empty_strided(
                    json["size"], json["stride"], dtype=_attribute(value, torch.dtype), device="meta"
                )
            case "sparse_coo":
                parts = self.read(value)
                made = torch.sparse_coo_tensor(parts["indices"], parts["values"], json["size"], check_invariants=True)
                return made._coalesced_(bool(json["coalesced"]))
            case "sparse":
                parts, layout = self.read(json["parts"]), _attribute(value, torch.layout)
                make: Any = torch.sparse_compressed_tensor
                return make(*parts, json["size"], layout=layout, check_invariants=True)
            case "quantized":
                held, scale, zero = (self.read(part) for part in (value, json["scale"], json["zero"]))
                if "axis" in json:
                    return torch._make_per_channel_quantized_tensor(held, scale, zero, json["axis"])
                return torch._make_per_tensor_quantized_tensor(held, scale, zero)
            case "DTensor":
                return self._sharded(value, json)
            case "subclass":
                made_by = self._class(value, Tensor).__tensor_unflatten__
                return made_by(
                    self.read(json["parts"]),
                    self.read(json["context"]),
                    torch.Size(json["size"]),
                    tuple(json["stride"] or ()),
                )
            case "as":
                made = self.read(json["tensor"]).as_subclass(self._class(value, Tensor))
                vars(made).update(self.read(json["attributes"]))
                return made
        return None

    def _data(self, value: Any) -> bytearray:
        if isinstance(value, str):
            return bytearray(base64.b64decode(value, validate=True))
        held = self.read(value)
        return bytearray(held.cpu().numpy().tobytes())

    def _class(self, name: Any, kind: type) -> Any:
        found = _found(name) if isinstance(name, str) else None
        if not isinstance(found, type) or not issubclass(found, kind):
            module = str(name).partition(":")[0]
            raise Unlike(
                f"has a value of the class {name!s:.120}, and this script has no such class under that name; define or import it "
                f"({module!s:.120}) before the checkpoint is read, as the script that saved it did"
            )
        return found

    def _device(self, kind: Any) -> torch.device:
        if kind in self._devices:
            return self._devices[kind]
        module = getattr(torch, str(kind), None)
        return (
            torch.device(kind)
            if module is not None and getattr(module, "is_available", bool)()
            else torch.device("cpu")
        )

    def _strided(self, held: Tensor, json: dict[str, Any]) -> Tensor:
        if self._copied or "dtype" in json:  # the memory of a file may be aligned for bytes only
            held = held.clone()
        if "dtype" in json:
            dtype = _attribute(json["dtype"], torch.dtype)
            held = (held.view(dtype) if held.numel() else torch.empty(0, dtype=dtype)).reshape(json["shape"])
        if "order" in json:
            order = json["order"]
            held = held.permute(order).contiguous().permute([order.index(dim) for dim in range(held.ndim)])
        if "device" in json:
            held = held.to(self._device(json["device"]))
        return held.expand(json["expand"]) if "expand" in json else held

    def _view(self, name: str, json: dict[str, Any]) -> Tensor:
        if name not in self._made:
            base = self._tensors[name].clone()  # in memory of its own, which begins with it
            self._made[name] = base.to(self._device(json["device"])) if "device" in json else base
        base, dtype = self._made[name], _attribute(json["dtype"], torch.dtype)
        shape, stride, offset = json["shape"], json["stride"], json["offset"]
        if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in (*shape, *stride, offset)):
            raise ValueError(f"a view of shape {shape!r:.80} and stride {stride!r:.80}")
        last = offset + sum(max(0, size - 1) * step for size, step in zip(shape, stride))
        if (last + 1) * dtype.itemsize > base.untyped_storage().nbytes():
            raise ValueError(f"a view that ends after its tensor {name!r:.80}")
        return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, shape, stride)

    def _sharded(self, local: Any, json: dict[str, Any]) -> Any:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        names, shape = json["mesh"]
        meshes = [
            mesh for mesh in self._meshes if [list(mesh.mesh_dim_names or ()), list(mesh.shape)] == [names, shape]
        ]
        if not meshes:
            raise Unlike(
                f"is sharded over a mesh {names!r:.80} of {shape!r:.80}, which this model has not; shard the model as the saved one was"
            )
        known: dict[str, Any] = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
        strided = vars(sys.modules["torch.distributed.tensor.placement_types"]).get("_StridedShard")
        known |= {"_StridedShard": strided} if strided else {}
        placements = [known[name](**fields) for name, fields in self.read(json["placements"])]
        size, stride = torch.Size(json["size"]), tuple(json["stride"])
        return DTensor.from_local(self.read(local), meshes[0], placements, run_check=False, shape=size, stride=stride)


def _array(dtype: str, shape: Sequence[int], data: bytearray, order: Any = "C") -> Any:
    """An array over `data`, of a length that fits."""
    kind = np.dtype(dtype)
    if kind.hasobject or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"an array of {dtype!r:.40} and shape {shape!r:.80} with {len(data)} bytes")
    return np.ndarray(shape, kind, data, order=order) if data else np.empty(shape, kind)
