"""What a member costs the link that missed some rounds: bytes and seconds of the state that it takes over. Emulated.

    sudo python benchmarks/joiner.py [--rate 20] [--away 0 1 10 1000] [--into FILE] [--quick]

Two replicas of an elastic run and a lighthouse each have a network namespace; `tc tbf` shapes what leaves one. Both take part in rounds.
Then one process is stopped (SIGSTOP), the other goes on alone for so many rounds, and the first continues: it is behind, and takes over
what has moved. *New* is a process without a state, *from its checkpoint* one that was killed, and loads the state it had saved when it
joins (`Replica(resume=...)`).

*Rounds* are the other's rounds less its own at the takeover, *bytes* what the other gave (event `given`), *seconds* what the takeover took
at the receiver. Inner steps take milliseconds, so that a thousand rounds pass soon. --quick: 0 and 1 rounds at 200 Mbit/s, in a separate file.
"""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from namespaces import Bridge, Namespaces, missing
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire import Replica, checkpoint, streaming_diloco
from thinwire.drivers.elastic import round_loop
from thinwire.membership import LighthouseRendezvous, Membership, Timeouts
from thinwire.pieces.partition import Sequential

PORT, WIDTH, FRAGMENTS, EVERY, PATIENCE = 29510, 512, 8, 16, 300.0
GONE = 8.0  # seconds after which the lighthouse counts a stopped process as dead
Line = dict[str, Any]


