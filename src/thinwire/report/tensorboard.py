"""The event log as TensorBoard scalars, while a run goes or afterwards (`pip install thinwire[tensorboard]`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.errors import ConfigurationError, DataError
from thinwire.records.events import Event, Tail
from thinwire.records.sessions import number, whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SCALARS = {
    "step": ("loss", "lr", "grad_norm", "compute_seconds"),
    "depart": ("nbytes",),
    "land": ("stall_seconds",),
    "eval": ("loss",),
}


class TensorBoardFollower:
    """Writes what is new in one replica's event file to `folder`; call `update` now and then, and `close` at the end.

    Steps that a resume does again replace the ones before it. Raises `ConfigurationError` without TensorBoard.
    """

    def __init__(self, events: str | Path, folder: str | Path) -> None:
        self._tail = Tail(events)
        self._folder = Path(folder)
        self._writer = _writer(self._folder, None)

    def update(self) -> int:
        """Write the new scalars; returns how many."""
        count = 0
        for event in self._tail.read():
            count += self._write(event)
        self._writer.flush()
        return count

    def close(self) -> None:
        """Write what is left, and close the files."""
        self.update()
        self._writer.close()

    def _write(self, event: Event) -> int:
        kind, step = event["event"], event["step"]
        if kind == "resume":
            self._writer.close()
            self._writer = _writer(self._folder, whole(event["from_step"]) + 1)
        names = SCALARS.get(kind, ())
        for name in names:
            self._writer.add_scalar(f"{kind}/{name}", number(event[name]), step)
        return len(names)


def export_tensorboard(folder: str | Path) -> Path:
    """Write the scalars of the run in `folder` to `folder/tensorboard`, a subfolder a replica; returns that path."""
    paths = sorted(Path(folder).glob("events/replica-*.jsonl"))
    if not paths:
        raise DataError(f"{folder} holds no events/replica-*.jsonl, so it is no run. Give the folder that a run wrote.")
    out = Path(folder) / "tensorboard"
    for path in paths:
        TensorBoardFollower(path, out / path.stem).close()
    return out


def _writer(folder: Path, purge_step: int | None) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigurationError(
            "TensorBoard output was asked for, but the package tensorboard is not installed. "
            "Run `pip install thinwire[tensorboard]`, or leave it out: the event log holds the same numbers."
        ) from error
    return SummaryWriter(str(folder), purge_step=purge_step)
