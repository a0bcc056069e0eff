"""The published losses to which the scaling laws were fitted (arXiv 2503.09799)."""

from __future__ import annotations

from collections.abc import Mapping

# Evaluation loss at the best settings: data-parallel, then DiLoCo with M = 1, 2, 4, 8. The last two rows were not used in the fits.
MEASURED: Mapping[float, tuple[float | None, ...]] = {
    35e6: (3.485, 3.482, 3.508, 3.554, 3.621),
    90e6: (3.167, 3.162, 3.182, 3.213, 3.265),
    180e6: (2.950, 2.943, 2.957, 2.981, 3.019),
    335e6: (2.784, 2.777, 2.788, 2.808, 2.841),
    550e6: (2.653, 2.645, 2.657, 2.673, 2.698),
    1.3e9: (2.460, 2.451, 2.464, 2.472, 2.493),
    2.4e9: (2.326, 2.317, 2.323, 2.332, 2.351),
    4e9: (2.224, 2.219, 2.220, 2.230, None),
    10e9: (2.090, 2.086, 2.086, 2.096, None),
}
