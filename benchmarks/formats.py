"""The loss of each format: every codec on drawn values and on real deltas, with bits, error, zeros, cosine, and what feedback recovers.

    python benchmarks/formats.py [--steps 300] [--into FILE]

Drawn: 2^20 values of each distribution. Real: what one of two replicas sends while they train a language model on real text: the
outer gradient of 30 inner steps (DiLoCo's loop) and the gradient of a step, in the last rounds of the run. The whole model is one
fragment. Feedback: all outer gradients of the run, one after another, go through the codec with `Feedback()`; the figure is the share
(of energy) of their sum that has not arrived in the end. The deltas are those of the run for every codec. docs/formats.md has the table.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance, save
from torch import Tensor

import thinwire as tw
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate, make_model
from thinwire.app.trainer.tokenizer import open_corpus
from thinwire.codecs import (
    DCT,
    E2M1,
    E3M0,
    E4M3,
    E5M2,
    Cast,
    ChunkedTopK,
    Codebook,
    Codec,
    Hadamard,
    Identity,
    Int,
    Shapes,
    Sign,
    Squares,
    TopK,
)
from thinwire.lab.codecs.lowrank import LowRank
from thinwire.rng import Key

NUMEL = 1 << 20
EVERY = 30
ROUNDS = 3  # the last ones of a run
RUN = Run.of(model="tiny", batch=8, sequence=128, lr=6e-3, replicas=2)
FORMATS: dict[str, tuple[Codec, ...]] = {
    "8 bits and more": (Cast("bf16"), E4M3(), E5M2(), Int(8)),
    "4 bits": (
        *(E3M0(), E3M0(32), E2M1(), E2M1(32, "bf16"), Int(4), Int(4, 32, "bf16")),
        *(Hadamard(E3M0()), Hadamard(E2M1()), Hadamard(Int(4)), E3M0(rounding="stochastic")),
    ),
    "1 and 2 bits": (Int(2, 32, "bf16"), Codebook(), Sign(block=128), Sign("l2", 128), Hadamard(Sign(block=128))),
    "most of a bit": (
        *(ChunkedTopK(4096, 136), ChunkedTopK(4096, 280, Sign(block=280))),
        *(LowRank(4, 1, Cast()), LowRank(4, 2, Cast()), LowRank(4, 4, Cast())),
        *(LowRank(8, 2, Int(8)), LowRank(16, 2, E2M1()), LowRank(16, 2, E3M0()), LowRank(8, 2, E2M1())),
    ),
    "less": (
        *(TopK(0.01), ChunkedTopK(), Squares(ChunkedTopK()), DCT(ChunkedTopK())),
        *(ChunkedTopK(values=Codebook()), ChunkedTopK(values=Sign(block=64)), LowRank(4, 2, E2M1()), LowRank(2, 2, E2M1())),
        *(ChunkedTopK(count=32), Squares(DCT(ChunkedTopK(count=32), axes=2)), LowRank(1, 2, Cast())),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Recorded(Codec):
    """An Identity that keeps what replica 0 encodes."""

    kept: list[tuple[Tensor, Shapes]] = field(default_factory=list, repr=False, compare=False)
    shapes: Shapes = ()

    def fitted(self, shapes: Shapes) -> Recorded:
        return Recorded(self.kept, shapes)

    def nbytes(self, numel: int) -> int:
        return Identity().nbytes(numel)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        if key.sender == 0 and self.shapes:  # a warm-up has no shapes
            self.kept.append((x.clone(), self.shapes))
        Identity().encode(x, payload, key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        Identity().decode_add(payload, out, key, weight)


def drawn() -> dict[str, list[tuple[Tensor, Shapes]]]:
    """Returns one tensor of each distribution, the same on every machine."""
    random = np.random.default_rng(8)
    values = {
        "Gaussian": random.standard_normal(NUMEL),
        "Laplace": random.laplace(size=NUMEL),
        "Student t(3)": random.standard_t(3, NUMEL),
    }
    return {name: [(torch.from_numpy(x).float(), ())] for name, x in values.items()}


def real(steps: int) -> dict[str, list[tuple[Tensor, Shapes]]]:
    """Returns all outer gradients of one run, and the last gradients of another."""
    outer, gradients = Recorded(), Recorded()
    train(tw.diloco(every=EVERY, codec=outer), steps)
    train(tw.data_parallel(codec=gradients), steps)
    return {"outer gradient": outer.kept[: steps // EVERY], "gradient": gradients.kept[-ROUNDS:]}


def train(strategy: tw.Strategy, steps: int, of: Run = RUN) -> None:
    """Runs the trainer's loop without its log: the same model, batches, optimizer and learning rate."""
    run = of.changed(steps=steps)
    corpus = open_corpus(run.data, run.model.model)

    def replica(group: tw.Group) -> None:
        model = make_model(run.model, run.data.sequence, run.seed, corpus.vocabulary)
        optimizer = tw.pieces.inner_optimizers.AdamW().make(model, run.lr, run.optimizer.weight_decay)
        with tw.Replica(strategy, model, optimizer, group) as attached:
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = learning_rate(run, step + 1)
                tokens, targets = corpus.batch(
                    run.seed, group.rank, run.placement.replicas, step, run.data.largest_batch, run.data.sequence
                )
                model(tokens, targets).loss.backward()
                attached.exchange_gradients()
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()

    tw.run_threads(2, replica, timeout=600.0)


