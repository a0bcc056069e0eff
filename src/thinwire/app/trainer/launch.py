"""A replica in this process: a thread of it, the rank that torchrun started here, or what a launcher started (supervisor.py).

All of them end in `train_here`, so a run file gives the same result with each.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without saying so

from thinwire import checkpoint
from thinwire.app.jobs.own import blaming_job
from thinwire.app.records.events import EventLog
from thinwire.app.records.printable import printable_lines, quoted
from thinwire.app.trainer.elastic_trainer import ElasticTrainer
from thinwire.app.trainer.final import of_full_disk
from thinwire.app.trainer.fixed_trainer import FixedTrainer
from thinwire.app.trainer.place import ElasticPlace, Place
from thinwire.app.trainer.place import Stop as Stop
from thinwire.app.trainer.resuming import complete
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.signals import ending_in_time, leave
from thinwire.app.trainer.trainer import Trainer
from thinwire.app.trainer.watch import LOOK_SECONDS, warn_of_open_files, watching
from thinwire.comm import Link, TorchGroup, parse_link, run_threads, start_torch
from thinwire.errors import ConfigurationError, JobError, LinkError, ThinwireError
from thinwire.files import open_regular

Tick = Callable[[], object]
STOPPING = "stopping: all replicas stop after the same inner step, with a checkpoint (Ctrl-C again: at once)"
_LAST_WORDS = 64 << 10  # most bytes at the end of a replica's output that are read
_ORPHAN_SECONDS = 2.0  # seconds that a replica which has lost launcher and hub has for its last words


def torchrun_place() -> tuple[int, int] | None:
    """Rank and world size, if torchrun (or supervisor.py) started this process. Only this file reads the environment.

    Raises `ConfigurationError` for variables that no rank can have.
    """
    rank, world = _variable("RANK", None, 0), _variable("WORLD_SIZE", None, 1)
    if rank is None or world is None:
        return None
    if rank >= world:
        raise ConfigurationError(
            f"RANK={rank} and WORLD_SIZE={world} in the environment: ranks below {world} are needed. {_NOT_A_RANK}"
        )
    master()
    local_rank()
    return rank, world


def local_rank() -> int:
    """The number of this process among those that torchrun started on this machine."""
    return _variable("LOCAL_RANK", 0, 0) or 0


def master() -> tuple[str, int]:
    """Host and port of the store of all ranks. Raises `ConfigurationError` for variables that cannot name one."""
    port = _variable("MASTER_PORT", 29500, 1, 65535)
    assert port is not None, "it has a default"
    host = os.environ.get("MASTER_ADDR", "").strip() or "127.0.0.1"
    if re.search(r"[\s/]", host) or host.count(":") == 1:  # an address of IPv6 has two colons at least
        raise ConfigurationError(
            f"MASTER_ADDR={host!r} in the environment: a host name or an address is needed, without a port, which MASTER_PORT has. {_NOT_A_RANK}"
        )
    return host, port


_NOT_A_RANK = "Start the ranks with torchrun, which sets them, or unset RANK and WORLD_SIZE to start all replicas here."


def _variable(name: str, default: int | None, least: int, most: int = 1 << 31) -> int | None:
    """A whole number in the environment; an empty text, as templates leave it, is as good as none."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        # Kubernetes sets NAME_PORT=tcp://… for each service called NAME
        service = (
            " Kubernetes sets it for a service of that name: rename the service, or set enableServiceLinks: false."
        )
        raise ConfigurationError(
            f"{name}={text!r} in the environment: a whole number from {least} to {most} is needed."
            f"{service if '://' in text else ''} {_NOT_A_RANK}"
        )
    return int(text)


def check_world(world: int, replicas: int) -> None:
    """Raise `ConfigurationError` if `world` processes cannot be `replicas` replicas."""
    if world % replicas:
        raise ConfigurationError(
            f"WORLD_SIZE={world}, {world} processes for {replicas} replicas: a multiple is needed; set --replicas or torchrun's counts. "
            f"{_NOT_A_RANK}"
        )


