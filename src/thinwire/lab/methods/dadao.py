"""DADAO: the reference for gossip without rounds on convex problems. All replicas run in one process, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError
from thinwire.lab.topology import Clocks, Ring, Topology, fitted_rates, meeting_rates, resistances
from thinwire.rng import derive

Vectors = NDArray[np.float64]  # [replicas, dimension]
_X, _XT, _Y, _YT, _Z, _ZT = range(6)


@dataclass
class Replicas:
    """The state of all replicas: x, x̃, y, ỹ, z, z̃ as [replicas, 6, dimension]; the time of each one's last event; and the number of events."""

    held: NDArray[np.float64]
    at: NDArray[np.float64]
    gradients: int = 0
    meetings: int = 0

    @property
    def x(self) -> Vectors:
        """Each replica's estimate of the minimum."""
        return self.held[:, _X]


@dataclass(frozen=True)
class Constants:
    """Constants of DADAO for L-smooth and μ-strongly convex functions, ν = μ/2, on a graph with χ₁. `rates` and `shapes` diagonalise the
    flow."""

    smooth: float
    convex: float
    chi1: float
    alpha: tuple[float, float] = field(init=False)
    beta: tuple[float, float] = field(init=False)
    gamma: tuple[float, float] = field(init=False)
    delta: float = field(init=False)
    rates: NDArray[np.complex128] = field(init=False)
    shapes: tuple[NDArray[np.complex128], NDArray[np.complex128]] = field(init=False)

    def __post_init__(self) -> None:
        nu = self.convex / 2
        root = math.sqrt(nu / self.smooth)
        eta, theta, (alpha, alpha2) = root / 8, 1 / (2 * root), (root / 4, root / 8)
        made: dict[str, object] = {
            "alpha": (alpha, alpha2),
            "beta": (0.5, 2 * self.chi1 / root),
            "gamma": (1 / (4 * self.smooth), 1 / (4 * math.sqrt(nu * self.smooth))),
            "delta": root / 4 + 1,
        }
        flow = np.zeros((6, 6))
        flow[_X, [_X, _XT]] = flow[_XT, [_XT, _X]] = -eta, eta
        flow[_Y, [_Y, _YT]] = flow[_Z, [_Z, _ZT]] = -alpha, alpha
        flow[_YT, [_XT, _Y, _Z]] = -theta * nu, -theta, -theta
        flow[_ZT, [_ZT, _Z]] = -alpha2, alpha2
        rates, shapes = np.linalg.eig(flow)
        made |= {"rates": rates, "shapes": (shapes, np.linalg.inv(shapes))}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def flow(self, replicas: Replicas, replica: int, at: float) -> None:
        """Move a replica's state to time `at`."""
        shapes, inverse = self.shapes
        moved = (shapes * np.exp(self.rates * (at - replicas.at[replica]))) @ inverse
        replicas.held[replica], replicas.at[replica] = moved.real @ replicas.held[replica], at

    def descend(
        self, replicas: Replicas, replica: int, gradient: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    ) -> None:
        """A gradient event at a replica, after `flow`."""
        x, _, _, ahead, _, _ = replicas.held[replica]
        rest = gradient(x) - self.convex / 2 * x - ahead
        replicas.held[replica, _X] -= self.gamma[0] * rest
        replicas.held[replica, _XT] -= self.gamma[1] * rest
        replicas.held[replica, _YT] += self.delta * rest
        replicas.gradients += 1

    def meet(self, replicas: Replicas, one: int, other: int) -> None:
        """A meeting over an edge, after `flow` of both ends."""
        said = replicas.held[:, _Y] + replicas.held[:, _Z]
        apart = said[one] - said[other]
        for replica, sign in ((one, 1), (other, -1)):
            replicas.held[replica, _Z] -= sign * self.beta[0] * apart
            replicas.held[replica, _ZT] -= sign * self.beta[1] * apart
        replicas.meetings += 1