def measure(codec: Codec, samples: list[tuple[Tensor, Shapes]]) -> dict[str, float] | None:
    """Returns the figures over all samples together; None for a codec that needs shapes if there are none."""
    bits = off = energy = zeros = count = dot = norm = 0.0
    for number, (x, shapes) in enumerate(samples):
        made = codec.fitted(shapes)
        if codec.needs_shapes and not shapes:
            return None
        q = roundtrip(made, x, number)
        a, b = x.double(), q.double()
        bits, count, zeros = bits + 8 * made.nbytes(x.numel()), count + x.numel(), zeros + float((q == 0).sum())
        off, energy = off + float((a - b).square().sum()), energy + float(a.square().sum())
        dot, norm = dot + float(a @ b), norm + float(b @ b)
    return {
        "bits": bits / count,
        "error": off / energy,
        "zeros": zeros / count,
        "cosine": dot / math.sqrt(energy * norm),
    }


def roundtrip(codec: Codec, x: Tensor, number: int) -> Tensor:
    payload, q = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.zeros_like(x)
    codec.encode(x, payload, Key(round=number))
    codec.decode_add(payload, q, Key(round=number))
    return q


def held_back(codec: Codec, deltas: list[tuple[Tensor, Shapes]]) -> float:
    feedback = tw.pieces.feedback.Feedback()
    state, after = (feedback.init(deltas[0][0].numel()) for _ in range(2))
    for number, (delta, shapes) in enumerate(deltas):
        sent = roundtrip(codec.fitted(shapes), feedback.signal(delta, state), number)
        feedback.settle(delta, sent, sent, state, after)
        state, after = after, state
    everything = torch.stack([delta for delta, _ in deltas]).double().sum(0)
    return float(state["residual"].double().square().sum() / everything.square().sum())


def rows(data: dict[str, list[tuple[Tensor, Shapes]]]) -> list[dict[str, Any]]:
    deltas = data["outer gradient"]
    samples = data | {"outer gradient": deltas[-ROUNDS:]}
    return [
        {
            "codec": repr(codec),
            "of": kind,
            "data": {name: measure(codec, some) for name, some in samples.items()},
            "held_back": held_back(codec, deltas),
        }
        for kind, codecs in FORMATS.items()
        for codec in codecs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/formats.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = provenance()
    data = drawn() | real(asked.steps)
    table = rows(data)
    for row in table:
        errors = "  ".join("   –  " if found is None else f"{found['error']:.4f}" for found in row["data"].values())
        print(f"{row['data']['gradient']['bits']:7.3f}  {errors}  {row['held_back']:7.4f}  {row['codec']}")
    setting = {"numel": NUMEL, "every": EVERY, "rounds": ROUNDS, "steps": asked.steps, "model": RUN.model.model}
    setting |= {
        "parameters": data["gradient"][0][0].numel(),
        "batch": RUN.data.batch,
        "sequence": RUN.data.sequence,
        "lr": RUN.lr,
    }
    result = about | {"benchmark": "formats", "word": "measured", "setting": setting, "rows": table}
    print(f"written: {save('formats', result, asked.into)}")


if __name__ == "__main__":
    main()
