import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # group_laws.py must be importable in the processes that tests start
