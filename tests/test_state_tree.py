"""Any state dict is written as JSON and safetensors, and comes back with its values, types and sharing. What cannot be is refused by its path."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.checkpoint import read_tree, write_tree
from thinwire.state_tree import Packed, pack, unpack


class Kind(enum.Enum):
    ADAPTIVE = 1


@dataclasses.dataclass
class Settings:
    rate: float
    scale: Tensor | None = None


Betas = collections.namedtuple("Betas", "first second")

MATRIX = torch.arange(20.0).reshape(4, 5)
OTHER_DTYPES = (
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint16, torch.uint32,
    torch.uint64, torch.complex64, torch.complex128, torch.bool, torch.int8,
)  # fmt: skip
VALUES = [
    None, True, 1, -5, 2**70, 1.5, -0.0, math.inf, math.nan, "a", "é\ud800", "x" * 5000, b"", b"abc", b"z" * 5000, bytearray(b"q"),
    complex(1, math.nan), [1, [2, (3,)]], (), {1: 2, (1, 2): "x", None: 3, "a": {"!x": 1}}, {"!tensor": "state"},
    collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.Counter("aab"), collections.deque([1, 2], maxlen=3),
    {1, 2}, frozenset([3]), torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.strided, torch.channels_last, range(3),
    slice(1, None, 2), np.float32(1.5), np.int64(3), np.bool_(True), np.float64(math.nan), np.str_("abc"), np.datetime64("2026-01-01"),
    np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((0, 3)), np.array(3.0), np.array(["ab", "c"]),
    np.random.RandomState(1).get_state(), np.random.default_rng(3).bit_generator.state, random.Random(1).getstate(),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.timedelta(1.5), Path("/data"), Kind.ADAPTIVE, Betas(0.9, [0.99]),
    Settings(0.1, MATRIX), torch.Generator().manual_seed(3), MATRIX, MATRIX.t(), MATRIX.expand(3, 4, 5), MATRIX[0, 0], torch.empty(0, 3),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), *(torch.arange(3).to(dtype) for dtype in OTHER_DTYPES),
    torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(),
    torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(3).to_sparse_csc(), torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    torch.empty(2, 3, device="meta"), nn.Parameter(MATRIX), torch.ones(2, requires_grad=True), MATRIX.as_strided((3, 2, 5), (5, 5, 1)),
    nn.BatchNorm1d(2).state_dict(), torch.amp.GradScaler("cpu").state_dict(),
]  # fmt: skip


def through_a_file(value, folder):
    packed = pack(value, "notes")
    write_tree(packed, folder / "tree.safetensors")
    return unpack(read_tree(folder / "tree.safetensors"), "notes")


def bits(value: Tensor):
    if value.layout != torch.strided:
        value = value.to_dense()
    flat = value.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def same(one, other) -> bool:
    assert type(one) is type(other), (one, other)
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape, one.layout, one.requires_grad) == (
            other.dtype,
            other.shape,
            other.layout,
            other.requires_grad,
        )
        if not alike or one.is_meta or one.layout != torch.strided:
            return alike and (one.is_meta or bits(one) == bits(other))
        return one.stride() == other.stride() and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    return same(vars(one), vars(other)) if dataclasses.is_dataclass(one) else repr(one) == repr(other)


def test_what_loops_have_at_hand_comes_back_as_it_was(tmp_path):
    for value in VALUES:
        assert same(value, through_a_file({"x": [value]}, tmp_path)["x"][0]), value
    back = through_a_file(nn.BatchNorm1d(2).state_dict(), tmp_path)
    assert back._metadata[""] == {"version": 2}


def test_tensors_that_share_memory_share_it_again(tmp_path):
    state = {"a": MATRIX, "same": MATRIX, "part": MATRIX[1:], "turned": MATRIX.t(), "bits": MATRIX.view(torch.int32)}
    back = through_a_file(state, tmp_path)
    assert same(state, back)
    back["a"].zero_()
    assert not any(value.any() for value in back.values())
    assert through_a_file(torch.ones(1).expand(8), tmp_path).untyped_storage().nbytes() == 4
    # parts of one buffer that do not overlap are stored each for itself
    assert len(pack(list(torch.zeros(100).split(10)), "x").tensors) == 10


def test_a_reference_to_a_parameter_is_that_parameter_again():
    one, other = (nn.Linear(2, 2) for _ in range(2))
    packed = pack({one.weight: [one.bias]}, "optimizer", list(one.parameters()))
    ((key, (value,)),) = unpack(packed, "optimizer", list(other.parameters())).items()
    assert key is other.weight and value is other.bias and not packed.tensors


def cyclic():
    items = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"state": {3: {"hook": lambda: 1}}},
            r'optimizer\.state\[3\]\["hook"\]: a function \(<lambda>\) cannot be saved',
        ),
        ({"model": nn.Linear(1, 1)}, r"optimizer\.model: a torch.*Linear cannot be saved .*give its state_dict\(\)"),
        ([np.random.default_rng()], r"optimizer\[0\]: .*give its bit_generator.state"),
        (collections.defaultdict(lambda: 1), r"optimizer.default_factory: a function"),
        (cyclic(), r"optimizer\[0\]: a list, inside itself,"),
        ({"at": {1: {object()}}}, r"optimizer.at\[1\]\[0\]: a object cannot be saved"),
    ],
)
def test_what_cannot_be_written_is_refused_by_its_path(state, message):
    with pytest.raises(tw.CheckpointError, match=message):
        pack(state, "optimizer")


@pytest.mark.parametrize(
    "bad",
    [
        {"!nothing": 1},
        {"!tensor": "absent"},
        {"!view": "t", "dtype": "float32", "shape": [1 << 40], "stride": [1], "offset": 0},
        {"!view": "t", "dtype": "float32", "shape": [2], "stride": [-1], "offset": 1},
        {"!dtype": "save"},
        {"!array": "|O", "shape": [1], "order": "C", "data": "AAAAAAAAAAA="},
        {"!array": "<f4", "shape": [1 << 40], "order": "C", "data": ""},
        {"!enum": "os:system", "member": "x"},
        {"!dataclass": "subprocess:Popen", "fields": {}},
        {"!object": "subprocess:Popen", "attributes": {}},
        {"!subclass": "os:system", "parts": {}, "context": None, "size": [], "stride": []},
        {"!reference": 5},
        {"!bytes": "%"},
        {"!sparse_coo": {"indices": {"!tensor": "i"}, "values": {"!tensor": "t"}}, "coalesced": False, "size": [1]},
        json.loads("[" * 900 + "]" * 900),
    ],
)  # fmt: skip
def test_a_tree_from_a_stranger_is_refused_or_read_as_data(bad):
    tensors = {"t": torch.zeros(3), "i": torch.tensor([[7, 8, 9]])}
    try:
        value = unpack(Packed(bad, tensors), "notes")
    except tw.CheckpointError as error:
        assert str(error).startswith("notes in the checkpoint")
    else:
        assert isinstance(value, list)
