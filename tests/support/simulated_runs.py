"""A scenario, a strategy and fragments for tests of the simulator of runs, and an observer that records it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import thinwire as tw
from thinwire.comm import Link
from thinwire.lab.simulate.replicas import SimulatedRound
from thinwire.lab.simulate.scenario import Scenario
from thinwire.testing.toy import Toy

FAST, THIN = Link(1e15), Link(1e6, 0.05)
STREAM = tw.streaming_diloco(every=12, fragments=3, delay=3)
NUMELS = [40_000, 50_000, 30_000]


def alike(replicas: int = 2, link: Link = THIN, **changes: Any) -> Scenario:
    return dataclasses.replace(Scenario.alike(replicas, 1.0, link), **changes)


def sizes_for(strategy: tw.Strategy) -> list[int]:
    """The sizes of the toy's fragments times a thousand: methods with offsets need this number of fragments."""
    return [1000 * fragment.numel for fragment in strategy.partition.fragments(Toy())]


class Recorder:
    """An observer that records all calls."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
        self.left: list[SimulatedRound] = []
        self.came: list[tuple[SimulatedRound, int, np.ndarray, np.ndarray, np.ndarray]] = []
        self.changes: list[tuple[list[int], list[float], str]] = []

    def stepped(self, first, done, begin, end):
        self.steps.append((first, done.copy(), begin.copy(), end.copy()))

    def departed(self, round_, away):
        self.left.append(round_)

    def landed(self, round_, step, begin, stall, away):
        self.came.append((round_, step, begin.copy(), stall.copy(), away.copy()))

    def changed(self, replicas, step, seconds, what):
        self.changes.append((replicas.tolist(), seconds.tolist(), what))
