"""Chooses which fragments of outer state on disk are in memory.

The idea is TPI-LLM's sliding window (arXiv 2410.00531), which holds the weights of a model in inference.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from thinwire.drivers.base import Training


class Window:
    """Keeps two kinds of fragments of a `training` in memory: those in flight, and those that depart within as many inner steps as
    lie between two departures. A separate thread reads them.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._soon = training, set[int]()
        self._ahead = max(1, training.strategy.schedule.every // max(1, len(training.fragments)))
        self._said = False
        self._thread = ThreadPoolExecutor(1, "thinwire-disk")

    def slide(self) -> None:
        """Order the fragments that depart soon to be read, and release those that neither depart soon nor are in flight."""
        training, soon = self._training, set[int]()
        for later in range(training.step + 1, training.step + self._ahead + 1):
            soon.update(training.calendar.departs(later))
        for fragment in training.fragments:
            if fragment.disk and fragment.index in soon and fragment.index not in self._soon:
                self._thread.submit(fragment.disk.read)
            elif fragment.disk and fragment.index not in soon and not fragment.flight:
                fragment.disk.release()
        self._soon = soon

    def departs(self, index: int) -> None:
        """Warn, the first time, if fragment `index` has not been read before its departure."""
        disk = self._training.fragments[index].disk
        unread = disk.unread_nbytes() if disk and not self._said else 0
        if disk and unread:
            self._said = True
            self._training.warn(
                f"the disk has read {disk.nbytes - min(unread, disk.nbytes):,} of {disk.nbytes:,} bytes of the outer state of fragment {index} "
                f"in the {self._ahead} inner steps before its departure, which waits for the rest; and so may later ones. Set TMPDIR to a "
                "faster disk, or choose anchors='host'"
            )

    def close(self) -> None:
        """End the thread. Does not wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
