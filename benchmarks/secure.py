"""The secure carrier beside gloo, torchft and plain TLS sockets, on thin links with long round trips. Emulated.

    sudo python benchmarks/secure.py                          # about twenty minutes
    sudo python benchmarks/secure.py --quick                  # about two minutes: a smoke run
    sudo python benchmarks/secure.py --out rows.json          # rows are kept as they come; the same command goes on after them
    sudo python benchmarks/secure.py --hub far                # the secure carrier alone, its hub a whole round trip from each replica

Two replicas in a process, a core and a network namespace each, a user-space router between them (router.py). The model has 7.2 million
parameters. Each replica's uplink has the rate; `floor` is 1.2 times the predicted floor of the method's own bytes. Any two replicas are
one round trip apart, whatever carries their packets: the hub (its own namespace and process, 1 Gbit/s) is half-way. With `--hub far`
the hub is a whole round trip from each of them, so they are two apart; ratios and goals stay those of one round trip.

* utilization  time in inner steps / wall time. DDP exchanges within backward, so it has none
* of bare      steps per second, over those of the same two processes without any exchange
* exchange     seconds of one message of 1 or 4 MB each way, after half a second without bulk, from the instant when both begin to the
               one when both have it; beside RTT + 8 · bytes / rate. DDP's is gloo's all-reduce of as many bytes
* control      round trips of messages of 64 bytes while 1 MB messages fill the link both ways; the goal is RTT + two chunks of 128 KiB
* MB           what a replica's interface sent in the window, headers and ACKs included, over 30 steps
* busy         the router was late by more than a tenth of the round trip (2 ms at least), one packet in a hundred; or other programs
               used more than 0.15 of a core
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Timer
from typing import IO, Any

from methods import Part
from namespaces import Namespaces, missing
from provenance import installed, provenance, save
from rich.console import Console
from rich.table import Table
from router import Router
from secure_replica import Place
from tls_sockets import make_keys

from thinwire import Strategy, streaming_diloco, streaming_sign
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.codecs import Sign
from thinwire.comm import Link
from thinwire.net.frames import CHUNK_NBYTES
from thinwire.pieces.schedule import short_first

EVERY, DELAY, FRAGMENTS = 30, 5, 3
SIGN_EVERY, SIGNS = 7, Sign(block=512)  # the form that `thinwire train` takes where a round lasts four steps and more
MARGIN = 1.2
RTTS = (0.3, 0.1, 0.002)  # falling, because BBR takes ten seconds to believe that a round trip has become longer
BULK_NBYTES = 1_000_000
HUB = 1e9  # bits per second of its uplink
IDLE_SECONDS = 0.5
PINGS, PING_EVERY = 100, 0.02
LIMIT_SECONDS = 150.0  # for one answer of a replica
PORT = 29530
SIZE = "mini"


@dataclass(frozen=True)
class Stand:
    """Two processes that stand until all their links are measured."""

    carrier: str  # of `Place`
    method: str  # as the table has it
    how: str  # for methods.py
    rate: str  # Mbit/s, or `floor`
    warm: int
    lead: int  # steps on the shaped link before the window
    steps: int
    nbytes: int  # predicted, sent by one replica in `EVERY` steps
    rtts: tuple[float, ...] = RTTS
    exchanges: bool = False
    controls: bool = False
    trips: int = 1  # between two replicas; 2 where the hub is one from each

    def key(self, rtt: float) -> tuple[str, str, str, float]:
        return self.carrier, self.method, self.rate, rtt


def stands(quick: bool) -> list[Stand]:
    """All rows: ours on three carriers, torchft, DDP."""
    model = Transformer(SIZES[SIZE])
    dense = 4 * sum(p.numel() for p in model.parameters())

    def ours(strategy: Strategy, every: int) -> tuple[str, int]:
        numels = [fragment.numel for fragment in strategy.partition.fragments(model)]
        return repr(strategy), EVERY * strategy.nbytes_per_period(numels, 2) // every

    fragments = len(streaming_diloco(every=EVERY, delay=DELAY).partition.fragments(model))
    diloco, nbytes = ours(
        streaming_diloco(every=EVERY, delay=DELAY, offsets=short_first(EVERY, fragments, DELAY)), EVERY
    )
    sign, sign_nbytes = ours(streaming_sign(every=SIGN_EVERY, delay=DELAY, codec=SIGNS), SIGN_EVERY)
    if quick:
        small: dict[str, Any] = {"rtts": (0.1,), "warm": 1, "lead": 2}
        here = [
            Stand(c, "streaming_diloco", diloco, "20", steps=6, nbytes=nbytes, exchanges=True, controls=True, **small)
            for c in ("secure", "gloo", "tls")
        ]
        here.append(Stand("", "torchft DiLoCo", "torchft", "100", 10, 0, 10, dense, rtts=(0.1,)))
        return [*here, Stand("", "torch DDP", "ddp", "100", 1, 0, 1, EVERY * dense, rtts=(0.1,), exchanges=True)]
    found = []
    for carrier in ("secure", "gloo", "tls"):
        found.append(Stand(carrier, "streaming_diloco", diloco, "floor", DELAY, DELAY, EVERY, nbytes))
        found.append(Stand(carrier, "streaming_sign", sign, "floor", DELAY, DELAY, 2 * SIGN_EVERY, sign_nbytes))
        for rate in ("20", "100"):
            half = Stand(carrier, "streaming_diloco", diloco, rate, DELAY, DELAY, EVERY // 2, nbytes)
            found.append(replace(half, exchanges=True, controls=True))
    third = EVERY // FRAGMENTS  # a fragment every ten steps, nothing in the air between them
    found.append(Stand("", "torchft DiLoCo", "torchft", "floor", third, 0, third, dense, rtts=(0.1,)))
    found += [Stand("", "torchft DiLoCo", "torchft", rate, third, 0, third, dense) for rate in ("20", "100")]
    found.append(Stand("", "torch DDP", "ddp", "20", 1, 0, 1, EVERY * dense, rtts=(0.1,), exchanges=True))
    found.append(Stand("", "torch DDP", "ddp", "100", 1, 0, 2, EVERY * dense, exchanges=True))
    return found


class Replicas:
    """Two processes that stand over a router, with a hub where they need one."""

    def __init__(self, stand: Stand, uplink: float | None, rtt: float, port: int) -> None:
        self.stand, self.uplink, self.rtt, self.port = stand, uplink, rtt, port
        self.router = Router(Link(HUB))
        self.space = Namespaces(3, self.router)
        self.folder = TemporaryDirectory()
        self.running: list[subprocess.Popen[str]] = []
        self.hub: subprocess.Popen[str] | None = None
        self.errors: IO[str] = TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Replicas:
        self.space.__enter__()
        try:
            self._shape(HUB, self.rtt)  # fast until all are warm, but as far apart as they will be
            self._start()
        except BaseException:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.space.close()
        self.errors.close()
        self.folder.cleanup()

    def _start(self) -> None:
        token, folder = "", Path(self.folder.name)
        if self.stand.carrier == "secure":
            token = self._hub(folder / "hub")
        if self.stand.carrier == "tls":
            make_keys(folder)
        part = Part(
            self.stand.how, 0, self.space.addresses, self.port, "", self.stand.warm, 0, EVERY, DELAY, FRAGMENTS, SIZE
        )
        program = [sys.executable, str(Path(__file__).with_name("secure_replica.py"))]
        for rank in (0, 1):
            own = replace(part, rank=rank, interface=self.space.interfaces[rank])
            keys = str(folder / f"keys-{rank}") if token else str(folder)
            place = Place(own, self.stand.carrier, self.uplink, token, keys)
            self.running.append(self.space.start(rank, [*program, json.dumps(asdict(place))], rank, self.errors))
        self.hear()

    def _hub(self, folder: Path) -> str:
        thinwire = str(Path(sys.executable).with_name("thinwire"))
        listen = f"{self.space.addresses[2]}:{PORT}"
        command = [thinwire, "hub", "--out", str(folder), "--listen", listen, "--uses", "2", "--json"]
        self.hub = hub = self.space.start(2, command, errors=self.errors)
        assert hub.stdout is not None
        for line in hub.stdout:
            if line.startswith("{"):
                return str(json.loads(line)["token"])
        raise RuntimeError(f"the hub could not start: {self._last_words()}")

    def shape(self, rtt: float) -> dict[str, Any]:
        """Give each uplink its rate, and each way its delay; returns the router's report of the time before."""
        return self._shape(self.uplink or HUB, rtt)

    def _shape(self, rate: float, rtt: float) -> dict[str, Any]:
        hops = 4 if self.stand.carrier == "secure" else 2  # a round trip by the hub has four ways
        delay = self.stand.trips * rtt / hops
        return self.router.shape([Link(rate, delay), Link(rate, delay), Link(HUB, delay)])

    def ask(self, **order: Any) -> list[dict[str, Any]]:
        """What both replicas answer to an order. Raises `RuntimeError`."""
        for process in self.running:
            print(json.dumps(order), file=process.stdin, flush=True)
        return self.hear()

    def hear(self) -> list[dict[str, Any]]:
        """A line of each. Raises `RuntimeError` if one ends early, or is too late."""
        limit = Timer(LIMIT_SECONDS, self.space.end_processes)
        limit.start()
        try:
            lines = [process.stdout.readline() if process.stdout else "" for process in self.running]
        finally:
            limit.cancel()
        if not all(lines):
            raise RuntimeError(
                f"replica {lines.index('')} ended early, or took {LIMIT_SECONDS:.0f} s: {self._last_words()}"
            )
        return [json.loads(line) for line in lines]

    def _last_words(self) -> str:
        self.errors.seek(0)
        return "".join(self.errors.readlines()[-1:]).strip()

    def cpu_seconds(self) -> float:
        """CPU of this benchmark: replicas, hub, router and this process."""
        processes = [*self.running, self.hub, self.router.process]
        return time.process_time() + sum(_cpu_of(process.pid) for process in processes if process is not None)


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """CPU seconds of this machine in programs; the kernel's interrupts are the network's."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def measured(replicas: Replicas, stand: Stand, rtt: float) -> dict[str, Any]:
    """One row."""
    rate, path = replicas.uplink, stand.trips * rtt
    replicas.shape(rtt)
    clock, busy, own = time.monotonic(), _busy_seconds(), replicas.cpu_seconds()
    row: dict[str, Any] = _trained(stand, replicas.ask(do="train", steps=stand.steps, lead=stand.lead))
    if stand.exchanges and rate:
        row["exchanges"] = []
        for nbytes, warm, rounds in ((BULK_NBYTES, 1, 3), (4 * BULK_NBYTES, 0, 2)):
            told = replicas.ask(do="exchange", rtt=path, nbytes=nbytes, warm=warm, rounds=rounds, idle=IDLE_SECONDS)
            row["exchanges"].append(_exchanged(told, nbytes, rtt + 8 * nbytes / rate))
    if stand.controls and rate:
        bulk = int((2.0 + 3 * path + PINGS * PING_EVERY) * rate / 8 / BULK_NBYTES) + 2
        told = replicas.ask(do="control", rtt=path, nbytes=BULK_NBYTES, bulk=bulk, pings=PINGS, every=PING_EVERY)
        row["control"] = _controlled(told, rtt + 2 * 8 * CHUNK_NBYTES / rate)
        row["control"]["bulk_of_rate"] = 8 * bulk * BULK_NBYTES / max(t["bulk_seconds"] for t in told) / rate
    foreign = _busy_seconds() - busy - (replicas.cpu_seconds() - own)
    report = replicas.shape(rtt)
    row["others_cpu"] = max(0.0, foreign) / (time.monotonic() - clock)
    row["router"] = report
    late = report["late_seconds"]["p99"] > max(0.002, path / 10)
    row["busy"] = bool(late or row["others_cpu"] > 0.15)
    return row


def _trained(stand: Stand, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    wall = statistics.mean(r["wall_seconds"] for r in replicas)
    inner = None if stand.how == "ddp" else statistics.mean(r["inner_seconds"] for r in replicas)
    scale = EVERY / stand.steps
    return {
        "steps_per_second": stand.steps / wall,
        "utilization": None if inner is None else inner / wall,
        "wire_nbytes_per_period": scale * statistics.mean(r["wire_nbytes"] for r in replicas),
        "counted_nbytes_per_period": scale * statistics.mean(r.get("counted_nbytes", 0) for r in replicas),
        "beside_cpu": statistics.mean(
            (r["cpu_seconds"] - r["training_thread_cpu_seconds"]) / r["wall_seconds"] for r in replicas
        ),
        "replicas": replicas,
    }


def _exchanged(told: list[dict[str, Any]], nbytes: int, ideal: float) -> dict[str, Any]:
    rounds = zip(*(replica["spans"] for replica in told), strict=True)
    seconds = [max(end for _, end in both) - max(begin for begin, _ in both) for both in rounds]
    median = statistics.median(seconds)
    return {
        "nbytes": nbytes,
        "seconds": median,
        "all_seconds": seconds,
        "ideal_seconds": ideal,
        "of_ideal": median / ideal,
    }


def _controlled(told: list[dict[str, Any]], goal: float) -> dict[str, Any]:
    seconds = sorted(back - sent for sent, back in told[0]["pings"])
    ranks = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: seconds[int(share * (len(seconds) - 1))] for name, share in ranks.items()} | {
        "pings": len(seconds),
        "goal_seconds": goal,
        "seconds": seconds,
    }


def rows_of(stand: Stand, uplink: float | None, rtts: Sequence[float], port: int) -> Iterator[dict[str, Any]]:
    """The rows of one pair of processes; a row with a `problem` ends it."""
    rtt = rtts[0]
    try:
        with Replicas(stand, uplink, rtt, port) as replicas:
            for rtt in rtts:
                yield _named(stand, uplink, rtt) | measured(replicas, stand, rtt)
    except (OSError, RuntimeError) as error:
        yield _named(stand, uplink, rtt) | {"problem": f"failed: {error}"}


def _named(stand: Stand, uplink: float | None, rtt: float) -> dict[str, Any]:
    return {
        "carrier": stand.carrier, "method": stand.method, "how": stand.how, "rate": stand.rate, "rtt_seconds": rtt,
        "bits_per_second": uplink, "steps": stand.steps, "trips": stand.trips, "predicted_nbytes_per_period": stand.nbytes,
    }  # fmt: skip


def measure(result: dict[str, Any], wanted: list[Stand], quick: bool) -> Iterator[dict[str, Any]]:
    """Every row that `result` does not have yet: bare first, then all links of one stand after the other."""
    done = {(r["carrier"], r["method"], r["rate"], r["rtt_seconds"]) for r in result["rows"] if "problem" not in r}
    port = 29600
    bare = Stand("", "bare", "bare", "-", 2, 0, 5 if quick else EVERY, 0, rtts=(0.0,))
    if bare.key(0.0) not in done:
        yield from rows_of(bare, None, (0.0,), port)
    step = 1 / next(r["steps_per_second"] for r in result["rows"] if r["method"] == "bare")
    for stand in wanted:
        port += 4
        left = [rtt for rtt in stand.rtts if stand.key(rtt) not in done]
        if stand.how == "torchft" and installed("torchft") is None:
            continue
        uplink = MARGIN * 8 * stand.nbytes / EVERY / step if stand.rate == "floor" else float(stand.rate) * 1e6
        if stand.rate == "floor" and not stand.carrier:  # the link of the first row, whatever this one's own floor is
            uplink = MARGIN * 8 * wanted[0].nbytes / EVERY / step
        if left:
            yield from rows_of(stand, uplink, left, port)


def told(row: dict[str, Any], bare: float) -> list[str]:
    """A row as the table has it."""
    rate, rtt = row["bits_per_second"], row["rtt_seconds"]
    link = f"{rate / 1e6:.3g}, {rtt * 1e3:.0f}" if rate else "–"
    who = f"{row['method']}, {row['carrier']}" if row["carrier"] else row["method"]
    if "problem" in row:
        return [link, f"{who}: {row['problem']}", *[""] * 6]
    share = "–" if row["utilization"] is None else f"{row['utilization']:.1%}"
    times = [f"{e['seconds']:.2f} ({e['of_ideal']:.2f})" for e in row.get("exchanges", ())] or ["–", "–"]
    held = row.get("control")
    control = f"{held['p50']:.3f} / {held['p99']:.3f} ({held['goal_seconds']:.3f})" if held else "–"
    of_bare = f"{row['steps_per_second'] / bare:.1%}"
    sent = f"{row['wire_nbytes_per_period'] / 1e6:.2f}"
    return [link, who, share, of_bare, *times, control, sent + (" busy" if row["busy"] else "")]


def table(rows: list[dict[str, Any]]) -> Table:
    view = Table(title="Two replicas, emulated links")
    columns = "Mbit/s, RTT ms|method|utilization|of bare|1 MB, s (ratio)|4 MB, s (ratio)|control p50 / p99 (goal), s|MB"
    for column in columns.split("|"):
        view.add_column(column, justify="left" if column == "method" else "right")
    bare = next(row["steps_per_second"] for row in rows if row["method"] == "bare")
    for row in rows:
        view.add_row(*told(row, bare))
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one link for each carrier, short windows")
    parser.add_argument("--only", default="", help="only stands whose carrier, method and rate contain these words")
    parser.add_argument("--hub", choices=("half-way", "far"), default="half-way", help="where the hub is")
    parser.add_argument(
        "--out",
        type=Path,
        help="the JSON (default: benchmarks/results/secure.json, with --hub far secure_far.json); rows stay",
    )
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"secure.py cannot run here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, as with Ctrl-C
    result: dict[str, Any] = {"benchmark": "secure", "word": "emulated", "seed": 0, **provenance(), "rows": []}
    if options.out and options.out.exists():
        result = json.loads(options.out.read_text())
    words = options.only.split()
    wanted = [s for s in stands(options.quick) if all(w in f"{s.carrier} {s.method} {s.rate}" for w in words)]
    name, trips, path = "secure", 1, options.out
    if options.hub == "far":
        name, trips = "secure_far", 2
        wanted = [replace(stand, trips=trips) for stand in wanted if stand.carrier == "secure"]
    if any(row.get("trips", 1) != trips for row in result["rows"] if row["carrier"]):
        raise SystemExit(f"{path} has rows of a hub elsewhere; give another --out.")
    for row in measure(result, wanted, options.quick):
        kept = [r for r in result["rows"] if any(r[k] != row[k] for k in ("carrier", "method", "rate", "rtt_seconds"))]
        result["rows"] = [*kept, row]
        path = save(name, result, options.out)
        if row["method"] == "bare" and "problem" in row:
            raise SystemExit(f"two replicas cannot train here without any exchange: {row['problem']}")
        bare = next(r["steps_per_second"] for r in result["rows"] if r["method"] == "bare")
        print(" | ".join(told(row, bare)), file=sys.stderr, flush=True)
    Console(width=170).print(table(result["rows"]))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
