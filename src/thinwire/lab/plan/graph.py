"""Searches the gossip graph with the fastest agreement over given links, if each replica has at most a given number of neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.app.plan.links import Links
from thinwire.app.report.charts import Chart, ChartState, Json, colour
from thinwire.errors import ConfigurationError
from thinwire.lab.topology import Listed, Topology, metropolis, spectrum
from thinwire.lab.topology.base import Edges
from thinwire.rng import derive

PROPOSALS = 1500  # small changes that are tried from each start
WARMTH = 0.2  # the first temperature of the annealing, as a logarithm of the time
STARTS = 12  # number of bounds on the time of a link; each gives a graph to start from
CLIMBED = 3
Floats = NDArray[np.float64]


def round_seconds(links: Links, edges: Edges, nbytes: float) -> float:
    """Seconds of a round in which each replica sends `nbytes` over each of its edges, and all begin at once.

    It is the longest time of a single edge, of a replica's whole uplink traffic, and of its whole downlink traffic.

    Args:
        links: between the replicas, by rank.
        edges: boolean [size, size]; [i, j]: replica i sends to replica j.
        nbytes: bytes on an edge.

    >>> from thinwire.comm import Link
    >>> round_seconds(Links.uniform(Link(8e6, 0.5), 3), ~np.eye(3, dtype=bool), nbytes=1e6)
    2.5
    """
    if not edges.any():
        return 0.0
    rates, delays = links.rates, links.delays
    delay = np.where(edges, delays, 0.0)
    alone = np.where(edges, 8 * nbytes / rates + delays, 0.0).max()
    up = (edges.sum(1) * 8 * nbytes / np.array(links.up) + delay.max(1)).max()
    down = (edges.sum(0) * 8 * nbytes / np.array(links.down) + delay.max(0)).max()
    return float(max(alone, up, down))


def halving_seconds(links: Links, topology: Topology, nbytes: float) -> float:
    """Seconds of gossip over these links until the distance from the mean has halved.

    Args:
        links: between the replicas, by rank.
        topology: the edges. If they change, 64 rounds or a period are used.
        nbytes: bytes on an edge.

    Raises:
        ConfigurationError: the topology does not fit the number of replicas.

    >>> from thinwire.comm import Link
    >>> from thinwire.lab.topology import Ring
    >>> round(halving_seconds(Links.uniform(Link(8e6), 8), Ring(), nbytes=1e6), 2)
    6.38
    """
    size = len(links)
    numbers = range(topology.rounds(size) or 64)
    seconds = np.mean([round_seconds(links, topology.edges(size, number), nbytes) for number in numbers])
    return float(seconds) * max(1.0, spectrum(topology, size).halving)


def within_budget(links: Links, degree: int, nbytes: float) -> Listed:
    """The graph over which replicas agree soonest (`halving_seconds`), if each has at most `degree` neighbours.

    It is a heuristic search. It begins with trees of fast links, adds edges where the graph is weakest, and makes
    small changes: add, remove or move an edge, or swap the ends of two. The same links give the same graph.

    Args:
        links: between the replicas, by rank.
        degree: most neighbours of a replica.
        nbytes: bytes on an edge, in a round.

    Raises:
        ConfigurationError: no graph with this degree is connected.

    >>> from thinwire.comm import Link
    >>> within_budget(Links.uniform(Link(8e6), 4), degree=2, nbytes=1e6).edges(4).sum(1)
    array([2, 2, 2, 2])
    """
    size = len(links)
    if size < 2:
        raise ConfigurationError(f"a graph of degree {degree} among {size} replicas: at least 2 replicas are needed.")
    least = min(2, size - 1)
    if type(degree) is not int or not least <= degree < max(2, size):
        one = (
            " With one neighbour each only two replicas are connected; for random pairs in each round take random_pairs."
            * (degree == 1)
        )
        raise ConfigurationError(
            f"degree={degree} among {size} replicas: {least} to {size - 1} neighbours are needed.{one}"
        )
    rng = np.random.default_rng(derive(0, "budget"))
    search = _Search(links, degree, nbytes)
    starts = sorted(search.starts(rng), key=search.worth)[:CLIMBED]
    best = min((search.climbed(start, rng) for start in starts), key=search.worth)
    return Listed(tuple((int(one), int(other)) for one, other in np.argwhere(np.triu(best))))


@dataclass(frozen=True)
class _Search:
    links: Links
    degree: int
    nbytes: float

    def worth(self, edges: Edges) -> float:
        """Seconds until the distance has halved; infinite if the graph is not connected."""
        values = np.abs(np.linalg.eigvalsh(metropolis(edges) - 1 / len(edges)))
        second = float(values.max())
        if second >= 1 - 1e-12:
            return np.inf
        return round_seconds(self.links, edges, self.nbytes) * max(1.0, float(-np.log(2) / np.log(max(second, 1e-9))))

    def starts(self, rng: np.random.Generator) -> Iterator[Edges]:
        """A connected graph for each bound on the time of an edge, if there is one."""
        took = 8 * self.nbytes / self.links.rates + self.links.delays
        took = np.maximum(took, took.T)
        ones, others = np.triu_indices(len(took), 1)
        order = np.lexsort((rng.random(len(ones)), took[ones, others]))
        pairs = [(int(ones[index]), int(others[index])) for index in order]
        for count in sorted({max(1, round(len(pairs) * share)) for share in np.linspace(0, 1, STARTS + 1)[1:]}):
            edges = self._tree(pairs[:count], len(took))
            if edges is not None:
                yield edges.copy()
                yield self._filled(edges, pairs[:count])

    def _tree(self, pairs: list[tuple[int, int]], size: int) -> Edges | None:
        """A spanning tree, fast edges first; None if they do not connect all."""
        edges = np.zeros((size, size), dtype=bool)
        part = np.arange(size)
        for one, other in pairs:
            if part[one] != part[other] and max(edges[one].sum(), edges[other].sum()) < self.degree:
                edges[one, other] = edges[other, one] = True
                part[part == part[other]] = part[one]
        return edges if len(set(part)) == 1 else None

    def _filled(self, edges: Edges, pairs: list[tuple[int, int]]) -> Edges:
        """Add edges between the replicas that the slowest mode separates most, while degrees allow it."""
        while True:
            degrees = edges.sum(1)
            free = [(a, b) for a, b in pairs if not edges[a, b] and max(degrees[a], degrees[b]) < self.degree]
            if not free:
                return edges
            mode = np.linalg.eigh(np.diag(degrees) - edges.astype(np.float64))[1][:, 1]
            one, other = max(free, key=lambda pair: round(abs(float(mode[pair[0]] - mode[pair[1]])), 9))
            edges[one, other] = edges[other, one] = True

    def climbed(self, edges: Edges, rng: np.random.Generator) -> Edges:
        """Simulated annealing by small changes; returns the best graph that was found."""
        best = at = edges
        least = seconds = self.worth(edges)
        for warmth in np.linspace(WARMTH, 0, PROPOSALS):
            tried = self._changed(at, rng)
            if tried.sum(1).max() <= self.degree and not (tried == at).all():
                worth = self.worth(tried)
                if worth <= seconds * np.exp(warmth * rng.exponential()):
                    at, seconds = tried, worth
                    best, least = (at, seconds) if seconds < least else (best, least)
        return best

    def _changed(self, edges: Edges, rng: np.random.Generator) -> Edges:
        """Add, remove or move an edge, or swap the ends of two."""
        there, size = np.argwhere(np.triu(edges)), len(edges)
        kind = int(rng.integers(3))
        a, b = (int(end) for end in there[rng.integers(len(there))])
        c, d = (int(end) for end in rng.choice(size, 2, replace=False))
        changed = edges.copy()
        if kind == 0:
            changed[c, d] = changed[d, c] = not edges[c, d]
        elif kind == 1:
            changed[a, b] = changed[b, a] = False
            changed[c, d] = changed[d, c] = True
        else:
            c, d = (int(end) for end in there[rng.integers(len(there))][:: 1 if rng.random() < 0.5 else -1])
            if len({a, b, c, d}) == 4 and not edges[a, c] and not edges[b, d]:
                changed[a, b] = changed[b, a] = changed[c, d] = changed[d, c] = False
                changed[a, c] = changed[c, a] = changed[b, d] = changed[d, b] = True
        return changed


def graph_chart(edges: Edges, values: Floats, unit: str, names: tuple[str, ...] = ()) -> Chart:
    """The graph with its replicas on a circle; the thickest third of its edges has the largest values.

    Args:
        edges: boolean [size, size].
        values: float64 [size, size], one for each edge.
        unit: the unit of the values, for the legend.
        names: names of the replicas; (): their ranks.

    >>> len(graph_chart(~np.eye(3, dtype=bool), np.ones((3, 3)), "meetings").views[0].data)
    2
    """
    both = np.triu(edges | edges.T, 1)
    angle = np.pi / 2 - 2 * np.pi * np.arange(len(edges)) / len(edges)
    places = np.stack([np.cos(angle), np.sin(angle)], 1).round(4)
    found = np.where(edges, values, np.where(edges.T, values.T, 0.0))
    # values that differ by rounding become equal
    found = np.array([[float(f"{value:.3g}") for value in row] for row in found])
    bounds = sorted({float(value) for value in np.quantile(found[both], (1 / 3, 2 / 3, 1), method="inverted_cdf")})
    data: list[Json] = []
    for number, bound in enumerate(bounds):
        above = bounds[number - 1] if number else -np.inf
        chosen = np.argwhere(both & (found <= bound) & (found > above))
        across = [[(float(places[a, axis]), float(places[b, axis]), None) for a, b in chosen] for axis in (0, 1)]
        x, y = ([value for three in one for value in three] for one in across)
        line = {"color": colour(number), "width": 1 + 2 * number}
        name = f"{unit} up to {bound:.3g}"
        data.append(
            {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": line, "hoverinfo": "skip"}
        )
    data = [one for one in data if one["x"]]
    data.append(
        {
            "type": "scatter", "mode": "markers+text", "x": places[:, 0].tolist(), "y": places[:, 1].tolist(),
            "name": "replicas", "text": list(names or map(str, range(len(edges)))), "textposition": "top center",
            "marker": {"color": colour(len(bounds)), "size": 14}, "showlegend": False, "hoverinfo": "text",
        }
    )  # fmt: skip
    bare = {"title": {"text": ""}, "tickvals": [], "ticktext": [], "range": [-1.25, 1.25], "zeroline": False}
    layout = {"xaxis": dict(bare), "yaxis": dict(bare), "hovermode": "closest", "showlegend": True}
    return Chart([ChartState("", data, layout)], 560)
