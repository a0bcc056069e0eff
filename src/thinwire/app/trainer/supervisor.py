"""Starts the replicas of a run as processes of this machine, each with a name that it keeps, and watches them.

    python -m thinwire.app.trainer.supervisor FOLDER NAME INDEX begin|resume WORDS LAUNCHER

is one replica; see `meeting_of` for the words.

In a fixed group all replicas end together: when one has failed, the others have some seconds to end by themselves. A replica of an elastic
run that dies is started again and resumes from its own newest checkpoint; if it dies again at once, the waits grow. A
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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from thinwire.app.records.events import Tail
from thinwire.app.trainer import launch
from thinwire.app.trainer.final import of_full_disk
from thinwire.app.trainer.launch import (
    Stop,
    Tick,
    as_replica,
    end,
    in_words,
    last_words,
    post_mortem,
    raise_for_job,
    sharing_cores,
    stopping,
    train_here,
)
from thinwire.app.trainer.meeting import ElasticMeeting, Meeting, Process, meeting_of, own_meeting
from thinwire.app.trainer.resuming import steps_logged
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.run_folder import run_in
from thinwire.checkpoint import newest
from thinwire.drivers.unequal.composition import Composition
from thinwire.errors import CheckpointError, LinkError
from thinwire.files import open_to_append

FINAL_EXIT_CODE = 3  # exit code of a replica that would fail again
TRIES = 5  # deaths in a row after which a replica is given up
SETTLED_SECONDS = 60.0  # seconds of life after which a death counts as the first in a row again
LONGEST_PAUSE = 60.0  # most seconds before a replica is started again
_GRACE = 20.0  # seconds after a replica's failure in which the others of a fixed group may end by themselves
_UNREADY = (
    130,
    143,
    -signal.SIGINT,
    -signal.SIGTERM,
)  # exit codes of a replica that a signal ended before it had trained
STOPPING = "stopping: each replica ends its inner step and leaves a checkpoint (Ctrl-C again: at once)"

Say = Callable[[str], object]


@dataclass(frozen=True)
class JoiningReplica:
    """One replica of a run whose lighthouse or hub runs elsewhere."""

    meeting: ElasticMeeting
    name: str


def train_processes(
    run: Run, folder: Path, resume: bool, tick: Tick, stop: Stop | None = None, say: Say = print,
    joining: JoiningReplica | None = None,
) -> None:  # fmt: skip
    """Run a process for each replica of `run` on this machine, with their meeting place; or only the replica `joining`. Their output goes to
    RUN/logs.

    Raises `LinkError` with the reason if the run has ended without its replicas; `CheckpointError` if no elastic one has anything to resume from.
    """
    stop, elastic = stop or Stop(), run.placement.elastic
    (folder / "logs").mkdir(exist_ok=True)
    names = [joining.name] if joining else [f"replica-{index}" for index in range(run.placement.replicas)]
    if elastic and resume and not joining:  # replicas on other machines may have the agreed state
        _check_checkpoints(run, folder, names)
    with nullcontext(joining.meeting) if joining else own_meeting(run, folder) as meeting:
        about = [(folder, name, meeting, index, sharing_cores(len(names))) for index, name in enumerate(names)]
        group: _FixedGroup | _ElasticGroup
        if elastic:
            needed, seconds = (1, None) if joining else (run.placement.least, run.placement.timeout)
            group = _ElasticGroup([_Member(*one) for one in about], needed, seconds, say)
        else:
            group = _FixedGroup([_Replica(*one) for one in about], run, folder)
        for replica in group.replicas:
            replica.begin(resume)
        if joining and (away := meeting.away()):  # its process takes seconds to start, and then asks for as long
            say(f"{joining.name} waits: {away}")
        try:
            _watch(group, tick, stop)
        except BaseException:
            end([replica.process for replica in group.replicas])
            raise
    group.result(folder, stop)


def _check_checkpoints(run: Run, folder: Path, names: Sequence[str]) -> None:
    """Raise `CheckpointError` if none of the elastic replicas `names` has a checkpoint, though the run has trained for longer than one needs."""
    lost = max(steps_logged(folder, name) for name in names) > run.placement.checkpoint_every
    if lost and not any(newest(folder / "checkpoints" / name)[0] for name in names):
        raise CheckpointError(
            f"--resume: none of {', '.join(names)} has a complete checkpoint in {folder / 'checkpoints'}. Restore the missing ones, or begin "
            "again at the first step by --resume --from-start."
        )


def _watch(group: _FixedGroup | _ElasticGroup, tick: Tick, stop: Stop) -> None:
    """Wait until the group has ended.

    The first Ctrl-C (or SIGTERM) is forwarded: the replicas leave a checkpoint, and none is started again. The second ends them.
    """
    passed_on = False
    stop.heed()  # the replicas do
    with stopping(stop):
        while group.going:
            tick()
            time.sleep(0.2)  # logs and processes offer no event, and the display is redrawn anyway
            if stop.is_set() and not passed_on:
                passed_on = True
                print(f"\n{group.stopping}", file=sys.stderr)
                for replica in group.replicas:
                    replica.process.send_signal(
                        signal.SIGTERM
                    )  # while it loads, an import may swallow a KeyboardInterrupt
            group.look(stop)
    tick()


@dataclass
class _Replica:
    """A replica in a process of this machine."""

    folder: Path
    name: str
    meeting: Meeting
    index: int
    shared: dict[str, str]  # the environment variables of all replicas
    process: subprocess.Popen[bytes] = field(init=False)
    _spoken: int = 0  # bytes of its output before its last start

    def begin(self, resume: bool) -> None:
        given = [str(self.folder), self.name, str(self.index), "resume" if resume else "begin", *self.meeting.words()]
        command = [sys.executable, "-m", "thinwire.app.trainer.supervisor", *given]
        with os.fdopen(open_to_append(self._output), "ab") as file:
            self._spoken = file.tell()  # earlier lines belong to an earlier start
            self.process = subprocess.Popen(
                [*command, str(os.getpid())], env=self.shared | self.meeting.variables(self.index), stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, start_new_session=True,
            )  # fmt: skip

    @property
    def _output(self) -> Path:
        return self.folder / "logs" / f"{self.name}.txt"

    @property
    def last_words(self) -> str:
        """The last line that it has printed since its start."""
        return last_words(self._output, self._spoken)


class _FixedGroup:
    """Replicas that end together."""

    stopping: ClassVar[str] = launch.STOPPING

    def __init__(self, replicas: list[_Replica], run: Run, folder: Path) -> None:
        self.replicas, self._run, self._folder = replicas, run, folder
        self._goes_on = isinstance(run.make_method(), Composition)  # such a run continues without lost replicas
        self._first_failure, self._silent = math.inf, list[int]()

    @property
    def going(self) -> bool:
        return any(replica.process.poll() is None for replica in self.replicas)

    def look(self, stop: Stop) -> None:
        """End the replicas that do not end within some seconds after another has failed."""
        processes = [replica.process for replica in self.replicas]
        if not self._goes_on and any(process.returncode in _UNREADY for process in processes):
            stop.set()  # a signal to one replica stops all: before it had trained the others would wait for it
        if not any(process.poll() for process in processes):
            return
        self._first_failure = min(self._first_failure, time.monotonic())
        if not self._goes_on and time.monotonic() - self._first_failure > _GRACE:
            self._silent = [rank for rank, process in enumerate(processes) if process.poll() is None]
            end(processes)

    def result(self, folder: Path, stop: Stop) -> None:
        """Raise the error of the replicas that failed."""
        codes, silent = [replica.process.returncode for replica in self.replicas], self._silent
        if stop.is_set() and any(code in _UNREADY for code in codes):
            raise KeyboardInterrupt(stop.number)  # a replica had not begun, or did not wait
        failed = [rank for rank, code in enumerate(codes) if code and rank not in silent]
        if not failed:
            return
        last = {rank: self.replicas[rank].last_words or "it ended without a message" for rank in failed}
        raise_for_job(last.values())
        told = post_mortem(last, codes, self._run, folder)
        if ended := [str(rank) for rank, code in enumerate(codes) if not code and self._goes_on]:
            told = f"The run ended without lost replicas, on replica {', '.join(ended)}.\n{told}"
        raise LinkError("\n".join([*(f"replica {r} did not end in {_GRACE:g} s and was killed" for r in silent), told]))


@dataclass
class _Member(_Replica):
    """An elastic replica, over all its restarts."""

    deaths: int = 0  # in a row
    due: float | None = None  # the time of its next start
    given_up: str = ""
    finished: bool = False
    joined: bool = False  # whether it has joined since its last start
    keeps: bool = False  # whether it has finished, and keeps the final state for others
    heard: float = 0.0
    step: int = 0
    began: float = 0.0
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._tail = Tail(self.folder / "events" / f"{self.name}.jsonl")
        self._tail.pass_over()

    @property
    def going(self) -> bool:
        return self.due is not None or (not self.finished and not self.given_up)

    def begin(self, resume: bool) -> None:
        super().begin(resume)
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
        words = self.last_words
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


class _ElasticGroup:
    """Replicas that end by themselves. For `seconds` see `_see_off`; None if replicas run on other machines too."""

    stopping: ClassVar[str] = STOPPING

    def __init__(self, replicas: list[_Member], needed: int, seconds: float | None, say: Say) -> None:
        self.replicas, self._needed, self._seconds, self._say = replicas, needed, seconds, say
        self._too_few = False

    @property
    def going(self) -> bool:
        return not self._too_few and any(replica.going for replica in self.replicas)

    def look(self, stop: Stop) -> None:
        """Start again those that died, and end what waits for nothing."""
        replicas = self.replicas
        for replica in replicas:
            replica.listen()
            self._look_after(replica, any(other.finished for other in replicas), stop.is_set())
        if self._seconds is not None:
            self._see_off(self._seconds)
        left = [replica for replica in replicas if not replica.given_up]
        if 0 < len(left) < self._needed and not any(replica.finished for replica in replicas):
            self._say(f"{len(left)} of at least {self._needed} replicas are left; the run ends here")
            end([replica.process for replica in left])
            self._too_few = True

    def result(self, folder: Path, stop: Stop) -> None:
        """Raise the error of the replicas that were given up, if none has finished."""
        if stop.is_set() and not any(replica.step for replica in self.replicas):
            raise KeyboardInterrupt(stop.number)  # before training began
        given_up = [f"{replica.name}: {replica.given_up}" for replica in self.replicas if replica.given_up]
        if given_up and not any(replica.finished for replica in self.replicas):
            raise_for_job(replica.given_up for replica in self.replicas)
            printed = f"All that the replicas printed is in {folder / 'logs'}."
            raise LinkError("\n".join([printed, *dict.fromkeys(given_up)]))

    def _see_off(self, seconds: float) -> None:
        """At the end of a run on one machine: end replicas that keep the final state needlessly, and those that were silent for `seconds`."""
        going = [replica for replica in self.replicas if replica.going]
        if all(replica.keeps for replica in going):
            for replica in going:
                replica.process.send_signal(signal.SIGTERM)
                replica.keeps = False
        elif any(replica.finished for replica in self.replicas) and not any(replica.keeps for replica in going):
            for replica in going:
                if time.monotonic() - replica.heard > seconds:
                    self._say(f"{replica.name} was silent for {seconds:g} s, and the others have finished: it is ended")
                    replica.process.kill()
                    replica.heard = math.inf

    def _look_after(self, replica: _Member, others_finished: bool, stopped: bool) -> None:
        """Check a replica: it may have ended, need a restart, or wait for others that will not come."""
        if not replica.going:
            return
        if replica.due is not None:
            if stopped or others_finished:
                replica.due, replica.finished = None, True
                self._say(
                    f"{replica.name} is not started again: {'stopping' if stopped else 'the others have finished'}"
                )
            elif time.monotonic() >= replica.due:
                replica.begin(resume=True)
                self._say(f"{replica.name} is started again")
            return
        code = replica.process.poll()
        if code is None:
            if others_finished and not replica.joined:  # it has nothing to save
                end([replica.process])
        elif code == 0 or stopped or others_finished:
            replica.finished = True
            if code != 0 and not stopped:
                self._say(f"{replica.name} is not started again: the others have finished")
        else:
            self._say(replica.died(code))


def _signal(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def main() -> int:
    """One replica, as `train_processes` starts it."""
    folder, name, index, resume = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
    meeting = meeting_of(sys.argv[5:-1])

    def train(stop: Stop) -> None:
        run = run_in(folder)
        with meeting.place(run, Process(folder, name, index, resume, stop)) as place, stopping(stop):
            train_here(run, place)

    if not meeting.elastic:
        return as_replica(train, has_the_hub=meeting.hub_in_launcher)
    code = as_replica(train, failed=FINAL_EXIT_CODE)
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo may still wait for a dead peer, and if it returns while Python ends, the process aborts.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
