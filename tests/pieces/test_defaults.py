"""The default settings of pieces: what is written without settings is the same in every version."""

from __future__ import annotations

from thinwire.catalogue.parsing import PIECES, parse
from thinwire.lab.robust.attack_table import ATTACKS

DUE = """
Average()
Nesterov(lr=0.4, momentum=0.9)
DelayedNesterov(lr=0.4, momentum=0.9, updates=2)
HeavyBall(lr=1.0, momentum=0.0, gap=0.0, clip=None)
Feedback(kappa=0, eta=1.0, beta=1.0, alpha=1.0)
Mix(alpha=0.0)
Keep()
KeepUnsent(share=0.65)
ByTokens(power=0.5)
HeLoCo(strength=1.0)
Strided(count=None, layers=None, share=1.0)
Sequential(count=None, layers=None, share=1.0)
DenseLast(dense=E3M0(block=128, scale='exponent', rounding='nearest'))
Clip(norm=1.0)
Momentum(decay=0.9, clears='sent')
Moments(beta1=0.9, beta2=0.999, eps=1e-08, freeze=100)
Settled(ratio=0.96, least=100)
AdamW(beta1=0.9, beta2=0.99)
SGD(momentum=0.0, lr_factor=1.0)
Muon(momentum=0.95)
SAM(inner=AdamW(beta1=0.9, beta2=0.99), radius=0.01)
Median()
TrimmedMean(liars=1)
MeaMed(liars=1)
Krum(liars=1)
MultiKrum(liars=1)
Bulyan(liars=1)
MDA(liars=1)
GeometricMedian()
CenteredClipping(radius=None, iterations=3)
NearestNeighbourMixing(rule=Median(), liars=1)
Bucketing(rule=Median(), each=2)
StaticClipping(rule=Median(), norm=2.0)
ARC(rule=Median(), liars=1)
NoLoCo(momentum=0.5, lr=0.7, pull=None)
Choco(step=0.3)
MGS(rule=AdaptThenCombine(), steps=4)
GASLoC(lr=0.7, momentum=0.5, pull=1.0)
SybilWall(width=16384, reach=8, rate=0.8)
LGreCo(candidates=(), alpha=1.0, window=10)
Guard(z=4.0, warm_up=3)
Privacy(clip=1.0, noise=1.0, delta=1e-05)
IPM(eps=2.0)
ALIE(z=None)
Gaussian(sigma=1.0)
Mimic(rank=0)
NotFinite(value='nan')
Dissensus(eps=1.5)
Switch(then=SignFlip(), every=2)
Sybils(then=LabelFlip())
"""


# those with a setting that has no default, and what else it is written with
SET = {
    "Every(4)": "Every(every=4, delay=0)",
    "Staggered(4)": "Staggered(every=4, delay=0, offsets=None)",
    "Quadratic(4, 0.1)": "Quadratic(every=4, scale=0.1, power=2.0, delay=0)",
    "BySize(3)": "BySize(count=3)",
    "DenseUntil(3)": "DenseUntil(rounds=3, dense=Identity())",
    "DensityWarmup(3)": "DensityWarmup(rounds=3, densities=(0.25, 0.0625, 0.015625, 0.004), dense=Identity())",
}


def test_defaults_are_as_recorded():
    """Run files and the strategies of replicas are compared by these texts."""
    for short, due in SET.items() | {(f"{due.split('(')[0]}()", due) for due in DUE.strip().splitlines()}:
        assert repr(parse(short, PIECES | ATTACKS)) == due
