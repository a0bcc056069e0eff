"""`thinwire plan` in a folder of its own, in which machine.toml is a machine with 80 GB."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from thinwire.app.cli import main
from thinwire.app.plan.machine import Machine


class Planned(NamedTuple):
    """What the command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planned]:
    monkeypatch.chdir(tmp_path)
    Machine("cpu", memory_nbytes=80 * 10**9, flops_per_second=1.5e14).save(Path("machine.toml"))

    def planned(arguments: str, *more: str) -> Planned:
        """The words of `arguments`, and `more` that have blanks."""
        capsys.readouterr()
        code = main(["plan", *arguments.split(), *more])
        return Planned(code, *capsys.readouterr())

    return planned
