"""Settings for all tests. torch runs one thread, so that results do not depend on the number of cores. Without a GPU,
Triton's interpreter is chosen here, because Triton reads the choice when it is imported.

tests/ mirrors src/thinwire: what is not in app, lab, net or integrations tests the core. tests/laws holds what is true of every piece
and method, tests/repo compares pages with code,
and tests/support has helpers of several tests and the programs that tests start.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from thinwire.testing import values

TESTS = Path(__file__).parent
# child processes inherit these
sys.path[:0] = [
    str(TESTS / "support"),
    str(TESTS.parent / "docs"),
    str(TESTS.parent / "benchmarks"),
]
pytest_plugins = ("leaks", "run_folders", "inline", "late", "compiled_once", "small_messages")  # in tests/support

# No Hypothesis example has a deadline, so a busy machine fails no test; no example is stored on disk.
settings.register_profile("tests", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["OMP_NUM_THREADS"] = "1"  # in child processes too: OpenMP threads that wait for each other spin
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # tests send no telemetry; its thread would outlive the test

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

gc.disable()  # until all tests are collected: half a million objects, all of which stay


def pytest_collection_finish() -> None:
    gc.freeze()  # what the tests and their libraries hold is not looked through again
    gc.set_threshold(20_000, 20, 10)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_numbers(request):
    """Each test draws the same numbers, whichever tests ran before it in this process."""
    values._draw.manual_seed(0)
    for drawn in ("random", "_draw"):
        if isinstance(generator := getattr(request.module, drawn, None), torch.Generator):
            generator.manual_seed(0)


@pytest.fixture(scope="session")
def alone():
    """Calls a function of an importable module in a separate process, in which no other thread runs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(int).result()  # the worker exists before the leak check of any test
        yield lambda function, *given: pool.submit(function, *given).result()
