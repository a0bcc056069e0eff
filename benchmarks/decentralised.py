"""Gossip beside methods in which all hear all: methods × topologies × 8 and 32 replicas, at equal tokens.

    python benchmarks/decentralised.py [--steps 210] [--seeds 0 1 2] [--into FILE] [--quick]
    python benchmarks/decentralised.py --cut

Replicas are threads of one process with one thread of torch. They train a small model of the next byte on the sources of Python's
standard library, from the same start with different batches. The inner optimizer is AdamW at one rate, unless a method has its own.

*Measured*: the held-out loss of the saved model (in gossip the mean of all replicas' weights), the held-out loss of a replica's own
weights before that mean, the distance of replicas from their mean ‖x_i − x̄‖ / ‖x̄‖ (rms), and packets counted by pair: bytes of the
busiest link (one way) and of the busiest replica. The mean at the end is not counted.

*Simulated*: seconds of an inner step of a model of 10⁸ parameters, including 1 s of compute; 2,100 steps in virtual time. Uplinks
have 1 Gbit/s and carry one message at a time; a path takes 50 ms. A second case gives the path between replicas 0 and 1 20 Mbit/s.

An interrupted run continues with the same --into. `make tables` writes docs/gossip.md and its picture from the result.
--cut: d_psgd among eight replicas on a ring that is cut in two for a third of the rounds and then heals. It shows the distance of
replicas within the halves, and of the halves from each other, relative to the mean's norm. The result is results/cut.json.
--quick: 30 steps of two methods and 8 replicas, one seed, in a separate file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import HERE, provenance, save
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gradients.recipes import SGD_RATE
from thinwire.lab.pairs.method import a2cid2, ad_psgd
from thinwire.lab.recipes import choco, d_psgd, dfedsam, dfedsam_mgs, gasloc, moshpit, noloco, sgp
from thinwire.lab.topology import Complete, Cut, Exponential, OnePeerExponential, RandomPairs, Ring, Torus
from thinwire.pieces.inner_optimizers import SAM, SGD, AdamW, at_the_worst_point
from thinwire.recipes import streaming_diloco, streaming_sign
from thinwire.strategy import Strategy

SIZES, EVERY = (8, 32), 10
BATCH, CONTEXT, WARMUP = 16, 8, 20
# The best of 0.005, 0.015 and 0.04 for three methods, and of 0.015 and 0.05. From 0.15 on some runs diverge.
LR, SGD_LR = 0.04, 0.05
METHODS: dict[tuple[str, str], Callable[[], Any]] = {
    ("streaming_sign (default)", "all"): streaming_sign,
    ("streaming_diloco", "all"): streaming_diloco,
    ("d_psgd", "complete"): lambda: d_psgd(every=EVERY, topology=Complete()),
    ("d_psgd", "ring"): lambda: d_psgd(every=EVERY),
    ("d_psgd", "torus"): lambda: d_psgd(every=EVERY, topology=Torus()),
    ("d_psgd", "exponential"): lambda: d_psgd(every=EVERY, topology=Exponential()),
    ("d_psgd", "one-peer exp."): lambda: d_psgd(every=EVERY, topology=OnePeerExponential()),
    ("d_psgd", "random pairs"): lambda: d_psgd(every=EVERY, topology=RandomPairs()),
    ("sgp", "one-peer exp."): lambda: sgp(every=EVERY),
    ("choco, 4 bits", "ring"): lambda: choco(every=EVERY),
    ("choco, 4 bits", "torus"): lambda: choco(every=EVERY, topology=Torus()),
    ("moshpit", "grid of 4"): lambda: moshpit(every=EVERY),
    ("noloco", "random pairs"): lambda: noloco(every=EVERY),
    ("gasloc", "random pairs"): lambda: gasloc(every=EVERY),
    ("gasloc", "ring"): lambda: gasloc(every=EVERY, topology=Ring()),
    ("dfedsam", "ring"): lambda: dfedsam(every=EVERY),
    ("dfedsam_mgs", "ring"): lambda: dfedsam_mgs(every=EVERY),
    ("dfedsam_mgs", "one-peer exp."): lambda: dfedsam_mgs(every=EVERY, topology=OnePeerExponential()),
    ("d_psgd, SGD", "ring"): lambda: replace(d_psgd(every=EVERY), inner=SGD(0.9, SGD_RATE)),
    ("d_psgd, SAM", "ring"): lambda: replace(d_psgd(every=EVERY), inner=SAM()),
    ("ad_psgd", "ring"): lambda: ad_psgd(every=EVERY),
    ("a2cid2", "ring"): lambda: a2cid2(every=EVERY),
    ("a2cid2, 4 bits", "ring"): lambda: a2cid2(every=EVERY, codec=tw.codecs.E3M0()),
}  # fmt: skip
LARGE = [  # pairs that also run with 32 replicas, the most informative first
    ("streaming_sign (default)", "all"),
    ("d_psgd", "ring"),
    ("d_psgd", "one-peer exp."),
    ("gasloc", "random pairs"),
    ("choco, 4 bits", "ring"),
    ("noloco", "random pairs"),
    ("moshpit", "grid of 4"),
    ("d_psgd", "random pairs"),
    ("streaming_diloco", "all"),
    ("dfedsam_mgs", "one-peer exp."),
    ("d_psgd, SGD", "ring"),
    ("d_psgd", "complete"),
]
NUMEL, COMPUTE, RATE, DELAY, SLOW, STEPS = 10**8, 1.0, 1e9, 0.05, 2e7, 2100  # for the simulated time


class Bytes(nn.Module):
    """A model of the next byte: six layers of width 48."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 8)
        self.first = nn.Linear(8 * CONTEXT, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.head = nn.Linear(48, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x).flatten(1))
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