def _agent() -> bool:
    """Whether torchrun's agent hosts the store; it outlives the attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def began_here(rank: int, folder: Path, now: bool = False) -> bool:
    """Whether an earlier attempt of this torchrun (`--max-restarts`) began its run in `folder`, which this attempt therefore continues. `now`: it has
    begun.
    """
    attempt = _variable("TORCHELASTIC_RESTART_COUNT", 0, 0)
    if not _agent() or not (now or attempt):
        return False
    key = f"thinwire/began/{rank}/{folder.absolute()}".encode(errors="surrogateescape").hex()
    try:
        store = TCPStore(*master(), is_master=False, wait_for_workers=False)
        if now:
            store.set(key, "")
        return bool(store.check([key]))
    except (RuntimeError, OSError) as error:  # the agent has ended
        raise LinkError(f"torchrun's store cannot be reached at {':'.join(map(str, master()))} ({error}).") from None


def _say_here(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def train_as_rank(
    run: Run, folder: Path, resume: bool, stop: Stop | None = None, say: Callable[[str], object] = _say_here
) -> dict[str, Any]:
    """Train as the rank in torchrun's environment, from joining the world to leaving it. `say` is told which ranks it waits for."""
    stop = stop or Stop()
    with place_of_rank(run, folder, resume, stop, say) as place, stopping(stop):
        return train_here(run, place)


@contextmanager
def place_of_rank(
    run: Run, folder: Path, resume: bool, stop: Stop, say: Callable[[str], object] = _say_here
) -> Iterator[Place]:
    """A context in which this process is the rank of torchrun's environment, and its place."""
    with joined(run.placement.replicas, run.placement.timeout, parse_link(run.placement.uplink), say) as group:
        yield Place(group, folder, resume, group.site, group.shard, group.shards, local_rank(), stop)


@contextmanager
def joined(
    replicas: int, timeout: float, uplink: Link | None = None, say: Callable[[str], object] = _say_here
) -> Iterator[TorchGroup]:
    """A context in which this process is the rank of torchrun's environment, in a world of `replicas`. `uplink` is the rate of a site."""
    place = torchrun_place()
    assert place is not None, "only a rank joins"
    (rank, world), (address, port) = place, master()
    check_world(world, replicas)
    prefix = f"thinwire/attempt-{_variable('TORCHELASTIC_RESTART_COUNT', 0, 0)}" if _agent() else None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # nccl inside a replica; packets take gloo
    start_torch(rank, world, address, port, timeout, backend, prefix, say)
    rate = uplink.bits_per_second * replicas / world if uplink else None  # the ranks of a replica share its uplink
    group = TorchGroup.from_world(replicas, timeout=timeout, uplink=rate, say=say)
    try:
        yield group
    finally:
        group.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def train_here(run: Run, place: Place | ElasticPlace) -> dict[str, Any]:
    """Train one replica in this thread and process, logging to the run folder."""
    with (
        EventLog(place.folder / "events" / f"{place.name}.jsonl") as log,
        watching(warn_of_open_files(log), LOOK_SECONDS, "thinwire-files"),
    ):
        trainer: Trainer | None = None
        try:
            with blaming_job(run.model.job):
                if isinstance(place, ElasticPlace):
                    trainer = ElasticTrainer(run, place, log)
                else:
                    trainer = FixedTrainer(run.of_replica(place.group.rank), place, log)
                return trainer.train()
        except ThinwireError as error:
            log.emit("warning", trainer.replica.step if trainer else 0, message=f"{type(error).__name__}: {error}")
            raise
        finally:
            if trainer:
                trainer.replica.close()


def train_threads(run: Run, folder: Path, resume: bool, tick: Tick, stop: Stop | None = None) -> dict[str, Any]:
    """Run all replicas as threads of this process."""
    stop, done, said = stop or Stop(), threading.Event(), False
    outcome: list[list[dict[str, Any]] | BaseException] = []

    def body() -> None:
        try:
            outcome.append(
                run_threads(
                    run.placement.replicas,
                    lambda g: train_here(run, Place(g, folder, resume, stop=stop)),
                    run.placement.timeout,
                )
            )
        except BaseException as error:
            outcome.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=body, name="thinwire-replicas")
    # Nothing can end a thread from outside, so a second Ctrl-C must not end the process without them.
    with stopping(stop, raises=False):
        thread.start()
        try:
            while not done.wait(0.2):
                tick()
                if stop.is_set() and not said:
                    said = True
                    print(f"\n{STOPPING}", file=sys.stderr)
        except BaseException:
            stop.at_once = True
            stop.set()
            thread.join()
            raise
    tick()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0][0]


def threads_each(replicas: int) -> int:
    """Threads of each of `replicas` processes on this machine: OMP_NUM_THREADS, or an equal share of the cores."""
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // replicas)