@dataclass(frozen=True, kw_only=True)
class Dadao:
    """DADAO (Nabli, Oyallon, arXiv 2208.00779): Σ f_i over a graph without rounds, with gradients and messages by Poisson clocks.

    It uses no network. Gossip without rounds can be compared with it on convex problems.

    Args:
        smooth: L, a number, of every f_i.
        convex: μ, a number, of every f_i, above 0 and at most L.
        topology: the edges over which replicas meet; fixed.
        rate: number of meetings on all edges together while each replica takes one gradient; None: the least that suffices.
        rates: `even`: all edges have one rate; `fitted`: the rates with which the fewest meetings suffice (`fewest_meetings`).
        seed: of the clocks.

    Raises:
        ConfigurationError: a setting cannot work; the message has the number.

    >>> ends = Dadao(smooth=1.0, convex=1.0).minimise([lambda x: x - 1, lambda x: x + 3], np.zeros(1), until=300)
    >>> np.round(ends.x, 3).tolist()
    [[-1.0], [-1.0]]
    """

    smooth: float
    convex: float
    topology: Topology = Ring()
    rate: float | None = None
    rates: Literal["even", "fitted"] = "even"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.convex <= self.smooth < math.inf:
            raise ConfigurationError(f"smooth={self.smooth}, convex={self.convex}: 0 < convex <= smooth is needed.")
        if self.rates not in ("even", "fitted"):
            raise ConfigurationError(f"rates={self.rates!r}: even or fitted is needed.")

    def least_rate(self, size: int) -> float:
        """The least rate, √(2·χ₁·χ₂) of clocks with a total rate of 1. Below it the replicas diverge. Raises `ConfigurationError`.

        >>> round(Dadao(smooth=1, convex=1).least_rate(8), 3)
        9.777
        """
        chi1, chi2 = resistances(self._rates(size, 1.0))
        return math.sqrt(2 * chi1 * chi2)

    def clocks(self, size: int) -> Clocks:
        """The clocks of the edges. Raises `ConfigurationError` if they are too slow, or the graph does not fit."""
        least = self.least_rate(size)
        rate = least if self.rate is None else self.rate
        if not least * (1 - 1e-9) <= rate < math.inf:
            chi1, chi2 = resistances(self._rates(size, rate)) if rate > 0 else (math.inf, math.inf)
            raise ConfigurationError(
                f"rate={rate:g} on {self.topology} among {size} replicas: χ₁·χ₂ is {chi1 * chi2:.3g}, at most 1/2 is needed, otherwise all diverge; "
                f"give a rate of at least {least:.3f}, or None."
            )
        return Clocks(self._rates(size, rate), 1, self.seed)

    def minimise(
        self, gradients: Sequence[Callable[[NDArray[np.float64]], NDArray[np.float64]]], start: NDArray[np.float64], until: int
    ) -> Replicas:  # fmt: skip
        """All replicas at time `until`. Each begins at `start`, and takes one gradient of its own function in a unit of time, on average."""
        clocks = self.clocks(len(gradients))
        constants = Constants(self.smooth, self.convex, resistances(clocks.rates)[0])
        return play(constants, clocks, gradients, start, until)

    def _rates(self, size: int, total: float) -> NDArray[np.float64]:
        given = meeting_rates if self.rates == "even" else fitted_rates
        return given(self.topology, size, 2 * total / size)


def play(
    constants: Constants, clocks: Clocks, gradients: Sequence[Callable[[NDArray[np.float64]], NDArray[np.float64]]],
    start: NDArray[np.float64], until: int, each: Callable[[Replicas], None] = lambda replicas: None,
) -> Replicas:  # fmt: skip
    """Run every event before `until`, in order, and call `each` after it. At the end the states of all replicas are at time `until`."""
    size = len(gradients)
    replicas = Replicas(np.zeros((size, 6, len(start))), np.zeros(size))
    replicas.held[:, _X] = start
    for unit in range(until):
        for at, ends in sorted([*_strikes(size, unit, clocks.seed), *_meetings(clocks, unit)]):
            for replica in ends:
                constants.flow(replicas, replica, at)
            if len(ends) == 1:
                constants.descend(replicas, ends[0], gradients[ends[0]])
            else:
                constants.meet(replicas, *ends)
            each(replicas)
    for replica in range(size):
        constants.flow(replicas, replica, float(until))
    return replicas


def _strikes(size: int, unit: int, seed: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Times and replicas of gradients: one in a unit of time for each replica, on average."""
    rng = np.random.default_rng(derive(seed, "gradients", unit))
    replicas = rng.integers(size, size=int(rng.poisson(size)))
    return ((unit + float(at), (int(replica),)) for at, replica in zip(rng.random(len(replicas)), replicas))


def _meetings(clocks: Clocks, unit: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    return ((one.at, (one.one, one.other)) for one in clocks.within(unit))