@cache
def text() -> tuple[Tensor, Tensor]:
    """Returns training text and held-out text as windows of `CONTEXT` bytes and the next byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    whole = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = whole.clamp(max=127).long().unfold(0, CONTEXT + 1, 1)
    cut = len(windows) * 9 // 10
    return windows[:cut], windows[cut + CONTEXT :: 97][:8192]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def backward(model: nn.Module, windows: Tensor) -> float:
    loss = loss_of(model, windows)
    loss.backward()
    return float(loss.detach())


class Told:
    """The weights of all replicas after each round of `EVERY` steps."""

    def __init__(self) -> None:
        self.weights: dict[tuple[int, int], tuple[Tensor, float]] = {}

    def hear(self, rank: int, number: int, model: nn.Module) -> None:
        with torch.no_grad():
            self.weights[rank, number] = flat(model), float(loss_of(model, text()[1]))


def trained(method: Any, size: int, steps: int, seed: int, told: Told | None = None) -> dict[str, float]:
    """Returns one run. Losses are of held-out text, in nats for each byte."""
    train, held_out = text()
    ledgers = [Ledger() for _ in range(size)]
    torch.manual_seed(seed)
    start = Bytes().state_dict()

    def replica(group: tw.Group) -> tuple[Tensor, float, float]:
        model = Bytes()
        model.load_state_dict(start)
        draw = torch.Generator().manual_seed(1000 * seed + group.rank)
        counted = CountedGroup(group, ledgers[group.rank])
        inner = (method.inner if isinstance(method, Strategy) else None) or AdamW()
        optimizer = inner.make(model, LR, 0.1)
        one: Any = (
            tw.Replica(method, model, optimizer, counted)
            if isinstance(method, Strategy)
            else method.attach(model, optimizer, counted)
        )
        rate = LR if inner.lr_factor == 1 else SGD_LR
        for step in range(1, steps + 1):
            for settings in optimizer.param_groups:
                settings["lr"] = rate * min(step / WARMUP, 1 - 0.9 * step / steps)
            windows = train[torch.randint(len(train), (BATCH,), generator=draw)]
            optimizer.zero_grad()
            at_the_worst_point(optimizer, partial(backward, model, windows))
            optimizer.step()
            if told and step % EVERY == 0:
                told.hear(group.rank, step // EVERY, model)
        with torch.no_grad():
            own, alone = flat(model), float(loss_of(model, held_out))
            one.finish()
            one.close()
            return own, alone, float(loss_of(model, held_out)) if group.rank == 0 else 0.0

    ends = tw.run_threads(size, replica, timeout=3600.0)
    weights = torch.stack([own for own, _, _ in ends])
    apart = (weights - weights.mean(0)).norm(dim=1).square().mean().sqrt() / weights.mean(0).norm()
    pairs = [[ledger.sent("packet", peer) for peer in range(size)] for ledger in ledgers]
    return {
        "loss": ends[0][2],
        "own_loss": statistics.fmean(alone for _, alone, _ in ends),
        "distance": float(apart),
        "link_nbytes": max(map(max, pairs)),
        "replica_nbytes": max(map(sum, pairs)),
    }


def seconds(strategy: Strategy, size: int, slow: bool, steps: int = STEPS) -> float:
    """Returns simulated mean seconds of an inner step. Replicas have separate clocks; each waits for what its next weights need."""
    with torch.device("meta"):
        count = len(strategy.partition.fragments(Bytes()))
    coded = [strategy.coded(((1000, NUMEL // count // 1000),)) for _ in range(count)]
    now, rounds, flying = np.zeros(size), [0] * count, dict[int, list[np.ndarray]]()
    free = np.zeros(size)  # when an uplink is free
    rate = np.full((size, size), RATE)
    if slow:
        rate[0, 1] = rate[1, 0] = SLOW
    exchange, delay = strategy.exchange, strategy.schedule.delay
    compute = COMPUTE * (2 if isinstance(strategy.inner, SAM) else 1)
    for step in range(1, steps + 1):
        now = now + compute
        for fragment in strategy.schedule.departs(step, count):
            codec, numel = coded[fragment]
            repeats = getattr(exchange.rule, "steps", 1) if isinstance(exchange, Gossip) else 1
            arrived = now
            for repeat in range(repeats):
                number = rounds[fragment] * repeats + repeat
                edges = (
                    exchange.topology.edges(size, number, fragment, strategy.seed)
                    if isinstance(exchange, Gossip)
                    else Complete().edges(size)
                )
                sent = [exchange.nbytes_sent(codec, numel, size, one) / repeats for one in range(size)]
                arrived, free = landed(arrived, free, edges, sent, rate)
            rounds[fragment] += 1
            flying.setdefault(step + delay, []).append(arrived)
        for arrived in flying.pop(step, []):
            now = np.maximum(now, arrived)
    return float(now.max()) / steps


def landed(
    began: np.ndarray, free: np.ndarray, edges: np.ndarray, sent: list[float], rate: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns when each replica has heard all its neighbours, and when uplinks are free. An uplink sends to one neighbour after another,
    the next rank first."""
    size, heard, free = len(began), began.copy(), np.maximum(free, began)
    for one in range(size):
        targets = [(one + far) % size for far in range(1, size) if edges[one, (one + far) % size]]
        for other in targets:
            bits = 8 * sent[one] / len(targets)
            free[one] += bits / RATE
            heard[other] = max(heard[other], free[one] + bits / rate[one, other] - bits / RATE + DELAY)
    return heard, free


