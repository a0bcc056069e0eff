"""One replica of a rolling upgrade, for test_upgrade_processes.py: ADDRESS NAME FOLDER. It says first which protocols it speaks.

It trains until FOLDER/end is there, and up to the step that stands in it; then it says the digest of its anchors. If FOLDER/NAME.leave is there, it
waits until all that it trained counts, saves a checkpoint and leaves.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from counting import rendezvous

import thinwire as tw
from thinwire import checkpoint, version
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.handshake import digest
from thinwire.integrations.members import MemberSampler
from thinwire.membership import Membership, Timeouts

# Nobody is given up for being slow, however busy the machine is.
PATIENT = Timeouts(
    heartbeat_interval=0.1, heartbeat_timeout=600.0, grace=600.0, connect=600.0, transfer=600.0, vote=700.0, view=600.0
)
EVERY, SAMPLES, BATCH = 8, 1 << 24, 2


class Books:
    """The samples that this process has trained, and those of them that count."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.seen, self.counted = name, 0, 0
        self._file = (folder / f"{name}.samples").open("a")

    def trained(self, drawn: list[int]) -> None:
        self._file.write("".join(f"{index}\n" for index in drawn))
        self._file.flush()
        self.seen += len(drawn)

    def check(self) -> None:
        assert self.counted == self.seen, (self.counted, self.seen)

    def hear(self, event: str, step: int, **fields: Any) -> None:
        if event == "data":
            self.counted += sum(end - begin for name, begin, end in fields["trained"] if name == self.name)
        if event in ("data", "round", "caught_up", "retry", "view"):
            kept = {key: fields[key] for key in ("members", "committed", "lost", "returned", "reason") if key in fields}
            print(json.dumps({"event": event, "step": step} | kept), flush=True)


def all_counted(replica: tw.Replica, books: Books) -> None:
    """Take part in rounds until all that this process trained counts: it brings what is left."""
    driver = cast(ElasticDriver, replica._driver)
    while books.counted < books.seen:
        left = [index for index, travelled in enumerate(driver._in_anchors) if travelled < driver._trained]
        brought = [driver._bring(index, replica.step) for index in left if index not in driver._waiting]
        driver.rounds.depart(*brought, own_steps=driver._own_steps)
        driver.rounds.wait(lambda: driver.rounds.idle)
        driver._pick_up(replica.step)
        time.sleep(0.02)


def main(address: str, name: str, given: str) -> None:
    folder = Path(given)
    print(json.dumps({"event": "speaks", "protocols": str(version.PROTOCOLS)}), flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    books, saved = Books(folder, name), folder / f"{name}.checkpoints"
    leave, end = folder / f"{name}.leave", folder / "end"
    membership = Membership(rendezvous(address, name, folder), name, timeouts=PATIENT)
    sampler = MemberSampler(SAMPLES, 0, membership, lambda: None)
    membership.require(sampler.facts(BATCH))
    strategy = tw.recipes.diloco(every=EVERY)
    replica = tw.Replica(strategy, model, optimizer, membership, reader=sampler.open(BATCH), observer=books.hear)
    for path in saved.glob("step-*"):
        joined = replica.step
        checkpoint.load(checkpoint.read(path), replica)
        replica.step = max(joined, replica.step)
    samples = iter(sampler)
    while not end.exists() or replica.step < int(end.read_text()):
        if leave.exists():
            all_counted(replica, books)
            checkpoint.save(saved, replica, {})
            replica.close()
            return
        drawn = [next(samples) for _ in range(BATCH)]
        if sampler.trains(BATCH):
            x = torch.nn.functional.one_hot(torch.tensor(drawn) % 32, 32).float()
            (model(x) - 1.0).square().mean().backward()
            books.trained(drawn)
        optimizer.step()
        optimizer.zero_grad()
        if not end.exists():
            time.sleep(0.01)
    replica.finish()
    books.check()
    print(json.dumps({"event": "end", "step": replica.step, "digest": digest(replica.anchors()).hex()}), flush=True)
    replica.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
