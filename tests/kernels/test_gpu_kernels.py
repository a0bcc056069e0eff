"""The Triton kernels have the bytes of the reference, on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pieces import CODECS, OUTERS

import thinwire as tw
from thinwire import kernels
from thinwire.codecs.base import encode_from, runs_anywhere
from thinwire.kernels import reference
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.testing.values import EXTREME, NORMAL, draw, gaussian, roundtrip

pytest.importorskip("triton", reason="the GPU's kernels run through triton's interpreter: pip install triton")

import triton
import triton.language as tl

from thinwire.kernels import gpu
from thinwire.kernels.triton_programs import _part

# Warnings of numpy: the values overflow on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAM = Key(3).own("rounding")
NORMS = [("mean", 4096), ("l2", 4096), ("mean", 33), ("l2", 128), ("mean", 1), ("l2", 5000), ("mean", 8192)]
BLOCKS = {
    (row.piece.grid, row.piece.block, row.piece.scale, None if row.piece.rounding == "nearest" else STREAM): str(row)
    for row in CODECS
    if hasattr(row.piece, "grid")
}


def everything(n: int) -> torch.Tensor:
    """n values of each kind of data in one tensor, and two more."""
    return torch.cat([draw(data, n) for data in (*NORMAL, *EXTREME)] + [gaussian(2)])


def inputs(block: int) -> list[torch.Tensor]:
    """No value, one value, and all kinds of data, so that blocks hold one kind or several."""
    return [gaussian(0), gaussian(1), everything(block if 40 <= block <= 1000 else 130)]


def buffer(nbytes: int) -> torch.Tensor:
    """A buffer of garbage at an odd address."""
    return torch.full((nbytes + 3,), 0xA5, dtype=torch.uint8, device=DEVICE)[3:]


def check_encode(encode: str, x: torch.Tensor, nbytes: int, *args: object) -> torch.Tensor:
    """Encode with both kernels, check that their bytes are equal, and return them."""
    wanted, got = torch.full((nbytes,), 0x5A, dtype=torch.uint8), buffer(nbytes)
    assert getattr(reference, encode)(x, wanted, *args) and getattr(gpu, encode)(x.to(DEVICE), got, *args)
    assert torch.equal(got.cpu(), wanted)
    return wanted


def check_add(add: str, payload: torch.Tensor, n: int, *args: object) -> None:
    wanted = everything(-(-n // 16))[:n] / 4
    got, there = wanted.to(DEVICE, copy=True), buffer(len(payload)).copy_(payload)
    getattr(reference, add)(payload, wanted, *args)
    getattr(gpu, add)(there, got, *args)
    assert same_bits(got.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0)) and torch.equal(there.cpu(), payload)


@pytest.fixture
def on_gpu(monkeypatch):
    """Call a function with Triton's kernels on any device."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_of", lambda device: gpu)
            return function()

    return run


@triton.jit
def first_columns(found, pieces, COLS: tl.constexpr):
    _, first = _part(0, 0, pieces, 1, COLS)
    tl.store(found + tl.program_id(0), first)


def test_a_block_may_have_more_elements_than_an_int32_counts():
    """As in `Sign()`, whose block is a whole fragment. No block of this size is made."""
    found = torch.empty(6, dtype=torch.int64, device=DEVICE)
    first_columns[(6,)](found, 6, COLS=1 << 30)
    assert found.tolist() == [place << 30 for place in range(6)]


@pytest.mark.parametrize("row", [row for row in CODECS if runs_anywhere(row.piece)], ids=str)
def test_codecs_have_the_bytes_of_the_cpu(row, on_gpu):
    """The decoded values are equal, too, and values that are not finite are refused."""
    for n in (0, 1, 301):
        x = gaussian(n)
        due, payload = roundtrip(row.piece, x, Key(3)), torch.zeros(row.piece.nbytes(n), dtype=torch.uint8)
        bytes_due = payload.clone()
        row.piece.encode(x, bytes_due, Key(3))
        on_gpu(lambda x=x, to=payload: encode_from(x.to(DEVICE), row.piece, to, Key(3)))
        assert torch.equal(payload, bytes_due)
        there, out = payload.to(DEVICE), torch.zeros(n, device=DEVICE)
        on_gpu(lambda there=there, out=out: row.piece.decode_add(there, out, Key(3)))
        assert same_bits(out.cpu(), due)
    x[7] = torch.nan
    with pytest.raises(tw.NonFiniteError, match="1 of 301 values"):
        on_gpu(lambda: encode_from(x.to(DEVICE), row.piece, payload, Key(3)))


def test_values_and_payload_on_different_devices_are_refused():
    elsewhere = torch.zeros(4, dtype=torch.uint8, device="meta")
    with pytest.raises(
        tw.ConfigurationError, match="values on cpu with a payload on meta were given, one device is needed"
    ):
        tw.codecs.Identity().encode(torch.zeros(1), elsewhere, Key())


