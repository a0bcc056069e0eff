"""One replica as a process: it holds rounds until the file `stop` appears, and writes a line for each.

python roster_process.py ADDRESS NAME FOLDER [LEAST]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from thinwire.comm import CountedGroup, Ledger, gather
from thinwire.errors import LinkError, UndecidedError
from thinwire.membership import Deadlines, LighthouseMeeting, Roster

DEADLINES = Deadlines(
    heartbeat_interval=0.3, heartbeat_timeout=1.5, grace=3.0, connect=3.0, transfer=2.0, vote=4.0, muster=30.0
)


def main(address: str, name: str, folder: str, least: str = "2") -> None:
    torch.set_num_threads(1)
    ledger = Ledger()
    with (Path(folder) / f"{name}-{time.monotonic_ns()}.jsonl").open("w", buffering=1) as lines:

        def write(kind, **fields):
            lines.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

        roster = Roster(
            LighthouseMeeting(address), name, least=int(least), deadlines=DEADLINES,
            wrap=lambda group: CountedGroup(group, ledger), observe=lambda kind, fields: write(kind, **fields),
        )  # fmt: skip
        number = 0
        while not (Path(folder) / "stop").exists():
            try:
                began = time.monotonic()
                muster = roster.muster({"round": number})
                mustered = time.monotonic()
            except LinkError as error:
                write("no muster", reason=str(error))
                continue
            number = max(member.claim["round"] for member in muster.members)
            answer: bool | None
            sent, received = ledger.sent(), ledger.received()
            try:
                heard = gather(muster.group, f"{name} {number}".encode(), 64, "packet")
                yes = heard == [f"{member.name} {number}".encode() for member in muster.members]
            except LinkError as error:
                write("failed", reason=str(error))
                yes = False
            try:
                answer = muster.decide("land", yes, DEADLINES.vote)
            except UndecidedError as error:
                write("undecided", reason=str(error))
                answer = None
            if not yes or answer is None:
                muster.close()
            number += bool(answer)
            write(
                "round", id=muster.id, answer=answer, number=number, members=[m.name for m in muster.members],
                rebuilt=muster.rebuilt, muster_seconds=mustered - began, vote_seconds=time.monotonic() - mustered,
                sent=ledger.sent() - sent, received=ledger.received() - received,
            )  # fmt: skip
            time.sleep(0.02)
        roster.close()
    Path(folder, f"{name}.over").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # what gloo still waits for after a kill may come back while Python ends, which would abort it
