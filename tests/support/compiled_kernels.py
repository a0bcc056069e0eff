"""Compiles the GPU kernels without a GPU, and prints the instructions of each program that use floats.

test_gpu_kernels.py starts it as a separate process, because Triton runs as an interpreter in the process of the tests.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thinwire.codecs import E3M0, E4M3, Int
from thinwire.kernels import gpu

TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
compiled: dict[str, dict[str, Any]] = {}


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def compile_only(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Compiles a launch for an A100 and an H100 instead of launching it."""
    names = kernel.arg_names
    ones = [name for name, value in zip(names, arguments) if type(value) is int and value == 1 and name != "stream"]
    constants |= dict.fromkeys(ones, 1)  # Triton treats arguments equal to 1 as constants when it launches
    signature = {name: type_of(value) for name, value in zip(names, arguments)} | dict.fromkeys(constants, "constexpr")
    assert set(signature) == set(names)
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    for capability in (80, 90):
        built = triton.compile(source, GPUTarget("cuda", capability, 32), gpu.OPTIONS)
        floats = set(
            re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][a-z0-9._]*\.f(?:16|32|64)[a-z0-9.]*)", built.asm["ptx"], re.M)
        )
        name = f"{kernel.__name__} {sorted(map(str, constants.items()))} sm_{capability}"
        compiled[name] = {"floats": sorted(floats), "nbytes": len(built.asm["cubin"])}


gpu._run = compile_only  # type: ignore[assignment]
x, payload, index = torch.zeros(5000), torch.zeros(20_000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.int64)
for some in (x, x[:1]):
    for codec, stream in ((E3M0(), None), (E4M3(64, "fp32", "stochastic"), 1 << 62), (Int(8, 1, "bf16"), None)):
        gpu.encode_blocks(some, payload, codec.grid, codec.block, codec.scale, stream)
        gpu.add_blocks(payload, some, codec.grid, codec.block, codec.scale, 0.5)
    for form in ("fp32", "bf16", "fp16"):
        gpu.encode_floats(some, payload, form)
        gpu.add_floats(payload, some, form, 0.5)
    for block, norm in ((5000, "l2"), (64, "mean"), (1, "mean")):
        gpu.encode_signs(some, payload, block, norm)
        gpu.add_signs(payload, some, block, 0.5)
    gpu.pack(index[: len(some)], payload[: len(some)], 12)
    gpu.unpack(payload, index[: len(some)], 12)
    gpu.nesterov(some, some, some, 0.4, 0.9, some, some)
json.dump(compiled, sys.stdout)
