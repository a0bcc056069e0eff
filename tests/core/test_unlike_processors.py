"""Replicas on unlike processors hold the same bits. The processor is real, what libraries make of it is asked for by their own
environment variables: torch, MKL, glibc and numba each have loops of their own for each generation."""

from __future__ import annotations

import pytest
import torch
from core_processes import FOUR, run_world
from pieces import METHODS, Journey, Plan, same_bits, travel

import thinwire as tw

NEW = {"ATEN_CPU_CAPABILITY": "avx512"}  # or the most that this machine has
MIDDLE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OLD = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2",
}
OLDEST = OLD | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
FEW = {
    "moments": tw.Strategy(
        schedule=tw.Every(2),
        filters=(tw.Moments(beta2=0.5, freeze=tw.Settled(0.5, 3)),),
        codec=tw.Sign("l2"),
        feedback=tw.Feedback(),
        exchange=tw.TwoShot(tw.Feedback()),
    ),
    "one_bit_adam": METHODS["one_bit_adam"],
    "data_parallel": METHODS["data_parallel"],
}


def few(rank: int) -> dict[str, Journey]:
    group = tw.TorchGroup.from_world(replicas=2, timeout=60.0)
    return {name: travel(Plan(strategy), group) for name, strategy in FEW.items()}


def all_of_them(rank: int) -> dict[str, Journey]:
    group = tw.TorchGroup.from_world(replicas=4, timeout=60.0)
    return {name: travel(Plan(strategy), group) for name, strategy in FOUR.items()}


def check_agreed(strategy: tw.Strategy, journeys: list[Journey]) -> None:
    """After every step what is agreed, and at the end the weights. Between two looks at them weights may drift where a torch
    optimizer steps from gradients.
    """
    drifts = isinstance(strategy.signal, tw.Gradients) and strategy.inner is None
    for one in journeys:
        for step, (a, b) in enumerate(zip(one.agreed, journeys[0].agreed, strict=True), 1):
            assert a.keys() == b.keys()
            for key in a:
                assert same_bits(a[key], b[key]) or (drifts and key.endswith(".now")), (step, key)
        assert torch.isfinite(one.final).all() and same_bits(one.final, journeys[0].final)


def test_two_processors(tmp_path):
    world = run_world(few, tmp_path, machines=(OLD, NEW))
    for name, strategy in FEW.items():
        check_agreed(strategy, [results[name] for results in world])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return run_world(all_of_them, tmp_path_factory.mktemp("unlike"), machines=(OLDEST, OLD, MIDDLE, NEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_every_recipe(world, name):
    check_agreed(FOUR[name], [results[name] for results in world])
