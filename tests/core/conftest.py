import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pieces.py, and processes.py in the processes that tests start
