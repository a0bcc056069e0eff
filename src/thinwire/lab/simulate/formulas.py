"""Closed forms for comparison with the simulator. Their results are *predicted*; each states its range.

In all of them `load` is c = κ·b·N / (B·T): the number of steps that the link needs for one exchange of the whole model. N are the
parameters, b the bits of one on the wire, B the rate, T the seconds of an inner step. κ is the number of message sizes that the
collective sends: 2·(M−1)/M for a ring, or a reduce-scatter and a gather; M − 1 if every replica sends to every other.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.lab.simulate.layers import FORWARD

BACKWARD = 1 - FORWARD  # share of a step


def load(parameters: float, bits_per_parameter: float, bits_per_second: float, step_seconds: float) -> float:
    """c = b·N / (B·T), where b includes κ.

    Args:
        parameters: number N of parameters.
        bits_per_parameter: bits b of one parameter on the wire, times the collective's κ.
        bits_per_second: rate B of the link, in bits per second.
        step_seconds: seconds T of an inner step.

    >>> load(1e9, 16, bits_per_second=160e9, step_seconds=0.1)
    1.0
    """
    return bits_per_parameter * parameters / (bits_per_second * step_seconds)


def floor_bits_per_second(parameters: float, bits_per_parameter: float, every: int, step_seconds: float) -> float:
    """B ≥ κ·b·N / (H·T): below this rate no schedule and no overlap reaches full utilization. It always holds.

    H is the real period: the rounded one, if a schedule rounds it. For several parallel links, B is their sum.

    Args:
        parameters: number N of parameters.
        bits_per_parameter: bits b of one parameter on the wire, times the collective's κ.
        every: inner steps H between two exchanges of a fragment.
        step_seconds: seconds T of an inner step.

    >>> floor_bits_per_second(1e9, 4, every=100, step_seconds=0.1) / 1e9
    0.4
    """
    return bits_per_parameter * parameters / (every * step_seconds)


def most_utilization(load: float, every: int) -> float:
    """U ≤ min(1, H/c): the same bound, as utilization. It is reached if the delay is long enough.

    Args:
        load: number c of steps that the link needs for one exchange of the whole model.
        every: inner steps H between two exchanges of a fragment.

    >>> most_utilization(200.0, every=100)
    0.5
    """
    return min(1.0, every / load) if load > 0 else 1.0


def data_parallel_utilization(load: float, layers: int) -> float:
    """U = 1 / (⅓ + max(⅔ + c/L, ⅔/L + c)): gradients are sent during the backward pass.

    Either only the last layer is sent after the pass (c/L), or the link is busy from the first layer on. Exact
    for equal layers, ⅓ of the step forward, no latency. The paper's simpler form omits ⅔/L.

    Args:
        load: number c of steps that the link needs for one exchange of the whole model.
        layers: number L of equal layers.

    >>> round(data_parallel_utilization(1.0, layers=24), 4)
    0.7347
    """
    return 1 / (FORWARD + max(BACKWARD + load / layers, BACKWARD / layers + load))


def diloco_utilization(load: float, layers: int, every: int) -> float:
    """U = H / (H + max(c/L, c − ⅔·(1 − 1/L))): one exchange in H steps, which overlaps with one backward pass.

    Exact for equal layers, ⅓ of the step forward, no latency, delay 0, and all fragments at once.

    Args:
        load: number c of steps that the link needs for one exchange of the whole model.
        layers: number L of equal layers.
        every: inner steps H between two exchanges.

    >>> round(diloco_utilization(10.0, layers=24, every=100), 4)
    0.9144
    """
    return every / (every + max(load / layers, load - BACKWARD * (1 - 1 / layers)))


def streaming_utilization(
    load: float, layers: int, fragments: Sequence[Sequence[int]], every: int, delay: int
) -> float:
    """U = H / (H + Σ_p stall_p): every fragment (a list of its layers) stalls separately.

    A layer l that is sent is ready (L − l)·⅔/L after the beginning of the backward pass, and is needed ⅔ + τ + l/(3L) after
    it. The k-th sent layer arrives at a_k = max(a_(k−1), ready_k) + c/L, and stall = max_k (a_k − needed_k), or 0.
    *Range*: τ < the steps between two departures, so that a flight has landed before the next one departs; then it
    is exact at any load. With a longer delay flights share the link, land later, and this is too high;
    `most_utilization` is still a bound.

    Args:
        load: number c of steps that the link needs for one exchange of the whole model.
        layers: number L of equal layers.
        fragments: the numbers of the layers of each fragment.
        every: inner steps H between two exchanges of a fragment.
        delay: inner steps τ from departure to landing.

    >>> streaming_utilization(10.0, layers=4, fragments=[[0, 2], [1, 3]], every=100, delay=5)
    1.0
    """
    stalls = 0.0
    for fragment in fragments:
        arrival = late = 0.0
        for layer in sorted(fragment, reverse=True):
            arrival = max(arrival, (layers - layer) * BACKWARD / layers) + load / layers
            late = max(late, arrival - (BACKWARD + delay + layer * FORWARD / layers))
        stalls += late
    return every / (every + stalls)
