"""Makes the table of pieces (tests/core/pieces.py) and oracle.py importable: tests/ is no package."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "core")]
