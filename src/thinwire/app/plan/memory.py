"""Predicts the memory of one replica before it is started. *Predicted*; benchmarks/memory.py measures the error.

Weights, moments and anchors are kept all the time. The rest is temporary, so its largest moment counts: the start of a backward
pass, a landing, an evaluation, or the end. Activations of `lm.model.Transformer` are counted by the tensors that autograd saves on
a CPU; `outline` counts those of other models.

These are bytes in use. A process on a CPU holds more (`Memory.process_nbytes`): its libraries, and freed bytes, which glibc keeps
for later use unless MALLOC_MMAP_THRESHOLD_=65536 is set before the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from thinwire.app.plan.outline import Outline, Shape
from thinwire.app.plan.sharding import FP32, Shards
from thinwire.codecs import Codec
from thinwire.drivers.fragment import stays_on_device
from thinwire.exchange import Direct, Exchange
from thinwire.exchange.chunks import PIECE_NUMEL
from thinwire.exchange.decode import PIECE
from thinwire.pieces.outer import Outer
from thinwire.pieces.schedule import Schedule, busiest
from thinwire.strategy import Strategy

Place = Literal["device", "host", "disk"]
FREED_SHARE = 0.5  # share of the temporary bytes that glibc keeps after they are freed: measured 0.1 to 1.0
# Bytes: glibc keeps pieces of up to 32 MiB only, and the next step of a large model takes them again.
MOST_FREED = 256 << 20
_STATE_NBYTES = {"fp32": 4, "bf16": 2}  # of a value of outer state and feedback


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: those `kept` all the time, and those that each phase adds. Keys are (place, purpose). What is on disk is no
    memory."""

    kept: Mapping[tuple[Place, str], int]
    phases: Mapping[str, Mapping[Place, int]]

    def peak(self, *places: Place) -> int:
        """Most bytes at one moment on these places together (default: on all, as when the device is the CPU)."""
        return self.worst(*places)[1]

    def worst(self, *places: Place) -> tuple[str, int]:
        """The phase with most bytes, and these bytes."""
        wanted = places or ("device", "host")
        kept = sum(nbytes for (where, _), nbytes in self.kept.items() if where in wanted)
        added = {phase: sum(parts.get(where, 0) for where in wanted) for phase, parts in self.phases.items()}
        phase = max(added, key=lambda name: added[name])
        return phase, kept + added[phase]

    def process_nbytes(self, base: int) -> int:
        """Most resident bytes of a process on a CPU. `base` are its resident bytes without a model."""
        peak = self.peak()
        return base + peak + min(MOST_FREED, round(FREED_SHARE * (peak - sum(self.in_memory().values()))))

    def in_memory(self) -> dict[str, int]:
        """The `kept` bytes that are not on disk, by purpose."""
        return {purpose: nbytes for (place, purpose), nbytes in self.kept.items() if place != "disk"}


