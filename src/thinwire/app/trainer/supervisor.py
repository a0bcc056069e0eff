"""Starts and restarts the replicas of an elastic run on this machine, each a process with a name that it keeps.

    python -m thinwire.app.trainer.supervisor FOLDER NAME INDEX begin|resume WORDS LAUNCHER

starts one replica, as `train_elastic` does: see `meeting_of`.

A replica that dies is started again and resumes from its own newest checkpoint; if it dies again at once, the waits grow. A
replica that ends with an error that a restart cannot cure (different settings, a full disk) is given up. The run
continues while enough replicas are left for a round. At its end one replica may keep the final state for another that is missing;
if no replica on this machine can still come, it is told to end.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.app.records.events import Tail
from thinwire.app.trainer.final import of_full_disk
from thinwire.app.trainer.job import open_job
from thinwire.app.trainer.launch import (
    Stop,
    Tick,
    as_replica,
    end,
    in_words,
    last_words,
    raise_for_job,
    sharing_cores,
    start,
    stopping,
    train_here,
)
from thinwire.app.trainer.meeting import Meeting, meeting_of, own_meeting
from thinwire.app.trainer.place import ElasticPlace
from thinwire.app.trainer.resuming import steps_logged
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.run_folder import run_in
from thinwire.checkpoint import newest
from thinwire.errors import CheckpointError, LinkError

FINAL_EXIT_CODE = 3  # exit code of a replica that would fail again
TRIES = 5  # deaths in a row after which a replica is given up
SETTLED_SECONDS = 60.0  # seconds of life after which a death counts as the first in a row again
LONGEST_PAUSE = 60.0  # most seconds before a replica is started again
STOPPING = "stopping: each replica ends its inner step and leaves a checkpoint (Ctrl-C again: at once)"

Say = Callable[[str], object]


@dataclass(frozen=True)
class JoiningReplica:
    """One replica of a run whose lighthouse or hub runs elsewhere."""

    meeting: Meeting
    name: str


def train_elastic(
    run: Run, folder: Path, resume: bool, tick: Tick, say: Say, joining: JoiningReplica | None, stop: Stop | None = None
) -> None:
    """Run all replicas of `run` on this machine, with their lighthouse or hub, or only the replica `joining`. Their output goes to RUN/logs.

    Raises `LinkError` with the reason if none of them has finished; `CheckpointError` if none has anything to resume from.
    """
    stop = stop or Stop()
    open_job(run, folder)  # once, so that the text is tokenised before they start, and errors appear here
    (folder / "logs").mkdir(exist_ok=True)
    names = [joining.name] if joining else [f"replica-{index}" for index in range(run.placement.replicas)]
    # replicas on other machines may have the agreed state
    lost = max(steps_logged(folder, name) for name in names) > run.placement.checkpoint_every
    if resume and lost and not joining and not any(newest(folder / "checkpoints" / name)[0] for name in names):
        raise CheckpointError(
            f"--resume: none of {', '.join(names)} has a complete checkpoint in {folder / 'checkpoints'}. Restore the missing ones, or begin "
            "again at the first step by --resume --from-start."
        )
    with nullcontext(joining.meeting) if joining else own_meeting(run, folder) as meeting:
        shared = sharing_cores(len(names))
        replicas = [_Replica(folder, name, meeting, index, shared) for index, name in enumerate(names)]
        needed = 1 if joining else run.placement.least
        for replica in replicas:
            replica.begin(resume)
        if joining and (away := meeting.away()):  # its process takes seconds to start, and then asks for as long
            say(f"{joining.name} waits: {away}")
        try:
            _watch(replicas, needed, None if joining else run.placement.timeout, tick, say, stop)
        except BaseException:
            end([replica.process for replica in replicas])
            raise
    if stop.is_set() and not any(replica.step for replica in replicas):
        raise KeyboardInterrupt(stop.number)  # before training began
    given_up = [f"{replica.name}: {replica.given_up}" for replica in replicas if replica.given_up]
    if given_up and not any(replica.finished for replica in replicas):
        raise_for_job(replica.given_up for replica in replicas)
        printed = f"All that the replicas printed is in {folder / 'logs'}."
        raise LinkError("\n".join([printed, *dict.fromkeys(given_up)]))


@dataclass
class _Replica:
    """One replica of this machine, over all its restarts."""

    folder: Path
    name: str
    meeting: Meeting
    index: int
    variables: dict[str, str]  # its environment variables
    deaths: int = 0  # in a row
    due: float | None = None  # the time of its next start
    given_up: str = ""
    finished: bool = False
    joined: bool = False  # whether it has joined since its last start
    keeps: bool = False  # whether it has finished, and keeps the final state for others
    heard: float = 0.0
    step: int = 0
    began: float = 0.0
    process: subprocess.Popen[bytes] = field(init=False)
    _tail: Tail = field(init=False)
    _spoken: int = 0  # bytes of its output before its last start

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / "events" / f"{self.name}.jsonl")
        self._tail.pass_over()

    @property
    def _output(self) -> Path:
        return self.folder / "logs" / f"{self.name}.txt"

    @property
    def going(self) -> bool:
        return self.due is not None or (not self.finished and not self.given_up)

    def begin(self, resume: bool) -> None:
        given = [str(self.folder), self.name, str(self.index), "resume" if resume else "begin", *self.meeting.words()]
        command = [sys.executable, "-m", "thinwire.app.trainer.supervisor", *given]
        self._spoken, self.process = start(command, self.variables, self._output)
        self.due, self.joined, self.keeps = None, False, False
        self.began = self.heard = time.monotonic()

    def listen(self) -> None:
        """Read its progress from its events."""
        for event in self._tail.read():
            self.joined |= event["event"] in ("round", "back", "step")
            self.keeps |= event["event"] == "keeps"
            self.heard = time.monotonic()
            self.step = max(self.step, event["step"])

    def died(self, code: int) -> str:
        """Plan its next start, or none. Returns a line about it."""
        how = _signal(-code) if code < 0 else f"exit code {code}"
        words = last_words(self._output, self._spoken)
        why = f"{how}: {words}" if words else how
        if code == FINAL_EXIT_CODE:
            self.given_up = words or of_full_disk(self.folder)[0] or "it ended without a message"
            return f"{self.name} has ended at step {self.step} and is not started again: {in_words(self.given_up)}"
        self.deaths = 1 if time.monotonic() - self.began > SETTLED_SECONDS else self.deaths + 1
        if self.deaths >= TRIES:
            self.given_up = f"died {self.deaths} times in a row, last by {why}"
            return f"{self.name} {self.given_up}; it is not started again"
        pause = min(LONGEST_PAUSE, 2.0 ** (self.deaths - 1))
        self.due = time.monotonic() + pause
        return f"{self.name} died at step {self.step} ({why}); it is started again in {pause:g} s"


def _watch(replicas: list[_Replica], needed: int, seconds: float | None, tick: Tick, say: Say, stop: Stop) -> None:
    """Wait until all replicas have finished or were given up, and restart those that died. For `seconds` see `_see_off`; None if replicas
    run on other machines too.

    The first Ctrl-C (or SIGTERM) is forwarded, and no replica is restarted. The second ends them.
    """
    passed_on = False
    stop.heed()  # the replicas do
    with stopping(stop):
        while any(replica.going for replica in replicas):
            tick()
            time.sleep(0.2)  # logs and processes offer no event, and the display is redrawn anyway
            if stop.is_set() and not passed_on:
                passed_on = True
                print(f"\n{STOPPING}", file=sys.stderr)
                for replica in replicas:
                    replica.process.send_signal(signal.SIGTERM)
            for replica in replicas:
                replica.listen()
                _look_after(replica, any(other.finished for other in replicas), passed_on, say)
            if seconds is not None:
                _see_off(replicas, seconds, say)
            left = [replica for replica in replicas if not replica.given_up]
            if 0 < len(left) < needed and not any(replica.finished for replica in replicas):
                say(f"{len(left)} of at least {needed} replicas are left; the run ends here")
                end([replica.process for replica in left])
                return
    tick()


def _see_off(replicas: list[_Replica], seconds: float, say: Say) -> None:
    """At the end of a run on one machine: end replicas that keep the final state needlessly, and those that were silent for `seconds`."""
    going = [replica for replica in replicas if replica.going]
    if all(replica.keeps for replica in going):
        for replica in going:
            replica.process.send_signal(signal.SIGTERM)
            replica.keeps = False
    elif any(replica.finished for replica in replicas) and not any(replica.keeps for replica in going):
        for replica in going:
            if time.monotonic() - replica.heard > seconds:
                say(f"{replica.name} was silent for {seconds:g} s, and the others have finished: it is ended")
                replica.process.kill()
                replica.heard = math.inf


def _look_after(replica: _Replica, others_finished: bool, stopped: bool, say: Say) -> None:
    """Check a replica: it may have ended, need a restart, or wait for others that will not come."""
    if not replica.going:
        return
    if replica.due is not None:
        if stopped or others_finished:
            replica.due, replica.finished = None, True
            say(f"{replica.name} is not started again: {'stopping' if stopped else 'the others have finished'}")
        elif time.monotonic() >= replica.due:
            replica.begin(resume=True)
            say(f"{replica.name} is started again")
        return
    code = replica.process.poll()
    if code is None:
        if others_finished and not replica.joined:  # it has nothing to save
            end([replica.process])
        return
    if code == 0 or stopped or others_finished:
        replica.finished = True
        if code != 0 and not stopped:
            say(f"{replica.name} is not started again: the others have finished")
        return
    say(replica.died(code))


def _signal(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def main() -> int:
    """One replica, as `train_elastic` starts it."""
    folder, name, index, resume = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"

    def train(stop: Stop) -> None:
        with stopping(stop):
            run = run_in(folder)
            member = meeting_of(sys.argv[5:-1]).member(run, name)
            train_here(run, ElasticPlace(member, folder, resume, index, stop))

    return as_replica(train, failed=FINAL_EXIT_CODE)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread of gloo may still wait for a dead peer, and if it returns while Python ends, the process aborts.
    os._exit(code)
