"""What `import thinwire` loads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("plotly", "rich", "tyro", "triton", "torch", "numba", "grpc", "cryptography")


def loaded(code: str) -> set[str]:
    """Which of the heavy packages are loaded after `code`."""
    ends = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, timeout=600, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "may"),
    [
        ("import thinwire", set()),
        ("import thinwire.comm, thinwire.codecs; thinwire.Replica; thinwire.streaming_diloco()", {"torch", "numba"}),
        ("from thinwire.comm.secure import Hub", {"grpc", "cryptography"}),  # a hub's machine needs no more
        ("import thinwire.cli.hub, thinwire.cli.lighthouse", {"grpc", "cryptography", "rich", "tyro"}),
    ],
)
def test_nothing_is_loaded_that_only_the_command_needs(code, may):
    assert loaded(code) <= may


def test_what_is_loaded_would_be_seen():
    assert loaded("import rich") == {"rich"}
