"""What all tests share: one thread for torch, so that results and times do not depend on the machine's cores, and where there
is no GPU Triton's interpreter in its place: Triton asks for it when it is imported.

tests/ mirrors src/thinwire; tests/laws holds what is true of every piece and method, tests/repo the pages to the code, and
tests/support has what several tests use, with the programs that tests start.
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
sys.path[:0] = [
    str(TESTS / "support"),
    str(TESTS.parent / "docs"),
    str(TESTS.parent / "benchmarks"),
]  # of processes, too
pytest_plugins = ("leaks", "run_folders", "inline", "late")  # of tests/support

# Whatever else the machine does: no example has a deadline, and none is kept on disk.
settings.register_profile("tests", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell starts what runs in the background with SIGINT ignored, and nohup with SIGHUP; processes of tests would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["OMP_NUM_THREADS"] = "1"  # processes of tests, too: threads that wait for one another spin
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # tests call nobody; its thread would stay, too

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def alone():
    """Calls a function of an importable module in a process of its own, in which no other thread runs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(int).result()  # it is there before any test looks around
        yield lambda function, *given: pool.submit(function, *given).result()
