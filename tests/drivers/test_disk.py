"""Outer state on disk: the bits are those of state in memory, two fragments are in memory, and a slow disk causes a warning."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.drivers import disk as disk_module
from thinwire.drivers.disk import DiskTensors, Window
from thinwire.drivers.elastic.driver import check
from thinwire.drivers.saved_state import restore, tensors_to_save
from thinwire.pieces.partition import BySize
from thinwire.testing.toy import batch, inner_step, journey, same_bits, sgd


@pytest.mark.parametrize("recipe", [tw.streaming_diloco, tw.streaming_sign])
def test_state_on_disk_has_the_bits_of_state_in_memory(recipe: Any) -> None:
    """This holds after every step for everything that is saved, also after a refused round and after a state was loaded."""
    strategy = recipe(every=4, delay=1, partition=BySize(3))

    def poison(replica: tw.Replica, step: int) -> None:
        if step == 6 and replica.group.rank == 1:
            next(replica.model.parameters()).grad = torch.full_like(next(replica.model.parameters()), torch.nan)

    one, other = (
        journey(dataclasses.replace(strategy, anchors=place), 2, before_step=poison) for place in ("host", "disk")
    )
    for host, disk in zip(one, other):
        assert host.heard("refused") and len(host.heard("refused")) == len(disk.heard("refused"))
        for of_host, of_disk in zip([host.final_agreed, *host.agreed], [disk.final_agreed, *disk.agreed]):
            assert of_host.keys() == of_disk.keys()
            assert all(same_bits(of_host[name], of_disk[name]) for name in of_host)
        assert all(same_bits(a, b) for a, b in zip([host.final, *host.weights], [disk.final, *disk.weights]))


PAGEOUT = 21  # Linux: write pages back and drop them from memory


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 1))


def resident_nbytes(tensor: Tensor) -> int:
    """Returns how many bytes of the mapping of `tensor` are in this process's memory, by the kernel's count."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split(" ", 1)[0]
        if not word.endswith(":"):
            begin, end = (int(address, 16) for address in word.split("-"))
            here = begin <= tensor.data_ptr() < end
        elif here and word == "Rss:":
            return 1024 * int(line.split()[1])
    raise AssertionError("the tensor is in no mapping")


def test_only_two_fragments_are_in_memory() -> None:
    """All values are there after a checkpoint is read, though that touches all pages."""
    strategy = dataclasses.replace(tw.streaming_sign(every=6, delay=1, partition=BySize(6)), anchors="disk")

    def replica(group: tw.Group) -> None:
        model = layers()
        optimizer = sgd(model)
        with tw.Replica(strategy, model, optimizer, group) as attached:
            fragments = attached._training.fragments
            held = [one.disk for one in fragments]
            for step in range(1, 16):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                if step == 9:  # a step without rounds in flight, after all fragments were touched
                    before = {name: value.clone() for name, value in tensors_to_save(fragments).items()}
                    restore(fragments, before, attached.state()[1], strategy.outer)
                    assert all(same_bits(value, before[name]) for name, value in tensors_to_save(fragments).items())
                    assert all(one.disk is not file for one, file in zip(fragments, held))
                    continue
                resident = [resident_nbytes(one.anchor) for one in fragments]
                most = max(one.disk.nbytes for one in fragments if one.disk)
                assert sum(resident) <= 2 * most + len(fragments) * 8192, (step, resident)
                assert step < 6 or sum(resident) >= most // 2, (step, resident)
            attached.finish()
            with attached.anchored():
                assert sum(resident_nbytes(one.anchor) for one in fragments) <= len(fragments) * 8192

    tw.run_threads(1, replica, timeout=600.0)


def test_waiting_for_the_disk_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskTensors([torch.arange(4_000_000.0)])  # more than the kernel reads ahead
    disk._map.flush()
    disk._map.madvise(PAGEOUT)  # a file system in memory keeps them
    disk.read()
    assert disk.unread_nbytes() == 0 and float(disk.tensors[0][-1]) == 3_999_999
    monkeypatch.setattr(DiskTensors, "unread_nbytes", lambda self: 4096)
    one, *_ = journey(dataclasses.replace(tw.streaming_diloco(every=4, delay=1), anchors="disk"), 2)
    (told,) = one.heard("warning")
    assert "departure, which waits for the rest" in told["message"] and told["step"] == 4, "the first of all"


