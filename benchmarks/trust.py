"""Training over a graph in which three of twelve replicas lie: every attack against every rule of gossip, three seeds.

    python benchmarks/trust.py [--into FILE] [--quick]

Twelve replicas are threads of one process with one thread of torch, on a drawn graph in which each has four neighbours; a round
follows every 5 inner steps. The task is synthetic: 10 classes of 32 numbers each, and a network with one hidden layer. Each replica
has its own mix of classes, drawn by Dirichlet's distribution with α = 0.5. Accuracy is on samples of all classes, of the honest
replicas' own weights before the last mean: their mean, and the worst replica's. Bristle's validation samples are 4 batches of 25, of
all classes or of the replica's own mix. Liars are the last three ranks; with LabelFlip they train on class 9 − y.
`make tables` writes docs/robust.md from the result.
An interrupted run continues with the same --into. --quick: two cells of one seed, in a separate file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from provenance import HERE, provenance, save
from torch import Tensor, nn

import thinwire as tw
from thinwire.catalogue.methods import RECIPES
from thinwire.lab.robust.attack_table import attack_of
from thinwire.lab.robust.attacked import lies, with_liars
from thinwire.lab.topology import RandomRegular
from thinwire.rng import derive

REPLICAS, LIARS, STEPS, CLASSES, NUMBERS, BATCH = 12, 3, 150, 10, 32, 16
METHODS = {
    "d_psgd": "d_psgd",
    "FoolsGold among neighbours": "sybil_wall, reach=1",
    "sybil_wall": "sybil_wall",
    "bristle, all classes": "bristle",
    "bristle, own classes": "bristle",
}
ATTACKS = ("none", "LabelFlip()", "Sybils()", "SignFlip()", "IPM(2.0)", "Gaussian(1.0)", "Sybils(Gaussian(0.1))")
SEEDS = (0, 1, 2)


def samples(seed: int, name: str, mix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns samples of classes drawn by `mix`; those of a class lie around its centre."""
    generator = torch.Generator().manual_seed(derive(seed, name))
    centres = torch.randn(CLASSES, NUMBERS, generator=torch.Generator().manual_seed(derive(seed, "centres"))) * 0.6
    classes = torch.multinomial(mix, count, replacement=True, generator=generator)
    return centres[classes] + torch.randn(count, NUMBERS, generator=generator), classes


def mixes(seed: int) -> Tensor:
    """Returns the shares of the classes for each replica, by row: Dirichlet(½), from squares of normals."""
    generator = torch.Generator().manual_seed(derive(seed, "mixes"))
    squares = torch.randn(REPLICAS, CLASSES, generator=generator).square()
    return squares / squares.sum(1, keepdim=True)


def strategy_of(method: str, attack: str, seed: int) -> tw.Strategy:
    topology, recipes = RandomRegular(4), dict[str, Callable[..., tw.Strategy]](RECIPES)
    kind, _, setting = METHODS[method].partition(", ")
    settings = {"reach": 1} if setting else {}
    made = replace(recipes[kind](every=5, topology=topology, **settings), seed=seed)
    return made if attack == "none" else replace(made, exchange=with_liars(made.exchange, attack_of(attack), LIARS))


def accuracies(method: str, attack: str, seed: int) -> list[float]:
    """Returns the accuracy of each honest replica."""
    strategy, of_all = strategy_of(method, attack, seed), torch.ones(CLASSES)
    test_x, test_y = samples(seed, "test", of_all, 2000)

    def replica(group: tw.Group) -> float:
        mix = mixes(seed)[group.rank]
        x, y = samples(seed, f"of replica {group.rank}", mix, STEPS * BATCH)
        lying = attack != "none" and lies(group.rank, group.size, LIARS)
        if lying and attack_of(attack).flips_labels:
            y = CLASSES - 1 - y
        seen = mix if "own" in method else of_all
        held_x, held_y = samples(seed, f"validation of {group.rank}", seen, 100)
        with torch.random.fork_rng():
            model = nn.Sequential(nn.Linear(NUMBERS, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        generator = torch.Generator().manual_seed(derive(seed, "weights"))
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.15, 0.15, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

        def validation() -> list[float]:
            batches = zip(held_x.split(25), held_y.split(25))
            return [float(nn.functional.cross_entropy(model(some), classes)) for some, classes in batches]

        with tw.Replica(strategy, model, optimizer, group, validation=validation):
            for step in range(STEPS):
                optimizer.zero_grad()
                batch = slice(step * BATCH, (step + 1) * BATCH)
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                return float((model(test_x).argmax(1) == test_y).float().mean())

    return tw.run_threads(REPLICAS, replica, timeout=600.0)[: REPLICAS - LIARS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two cells, into a folder that is thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/trust.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    methods, attacks, seeds = list(METHODS), ATTACKS, SEEDS
    if asked.quick:
        methods, attacks, seeds = methods[:1], attacks[:2], seeds[:1]
        asked.into = Path(tempfile.mkdtemp()) / "trust.json"
    into = asked.into or HERE / "results" / "trust.json"
    setting = {"replicas": REPLICAS, "liars": LIARS, "steps": STEPS, "every": 5, "degree": 4, "alpha": 0.5, "seeds": 3}
    found = json.loads(into.read_text()) if into.exists() else {}
    if found.get("setting") != setting:
        found = provenance() | {"benchmark": "trust", "word": "measured", "setting": setting, "rows": []}
    done = {(row["method"], row["attack"], row["seed"]) for row in found["rows"]}
    for seed in seeds:
        for attack in attacks:
            for method in methods:
                if (method, attack, seed) not in done:
                    began = time.process_time()
                    each = accuracies(method, attack, seed)
                    mean, worst, spent = sum(each) / len(each), min(each), time.process_time() - began
                    row = {"method": method, "attack": attack, "seed": seed, "accuracy": mean, "worst": worst}
                    found["rows"].append(row | {"cpu_seconds": spent})
                    print(f"{seed} {attack:<22} {method:<28} {mean:.3f} {worst:.3f}  {spent:.1f} s", flush=True)
                    save("trust", found, into)


if __name__ == "__main__":
    main()
