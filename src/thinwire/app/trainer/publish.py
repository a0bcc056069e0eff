"""Publishes a replica's agreed weights while it trains: each version as lossless changes in bf16 from the previous version."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from thinwire.app.jobs.base import Job
from thinwire.app.records.events import EventLog
from thinwire.app.records.patches import Bits, encode_patch, state_of
from thinwire.app.records.published import NOTHING, Change, FragmentVersion, Layout, Publication, Store, TensorPlace
from thinwire.app.trainer.place import ElasticPlace, Place
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.watch import watching
from thinwire.drivers.attached import Attached
from thinwire.errors import ConfigurationError, LinkError
from thinwire.pieces.partition import Fragment
from thinwire.replica import Replica

if TYPE_CHECKING:
    from thinwire.net.upload import HubUploader

MODEL = "model.safetensors"
RETRY_SECONDS = 1.0  # before the hub is tried again; twice as long each time while the run goes on
LAST_SECONDS = 60.0  # after the run's end, during which the hub may come back


class Publisher:
    """Publishes the weights given to `offer`, in its own thread. A version for which it has no time becomes part of the next one. To copy the
    weights costs training time, so offer them while it is `idle`, and the last ones in any case.

    Args:
        folder: the folder in which it publishes.
        fragments: the fragments of the model.
        write_model: writes the model's folder with the present agreed weights; config, tokenizer and tensors that are not exchanged come from it.
        failed: called with a line if publishing fails, after which nothing more is published, or if the hub takes no versions.
        make_uploader: makes what sends each version to a hub elsewhere; None: nothing does.
    """

    def __init__(
        self,
        folder: Path,
        fragments: Sequence[Fragment],
        write_model: Callable[[Path], object],
        failed: Callable[[str], object],
        make_uploader: Callable[[], HubUploader] | None = None,
    ) -> None:
        self._store, self._failed = Store(folder), failed
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as draft:
            write_model(Path(draft))
            self._layout = _layout(self._store, Path(draft), fragments)
        self._layout_as = self._store.put(self._layout.written())
        self._held: list[Bits] = []
        self._versions: list[FragmentVersion] = []
        self._patched = [0] * len(fragments)  # bytes of patches since each fragment's full copy
        self._number = 0
        self._due: tuple[int, list[Tensor], bool] | None = None
        self._wake, self._closed, self._abandoned = threading.Condition(), False, threading.Event()
        self._waits = True  # whether the thread would take a version now
        self._uploader, self._failures = make_uploader() if make_uploader else None, 0
        self._thread = threading.Thread(target=self._body, name="thinwire-publisher", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether a version that is offered now would be published, rather than kept until the one before is."""
        return self._waits and self._due is None

    def offer(self, step: int, anchors: Sequence[Tensor], over: bool = False) -> None:
        """Take the agreed weights after `step`, as `Replica.anchors` returns them. Returns at once."""
        with self._wake:
            self._due = step, [anchor.to("cpu", torch.bfloat16) for anchor in anchors], over
            self._wake.notify()

    def close(self) -> None:
        """Publish the last offered state, and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        if self._uploader:
            self._uploader.close()

    def abandon(self) -> None:
        """Send nothing more to the hub: `close` does not wait for it."""
        self._abandoned.set()

    def _body(self) -> None:
        with suppress(AttributeError, OSError):  # training has priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            with self._wake:
                self._waits = True
                self._wake.wait_for(lambda: self._due is not None or self._closed)
                self._waits, due, self._due = False, self._due, None
            if due is None:
                return
            try:
                self._publish(*due)
                self._upload()
            except OSError as error:
                self._failed(f"publishing has ended: {error}. Followers stay at version {self._number}.")
                return

    def _publish(self, step: int, values: list[Tensor], over: bool) -> None:
        states = [value.view(torch.int16).numpy().view(np.uint16) for value in values]
        for index, state in enumerate(states):
            if len(self._versions) <= index:
                full = self._full(state)
                self._versions.append(FragmentVersion(full.to, state.nbytes, full, ()))
                self._held.append(state)
            elif not np.array_equal(self._held[index], state):
                self._versions[index] = self._changed(index, state)
                self._held[index] = state
        self._number += 1
        made = Publication(self._number, step, over, self._layout_as, tuple(self._versions))
        self._store.announce(made, self._layout)

    def _upload(self) -> None:
        """Send the version to the hub. If the link is cut, it is sent again, until a newer version waits or the run has ended for a while."""
        begun = time.monotonic()
        while self._uploader and not self._abandoned.is_set():
            try:
                if self._uploader.send(self._store.folder, self._abandoned.is_set):
                    self._failures = 0
                    return
            except LinkError as error:
                self._failed(f"versions do not get to followers of the hub: {error}")
                self.abandon()
                return
            with self._wake:
                closed, self._failures = self._closed, self._failures + 1
                pause = RETRY_SECONDS if closed else min(LAST_SECONDS, RETRY_SECONDS * 2.0 ** min(self._failures, 9))
                self._waits = True
                self._wake.wait_for(lambda: self._closed != closed, pause)  # noqa: B023  # it is called here only
                self._waits = False
                if self._due is not None:
                    return
                begun = begun if closed else time.monotonic()
            if time.monotonic() - begun > LAST_SECONDS:
                self._failed(f"the last version has not got to the hub in {LAST_SECONDS:g} s: {self._uploader.state}")
                return

    def _changed(self, index: int, state: Bits) -> FragmentVersion:
        """A patch from the previous version. When the patches since the last full copy reach a quarter of its size, a new full copy too."""
        known, now = self._versions[index], state_of(state)
        patch = self._store.put(encode_patch(self._held[index], state))
        changes, full = [*known.changes, Change(known.state, now, patch)], known.full
        self._patched[index] += patch.nbytes
        if 4 * self._patched[index] > full.patch.nbytes:
            full, self._patched[index] = self._full(state), 0
        # older patches are kept while their sum is less than a full copy; those after the full copy are always kept
        while sum(change.patch.nbytes for change in changes) > full.patch.nbytes and changes[0].base != full.to:
            del changes[0]
        return FragmentVersion(now, state.nbytes, full, tuple(changes))

    def _full(self, state: Bits) -> Change:
        return Change(NOTHING, state_of(state), self._store.put(encode_patch(np.zeros_like(state), state)))


@contextmanager
def publishing(
    run: Run, place: Place | ElasticPlace, job: Job, model: nn.Module, replica: Replica | Attached, log: EventLog
) -> Iterator[Publisher | None]:
    """A context that publishes the versions of `replica`, if `run` has `publish`, and the last version at its end. Raises `ConfigurationError`."""
    if not run.placement.publish or not place.writes_the_model or replica.own_loop:
        yield None
        return
    if place.shards > 1:
        raise ConfigurationError(
            f"publish on replicas of {place.shards} ranks: whole replicas are needed; start one process per replica."
        )

    def write_model(folder: Path) -> None:
        job.keep(folder, "publisher")
        job.store(folder, model, replica.export(), "publisher")

    def warn(said: str) -> None:
        log.emit("warning", replica.step, message=said)

    publisher = Publisher(place.folder / "published" / place.name, replica.fragments, write_model, warn, place.uploader)
    try:
        publisher.offer(replica.step, replica.anchors())
        yield publisher
        publisher.offer(replica.step, replica.anchors(), over=replica.step >= run.optimizer.steps)
    except BaseException:
        publisher.abandon()
        raise
    finally:
        with watching(lambda: publisher.abandon() if place.stop.is_set() else None, 0.2, "thinwire-publisher-stop"):
            publisher.close()


def _layout(store: Store, folder: Path, fragments: Sequence[Fragment]) -> Layout:
    """The fragments' tensors of the model in `folder`. Raises `ConfigurationError` if a fragment's tensor is not in its file."""
    places: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    for index, fragment in enumerate(fragments):
        begin = 0
        for (name, parameter), shape in zip(fragment.parameters, fragment.shapes):
            places[name.replace("_orig_mod.", "")] = index, begin, shape
            begin += parameter.numel()
    tensors, rest, found = [], dict[str, Any](), set[str]()
    with safe_open(str(folder / MODEL), "pt") as file:
        metadata = dict(file.metadata() or {})
        for name in file.keys():  # noqa: SIM118  # the file is no mapping
            own = name if name in places else f"model.{name}"  # the names of transformers inside our wrapper
            value = file.get_tensor(name)
            if own in places and places[own][2] == tuple(value.shape):
                found.add(own)
                tensors.append(TensorPlace(name, places[own][2], *places[own][:2]))
            else:
                rest[name] = value
    if missing := sorted(places.keys() - found):
        raise ConfigurationError(
            f"publish with this model: {', '.join(missing[:3])} is not in its file under that name; leave publish out."
        )
    files = {path.name: store.put(path.read_bytes()) for path in sorted(folder.iterdir()) if path.name != MODEL}
    return Layout(tuple(tensors), store.put(save(rest)), metadata, files)
