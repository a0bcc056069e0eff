"""`import thinwire`, in a fresh process, loads no package that only a command or an extra needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("plotly", "rich", "tyro", "triton", "torch", "numba", "grpc", "cryptography", "pytest")


def loaded(code: str) -> set[str]:
    """Returns which of the heavy packages are loaded after `code` has run."""
    ends = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, timeout=600, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "may"),
    [
        ("import thinwire", set()),
        (  # `thinwire.testing` is for other people's test runners too
            "import thinwire.comm, thinwire.codecs, thinwire.testing; thinwire.Replica; thinwire.streaming_diloco()",
            {"torch", "numba"},
        ),
        ("from thinwire.net import Hub", {"grpc", "cryptography"}),  # the machine of a hub needs no more
        ("import thinwire.app.cli.hub, thinwire.app.cli.lighthouse", {"grpc", "cryptography", "rich", "tyro"}),
        ("import thinwire.app.cli.top", {"rich", "tyro", "plotly"}),
    ],
)
def test_imports_load_only_the_heavy_packages_that_they_need(code, may):
    assert loaded(code) <= may


def test_the_check_sees_a_heavy_package_that_is_loaded():
    assert loaded("import rich") == {"rich"}