def test_pages_in_memory_are_counted_by_their_lowest_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty tensor takes no room. Nothing is unread if the kernel does not say it."""
    given = torch.arange(3.0 * mmap.PAGESIZE // 4)
    disk = DiskTensors([given, torch.empty(0, 4)])
    assert torch.equal(disk.tensors[0], given) and disk.tensors[0].data_ptr() != given.data_ptr()
    assert disk.tensors[1].shape == (0, 4) and disk.nbytes == 3 * mmap.PAGESIZE and DiskTensors([]).nbytes == 1

    def mincore(begin: ctypes.c_void_p, nbytes: ctypes.c_size_t, pages: ctypes.c_void_p) -> int:
        assert begin.value == disk.tensors[0].data_ptr() and nbytes.value == disk.nbytes and pages.value
        (ctypes.c_uint8 * 3).from_address(pages.value)[:] = [1, 2, 3]
        return 0

    monkeypatch.setattr(disk_module, "_LIBC", SimpleNamespace(mincore=mincore))
    assert disk.unread_nbytes() == mmap.PAGESIZE
    monkeypatch.setattr(disk_module, "_LIBC", SimpleNamespace(mincore=lambda *_: -1))
    assert disk.unread_nbytes() == 0


class Noted:
    """State on disk that notes what is asked of it. `read` waits until it may go on."""

    def __init__(self, index: int, heard: list[str], may_go_on: threading.Event | None = None) -> None:
        self.index, self.heard, self.may_go_on, self.nbytes = index, heard, may_go_on, 100

    def read(self) -> None:
        self.heard.append(f"read {self.index}")
        if self.may_go_on:
            self.may_go_on.wait()

    def release(self) -> None:
        self.heard.append(f"release {self.index}")

    def unread_nbytes(self) -> int:
        return 40


def window_of(every: int, disks: Sequence[Noted | None]) -> tuple[Window, Any, list[str]]:
    """Returns a window over fragments of which one departs after every second step, their training, and its warnings."""
    warnings: list[str] = []
    fragments = [SimpleNamespace(index=index, disk=disk, flight=None) for index, disk in enumerate(disks)]
    training = SimpleNamespace(
        strategy=SimpleNamespace(schedule=SimpleNamespace(every=every)),
        fragments=fragments,
        calendar=SimpleNamespace(departs=lambda step: () if step % 2 else (step // 2 % len(fragments),)),
        step=0,
        warn=warnings.append,
    )
    return Window(training), training, warnings  # type: ignore[arg-type]


def test_fragments_are_read_before_their_departure_and_released_after_their_flight() -> None:
    """Of four fragments the last is in memory, and each flies for a step."""
    heard: list[str] = []
    window, training, _ = window_of(8, [*(Noted(index, heard) for index in range(3)), None])
    window.close()
    window._thread = SimpleNamespace(submit=lambda job: job())  # type: ignore[assignment]
    asked = []
    for step in range(6):
        training.step = step
        for fragment in training.fragments:
            fragment.flight = fragment.index in training.calendar.departs(step) if step else None
        window.slide()
        asked.append(sorted(heard))
        heard.clear()
    released = [f"release {index}" for index in range(3)]
    assert (
        asked
        == [
            ["read 1", released[0], released[2]],
            [released[0], released[2]],
            ["read 2", released[0]],  # 1 is in flight
            released[:2],
            released[:2],  # 2 is in flight; 3 has no file
            released,
        ]
    )


def test_a_window_warns_once_of_what_is_unread_and_drops_its_reads_at_the_end() -> None:
    heard: list[str] = []
    for every, steps, count in ((8, 8, 1), (8, 4, 2), (2, 1, 4)):
        window, _, warnings = window_of(every, [Noted(index, heard) for index in range(count)])
        for _ in range(2):
            window.departs(0)
        (told,) = warnings
        assert f"has read 60 of 100 bytes of the outer state of fragment 0 in the {steps} inner steps" in told
        window.close()

    may_go_on = threading.Event()
    window, _, _ = window_of(16, [Noted(index, heard, may_go_on) for index in range(4)])
    window.slide()  # two fragments depart within four steps
    window.close()  # does not wait for the first
    may_go_on.set()
    window._thread.shutdown(wait=True)
    assert "read 2" not in heard


def test_state_on_disk_is_refused_where_all_fragments_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (tw.data_parallel(), tw.recipes.eager_diloco(), tw.recipes.qsr()):
        with pytest.raises(tw.ConfigurationError, match=r"anchors='disk': .* choose anchors='host'"):
            dataclasses.replace(other, anchors="disk")
    with pytest.raises(tw.ConfigurationError, match="'host', 'device' or 'disk' is needed"):
        dataclasses.replace(tw.diloco(), anchors="tape")  # type: ignore[arg-type]

    with pytest.raises(tw.ConfigurationError, match="anchors='disk' in an elastic run"):
        check(dataclasses.replace(tw.streaming_sign(), anchors="disk"))

    def full(_: int, begin: int, nbytes: int) -> None:
        assert (begin, nbytes) == (0, 20096)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(tw.ConfigurationError, match=r"20,096 bytes are needed in .* Set TMPDIR"):
        DiskTensors([torch.zeros(5000), torch.zeros(3)])
