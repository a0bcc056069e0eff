"""Rules of gossip that trust no neighbour: each replica judges its neighbours' weights by its own data and memory.

    x_i ← (θ_i + Σ_j w_ij·θ_j) / (1 + Σ_j w_ij),   w_ij ≥ 0

The sum runs over the neighbours of the round. A replica's own weight is 1. A neighbour whose parameters are not finite has the weight 0.
Nothing is conserved, because the weights of two neighbours for each other are not equal. At the end all replicas take the median of each
coordinate, not the mean.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.errors import ConfigurationError
from thinwire.exchange.products import inner_products
from thinwire.lab.gossip.rules import GossipRule, Vector, check_whole
from thinwire.lab.robust.coordinates import Median
from thinwire.lab.robust.direction_weights import foolsgold
from thinwire.lab.topology import Topology, outgoing
from thinwire.lab.topology.base import Weights
from thinwire.pieces.aggregate import Aggregate
from thinwire.rng import Key, derive, draw
from thinwire.types import State

NOBODY = -1
_ABOUT = 3  # numbers before the sketch in a record: replica, round, distance
_WORD = 64  # bits of a draw


@dataclass(frozen=True)
class Heard:
    """What a replica knows when a round lands.

    Args:
        key: the key of its own packet.
        size: number of replicas.
        own: its own weights at the departure, flat fp32.
        weights: the weights of each neighbour of the round, by rank; only those that are finite.
        records: these neighbours' records of other replicas, by the rank of the neighbour; empty if the rule sends no records.
        losses: computes the losses of given weights on each of the replica's validation batches.

    >>> Heard(Key(sender=1), 2, torch.zeros(1), {}, {}, lambda weights: [0.0]).size
    2
    """

    key: Key
    size: int
    own: Tensor
    weights: Mapping[int, Tensor]
    records: Mapping[int, Tensor]
    losses: Callable[[Tensor], Sequence[float]]


@runtime_checkable
class Judging(GossipRule, Protocol):
    """A rule that receives the weights of each neighbour separately, and computes w_ij from them when a round lands."""

    sends_weights: ClassVar[bool] = True

    @property
    def needs_losses(self) -> bool:
        """Whether it needs losses on validation batches."""
        return False

    @property
    def meets(self) -> Aggregate:
        return Median()

    def weights(self, topology: Topology, size: int, number: int, fragment: int, seed: int) -> Weights:
        return outgoing(topology.edges(size, number, fragment, seed))  # only shows which replicas are neighbours

    def begins(self, x: Tensor, key: Key, size: int) -> State:
        """The first state of replica `key.sender` of `size`, flat, in fp32, on the CPU. All replicas begin with the weights `x`."""
        return {}

    def tells(self, state: State, to: int, key: Key) -> Tensor:
        """The second vector, which goes to neighbour `to` only; called only for a rule with two `vectors`."""
        return torch.empty(0)

    @abstractmethod
    def judges(self, heard: Heard, state: State) -> tuple[dict[int, float], State]:
        """The weights w_ij of the neighbours in `heard.weights`, and the next state."""

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return (theta,)

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        return heard[0].clone(), {}


def weighed(own: Tensor, others: Mapping[int, Tensor], weights: Mapping[int, float]) -> Tensor:
    """(own + Σ_j w_j·θ_j) / (1 + Σ_j w_j), added in fp32, in rank order; equal values stay as they are, to the bit.

    >>> weighed(torch.tensor([1.0]), {3: torch.tensor([4.0])}, {3: 0.5}).tolist()
    [2.0]
    """
    total = 1.0 + math.fsum(weights.values())
    out = own.clone()
    for rank in sorted(weights):
        if weights[rank]:
            out.add_(others[rank] - own, alpha=weights[rank] / total)
    return out


# ---- by losses


def trust(own: Sequence[float], theirs: Sequence[float]) -> float:
    """Bristle's weight of a peer, from the qualities in [0, 1] of the own and the peer's model on each of several validation sets.

        d_c = 10·|u_c − v_c|;   s_c = d_c^(3 + u_c) if v_c > u_c, else −d_c^(4 + u_c);   certainty = max(0, mean v − std v)
        w = certainty · max(0, 10·sigmoid(Σ_c s_c / 100) − 4)

    >>> [round(trust([0.5], [v]), 3) for v in (0.3, 0.5, 1.0)]
    [0.131, 0.5, 5.424]
    """
    scores = [
        (10 * abs(u - v)) ** (3 + u) if v > u else -((10 * abs(u - v)) ** (4 + u))
        for u, v in zip(own, theirs, strict=True)
    ]
    mean = math.fsum(theirs) / len(theirs)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in theirs) / len(theirs))
    score = max(-100.0, math.fsum(scores))
    return max(0.0, mean - spread) * max(0.0, 10 / (1 + math.exp(-score / 100)) - 4)


@dataclass(frozen=True)
class Bristle(Judging):
    """A neighbour counts as much as its model does well on the replica's own validation batches (Verbraeken et al., arXiv 2110.11006).

        u_c = ½,   v_jc = min(1, ½·exp(L_c(θ_i) − L_c(θ_j)))          L_c: the loss on validation batch c
        d_jc = 10·|u_c − v_jc|;   s_jc = d_jc^(3 + u_c) if v_jc > u_c, else −d_jc^(4 + u_c)
        w_ij = max(0, mean_c v_jc − std_c v_jc) · max(0, 10·sigmoid(Σ_c s_jc / 100) − 4)

    A neighbour as good as the replica has the weight ½; one with 0.41 nats more on each of four batches has 0. *Differs*: the paper weighs each
    column of a classifier's output layer by F1 per class, on frozen features. Here the quality is the ratio of perplexities, whose
    half stands for F1. A neighbour has one weight, by the paper's formula for classes that a replica does not know. All neighbours are
    evaluated; the paper draws some of them by distance.

    Sends θ, 4 bytes per parameter. Costs (1 + neighbours) · batches forward passes in a round, on the main thread. Conserves nothing.

    >>> Bristle()
    Bristle()
    """

    needs_losses: ClassVar[bool] = True

    def judges(self, heard: Heard, state: State) -> tuple[dict[int, float], State]:
        own = heard.losses(heard.own)
        return {rank: trust(*qualities(own, heard.losses(theirs))) for rank, theirs in heard.weights.items()}, {}


def qualities(own: Sequence[float], theirs: Sequence[float]) -> tuple[list[float], list[float]]:
    """u and v from the own and a neighbour's losses: ½ means as good as the own model, 1 means half of its perplexity or less.

    >>> qualities([2.0, 2.0, 2.0], [2.0, 0.0, math.nan])
    ([0.5, 0.5, 0.5], [0.5, 1.0, 0.0])
    """
    ratios = [
        math.exp(min(1.0, max(-50.0, u - v))) if math.isfinite(v) else 0.0 for u, v in zip(own, theirs, strict=True)
    ]
    return [0.5] * len(ratios), [min(1.0, ratio / 2) for ratio in ratios]


# ---- by histories


def sketch(x: Tensor, width: int, stream: int) -> Tensor:
    """A random projection of flat `x` to `width` numbers. It keeps inner products without bias, and cosines with an error of about 1/√width.

    Each value gets a random sign, each run of `width` values is rotated by a random number of places, and the runs are added up. A vector of
    at most `width` values is returned as it is.

    Args:
        x: flat, fp32, on the CPU.
        width: a multiple of 64.
        stream: of random draws; sketches of one stream can be compared.

    >>> x = torch.ones(1 << 17)
    >>> round(float(sketch(x, 1 << 14, 7).square().sum()) / (1 << 17), 1)
    1.0
    """
    if x.numel() <= width or x.is_meta:  # meta: only the size counts
        return x[:width].clone()
    out, words = torch.zeros(width), width // _WORD
    places = torch.arange(_WORD)
    for row, begin in enumerate(range(0, x.numel(), width)):
        drawn = draw(stream, row * (words + 1), words + 1)
        signs = (drawn[:-1, None] >> places).bitwise_and_(1).mul_(-2).add_(1).view(-1)
        part = x[begin : begin + width]
        run = torch.zeros(width)
        run[: part.numel()] = part * signs[: part.numel()]
        out += run.roll(int(drawn[-1]) % width)
    return out


@dataclass(frozen=True)
class SybilWall(Judging):
    """Neighbours that resemble each other, or somebody's neighbours far away, count less (Werthenbach, Pouwelse, arXiv 2306.15044).

        h_j = neighbour j's weights − the common start;   w_i· = FoolsGold's weights from all h that replica i knows, for its neighbours only

    With its weights each replica sends each neighbour one record of a third replica, drawn with a chance ∝ λ·exp(−λ·(distance − 1)). So a replica
    can compare Sybils of one liar that have different neighbours. *Only if the replicas' data differ*: on similar data honest replicas
    resemble each other and lose all weight, and a lone liar keeps its weight. A liar can forge a record.

    *Differs*: h begins at the common start, not at 0; and it is a random projection to `width` numbers (`sketch`). The weights that are
    applied add up to 1, as in the paper; in the released code they do not since a later change.

    Sends θ, 4 bytes per parameter, and a record of 4·`width` + 12 bytes. State: 4·`width` bytes for each replica of the group. Conserves nothing.

    Args:
        width: numbers of a sketch, a multiple of 64 from 64 to 65,536; cosines have an error of about 1/√width.
        reach: how many hops away from its replica a record counts; 1: no records are sent, which is FoolsGold among neighbours.
        rate: λ, above 0; with a larger rate, records of near replicas are more likely.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> SybilWall()
    SybilWall(width=16384, reach=8, rate=0.8)
    """

    width: int = 1 << 14
    reach: int = 8
    rate: float = 0.8

    def __post_init__(self) -> None:
        whole = type(self.width) is int and type(self.reach) is int
        if not whole or self.width % _WORD or not _WORD <= self.width <= 1 << 16 or self.reach < 1:
            raise ConfigurationError(
                f"{self}: a width that is a multiple of 64, from 64 to 65,536, and a reach of 1 or more are needed."
            )
        if not 0 < self.rate < math.inf:
            raise ConfigurationError(f"{self}: a rate above 0 is needed.")

    def check(self, topology: Topology, codec: Codec) -> None:
        check_whole(self, codec)
        if not topology.fixed:
            raise ConfigurationError(
                f"{self} on {topology}: a replica remembers what its neighbours have sent, so these must be the same in every round; choose "
                "Ring(), RandomRegular(3) or another fixed graph."
            )

    def vectors(self, codec: Codec, numel: int) -> tuple[Vector, ...]:
        record = (Identity(), _ABOUT + min(self.width, numel))
        return ((codec, numel), record) if self.reach > 1 else ((codec, numel),)

    def begins(self, x: Tensor, key: Key, size: int) -> State:
        start = self._sketch(x, key)
        unknown = {name: torch.zeros(size) for name in ("distance", "round", "source")}
        return {"start": start, "histories": torch.zeros(size * start.numel()), **unknown}

    def tells(self, state: State, to: int, key: Key) -> Tensor:
        record = torch.zeros(_ABOUT + state["start"].numel())
        record[0] = NOBODY
        distances, sources = state["distance"].tolist(), state["source"].tolist()
        known = [p for p, far in enumerate(distances) if far and p not in (key.sender, to) and sources[p] != to]
        if known:
            chances = [math.exp(-self.rate * (distances[p] - 1)) for p in known]
            left = derive(key.seed, "record", key.fragment, key.round, key.sender, to) / 2**63 * math.fsum(chances)
            chosen = known[-1]
            for one, chance in zip(known, chances):
                left -= chance
                if left < 0:
                    chosen = one
                    break
            about = [float(chosen), float(state["round"][chosen]), distances[chosen]]
            record[:_ABOUT] = torch.tensor(about)
            record[_ABOUT:] = state["histories"].view(len(distances), -1)[chosen]
        return record

    def judges(self, heard: Heard, state: State) -> tuple[dict[int, float], State]:
        after = {name: kept.clone() for name, kept in state.items()}
        histories = after["histories"].view(heard.size, -1)
        neighbours = []
        for rank, weights in sorted(heard.weights.items()):
            moved = self._sketch(weights, heard.key) - state["start"]
            if bool(torch.isfinite(moved).all()):
                neighbours.append(rank)
                _remember(after, rank, moved, heard.key.round, 1, rank)
        for rank in neighbours:
            if rank in heard.records:
                self._hear(after, heard, rank, heard.records[rank])
        if not neighbours:
            return {}, after
        far = [rank for rank, distance in enumerate(after["distance"].tolist()) if distance > 1]
        products = inner_products(histories[[*neighbours, *far]])
        return dict(zip(neighbours, foolsgold(products, len(neighbours)))), after

    def _hear(self, after: State, heard: Heard, source: int, record: Tensor) -> None:
        """Keep the record that neighbour `source` sent, if it is valid and new."""
        if not bool(torch.isfinite(record).all()):
            return
        about, number, distance = record[:_ABOUT].tolist()
        whole = all(one == int(one) for one in (about, number, distance))
        sound = whole and 0 <= about < heard.size and 0 <= number <= heard.key.round and 1 <= distance < self.reach
        if not sound or int(about) in (heard.key.sender, source):
            return
        rank = int(about)
        known = float(after["distance"][rank])
        if not known or (known > 1 and number > float(after["round"][rank])):
            _remember(after, rank, record[_ABOUT:], number, distance + 1, source)

    def _sketch(self, x: Tensor, key: Key) -> Tensor:
        return sketch(x, self.width, derive(key.seed, "sketch", key.fragment))


def _remember(state: State, rank: int, moved: Tensor, number: float, distance: float, source: int) -> None:
    """Overwrite the record of replica `rank` in `state`, in place."""
    state["histories"].view(state["distance"].numel(), -1)[rank] = moved
    state["round"][rank], state["distance"][rank], state["source"][rank] = number, distance, source
