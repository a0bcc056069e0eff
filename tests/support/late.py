"""A fixture for tests of large libraries: their modules are loaded when the first test begins, not by every worker that collects."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def late_imports(request: pytest.FixtureRequest) -> None:
    """Runs what the test's module imports under `if TYPE_CHECKING:`."""
    module = request.module
    for statement in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(statement.body, []), module.__file__, "exec"), vars(module))
