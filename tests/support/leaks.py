"""Fixtures that fail a test, or a module of tests, that leaves a thread, process, open file, socket or network namespace behind.

They wait for what is about to end. What a fixture of wider scope holds exists before the test, so it does not count.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

# Made once in a process by the first test that needs it, and kept until the process ends.
KEPT_THREADS = ("tqdm_monitor",)  # progress bars of transformers
KEPT_PROCESSES = (
    "multiprocessing.resource_tracker",  # belongs to multiprocessing, and outlives its processes to tidy up
    "multiprocessing.forkserver",  # the processes that it forks are its children, so they are seen
)

TURNS = 1100  # turns in which other threads may run, each 1 ms longer than the last: ten minutes in all
COLLECT = (
    20  # turns at which garbage is collected; most things have ended by then, and a collection takes up to a second
)
PR_SET_CHILD_SUBREAPER = 36
FAILED = pytest.StashKey[bool]()


@dataclass(frozen=True)
class Snapshot:
    """What a process holds at one moment."""

    threads: set[threading.Thread] = field(default_factory=lambda: set(filter(_runs, threading.enumerate())))
    processes: dict[int, str] = field(default_factory=lambda: descendants())
    files: Counter[str] = field(default_factory=lambda: open_files())
    namespaces: set[str] = field(default_factory=lambda: namespaces())


EXCUSED = Snapshot(set(), {}, Counter(), set())  # held by fixtures of the session, and by tests marked `leaves`


def _runs(thread: threading.Thread) -> bool:
    """Says whether the thread runs. `threading` never forgets a thread that was begun elsewhere."""
    return not isinstance(thread, threading._DummyThread) or Path(f"/proc/self/task/{thread.native_id}").exists()


def open_files() -> Counter[str]:
    """Returns the targets of this process's file descriptors."""
    targets: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208, this is four times as fast
        try:
            targets[os.readlink(f"/proc/self/fd/{number}")] += 1  # noqa: PTH115
        except OSError:
            continue  # the descriptor that lists them
    return targets


def kept_files() -> set[str]:
    """Returns the pipes to the processes that are kept."""
    tracker, server = resource_tracker._resource_tracker, forkserver._forkserver  # type: ignore[attr-defined]
    numbers = tracker._fd, server._forkserver_alive_fd
    return {os.readlink(f"/proc/self/fd/{number}") for number in numbers if number is not None}  # noqa: PTH115


def descendants() -> dict[int, str]:
    """Returns the commands of all children, grandchildren and so on that have not ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # the common case; a grandchild whose parent has died counts as a child here
    family, found = set[int](), [os.getpid()]
    while found:
        found += (children := _children(found.pop()))
        family.update(children)
    return {pid: _command(pid) for pid in family if _state(pid) not in "ZX"}


def _state(pid: int) -> str:
    """Returns the state letter of a process; Z and X mean that it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _children(pid: int) -> list[int]:
    """Returns the children of all threads of a process."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += map(int, listing.read_text().split())
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def namespaces() -> set[str]:
    """Returns the names of all network namespaces."""
    folder = Path("/run/netns")
    return set(os.listdir(folder)) if folder.exists() else set()  # noqa: PTH208


def new_namespaces(before: Snapshot, now: Snapshot) -> set[str]:
    """Returns the new ones of this process and of ended ones; their names contain the process number."""
    new = now.namespaces - before.namespaces
    return {name for name in new if (made := re.search(r"\d+", name)) and _ours(int(made[0]))}


def _ours(pid: int) -> bool:
    return pid == os.getpid() or not Path(f"/proc/{pid}").exists()


def new_processes(before: Snapshot, now: Snapshot) -> dict[int, str]:
    return {
        pid: command
        for pid, command in now.processes.items()
        if not (pid in before.processes or pid in EXCUSED.processes or any(kept in command for kept in KEPT_PROCESSES))
    }


def new_threads(before: Snapshot, now: Snapshot) -> list[threading.Thread]:
    new = now.threads - before.threads - EXCUSED.threads
    return [thread for thread in new if thread.is_alive() and thread.name not in KEPT_THREADS]


def stacks(before: Snapshot) -> list[str]:
    """Returns where the new threads stand. Only for threads that stand still: Python 3.11 may crash if a thread runs meanwhile."""
    frames = sys._current_frames()
    stuck = [frames[thread.ident] for thread in new_threads(before, Snapshot()) if thread.ident in frames]
    return ["".join(traceback.format_stack(frame)) for frame in stuck]


def left_behind(before: Snapshot) -> list[str]:
    """Returns a description of everything that exists now and did not exist `before`."""
    now = Snapshot()
    words = [f"the thread {thread.name} is still running" for thread in new_threads(before, now)]
    for pid, command in new_processes(before, now).items():
        words.append(f"the process {pid} is still running: {command}")
    if more := now.files - before.files - EXCUSED.files:
        kept = kept_files()
        words += [f"{count} of {target} is still open" for target, count in more.items() if target not in kept]
    words += [f"the network namespace {name} is still there" for name in new_namespaces(before, now)]
    return words


def excuse(before: Snapshot, now: Snapshot) -> None:
    EXCUSED.threads.update(now.threads - before.threads)
    EXCUSED.processes.update(now.processes)
    EXCUSED.files.update(now.files - before.files)


def end_processes(before: Snapshot) -> None:
    for pid in new_processes(before, Snapshot()):
        os.kill(pid, signal.SIGKILL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and report.when != "teardown":
        for node in item.listchain():
            node.stash[FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    """Excuses what a fixture of the session makes, because that may happen in the middle of a module."""
    if fixturedef.scope != "session":
        return (yield)
    before = Snapshot()
    made = yield
    excuse(before, Snapshot())
    return made


def _excuse_marked(node: pytest.Item, before: Snapshot) -> None:
    for mark in node.iter_markers("leaves"):
        for target, count in (open_files() - before.files).items():
            if target.startswith(mark.kwargs["files"]):
                EXCUSED.files[target] += count


def watch(request: pytest.FixtureRequest) -> Iterator[None]:
    before = Snapshot()
    yield
    # After Ctrl-C an error would take the place of the reports.
    interrupted = request.session.exitstatus == pytest.ExitCode.INTERRUPTED
    if interrupted or request.node.stash.get(FAILED, False):  # the traceback of a failed test refers to its objects
        end_processes(before)
        return
    for turn in range(TURNS):
        if not (left := left_behind(before)):
            return
        if turn == COLLECT:
            getattr(request.node, "funcargs", {}).clear()  # pytest keeps the values of fixtures
            gc.collect()
            _excuse_marked(request.node, before)
        threading.Event().wait(turn / 1000)
    end_processes(before)
    pytest.fail("left behind: " + "\n".join([*left, *stacks(before)]), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def orphans_are_ours() -> None:
    """Makes a process whose parent has died a child of this one."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if sys.platform == "linux":  # everything is read from /proc
    no_test_leaves_anything = pytest.fixture(autouse=True)(watch)
    no_module_leaves_anything = pytest.fixture(autouse=True, scope="module")(watch)
