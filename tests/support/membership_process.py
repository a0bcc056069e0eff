"""One replica as a process: it holds rounds until the file `stop` appears, and writes a line for each.

python membership_process.py ADDRESS NAME FOLDER [LEAST]
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
from thinwire.membership import LighthouseRendezvous, Membership, Timeouts

DEADLINES = Timeouts(
    heartbeat_interval=0.3, heartbeat_timeout=1.5, grace=3.0, connect=3.0, transfer=2.0, vote=4.0, view=30.0
)


def main(address: str, name: str, folder: str, least: str = "2") -> None:
    torch.set_num_threads(1)
    ledger = Ledger()
    with (Path(folder) / f"{name}-{time.monotonic_ns()}.jsonl").open("w", buffering=1) as lines:

        def write(kind, **fields):
            lines.write(json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n")

        membership = Membership(
            LighthouseRendezvous(address), name, least=int(least), timeouts=DEADLINES,
            wrap=lambda group: CountedGroup(group, ledger), observe=lambda kind, fields: write(kind, **fields),
        )  # fmt: skip
        number = 0
        while not (Path(folder) / "stop").exists():
            try:
                began = time.monotonic()
                view = membership.next_view({"round": number})
                met = time.monotonic()
            except LinkError as error:
                write("no view", reason=str(error))
                continue
            number = max(member.status["round"] for member in view.members)
            answer: bool | None
            sent, received = ledger.sent(), ledger.received()
            try:
                heard = gather(view.group, f"{name} {number}".encode(), 64, "packet")
                yes = heard == [f"{member.name} {number}".encode() for member in view.members]
            except LinkError as error:
                write("failed", reason=str(error))
                yes = False
            try:
                answer = view.decide("land", yes, DEADLINES.vote)
            except UndecidedError as error:
                write("undecided", reason=str(error))
                answer = None
            if not yes or answer is None:
                view.close()
            number += bool(answer)
            write(
                "round", id=view.id, answer=answer, number=number, members=[m.name for m in view.members],
                rebuilt=view.rebuilt, view_seconds=met - began, vote_seconds=time.monotonic() - met,
                sent=ledger.sent() - sent, received=ledger.received() - received,
            )  # fmt: skip
            time.sleep(0.02)
        membership.close()
    Path(folder, f"{name}.over").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # gloo may still wait for a killed peer, and would abort the process while Python ends
