"""Records the results of byzfl 0.0.11 on a few vectors: the oracle of tests/lab/robust/test_byzfl.py.

    pip install byzfl==0.0.11          # in another environment: it needs torchvision, scipy, matplotlib and seaborn, which Thinwire does not
    python tests/support/record_byzfl.py

Only its rules and attacks are loaded, without the imports of its __init__, so `pip install --no-deps byzfl==0.0.11 scipy` is enough.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).parents[1] / "pieces/byzfl.json"
SIZE, NUMEL, LIARS = 11, 6, 2


def vectors(seed: int) -> np.ndarray:
    """Returns [11, 6], of which the last two are outliers; integers divided by 256, so that JSON holds them exactly."""
    chance = np.random.default_rng(seed)
    x = chance.normal(size=NUMEL) + chance.normal(size=(SIZE, NUMEL))
    x[-LIARS:] *= 10
    return np.round(x * 256) / 256


def main() -> None:
    spec = importlib.machinery.PathFinder.find_spec("byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["byzfl"] = package
    rules, before, attacks = (
        importlib.import_module(f"byzfl.{name}")
        for name in ("aggregators.aggregators", "aggregators.preaggregators", "attacks.attacks")
    )
    package.Average, package.Clipping = rules.Average, before.Clipping
    makers = {
        "Mean()": rules.Average(),
        "Median()": rules.Median(),
        "TrimmedMean(2)": rules.TrMean(LIARS),
        "MeaMed(2)": rules.Meamed(LIARS),
        "GeometricMedian()": rules.GeometricMedian(nu=1e-9, T=3000),
        "CenteredClipping(2.0, 3)": lambda x: rules.CenteredClipping(L=3, tau=2.0)(x),
        "Krum(2)": rules.Krum(LIARS),
        "MultiKrum(2)": rules.MultiKrum(LIARS),
        "MDA(2)": rules.MDA(LIARS),
        "NearestNeighbourMixing(Median(), 2)": lambda x: rules.Median()(before.NNM(LIARS)(x)),
        "NearestNeighbourMixing(TrimmedMean(2), 2)": lambda x: rules.TrMean(LIARS)(before.NNM(LIARS)(x)),
        "StaticClipping(TrimmedMean(2), 2.0)": lambda x: rules.TrMean(LIARS)(before.Clipping(2.0)(x.copy())),
        "ARC(TrimmedMean(2), 2)": lambda x: rules.TrMean(LIARS)(before.ARC(LIARS)(x.copy())),
    }
    lies = {
        "IPM(1.0)": attacks.SignFlipping(),
        "IPM(2.0)": attacks.InnerProductManipulation(2.0),
        "ALIE(-1.5)": attacks.ALittleIsEnough(1.5),
        "Mimic(3)": attacks.Mimic(3),
    }
    cases = []
    for seed in range(8):
        x = vectors(seed)
        rows = {text: np.asarray(make(x.copy())).tolist() for text, make in makers.items()}
        said = {text: np.asarray(attack(x[:-LIARS].copy())).tolist() for text, attack in lies.items()}
        cases.append({"vectors": x.tolist(), "rules": rows, "attacks": said})
    about = "byzfl 0.0.11 (MIT) on fp64 numpy arrays; made by tests/support/record_byzfl.py"
    RECORDED.write_text(json.dumps({"about": about, "cases": cases}, indent=None) + "\n")
    print(f"written: {RECORDED}")


if __name__ == "__main__":
    main()
