"""The bytes that the entropy stage saves on real deltas, and its cost. Two minutes on one core.

    python benchmarks/entropy.py [--steps 90] [--into FILE]

Deltas: the outer gradients of replica 0 in three short runs of the model nano (two seeds, and another text), each of 15 inner steps.
Sparse codecs send them with feedback, as `sparse_loco` does. Bytes: those of a run's packets without and with `Entropy`, beside the
empirical entropy of their symbols (codes of the codec's width, or bytes) and of the gaps between their places, pooled over a run.
Speed: GB/s of fp32 input on one message of such deltas, time of the thread, median of the turns. Measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formats import Recorded, train
from numpy.typing import NDArray
from provenance import installed, provenance, save
from torch import Tensor

import thinwire as tw
from thinwire.app.trainer.run import Run
from thinwire.codecs import E3M0, Cast, ChunkedTopK, Codebook, Codec, Int, Sign
from thinwire.codecs.layout import Symbols, unpack
from thinwire.lab.codecs.entropy import Entropy
from thinwire.rng import Key

EVERY, TURNS = 15, 7
NUMEL = 7 << 17  # values in a message of 4 bits each
RUN = Run.of(model="nano", batch=8, sequence=128, lr=6e-3, replicas=2)
RUNS = {"seed 0": RUN, "seed 1": RUN.changed(seed=1), "other text": RUN.changed(text=("docs",), seed=2)}
CODECS: dict[Codec, int] = {  # with the bits of a symbol; 8: bytes
    E3M0(): 4,
    E3M0(32): 4,
    Int(4): 4,
    Cast(): 8,
    ChunkedTopK(values=Codebook()): 2,
    ChunkedTopK(values=Sign(block=64)): 1,
    ChunkedTopK(): 8,
}


def deltas(run: Run, steps: int) -> list[Tensor]:
    recorded = Recorded()
    train(tw.diloco(every=EVERY, codec=recorded), steps, run)
    whole = [x for x, _ in recorded.kept if x.numel() == recorded.kept[-1][0].numel()]  # without those of the warm-up
    return whole[: steps // EVERY]


def signals(codec: Codec, run: list[Tensor]) -> list[Tensor]:
    """Returns the values to encode: the deltas, plus the feedback of a sparse codec."""
    if not codec.sparse:
        return run
    feedback, found = tw.pieces.feedback.Feedback(eta=0.95, beta=0.95), []
    state, after = (feedback.init(run[0].numel()) for _ in range(2))
    for delta in run:
        found.append(feedback.signal(delta, state).clone())
        sent = torch.zeros_like(delta)
        codec.decode_add(encoded(codec, found[-1]), sent, Key())
        feedback.settle(delta, sent, sent, state, after)
        state, after = after, state
    return found


def encoded(codec: Codec, x: Tensor) -> Tensor:
    payload = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    return payload[: codec.encode(x, payload, Key())]


def least(codec: Codec, width: int, payloads: list[tuple[int, Tensor]]) -> float:
    """Returns the bytes that the empirical entropies of symbols and gaps require; each part of a payload has its own distribution."""
    counts: dict[tuple[int, int], Counter[int]] = {}
    for numel, payload in payloads:
        at = 0
        for index, part in enumerate(codec.layout(numel)):
            own, at = payload[at : at + part.nbytes], at + part.nbytes
            if isinstance(part, Symbols):
                planes = own.view(-1, part.stride).t().contiguous().numpy()
                # Codes come first.
                symbols = [narrow(plane, 8 if index or part.stride > 1 else width) for plane in planes]
            else:
                places = unpack(own, part.kept, part.width).numpy()
                gaps = np.diff(places, prepend=[-1])
                gaps[:: part.count] = places[:: part.count] + 1
                symbols = [gaps]
            for plane, found in enumerate(symbols):
                counts.setdefault((index, plane), Counter()).update(found.tolist())
    return sum(_nbytes(np.array(list(counter.values()))) for counter in counts.values())


def narrow(octets: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    return np.concatenate([octets >> at & ((1 << width) - 1) for at in range(0, 8, width)])


def _nbytes(counts: NDArray[np.int64]) -> float:
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


def speed(codec: Codec, x: Tensor) -> dict[str, float]:
    """Returns GB/s of fp32 input."""
    payload, out = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.zeros_like(x)
    used = codec.encode(x, payload, Key())
    sent = payload if used is None else payload[:used]
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(x, payload, Key()),
        "decode": lambda: codec.decode_add(sent, out, Key(), 1e-3),
    }
    return {name: 4 * x.numel() / _median(work) / 1e9 for name, work in works.items()}


def _median(work: Callable[[], object]) -> float:
    def once() -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    return statistics.median(once() for _ in range(TURNS))


def row(codec: Codec, width: int, name: str, run: list[Tensor]) -> dict[str, Any]:
    said = signals(codec, run)
    plain = [(x.numel(), encoded(codec, x)) for x in said]
    tiled = torch.cat(said).repeat(-(-NUMEL // sum(map(len, said))))[:NUMEL].clone()
    return {
        "codec": repr(codec),
        "run": name,
        "packets": len(said),
        "nbytes": sum(len(payload) for _, payload in plain),
        "coded": sum(len(encoded(Entropy(codec), x)) for x in said),
        "entropy": least(codec, width, plain),
        "alone": speed(codec, tiled),
        "with_entropy": speed(Entropy(codec), tiled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--into", type=Path, help="where the result goes (default: benchmarks/results/entropy.json)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(AttributeError):  # some systems do not have it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = {"benchmark": "entropy", "word": "measured", **provenance()}
    result["versions"]["zstandard"] = installed("zstandard")
    rows = []
    for name, run in RUNS.items():
        made = deltas(run, asked.steps)
        for codec, width in CODECS.items():
            rows.append(row(codec, width, name, made))
            one = rows[-1]
            print(
                f"{name:10}  {one['nbytes']:9,}  {one['coded'] / one['nbytes'] - 1:+.1%}  "
                f"{one['coded'] / one['entropy'] - 1:+.1%} of its entropy  "
                f"{one['with_entropy']['encode']:.2f} / {one['with_entropy']['decode']:.2f} GB/s  {codec}"
            )
    setting = {"model": RUN.model.model, "every": EVERY, "steps": asked.steps, "numel": NUMEL, "turns": TURNS}
    print(f"written: {save('entropy', result | {'setting': setting, 'rows': rows}, asked.into)}")


if __name__ == "__main__":
    main()
