"""TensorBoard scalars in RUN/tensorboard, a subfolder for each replica (`pip install 'thinwire[tensorboard]'`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from thinwire.app.report.trackers.sinks import Sink


class TensorBoard(Sink):
    """Steps that a resume does again replace the ones before it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        self._folder = folder / "tensorboard"
        self.where = f"tensorboard --logdir {self._folder}"
        self._writers: dict[str, Any] = {}
        self._first: int | None = None  # TensorBoard drops what is there from this step on; None: nothing

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        writer = self._writers.get(replica) or self._begin(replica, self._first)
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def start_over(self) -> None:
        self._first = 0

    def rewind(self, replica: str, step: int) -> None:
        before = self._writers.get(replica)
        if before:
            before.close()
        self._begin(replica, step + 1 if before or self._first is None else self._first)

    def _begin(self, replica: str, purge_step: int | None) -> Any:
        writer = SummaryWriter(str(self._folder / replica), purge_step=purge_step)
        self._writers[replica] = writer
        return writer

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
