"""A replica whose training counts steps, run as a process that tests kill, freeze and damage: ADDRESS NAME FOLDER [MODEL].

ADDRESS is that of a lighthouse, or the token of a hub.

An inner step adds `UNIT` to the places of this replica, and nothing elsewhere. So every anchor shows how often each replica was
counted, and how large the groups were. The replica writes a line to its log before any other can know of the event; lines that the
kernel has accepted survive kill -9. SIGUSR1 damages the next packet; SIGUSR2 makes the next checkpoint fail for lack of disk space.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire import checkpoint
from thinwire.comm.group import Group, Transfer
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.handshake import digest
from thinwire.membership import LighthouseRendezvous, Membership, Timeouts
from thinwire.membership.rendezvous import Rendezvous

NAMES = "abcd"
UNIT = 12.0  # is whole after division by 1, 2, 3 or 4 members
PLACES = 4096  # in each of two fragments; place i belongs to NAMES[i % 4]
SAVE_EVERY = 40
QUICK = Timeouts(
    heartbeat_interval=0.3, heartbeat_timeout=1.5, grace=1.0, connect=3.0, transfer=2.0, vote=4.0, view=15.0
)


class Damaging:
    """A group that flips a bit of the next packet when it is told to."""

    told = False

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size, self.close = group, group.rank, group.size, group.close

    def post(self, tag: int, send: Any, recv: Any, purpose: str = "packet", sized: Any = None) -> Transfer:
        if Damaging.told and purpose == "packet" and send:
            Damaging.told = False
            send = {peer: message.clone() for peer, message in send.items()}
            for message in send.values():
                message[message.numel() // 2] ^= 1
        return self.group.post(tag, send, recv, purpose, sized)


class DurableLog:
    """A log of lines that survive the process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = os.open(folder / f"{name}-{time.monotonic_ns()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        steps = folder / f"{name}.steps"
        if not steps.exists():
            steps.write_bytes(bytes(8))
        with steps.open("r+b") as file:
            self.steps = mmap.mmap(file.fileno(), 8)

    def write(self, kind: str, **fields: Any) -> None:
        text = (json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n").encode()
        while text:
            try:
                text = text[os.write(self.file, text) :]
            except OSError:  # the disk has no space at the moment
                time.sleep(0.001)

    def count(self) -> None:
        """Counts one more inner step of this name over all its processes."""
        (steps,) = struct.unpack("<q", self.steps[:8])
        self.steps[:8] = struct.pack("<q", steps + 1)


def watch(replica: tw.Replica, log: DurableLog, name: str) -> None:
    """Logs the delta of this replica before it is sent, and each commit that this replica accepts."""
    assert isinstance(replica._driver, ElasticDriver)
    loop, own = replica._driver.rounds.loop, NAMES.index(name)
    fly, believe = loop._fly, loop._believe

    def flown(view: Any, plan: Any, ready: Any) -> Any:
        if view.group.rank in plan.counted:
            log.write("brings", id=view.id, steps=-float(ready.delta[own]) / UNIT)
        return fly(view, plan, ready)

    def believed(view: Any, plan: Any, ready: Any, moved: Any, granted: bool = False, *reads: Any) -> None:
        before = loop.agreed.state_digest
        believe(view, plan, ready, moved, granted, *reads)
        if moved is not None:
            names = [view.members[rank].name for rank in plan.counted]
            log.write(
                "commit", id=view.id, round=plan.round, fragment=plan.fragment, counted=names, before=before,
                state_digest=loop.agreed.state_digest, whole=plan.whole,
                anchor=[float(value) for value in loop.agreed.anchors[plan.fragment][: len(NAMES)]],
            )  # fmt: skip

    loop._fly, loop._believe = flown, believed  # type: ignore[method-assign]


def restore(folder: Path, replica: tw.Replica, log: DurableLog) -> None:
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            checkpoint.load(checkpoint.read(path), replica)
        except tw.CheckpointError as error:
            log.write("skipped", reason=str(error))
            continue
        log.write("resumed", step=replica.step)
        return


def save(folder: Path, replica: tw.Replica, log: DurableLog, full: bool) -> None:
    there, problem = sorted(folder.glob("step-*")), ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        checkpoint.save(folder, replica, {})
    except tw.CheckpointError as error:
        problem = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if full:
        log.write("not saved", reason=problem, kept=sorted(folder.glob("step-*")) == there)


def rendezvous(address: str, name: str, folder: Path) -> Rendezvous:
    if not address.startswith("tw1."):
        return LighthouseRendezvous(address)
    from thinwire.net import Token
    from thinwire.net.enrol import Enrolment
    from thinwire.net.rendezvous import HubRendezvous

    return HubRendezvous(Enrolment(Token.read(address), name, folder / "keys"))


def main(address: str, name: str, folder: str, size: str = str(PLACES)) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(Damaging, "told", True))
    full: list[bool] = []
    signal.signal(signal.SIGUSR2, lambda *_: full.append(True))
    log = DurableLog(Path(folder), name)
    log.write("start")
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(int(size))) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradient = torch.zeros(int(size))
    gradient[NAMES.index(name) :: 4] = -UNIT
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(every=8, delay=0),
        partition=tw.pieces.partition.BySize(2),
        outer=tw.pieces.outer.Average(),
    )
    meeting = rendezvous(address, name, Path(folder))
    membership = Membership(meeting, name, least=2, timeouts=QUICK, wrap=Damaging)

    def observe(event: str, step: int, **fields: Any) -> None:
        log.write(event, step=step, **{k: v for k, v in fields.items() if not isinstance(v, Tensor)})

    worst = 0.0
    with tw.Replica(strategy, model, optimizer, membership, observer=observe) as replica:
        watch(replica, log, name)
        restore(Path(folder, "saved", name), replica, log)
        began, own = time.monotonic(), 0
        while not Path(folder, "stop").exists():
            for parameter in model:
                parameter.grad = gradient.clone()
            time.sleep(0.02)
            log.count()
            before = time.monotonic()
            optimizer.step()
            worst, own = max(worst, time.monotonic() - before), own + 1
            if own % SAVE_EVERY == 0 or full:
                told = len(full)
                save(Path(folder, "saved", name), replica, log, bool(told))
                del full[:told]  # a signal that came meanwhile is for the next save
        log.write("finish", seconds=time.monotonic() - began, spent=replica.seconds, worst=worst, steps=own)
    assert isinstance(replica._driver, ElasticDriver)
    anchors = [[float(v) for v in anchor[:4]] for anchor in replica.anchors()]
    state_digest = replica._driver.rounds.loop.agreed.state_digest
    log.write(
        "done", digest=digest(replica.anchors()).hex(), anchors=anchors, state_digest=state_digest, step=replica.step
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
