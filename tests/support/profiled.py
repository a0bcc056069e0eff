"""Memory as torch's profiler counts it. `alone` (conftest.py) runs these functions in a process without other threads, because
beside waiting threads the profiler may end the process.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from thinwire.app.trainer.huggingface import hugging_face
from thinwire.app.trainer.model import Architecture, Transformer
from thinwire.codecs import Codec, warm_up
from thinwire.rng import Key


def of_a_codec(codec: Codec, numel: int, times: int) -> tuple[list[int], int]:
    """Returns the bytes of the tensors of one encoding and decoding of `numel` values, and the peak of Python's and numpy's in `times`."""
    torch.set_num_threads(1)
    x, out = torch.randn(numel), torch.zeros(numel)
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    warm_up(codec)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        codec.encode(x, payload, Key())
        codec.decode_add(payload, out, Key(), 0.5)
        seen = torch.empty(1)  # detects a profiler that sees nothing
    del seen
    allocated = [event.cpu_memory_usage for event in profiler.events() if event.cpu_memory_usage]
    tracemalloc.start()
    for _ in range(times):
        codec.encode(x, payload, Key())
        codec.decode_add(payload, out, Key(), 1e-3)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocated, most


def of_an_inner_step(shape: Architecture, batch: int, accumulate: int) -> int:
    """Returns the peak of live bytes in an inner step of Thinwire's language model."""
    model = Transformer(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(batch, shape.context, dtype=torch.long)

    def step() -> None:
        for _ in range(accumulate):
            model(tokens, tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _peak(step)


def of_forward_and_backward(kind: str, options: dict[str, Any], vocabulary: int) -> int:
    """Returns the same for a forward and backward pass of a Hugging Face model over 4 texts of 64 tokens."""
    model = hugging_face(kind, vocabulary=vocabulary, **options)
    tokens = torch.zeros(4, 64, dtype=torch.long)

    def step() -> None:
        loss = model(tokens, tokens).loss
        assert loss is not None
        loss.backward()
        model.zero_grad()

    return _peak(step)


def _peak(step: Callable[[], None]) -> int:
    torch.set_num_threads(1)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    most = alive = 0
    for _, nbytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        alive += nbytes
        most = max(most, alive)
    return most