def member(name: str, host: str, lighthouse: str, saved: str) -> None:
    """Train up to the round that a line of the input names, at its pace; prints its rounds, and states that it gave or took over."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(FRAGMENTS))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    level: Callable[..., str] = round_loop.level
    rounds = 0

    def say(kind: str, **fields: Any) -> None:
        # Two threads say something; print would mix lines.
        sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
        sys.stdout.flush()

    def timed(*args: Any) -> str:
        began, there = time.monotonic(), args[3].round
        if donor := level(*args):
            say("taken", seconds=time.monotonic() - began, missed=args[3].round - there)
        return donor

    def observe(event: str, step: int, **fields: Any) -> None:
        nonlocal rounds
        if event == "round" and fields["committed"] and fields["fragment"] >= 0:
            rounds = fields["round"] + 1
            say("round", rounds=rounds)
        if event == "given":
            say("given", nbytes=fields["nbytes"])

    round_loop.level = timed
    strategy = streaming_diloco(every=EVERY, delay=1, partition=Sequential(FRAGMENTS))
    times = Timeouts(grace=2.0, view=60.0)
    rendezvous = LighthouseRendezvous(lighthouse, host=host)
    membership = Membership(rendezvous, name, least=1, timeouts=times, observe=lambda kind, _: say(kind))

    def resume(replica: Replica) -> None:
        if found := checkpoint.newest(Path(saved))[0] if saved else None:
            checkpoint.load(found, replica)

    replica = Replica(strategy, model, optimizer, membership, resume=resume, observer=observe)
    say("joined")
    orders: queue.Queue[list[float]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))

    threading.Thread(target=listen, daemon=True).start()
    while True:
        target, pace = orders.get()
        while rounds < target:
            if not orders.empty():
                target, pace = orders.get()
            time.sleep(pace)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
        say("rests", rounds=rounds)
        if saved:
            checkpoint.save(Path(saved), replica, {}, keep=1)
            say("saved")


class Process:
    """A started member; its lines are read by a thread."""

    def __init__(self, space: Namespaces, number: int, name: str, saved: Path | None, errors: Any) -> None:
        address, lighthouse = space.addresses[number], f"{space.addresses[0]}:{PORT}"
        command = [sys.executable, __file__, "--member", name, address, lighthouse, str(saved or "")]
        self.running = space.start(number, command, errors=errors)
        self.rounds, self.nbytes, self.seconds, self.missed = 0, 0, 0.0, 0
        self._lines: queue.Queue[Line | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def go(self, target: float, pace: float) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(f"{json.dumps([target, pace])}\n")
        self.running.stdin.flush()

    def until(self, kind: str) -> None:
        """Read lines up to one of `kind`. Raises `RuntimeError`."""
        while True:
            line = self._lines.get(timeout=PATIENCE)
            if line is None:
                raise RuntimeError("a replica has ended")
            self.rounds = line.get("rounds", self.rounds)
            self.nbytes += line.get("nbytes", 0)
            self.seconds += line.get("seconds", 0.0)
            self.missed += line.get("missed", 0)
            if line["kind"] == kind:
                return


def joining(space: Namespaces, first: Process, folder: Path, errors: Any) -> Process:
    """Starts the second replica, while the first trains."""
    first.nbytes = 0
    second = Process(space, 2, "b", folder, errors)
    second.until("call")
    first.go(float("inf"), 0.5)
    second.until("joined")
    return second


def together(first: Process, second: Process) -> None:
    """Trains both for some rounds, so slowly that no deltas wait. The first stops last, because the second could hold no round without it."""
    first.go(float("inf"), 0.5)
    second.go(max(first.rounds, second.rounds) + 12, 0.5)
    second.until("rests")
    first.go(0, 0.5)
    first.until("rests")
    second.until("saved")


def row(case: str, nbytes: int, second: Process) -> Line:
    rounds = None if case == "new" else second.missed
    made = {"case": case, "rounds": rounds, "nbytes": nbytes, "seconds": second.seconds}
    second.seconds, second.missed = 0.0, 0
    print(made, file=sys.stderr, flush=True)
    return made


def rows(
    space: Namespaces,
    bridge: Bridge,
    rate: float,
    away: Sequence[int],
    killed: Sequence[int],
    folder: Path,
    errors: Any,
) -> list[Line]:
    command = [
        sys.executable,
        "-m",
        "thinwire",
        "lighthouse",
        "--host",
        space.addresses[0],
        "--port",
        str(PORT),
        "--json",
    ]
    lighthouse = space.start(0, command, errors=errors)
    assert lighthouse.stdout is not None
    lighthouse.stdout.readline()
    bridge.shape(rate * 1e6)
    first = Process(space, 1, "a", None, errors)
    first.until("joined")
    first.go(8, 0.01)
    first.until("rests")
    second = joining(space, first, folder, errors)
    together(first, second)
    made: list[Line] = [row("new", first.nbytes, second)]
    for number in away:
        second.running.send_signal(signal.SIGSTOP)
        there = first.rounds
        if number:
            time.sleep(GONE)  # the other rests meanwhile, so that no deltas wait
            first.go(there + number, 0.5 if number < 100 else 0.002)
            first.until("rests")
        first.nbytes = 0
        second.running.send_signal(signal.SIGCONT)
        together(first, second)
        made.append(row("stopped", first.nbytes, second))
    for number in killed:
        second.running.kill()
        second.running.wait()
        time.sleep(GONE)
        first.go(first.rounds + number, 0.5)
        first.until("rests")
        second = joining(space, first, folder, errors)
        together(first, second)
        made.append(row("from its checkpoint", first.nbytes, second))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s (default: %(default)s)")
    parser.add_argument("--away", type=int, nargs="*", default=[0, 1, 3, 10, 1000], help="rounds")
    parser.add_argument("--killed", type=int, nargs="*", default=[1, 3, 10], help="rounds of a killed one")
    parser.add_argument("--quick", action="store_true", help="0 and 1 rounds at 200 Mbit/s")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/joiner.json)")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        return member(*options.member)
    if reason := missing():
        raise SystemExit(f"joiner.py cannot run here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the namespaces, as Ctrl-C does
    rate, away = (200.0, [0, 1]) if options.quick else (options.rate, options.away)
    killed = [1] if options.quick else options.killed
    bridge, numel = Bridge(), 2 * FRAGMENTS * WIDTH * (WIDTH + 1)
    with TemporaryDirectory() as folder, Namespaces(3, bridge) as space, Path(folder, "errors").open("w+") as errors:
        try:
            made = rows(space, bridge, rate, away, killed, Path(folder), errors)
        except (RuntimeError, queue.Empty) as error:
            errors.seek(0)
            raise SystemExit(f"joiner.py: {error!r}\n{errors.read()[-2000:]}") from None
    setting = {"megabits_per_second": rate, "parameters": numel, "fragments": FRAGMENTS, "state_nbytes": 8 * numel}
    result = {"benchmark": "joiner", "word": "emulated", **provenance(), "setting": setting, "rows": made}
    table = Table(
        title=f"A member that comes back, emulated {rate:g} Mbit/s, {numel:,} parameters in {FRAGMENTS} fragments"
    )
    for column in ("member", "rounds missed", "bytes given", "of the state", "seconds"):
        table.add_column(column, justify="left" if column == "member" else "right")
    for one in made:
        missed = "–" if one["rounds"] is None else str(one["rounds"])
        table.add_row(
            one["case"], missed, f"{one['nbytes']:,}", f"{one['nbytes'] / (8 * numel):.1%}", f"{one['seconds']:.1f}"
        )
    Console(width=120).print(table)
    print(f"written: {save('joiner-quick' if options.quick else 'joiner', result, options.into)}")


if __name__ == "__main__":
    main()
