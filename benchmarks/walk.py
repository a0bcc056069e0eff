"""The walk of a delta: which files a round passes through, in which order, and where the path turns back to a file that it has left.

    python benchmarks/walk.py [--calls]

Two replicas on threads train a small model by `streaming_diloco`; replica 0 is watched from a departure to its landing. A reader
follows the calls. A call from a file to one that the walk came through before, and that itself calls others (no leaf), is a *return*: a
call-back, or a job that another thread runs for its author. --calls prints each call between files.
"""

from __future__ import annotations

import argparse
import copy
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import thinwire as tw
from thinwire.catalogue.parsing import parse

SRC = str(Path(tw.__file__).parent) + "/"
Place = tuple[str, str]  # file, function
Call = tuple[Place | None, Place]


def watched() -> list[tuple[str, Call]]:
    """Each call between files of thinwire in one round of replica 0, with the thread that made it, in the order of time."""
    calls: list[tuple[str, Call]] = []
    armed, lock = threading.Event(), threading.Lock()
    threads = set[int]()

    def place(frame: FrameType) -> Place | None:
        name = frame.f_code.co_filename
        return (name[len(SRC) : -3], frame.f_code.co_qualname) if name.startswith(SRC) else None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not armed.is_set() or threading.get_ident() not in threads:
            return
        to = place(frame)
        if to is None or frame.f_code.co_name.startswith("<"):
            return
        back = frame.f_back
        while back is not None and (place(back) is None or back.f_code.co_name.startswith("<")):
            back = back.f_back
        came = place(back) if back is not None else None
        if came is None or came[0] != to[0]:
            with lock:
                calls.append((threading.current_thread().name, (came, to)))

    def of_replica(frame: FrameType, event: str, arg: Any) -> None:
        profile(frame, event, arg)

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    started = threading.Thread.start

    def start(self: threading.Thread) -> None:  # the threads that replica 0 starts are its own
        if threading.get_ident() in threads:
            run = self.run

            def counted() -> None:
                threads.add(threading.get_ident())
                run()

            self.run = counted  # type: ignore[method-assign]
        started(self)

    def replica(group: tw.Group) -> None:
        if group.rank == 0:
            threads.add(threading.get_ident())
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(group.rank))
        strategy = tw.recipes.RECIPES["streaming_diloco"](every=5, delay=2, partition=parse("Whole()"))
        attached = tw.Replica(strategy, model, optimizer, group)
        for step in range(12):
            if step == 9 and group.rank == 0:  # the second round departs after step 10, and lands after step 12
                armed.set()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if group.rank == 0:
            armed.clear()
        attached.finish()
        attached.close()

    torch.set_num_threads(1)
    threading.Thread.start = start  # type: ignore[method-assign]
    threading.setprofile(of_replica)
    try:
        tw.run_threads(2, replica)
    finally:
        threading.setprofile(None)
        threading.Thread.start = started  # type: ignore[method-assign]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print each call between files")
    asked = parser.parse_args()
    calls = watched()
    callers = {came[0] for _, (came, _) in calls if came}
    order: dict[str, int] = {}
    # threads run beside each other: the walk follows the delta, from the main thread by the outbound one to the inbound one, and back
    rank = {"thinwire-outbound": 1, "thinwire-inbound": 2}
    landing = next((i for i, (_, (_, to)) in enumerate(calls) if to[1].endswith(("_land", ".land"))), len(calls))
    walk = sorted(
        range(len(calls)),
        key=lambda i: 3 if i >= landing and rank.get(calls[i][0], 0) == 0 else rank.get(calls[i][0], 0),
    )
    turns: dict[Call, str] = {}
    for i in walk:
        thread, (came, to) = calls[i]
        for file in (came[0] if came else None, to[0]):
            if file is not None:
                order.setdefault(file, len(order))
        if came and to[0] in callers and order[to[0]] < order[came[0]]:
            turns.setdefault((came, to), thread)
        if asked.calls:
            print(f"{thread:20} {':'.join(came) if came else '-':50} {':'.join(to)}")
    for (came, to), thread in turns.items():
        print(f"return: {':'.join(came or ('', ''))} → {':'.join(to)}   ({thread})")
    files = [file for file in order if file in callers]
    print(f"{len(order)} files, of which {len(files)} call others: {' '.join(files)}")
    print(f"{len(turns)} returns, between {len({(a[0], b[0]) for a, b in turns if a})} pairs of files")


if __name__ == "__main__":
    sys.exit(main())
