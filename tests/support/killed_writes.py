"""A process that saves checkpoints and is killed just before its n-th change to the file system.

The process is traced (ptrace through ctypes: Linux, x86-64, no other program needed). Every system call that changes files is
seen before the kernel executes it, whether Python or safetensors' own writer makes it; there the process gets `SIGKILL`.
This does not show a power cut, which also loses bytes that were written and not flushed; for that, `changes` lists the order
of writes, flushes and renames.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import struct
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire import checkpoint
from thinwire.testing.toy import adamw, batch, inner_step, toy

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["thinwire", "torch", "killed_writes"])

# x86-64: number, name, and which arguments are paths (P) or descriptors (D); the second P of a rename is its target
_CALLS = {
    1: ("write", "D"), 18: ("write", "D"), 20: ("write", "D"), 2: ("open", "P"), 257: ("open", "-P"), 74: ("flush", "D"),
    75: ("flush", "D"), 76: ("write", "P"), 77: ("write", "D"), 82: ("rename", "PP"), 264: ("rename", "-P-P"),
    316: ("rename", "-P-P"), 83: ("mkdir", "P"), 258: ("mkdir", "-P"), 84: ("delete", "P"), 87: ("delete", "P"),
    263: ("delete", "DP"), 90: ("chmod", "P"), 91: ("chmod", "D"), 268: ("chmod", "-P"), 285: ("write", "D"),
}  # fmt: skip
_OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SEIZE, _INTERRUPT, _SYSCALL, _GET_SYSCALL_INFO, _ALL_THREADS = 0x4206, 0x4207, 24, 0x420E, 0x40000000
_OPTIONS = 0x1 | 0x100000  # mark system calls; kill the traced process when this one ends


@dataclass(frozen=True)
class Change:
    """A system call that changes files: its kind and its paths."""

    what: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a process: the changes that it made, the steps whose checkpoints it finished, and the change before which it was killed."""

    changes: tuple[Change, ...]
    saved: tuple[int, ...]
    killed: Change | None


def replica_of(group: tw.Group) -> tw.Replica:
    """Returns a small replica with feedback, outer momentum and rounds in the air."""
    model = toy()
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(2, 1),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.codecs.Sign(block=32),
        feedback=tw.pieces.feedback.Feedback(),
        outer=tw.pieces.outer.Nesterov(0.7, 0.9),
    )
    return tw.Replica(strategy, model, adamw(model), group)


def train_and_save(replica: tw.Replica, folder: Path) -> int:
    """Trains one inner step, saves a checkpoint, and returns the step."""
    inner_step(replica.model, replica.optimizer, *batch(0, 0, replica.step + 1))
    checkpoint.save(folder, replica, {}, keep=2)
    return replica.step


def _serve(told: Connection, base: Path) -> None:
    """Saves two checkpoints into `base`. Then, for each folder received, a forked process saves a third checkpoint, which removes
    the first, and saves the third again, which replaces it.
    """
    torch.set_num_threads(1)

    def body(group: tw.Group) -> None:
        with replica_of(group) as replica:
            train_and_save(replica, base), train_and_save(replica, base)
            told.send("ready")
            while folder := told.recv():
                if not (child := os.fork()):
                    told.send(os.getpid())
                    told.recv()
                    replica.step += 1
                    for _ in range(2):
                        checkpoint.save(folder, replica, {}, keep=2)
                        told.send(replica.step)
                    os._exit(0)
                os.waitpid(child, 0)
                told.send("over")

    tw.run_threads(1, body, timeout=600.0)


class Saver:
    """A process with a trained replica, which forks the processes that are traced."""

    def __init__(self, base: Path) -> None:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            pytest.skip("system calls are traced on Linux and x86-64 only")
        self._base = base
        self._end, tell = FORKS.Pipe()
        self._process = FORKS.Process(target=_serve, args=(tell, base), daemon=True)
        self._process.start()
        tell.close()
        assert self._end.recv() == "ready"

    def close(self) -> None:
        self._end.send("")
        self._process.join()
        self._process.close()
        self._end.close()

    def save_until(self, folder: Path, number: int | None = None) -> Outcome:
        """Runs a process that saves into `folder`, and kills it before its change `number` (from 0). Without a number it ends by itself."""
        shutil.copytree(self._base, folder)
        self._end.send(folder)
        pid = self._end.recv()
        _ptrace(_SEIZE, pid, 0, _OPTIONS)
        _ptrace(_INTERRUPT, pid)
        _, status = os.waitpid(pid, _ALL_THREADS)
        self._end.send("go on")
        changes: list[Change] = []
        killed = None
        while os.WIFSTOPPED(status):
            stop = os.WSTOPSIG(status)
            change = _change(pid, folder) if stop == signal.SIGTRAP | 0x80 else None
            if change and len(changes) == number:
                killed = change
                os.kill(pid, signal.SIGKILL)
            elif change:
                changes.append(change)
            if not killed:
                _ptrace(_SYSCALL, pid, 0, stop if stop not in (signal.SIGTRAP, signal.SIGTRAP | 0x80) else 0)
            _, status = os.waitpid(pid, _ALL_THREADS)
        saved = tuple(iter(self._end.recv, "over"))
        return Outcome(tuple(changes), saved, killed)


def _change(pid: int, folder: Path) -> Change | None:
    """Returns the system call that the stopped process is about to make, if it changes something in `folder`."""
    said = ctypes.create_string_buffer(88)
    _ptrace(_GET_SYSCALL_INFO, pid, len(said), ctypes.addressof(said))
    operation, number, *arguments = struct.unpack_from("=B23xQ6Q", said.raw)
    if operation != 1 or number not in _CALLS:  # 1: the entry of a system call
        return None
    what, kinds = _CALLS[number]
    if what == "open" and not arguments[kinds.index("P") + 1] & _OPEN_TO_WRITE:
        return None
    paths = tuple(
        _text(pid, arguments[place]) if kind == "P" else str(Path(f"/proc/{pid}/fd/{arguments[place]}").readlink())
        for place, kind in enumerate(kinds)
        if kind != "-"
    )
    if what == "delete" and len(paths) == 2:
        paths = (str(Path(*paths)),)
    return Change(what, paths) if all(path.startswith(str(folder)) for path in paths) else None


def _text(pid: int, address: int) -> str:
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        memory.seek(address)
        return os.fsdecode(memory.read1(256).split(b"\0")[0])


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        if request == _SEIZE and number in (1, 13):
            pytest.skip("this machine does not let a process be traced")
        raise OSError(number, os.strerror(number))
