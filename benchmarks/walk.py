"""The walk of a delta: the files that one round passes through, in their order, and where the path turns back.

    python benchmarks/walk.py [--calls]

Two replicas on threads train a small model by `streaming_diloco`. Replica 0 is watched in the inner steps after which its second round
departs and lands; the walk follows the main thread to the departure, then the sending thread, then the receiving one, then the landing.
A *return* is a pair of files where the later one calls the earlier one; a *wait* is such a pair that only waits for what is done there.
Leaves are no part of the walk: carriers, codecs and kernels, values without calls of their own; nor are constructors, declarations
(properties) and the prediction of bytes. --calls prints each call.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import thinwire as tw
from thinwire.catalogue.parsing import parse

SRC = str(Path(tw.__file__).parent) + "/"
LEAVES = ("comm/", "codecs/", "kernels/", "drivers/monitor")  # monitor: it wraps the carrier
BEGINS = "DeltaDriver.after_inner_step"
Place = tuple[str, str]  # file, function
Call = tuple[str, Place, Place]  # thread, caller, called


def watched() -> list[Call]:
    """The calls between files of thinwire in one round of replica 0, in the order of time."""
    calls: list[Call] = []
    armed, threads = threading.Event(), set[int]()

    def place(frame: FrameType | None) -> Place | None:
        name = frame.f_code.co_filename if frame else ""
        inside = name.startswith(SRC) and frame and not frame.f_code.co_qualname.startswith(("<", "Arriving."))
        return (name[len(SRC) : -3], frame.f_code.co_qualname) if inside and frame else None

    def no_stay(frame: FrameType) -> bool:
        name, of = frame.f_code.co_name, frame.f_locals.get("self")
        declared = isinstance(inspect.getattr_static(type(of), name, None), property)
        return declared or name in ("__init__", "__post_init__", "nbytes_sent")

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not armed.is_set() or threading.get_ident() not in threads:
            return
        to, back, begun = place(frame), frame.f_back, threading.current_thread().name.startswith("thinwire")
        if to is None or no_stay(frame):
            return
        came = None
        while back is not None:
            above = place(back)
            came = came or above
            begun |= above is not None and above[1] == BEGINS
            if above is not None and no_stay(back):
                return
            back = back.f_back
        if came and came[0] != to[0] and begun:
            calls.append((threading.current_thread().name, came, to))

    started = threading.Thread.start

    def start(self: threading.Thread) -> None:  # the threads that replica 0 starts are its own
        run, own = self.run, threading.get_ident() in threads

        def counted() -> None:
            if own:
                threads.add(threading.get_ident())
            run()

        self.run = counted  # type: ignore[method-assign]
        started(self)

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))

    def replica(group: tw.Group) -> None:
        if group.rank == 0:
            threads.add(threading.get_ident())
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(group.rank))
        strategy = tw.recipes.RECIPES["streaming_diloco"](every=5, delay=2, partition=parse("Whole()"))
        with tw.Replica(strategy, model, optimizer, group):
            for step in range(12):
                if step == 9 and group.rank == 0:  # the second round departs after step 10, and lands after step 12
                    armed.set()
                model(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if group.rank == 0:
                armed.clear()

    torch.set_num_threads(1)
    threading.Thread.start = start  # type: ignore[method-assign]
    threading.setprofile(profile)
    try:
        tw.run_threads(2, replica)
    finally:
        threading.setprofile(None)
        threading.Thread.start = started  # type: ignore[method-assign]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print each call between files")
    asked, calls = parser.parse_args(), watched()
    landing = next(i for i, (*_, to) in enumerate(calls) if to[1].endswith(".land"))
    beside = {"thinwire-outbound": 1, "thinwire-inbound": 2}
    parts = [beside.get(thread, 0 if i < landing else 3) for i, (thread, *_) in enumerate(calls)]
    walk = [calls[i] for i in sorted(range(len(calls)), key=lambda i: parts[i])]
    callers = {came[0] for _, came, _ in walk}
    order: dict[str, int] = {}
    returns: dict[bool, dict[tuple[str, str], str]] = {False: {}, True: {}}  # by whether they only wait
    for thread, came, to in walk:
        for file in (came[0], to[0]):
            order.setdefault(file, len(order))
        stay = to[0] in callers and not to[0].startswith(LEAVES) and not came[0].startswith(LEAVES)
        if stay and order[to[0]] < order[came[0]]:
            waits = to[1].rpartition(".")[2].startswith("wait")
            returns[waits].setdefault((came[0], to[0]), f"{':'.join(came)} → {':'.join(to)}   ({thread})")
        if asked.calls:
            print(f"{thread:20} {':'.join(came):50} {':'.join(to)}")
    stays = [file for file in order if file in callers and not file.startswith(LEAVES)]
    print(f"{len(order)} files; stays: {' '.join(stays)}")
    for waits, found in returns.items():
        print(f"{len(found)} {'waits' if waits else 'returns'}:", *found.values(), sep="\n  ")


if __name__ == "__main__":
    main()
