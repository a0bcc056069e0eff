"""The default settings of pieces: what is written without settings is the same in every version."""

from __future__ import annotations

from thinwire.catalogue.parsing import PIECES, parse
from thinwire.lab.robust.attack_table import ATTACKS

DUE = """
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


def test_defaults_are_as_recorded():
    for due in DUE.split("\n")[1:-1]:
        assert repr(parse(f"{due.split('(')[0]}()", PIECES | ATTACKS)) == due