def sharing_cores(replicas: int) -> dict[str, str]:
    """The environment for `replicas` processes on this machine: without it each would use all cores, and spin while it waits."""
    return {"OMP_NUM_THREADS": str(threads_each(replicas)), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def last_words(output: Path, begin: int) -> str:
    """The last line of the output that begins at byte `begin` of a file; "" if there is none."""
    with open_regular(output) as file:
        file.seek(max(begin, output.stat().st_size - _LAST_WORDS))
        said = file.read(_LAST_WORDS).decode(errors="replace")
    return (said.strip().splitlines() or [""])[-1]


_OF_JOB = f"{JobError.__name__}: "


def in_words(last_words: str) -> str:
    """The end of a replica's output for people: an error in the user's own file without the name of its class."""
    return last_words.removeprefix(_OF_JOB)


def raise_for_job(last_words: Iterable[str]) -> None:
    """Raise the `JobError` at the end of a replica's output, if there is one, because it is the cause of all others."""
    for words in last_words:
        if words.startswith(_OF_JOB):
            raise JobError(in_words(words))


def post_mortem(last: Mapping[int, str], codes: list[int], run: Run, folder: Path) -> str:
    """The end of the output of the replicas that failed by themselves, without those that only lost their peer."""
    causes = [rank for rank in last if "LinkError" not in last[rank]] or list(last)
    lines = []
    for words in dict.fromkeys(last[rank] for rank in causes):  # equal messages of several replicas are shown once
        alike = [rank for rank in causes if last[rank] == words]
        who = f"replica{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))}"
        ends = dict.fromkeys(
            f"exit code {n}" if n >= 0 else f"killed by signal {-n}" for n in (codes[rank] for rank in alike)
        )
        lines.append(f"{who} ({', '.join(ends)}): {words}")
    saved = all(checkpoint.found_in(folder / f"checkpoints/replica-{rank}") for rank in range(len(codes)))
    whole = saved and not any("CheckpointError" in line for line in lines)
    full, kept = of_full_disk(folder)
    advice = f" To resume: thinwire resume {quoted(folder)}" if whole and not kept else ""
    if complete(run, folder):
        advice = f" The run has ended: its trained model is in {folder}."
    return "\n".join(
        [*lines, *([full] if full else []), f"All that the replicas printed is in {folder / 'logs'}.{advice}"]
    )


@contextmanager
def stopping(stop: Stop, raises: bool = True) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP (a closed terminal) sets `stop`, and if nothing was trained yet ends the process, by
    KeyboardInterrupt. So does a second SIGINT or SIGTERM in a process that was not launched; if `raises` is False, by `stop.at_once`. Only the
    main thread can listen. A SIGHUP that nohup lets the process ignore stays ignored.
    """

    def handle(number: int, frame: object) -> None:
        if stop.orphaned:
            os._exit(128 + number)
        if stop.is_set():
            if stop.launched or number == signal.SIGHUP:  # a shell may send a second SIGHUP at once
                return
            if raises:
                raise KeyboardInterrupt(number)
            stop.at_once = True
        stop.number = number
        stop.set()
        if not stop.heeded:
            raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            # A launched process ends now. Its launcher's signal may come when Python has put the default in the place of its own handlers.
            signal.signal(number, signal.SIG_IGN if stop.launched else handler)


def _stop_with_the_launcher(stop: Stop, has_the_hub: bool) -> None:
    """Stop as after Ctrl-C when the launcher is gone, because a killed launcher cannot forward a signal. It may be gone before this process
    has loaded its modules, so the last word of the command is its number."""
    while os.getppid() == int(sys.argv[-1]):
        time.sleep(1.0)
    stop.orphaned = True
    stop.set()
    if (
        has_the_hub or not stop.heeded
    ):  # the replicas cannot agree on the step of a stop without the hub, nor before they have met
        time.sleep(_ORPHAN_SECONDS)
        os._exit(128 + stop.number)


def as_replica(train: Callable[[Stop], object], failed: int = 1, has_the_hub: bool = False) -> int:
    """Train in a process that a launcher started, and end with the launcher. Returns the exit code; `failed` if it is an error of ours.
    `has_the_hub`: the hub of a fixed group is in the launcher's process.
    """
    stop = Stop(launched=True)
    args = stop, has_the_hub
    threading.Thread(target=_stop_with_the_launcher, args=args, name="thinwire-launcher-watch", daemon=True).start()
    try:
        with ending_in_time("interrupted"):
            train(stop)
    except ThinwireError as error:
        print(printable_lines(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        leave(130)
    return 0
