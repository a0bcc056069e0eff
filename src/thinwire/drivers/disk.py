"""Tensors in a memory-mapped file, whose memory can be released and read again."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from thinwire.drivers.base import Training
from thinwire.errors import ConfigurationError

_ALIGNED = 64  # bytes, as in torch's allocator
_LIBC = ctypes.CDLL(None)


class DiskTensors:
    """Copies of `tensors` in a nameless memory-mapped file in the folder for temporary files. The file is deleted with its last tensor.

    They are read and written like other tensors: the kernel reads a page when it is touched. Its cache may keep more pages than the process
    has mapped, as long as no other process needs the memory.

    Raises:
        ConfigurationError: the folder cannot hold them.

    >>> (kept,) = DiskTensors([torch.ones(3)]).tensors
    >>> kept
    tensor([1., 1., 1.])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        places = [0]
        for tensor in tensors:
            places.append(places[-1] + -(-tensor.nbytes // _ALIGNED) * _ALIGNED)
        self.nbytes = max(1, places[-1])
        try:
            with tempfile.TemporaryFile(prefix="thinwire-") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)  # without it, a full disk would crash later
                self._map = mmap.mmap(file.fileno(), self.nbytes)
        except OSError as error:
            raise ConfigurationError(
                f"anchors='disk': {self.nbytes:,} bytes are needed in {tempfile.gettempdir()}, which cannot hold them ({error}). Set TMPDIR "
                "to a folder with room, or choose anchors='host'."
            ) from None
        self.tensors = [self._kept(tensor, begin) for tensor, begin in zip(tensors, places)]

    def _kept(self, tensor: Tensor, begin: int) -> Tensor:
        if not tensor.numel():
            return tensor
        flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
        return flat.view(tensor.shape).copy_(tensor)

    def read(self) -> None:
        """Read all pages into memory; waits for the disk, and for another thread. The kernel's own MADV_WILLNEED reads 8 MB at most."""
        torch.frombuffer(self._map, dtype=torch.uint8)[:: mmap.PAGESIZE].max()

    def release(self) -> None:
        """Release the memory. The values stay in the file."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def unread_nbytes(self) -> int:
        """Bytes that are not in memory. A thread that touches them waits for the disk."""
        pages = np.zeros(-(-self.nbytes // mmap.PAGESIZE), dtype=np.uint8)
        begin = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        if _LIBC.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(self.nbytes), ctypes.c_void_p(pages.ctypes.data)):
            return 0  # the kernel does not report it
        return mmap.PAGESIZE * int((pages & 1 == 0).sum())


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