def saved_nbytes(shape: Shape, tokens: int, bf16: bool = False) -> int:
    """Bytes that autograd saves in a forward pass of `tokens` = batch · sequence tokens; exact for Thinwire's models.

    fp32: tokens · (layers · (88·D + 12·heads + 8) + 12·D + 4·V + 24) bytes. Under bf16 autocast 64·D a layer and 10·D, and
    the cast matrices, 2·(12·layers·D² + V·D).

    >>> from thinwire.app.trainer.model import Architecture
    >>> saved_nbytes(Architecture(layers=1, width=64, heads=2), tokens=96)
    718080
    """
    a = shape
    if isinstance(a, Outline):
        saved = a.saved_nbytes + (-(-tokens // a.sequence) - 1) * a.more_nbytes
        # as with Thinwire's models, autocast saves three quarters, and the cast matrices
        return 3 * saved // 4 + 2 * a.numel if bf16 else saved
    layer = (64 if bf16 else 88) * a.width + 12 * a.heads + 8
    head = (10 if bf16 else 12) * a.width + 4 * a.vocabulary + 24
    cast = 2 * (12 * a.layers * a.width**2 + a.vocabulary * a.width) if bf16 else 0
    return tokens * (a.layers * layer + head) + cast


def activation_nbytes(shape: Shape, tokens: int, bf16: bool = False) -> int:
    """Bytes at the start of the backward pass: the saved tensors, and the larger of four times the logits and the last layer's
    gradients."""
    return saved_nbytes(shape, tokens, bf16) + tokens * max(16 * shape.vocabulary, (13 if bf16 else 24) * shape.width)


def replica_memory(
    shape: Shape,
    strategy: Strategy,
    numels: Sequence[int],
    replicas: int,
    *,
    batch: int,
    sequence: int,
    accumulate: int = 1,
    bf16: bool = False,
    ranks: int = 1,
    payload_nbytes: int | None = None,
) -> Memory:
    """Memory of one rank of a replica of `ranks` (FSDP2) that trains `shape` in micro-batches of `batch` sequences.

    `numels` are the sizes of the whole fragments, not of a rank's part. A codec that needs shapes also needs `payload_nbytes`, the bytes of
    all their payloads. Raises `ConfigurationError` for less than one rank.
    """
    shards, parameters = Shards(ranks, ranks, ranks), shape.parameters()
    tokens = -(-batch // ranks) * sequence
    own = [-(-numel // ranks) for numel in numels]
    kept = by_place(kept_nbytes(-(-parameters // ranks), strategy, own, replicas), strategy, own)
    gradients = 4 * -(-parameters // ranks)
    gathered = 8 * _largest_gather(shape) if shards.weights > 1 else 0  # FSDP2 gathers a layer and the next one
    coded = payload_nbytes / max(1, sum(numels)) if payload_nbytes is not None else None
    flights = _flights(strategy, own, replicas, coded)  # the buffers of a flight are kept for the next one
    here: Place = "device" if stays_on_device(strategy) else "host"
    logits = tokens * max(12 * shape.vocabulary, (22 if bf16 else 40) * shape.width)
    before = gradients if accumulate > 1 else 0
    # at the end all fragments fly at once, and land one after the other
    finish = (
        0
        if strategy.exchanges_gradients
        else _in_the_air(strategy, own, sum(own), max(own, default=0), replicas, coded)
    )
    phases: dict[str, dict[Place, int]] = {
        "backward": {"device": activation_nbytes(shape, tokens, bf16) + before + gathered},
        "update": {"device": gradients + gathered},
        "evaluation": {"device": gradients + logits + gathered},
    }
    phases = {name: {**of, here: of.get(here, 0) + flights} for name, of in phases.items()}
    phases |= {"finish": {here: finish}, "export": {"device": gradients, "host": 4 * parameters}}
    return Memory(kept, phases)


def kept_nbytes(parameters: int, strategy: Strategy, numels: Sequence[int], replicas: int = 1) -> dict[str, int]:
    """Bytes that a replica of `replicas` keeps between two inner steps: 4 for each value of a parameter, 2 for one of outer state and
    feedback in bf16. The exchange's state is that of the first replica, which has the largest share.

    >>> from thinwire import streaming_diloco
    >>> kept_nbytes(1000, streaming_diloco(), [600, 400])
    {'parameters': 4000, 'AdamW': 8000, 'anchors': 4000, 'outer momentum': 4000}
    """
    exchanged = sum(numels)
    kept = {"parameters": FP32.weight * parameters, "AdamW": FP32.optimizer * parameters, "anchors": 4 * exchanged}
    if not strategy.exchanges_gradients:
        momentum = exchanged * _states(strategy.outer)  # type: ignore[arg-type]  # frozen values hash
        kept["outer momentum"] = _STATE_NBYTES[strategy.state_dtype] * momentum
        if strategy.merge.eager:
            kept["deviation and own delta"] = 8 * exchanged + 4 * momentum
        elif strategy.merge.whole_period:
            kept["own delta"] = 4 * exchanged
    if strategy.feedback:
        kept["feedback"] = _STATE_NBYTES[strategy.state_dtype] * exchanged * len(strategy.feedback.init(0))
    if strategy.filters:
        kept["filters"] = sum(4 * exchanged for one in strategy.filters for t in one.init(0).values() if not t.numel())
    owned = remembered = 0
    for numel, count in Counter(numels if replicas > 1 else ()).items():  # there may be hundreds of equal fragments
        owned += count * _exchange_nbytes(strategy.exchange, strategy.codec, numel, replicas)  # type: ignore[arg-type]  # frozen values hash
        remembered += count * _aggregate_nbytes(strategy, numel, replicas)
    if owned:
        kept["exchange"] = owned
    if remembered:
        kept["aggregate"] = remembered
    return kept


def by_place(kept: Mapping[str, int], strategy: Strategy, numels: Sequence[int]) -> dict[tuple[Place, str], int]:
    """`kept_nbytes` with the place of each; and of what is on disk the part that is in memory: two fragments, one in flight and one that
    departs next.
    """
    placed = {(_home(strategy, purpose), purpose): nbytes for purpose, nbytes in kept.items()}
    if on_disk := sum(nbytes for (place, _), nbytes in placed.items() if place == "disk"):
        placed["host", "two fragments of what is on disk"] = on_disk * sum(sorted(numels)[-2:]) // max(1, sum(numels))
    return placed


@lru_cache(maxsize=1 << 12)
def _exchange_nbytes(exchange: Exchange, codec: Codec, numel: int, replicas: int) -> int:
    """Bytes of the exchange's state for a fragment: the residual of its owner."""
    with torch.device("meta"):  # sizes alone
        state = exchange.init(codec, numel, 0, replicas)
    return sum(tensor.nbytes for tensor in state.values())


def _aggregate_nbytes(strategy: Strategy, numel: int, replicas: int) -> int:
    """Bytes of the aggregate's state for a fragment, or for the shard of it that is aggregated here."""
    with torch.device("meta"):
        state = strategy.aggregate.init(strategy.exchange.owns(strategy.codec, numel, 0, replicas), replicas)
    return sum(tensor.nbytes for tensor in state.values())


@lru_cache
def _states(outer: Outer) -> int:
    """Number of values that an outer step keeps for each parameter, without a count of its steps."""
    return sum(not state.numel() for state in outer.init(torch.empty(0)).values())


def most_at_once(strategy: Strategy, numels: Sequence[int]) -> int:
    """Most elements that are in flight at one step of a period."""
    if strategy.exchanges_gradients:
        return sum(numels)
    return _most_at_once(busiest(strategy.schedule), tuple(numels))  # type: ignore[arg-type]  # frozen values hash


@lru_cache(maxsize=4096)
def _most_at_once(schedule: Schedule, numels: tuple[int, ...]) -> int:
    first = 2 * schedule.every  # a period in which every fragment departs
    most = 0
    departures: list[tuple[int, int]] = []
    for step in range(first, first + 2 * schedule.every + 1):
        departures = [(d, p) for d, p in departures if d + schedule.delay > step - 1]
        departures += [(step, p) for p in schedule.departs(step, len(numels))]
        most = max(most, sum(numels[p] for _, p in departures))
    return most


def _flights(strategy: Strategy, numels: Sequence[int], replicas: int, coded: float | None) -> int:
    """Bytes of flights: deltas, packets of all replicas (`coded`: see `_packets`), and decoded results that wait for their landing."""
    if strategy.exchanges_gradients:
        return _gradient_exchange(strategy, numels, replicas, coded)
    at_once = most_at_once(strategy, numels)
    return _in_the_air(strategy, numels, at_once, at_once, replicas, coded)


def _packets(codec: Codec, numel: int, replicas: int, coded: float | None) -> int:
    """Bytes of all replicas' packets of `numel` elements; `coded` are those of a packet for each element, None: as of one vector."""
    return (codec.nbytes(numel) if coded is None else round(coded * numel)) * replicas


def _in_the_air(
    strategy: Strategy, numels: Sequence[int], at_once: int, landing: int, replicas: int, coded: float | None
) -> int:
    """Bytes of deltas of `at_once` elements in flight, and of the results of `landing` elements."""
    each = _STATE_NBYTES[strategy.state_dtype]
    states = each * _states(strategy.outer)  # type: ignore[arg-type]  # frozen values hash
    states += each * len(strategy.feedback.init(0)) if strategy.feedback else 0
    coding = _coding(strategy, max(numels, default=0), at_once, replicas)
    return 4 * at_once + (4 + states) * landing + coding + _packets(strategy.codec, at_once, replicas, coded)


def _coding(strategy: Strategy, largest: int, at_once: int, replicas: int) -> int:
    """Bytes in which flights are encoded and the one that arrives is decoded: signals with feedback, the mean, the own values, state in fp32.

    A codec with a grain has these in ranges that fit the cache. One that sends few values decodes them once, and goes through all in pieces.
    """
    codec, filters, cut = strategy.codec, len(strategy.filters), strategy.codec.grain is not None
    in_pieces = not cut and isinstance(strategy.exchange, Direct) and not stays_on_device(strategy)
    few = codec.few(largest) if in_pieces else None
    piece = min(largest, PIECE_NUMEL if cut else PIECE if few is not None else largest)
    own = bool(strategy.feedback or filters)
    copies = 2 * (strategy.state_dtype != "fp32")  # before and after
    signals = 4 * (piece if cut else at_once) if strategy.feedback else 0
    whole = filters + 2 if filters else int(not strategy.outer.elementwise)  # what these need of all values together
    whole += codec.needs_shapes  # it decodes into a copy, in the order of its tensors
    return signals + 4 * (1 + own + copies) * piece + 4 * whole * largest + 12 * (few or 0) * replicas


def _gradient_exchange(strategy: Strategy, numels: Sequence[int], replicas: int, coded: float | None) -> int:
    """Bytes of a data-parallel exchange: all gradients in a flat buffer, their packets, and the mean."""
    # what each replica's packet decodes to, what was sent, and the next state
    filters = 4 * (len(strategy.filters) + 2) if strategy.filters else 0
    copy = 4 * strategy.codec.needs_shapes  # see `_coding`
    return (8 + filters + copy) * sum(numels) + _packets(strategy.codec, sum(numels), replicas, coded)


def _home(strategy: Strategy, purpose: str) -> Place:
    if purpose in ("parameters", "AdamW", "gradients"):
        return "device"
    if strategy.anchors == "disk":
        return "disk" if purpose in ("anchors", "outer momentum", "feedback") else "host"
    return strategy.anchors


def _largest_gather(shape: Shape) -> int:
    """Most parameters that FSDP2 gathers at a time: those of a layer, or those outside the layers, whichever are more."""
    outside = 2 * shape.vocabulary * shape.width
    return max(outside, (shape.parameters() - outside) // shape.layers)