@pytest.mark.parametrize("form", BLOCKS, ids=BLOCKS.get)
def test_block_formats_match_the_reference(form):
    grid, block, scale, stream = form
    for x in inputs(block):
        nbytes = -(-len(x) * grid.bits // 8) + -(-len(x) // block) * {"exponent": 1, "bf16": 2, "fp32": 4}[scale]
        payload = check_encode("encode_blocks", x, nbytes, grid, block, scale, stream)
        check_add("add_blocks", payload, len(x), grid, block, scale, 0.3)
    torch.manual_seed(0)
    check_add("add_blocks", torch.randint_like(payload, 256), len(x), grid, block, scale, 1.0)  # any bytes at all


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
def test_float_formats_match_the_reference(form):
    for x in inputs(1):
        payload = check_encode("encode_floats", x, len(x) * (4 if form == "fp32" else 2), form)
        check_add("add_floats", payload, len(x), form, 0.3)
    words = torch.arange(1 << 16).short() if form != "fp32" else everything(200) * 3
    check_add("add_floats", words.view(torch.uint8), len(words), form, -1.7)


@pytest.mark.parametrize(("norm", "block"), NORMS)
def test_signs_match_the_reference(norm, block):
    for x in [*inputs(block), gaussian(9001)]:
        payload = check_encode("encode_signs", x, -(-len(x) // 8) + 4 * -(-len(x) // block), block, norm)
        check_add("add_signs", payload, len(x), block, 0.3)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 12, 33])
def test_pack_and_unpack_match_the_reference(width):
    for count in (0, 1, 1001):
        numbers = torch.randint(1 << width, (count,))
        packed, got = torch.empty(-(-count * width // 8), dtype=torch.uint8), buffer(-(-count * width // 8))
        reference.pack(numbers, packed, width)
        gpu.pack(numbers.to(DEVICE), got, width)
        assert torch.equal(got.cpu(), packed)
        back = torch.full((count,), -1, device=DEVICE)
        gpu.unpack(got, back, width)
        assert torch.equal(back.cpu(), numbers)


@pytest.mark.parametrize(("chunk", "count"), [(1, 1), (7, 3), (64, 64), (300, 2), (10_000, 40), (10_000, 0)])
def test_the_largest_are_those_of_the_reference(chunk, count):
    """Few different values, so that many are equal; a shorter last chunk; no value at all."""
    for x in (torch.randint(-3, 4, (2111,)) / 2, everything(80).clamp(-9, 9), gaussian(0), torch.zeros(500)):
        numel = max(1, len(x))
        whole, rest = divmod(len(x), min(chunk, numel))
        size = whole * min(count, numel) + -(-min(count, numel) * rest // min(chunk, numel))
        wanted, got = (torch.full((size,), -1, device=device) for device in ("cpu", DEVICE))
        fine = reference.select_largest(x, min(chunk, numel), min(count, numel), wanted)
        assert gpu.select_largest(x.to(DEVICE), min(chunk, numel), min(count, numel), got) == fine
        assert torch.equal(got.cpu(), wanted)
    x = torch.ones(2111, device=DEVICE)
    x[2000] = torch.nan
    assert not gpu.select_largest(x, 64, 3, torch.empty(0, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("row", [row for row in OUTERS if "momentum" in repr(row.piece)], ids=str)
def test_nesterov_matches_the_reference(row):
    for x in inputs(1):
        steps = [everything(130)[: len(x)] * 3, x / 4, x.flip(0) / 4]
        wanted, got = [torch.empty_like(x) for _ in range(2)], [torch.empty_like(x, device=DEVICE) for _ in range(2)]
        fine = reference.nesterov(*steps, row.piece.lr, row.piece.momentum, *wanted)
        assert gpu.nesterov(*(t.to(DEVICE) for t in steps), row.piece.lr, row.piece.momentum, *got) == fine
        assert all(same_bits(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(got, wanted))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_kernels_report_values_that_are_not_finite(bad):
    """At the first and the last place. Large finite values are not reported."""
    grid = next(iter(BLOCKS))[0]
    calls = {
        (gpu.encode_blocks, 2304): (grid, 1024, "bf16", None),
        (gpu.encode_floats, 8800): ("fp32",),
        (gpu.encode_signs, 287): (1024, "l2"),
    }
    for (encode, nbytes), args in calls.items():
        for place in (0, 2199):
            x = torch.full((2200,), 3.4e38, device=DEVICE)
            assert encode(x, buffer(nbytes), *args)
            x[place] = bad
            assert not encode(x, buffer(nbytes), *args)
    x = torch.zeros(2200, device=DEVICE)
    assert gpu.nesterov(x, x, x, 1.0, 0.5, x.clone(), x.clone())
    assert not gpu.nesterov(torch.full_like(x, bad), x, x, 1.0, 0.5, x.clone(), x.clone())


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_with_ieee_rounding(tmp_path):
    """The interpreter does not show this: every program compiles for an A100 and an H100 and rounds as IEEE 754 says.

    No operation is fused, approximate or flushed to zero.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "compiled_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert len({name.split()[0] for name in compiled}) == 10 and all(one["nbytes"] for one in compiled.values())
    for name, one in compiled.items():
        for instruction in one["floats"]:
            words = instruction.split(".")
            assert not {"ftz", "approx", "full"} & set(words) and words[0] not in ("fma", "mad"), (name, instruction)
            assert words[0] not in ("add", "sub", "mul", "div", "sqrt") or "rn" in words, (name, instruction)
