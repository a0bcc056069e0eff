"""Random faults in a reproducible order. What ends a fault, and begins the next one, are steps and rounds, not seconds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

MORTAL = "ab"  # who is killed; so no step of any other may be lost
STEPS, ROUNDS, PAUSES = 120, (0, 0, 1, 2, 3), (0, 0, 1, 2, 4, 8)


@dataclass(frozen=True)
class Fault:
    """A fault that ends when the other replicas have done `steps` inner steps and `rounds` rounds; some kinds end at once."""

    kind: str
    name: str  # of the replica that it happens to, if it is one replica
    steps: int
    rounds: int
    pause: int  # rounds between its begin and the next fault


def draw(kind: str, chance: random.Random, names: str) -> Fault:
    """Returns a fault of this kind."""
    name = chance.choice(MORTAL if kind == "kill -9" else names)
    return Fault(kind, name, chance.randrange(STEPS), chance.choice(ROUNDS), chance.choice(PAUSES))


def schedule(seed: int | str, count: int, kinds: Mapping[str, int], names: str) -> list[Fault]:
    """Returns `count` faults: each kind once at least, and the others by the weights of `kinds`."""
    chance = random.Random(seed)
    order = [*kinds, *chance.choices(list(kinds), list(kinds.values()), k=count - len(kinds))]
    chance.shuffle(order)
    return [draw(kind, chance, names) for kind in order]
