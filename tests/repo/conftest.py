"""Makes pages.py importable, and what fills the pages: neither tests/ nor docs/ is a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
