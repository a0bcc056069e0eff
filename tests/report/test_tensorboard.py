"""The event log as TensorBoard scalars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ConfigurationError, DataError
from thinwire.report import tensorboard
from thinwire.report.tensorboard import export_tensorboard


class Writer:
    """Stands in for TensorBoard's."""

    def __init__(self, purge_step: int | None) -> None:
        self.purge_step, self.scalars, self.closed = purge_step, {}, False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_scalars_and_resumes(make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", replicas=1, steps=210, killed_at=120)
    writers: list[Writer] = []

    def write(folder: Path, purge_step: int | None) -> Writer:
        writers.append(Writer(purge_step))
        return writers[-1]

    monkeypatch.setattr(tensorboard, "_writer", write)
    assert export_tensorboard(run) == run / "tensorboard"
    assert [writer.purge_step for writer in writers] == [None, 101]
    assert all(writer.closed for writer in writers)
    assert ("step/loss", 120) in writers[0].scalars and ("eval/loss", 200) in writers[1].scalars


def test_what_is_missing_is_said(make_run: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(DataError, match="no run"):
        export_tensorboard(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"pip install thinwire\[tensorboard\]"):
        export_tensorboard(make_run(tmp_path / "run", steps=10))
