"""Sharding degrees: the memory and traffic of named methods and of three levels, and refused degrees."""

from __future__ import annotations

import pytest

from thinwire.app.plan.sharding import FP32, MIXED, Shards, traffic
from thinwire.errors import ConfigurationError

N, R = 1_000_000, 8


@pytest.mark.parametrize(
    ("degrees", "name", "kept", "sent"),
    [
        ((1, 1, 1), "DDP", 16, 2 * 2),  # an all-reduce of 2-byte gradients
        ((1, 1, R), "ZeRO-1", 2 + 2 + 12 / R, 2 + 2),
        ((1, R, R), "ZeRO-2", 2 + 2 / R + 12 / R, 2 + 2),
        ((R, R, R), "ZeRO-3 (FSDP2)", 16 / R, 3 * 2),
    ],
)
def test_named_methods_have_their_memory_and_traffic(
    degrees: tuple[int, int, int], name: str, kept: float, sent: float
) -> None:
    """Memory in units of N bytes, traffic in units of (R−1)/R·N."""
    shards = Shards(*degrees)
    assert shards.name == name and shards.nbytes(N, MIXED) == kept * N
    phases = traffic(shards, N, R, [R], MIXED)
    assert sum(phase.nbytes for phase in phases) == pytest.approx(sent * N * (R - 1) / R)


def test_three_levels_reduce_the_traffic_between_machines() -> None:
    """64 ranks in machines of 8, in pairs: weights are sharded over a pair, gradients over a machine, moments over all."""
    shards = Shards(2, 8, 64)
    by_level = [0.0, 0.0, 0.0]
    for phase in traffic(shards, N, 64, [2, 8, 64], MIXED, micro_batches=4):
        by_level[phase.level] += phase.nbytes
    across = 7 / 8 * 2 * N / 8 + 31 / 32 * 2 * N / 2
    assert by_level == pytest.approx([4 * 2 * 0.5 * 2 * N, 4 * 7 / 8 * 2 * N, across])
    whole = traffic(Shards(64, 64, 64), N, 64, [2, 8, 64], MIXED, micro_batches=4)
    assert {phase.level for phase in whole} == {2} and sum(p.nbytes for p in whole) > 20 * across / 2
    assert shards.nbytes(N, MIXED) == 2 * N // 2 + 2 * N // 8 + 12 * N // 64 and shards.name == "three levels"


def test_traffic_between_machines_is_sent_once_per_step() -> None:
    one, many = (traffic(Shards(2, 8, 64), N, 64, [2, 8, 64], FP32, micro_batches=m) for m in (1, 10))
    assert [b.nbytes / a.nbytes for a, b in zip(one, many)] == [10, 10, 1, 1]


@pytest.mark.parametrize("degrees", [(0, 1, 1), (2, 1, 1), (2, 3, 6), (4, 8, 2), (-1, 1, 1)])
def test_degrees_that_do_not_nest_are_refused(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigurationError, match="nested groups are needed"):
        Shards(*degrees)


@pytest.mark.parametrize(("ranks", "levels"), [(6, [6]), (8, [3, 8]), (8, [4])])
def test_levels_that_do_not_fit_are_refused(ranks: int, levels: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="multiple of s_o"):
        traffic(Shards(1, 2, 4), N, ranks, levels)


def test_degrees_are_parsed() -> None:
    assert Shards.parse("2,8,64") == Shards(2, 8, 64)
    with pytest.raises(ConfigurationError, match="three whole numbers"):
        Shards.parse("2,8")