def cell(name: tuple[str, str], size: int, steps: int, seeds: list[int]) -> dict[str, Any]:
    """Returns a row of the table."""
    method, began = METHODS[name](), time.process_time()
    runs = [trained(method, size, steps, seed) for seed in seeds]
    row: dict[str, Any] = {"method": name[0], "topology": name[1], "replicas": size, "composition": repr(method)}
    row |= {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    row["spread"] = statistics.stdev([run["loss"] for run in runs]) if len(runs) > 1 else None
    row["losses"] = [run["loss"] for run in runs]
    if isinstance(method, Strategy):
        row |= {"seconds": seconds(method, size, False), "seconds_slow": seconds(method, size, True)}
    return row | {"cpu_seconds": time.process_time() - began}


def cut_apart(steps: int, seed: int) -> list[dict[str, float]]:
    """Runs eight replicas on a ring that is cut in two for the second third of the rounds, and on a whole ring. Returns a row for each round."""
    count, size = steps // EVERY, 8
    told = {"whole": Told(), "cut": Told()}
    for name, topology in (("whole", Ring()), ("cut", Cut(Ring(), count // 3, 2 * count // 3))):
        trained(d_psgd(every=EVERY, topology=topology), size, steps, seed, told[name])
    rows = []
    for number in range(1, count + 1):
        row: dict[str, float] = {"round": number}
        for name, one in told.items():
            x = torch.stack([one.weights[rank, number][0] for rank in range(size)])
            halves = x.view(2, size // 2, -1)
            middle = halves.mean(1, keepdim=True)
            row[f"{name} within"] = float((halves - middle).norm(dim=2).square().mean().sqrt() / x.mean(0).norm())
            row[f"{name} between"] = float((middle[0] - middle[1]).norm() / x.mean(0).norm())
            row[f"{name} loss"] = statistics.fmean(one.weights[rank, number][1] for rank in range(size))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--into", type=Path, help="where the result goes; without, results/decentralised.json")
    parser.add_argument("--quick", action="store_true", help="into a folder that is thrown away")
    parser.add_argument(
        "--cut", action="store_true", help="a ring that is cut in two and healed, into results/cut.json"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.cut:
        about = provenance() | {
            "benchmark": "cut",
            "word": "measured",
            "setting": {"steps": asked.steps, "every": EVERY, "lr": LR},
        }
        every = [cut_apart(asked.steps, seed) for seed in asked.seeds]
        rows = [{key: statistics.fmean(row[key] for row in of) for key in of[0]} for of in zip(*every, strict=True)]
        about["setting"] |= {"replicas": 8, "seeds": asked.seeds}
        print(save("cut", about | {"rows": rows}, asked.into))
        return
    names = {size: list(METHODS) if size == SIZES[0] else LARGE for size in SIZES}
    if asked.quick:
        names, asked.steps, asked.seeds = {SIZES[0]: list(METHODS)[1:4:2]}, 30, [0]
        asked.into = Path(tempfile.mkdtemp()) / "decentralised.json"
    into = asked.into or HERE / "results" / "decentralised.json"
    setting = {
        "steps": asked.steps,
        "seeds": asked.seeds,
        "batch": BATCH,
        "context": CONTEXT,
        "lr": [LR, SGD_LR],
        "every": EVERY,
    }
    setting |= {"parameters": sum(p.numel() for p in Bytes().parameters()), "simulated parameters": NUMEL}
    found = json.loads(into.read_text()) if into.exists() else {}
    if found.get("setting") != setting:
        found = provenance() | {"benchmark": "decentralised", "word": "measured; seconds simulated"}
        found |= {"setting": setting, "rows": []}
    done = {(row["method"], row["topology"], row["replicas"]) for row in found["rows"]}
    for size, methods in names.items():
        for name in methods:
            if (*name, size) not in done:
                row = cell(name, size, asked.steps, asked.seeds)
                order = list(METHODS)
                found["rows"].append(row)
                found["rows"].sort(key=lambda one: (one["replicas"], order.index((one["method"], one["topology"]))))
                save("decentralised", found, into)
                print({key: value for key, value in row.items() if key not in ("composition", "losses")}, flush=True)


if __name__ == "__main__":
    main()
