"""Reads the user's `batches(share)`, from the beginning or from a checkpoint's position."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.app.jobs.base import Packed, Share
from thinwire.app.jobs.blame import blaming
from thinwire.data_ledger import LeasedReader
from thinwire.errors import JobError
from thinwire.rng import derive

_ONE_GENERATOR = threading.RLock()  # for torch's global generator, which replicas in threads use one at a time


def seed_the_rest(seed: int) -> None:
    """Seed torch's global generator, for random numbers outside of any `Stream`."""
    with _ONE_GENERATOR:
        torch.manual_seed(seed % 2**63)


class Stream:
    """A random stream that replaces torch's global one in the context `drawn`, and does not change it."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed % 2**63).get_state()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        with _ONE_GENERATOR:
            before = torch.get_rng_state()
            torch.set_rng_state(self.state)
            try:
                yield
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(before)


class Batches:
    """The samples of a share, without end: an iterable that can be iterated again begins again in each epoch."""

    def __init__(self, path: Path, make: Callable[[Share], Any], share: Share) -> None:
        self._path, self._make, self._share = path, make, share
        self._iterator: Iterator[Any] | None = None
        self._generation = 0  # of the share's reader
        self._begin()

    def _begin(self, state: object = None) -> None:
        self.taken, self._iterator = 0, None
        self._stream = Stream(derive(self._share.seed, "batches", self._share.index))
        with self._user():
            self._source: Any = self._make(self._share)
            if state is not None:
                self._source.load_state_dict(state)
            # with leases, a loader that reads ahead would request samples too early
            if not isinstance(self._share.reader, LeasedReader):
                self._iterate()

    def _iterate(self) -> Iterator[Any]:
        reader = self._share.reader
        self._generation = reader.generation if reader else 0
        try:
            self._iterator = iter(self._source)
        except TypeError:
            raise JobError(
                f"{self._path}: batches(share) returned a value of type {type(self._source).__name__}; an iterable is needed. "
                "Write it as a generator (yield), or return a DataLoader or a list."
            ) from None
        return self._iterator

    def take(self) -> Any:
        """The next sample."""
        reader = self._share.reader
        with self._user():
            # samples read ahead may belong to others now
            void = reader is not None and reader.generation != self._generation
            iterator = self._iterate() if void or self._iterator is None else self._iterator
            try:
                value = next(iterator)
            except StopIteration:
                value = self._again()
        if is_empty(value):
            raise JobError(
                f"{self._path}: batches(share) yielded an empty batch as number {self.taken + 1}, for {self._part}; at least one "
                "sample is needed. Drop empty batches before they are yielded."
            )
        self.taken += 1
        if reader is not None:
            reader.trained(self._drawn_for_one if getattr(self._source, "num_workers", 0) else None)
        return value

    @property
    def _drawn_for_one(self) -> int | None:
        """The number of samples for a batch of a loader that reads ahead."""
        size, by = getattr(self._source, "batch_size", None), getattr(self._source, "batch_sampler", None)
        if isinstance(by, Packed) or (by is None and size is None):
            return 1
        return size or getattr(by, "batch_size", None)

    def _again(self) -> Any:
        if self._iterator is self._source:
            raise JobError(
                f"{self._path}: batches(share) ended after it had yielded {self.taken}, for {self._part}; more are needed. Yield without end "
                "(while True:), or return an iterable that can be iterated again, such as a DataLoader or a list."
            )
        self._iterator = iter(self._source)
        for value in self._iterator:
            return value
        raise JobError(
            f"{self._path}: the iterable from batches(share) is empty for {self._part}; at least one sample is needed. Give more data, "
            "or fewer replicas."
        )

    @property
    def _part(self) -> str:
        """The share in the words of the user's file."""
        return f"share.index={self._share.index} of share.count={self._share.count}"

    @contextmanager
    def _user(self) -> Iterator[None]:
        with blaming(self._path, f"{self._path}, in batches(share)"), self._stream.drawn():
            yield

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint's notes."""
        if self._follows:
            return {"taken": self.taken, "stream": self._stream.state}
        if not self._saves_itself:
            return {"taken": self.taken}
        with self._user():
            source = self._source.state_dict()
        return {"taken": self.taken, "source": source, "stream": self._stream.state}

    def load_state(self, state: Mapping[str, Any]) -> str:
        """Resume from `state()`. Returns a warning for the user, or "". A reader of the share must have been restored before."""
        if "stream" in state and "source" not in state:
            self._begin()
            self._iterate()
            self.taken, self._stream.state = int(state["taken"]), state["stream"]
            return ""
        if "source" in state:
            self._begin(state["source"])
            self.taken, self._stream.state = int(state["taken"]), state["stream"]
            return ""
        self._begin()
        for _ in range(int(state["taken"])):
            self.take()
        return f"batches(share) has no state_dict and load_state_dict: {self.taken} of its batches were read again to resume from there"

    @property
    def _follows(self) -> bool:
        """Whether the file uses `share.sampler`."""
        return self._share.reader is not None and self._share.reader.samples is not None

    @property
    def _saves_itself(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")


def is_empty(batch: object) -> bool:
    """Whether `batch` is empty: None, no element, or empty elements only."""
    if isinstance(batch, Tensor):
        return batch.numel() == 0
    if isinstance(batch, Mapping):
        return all(is_empty(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return all(is_empty(value) for value in batch)
    return batch is None


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch
