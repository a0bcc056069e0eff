"""Seconds of one exchange against the ideal of its link, beside gloo's own all-reduce: namespaces and a router in user space. Emulated.

    sudo python benchmarks/exchange.py            # about five minutes
    sudo python benchmarks/exchange.py --quick    # half a minute: a smoke run
    sudo python benchmarks/exchange.py --links 1gbit,2ms --replicas 2,3

2, 3 and 4 replicas, a process and a namespace each; every uplink has the rate and the one-way delay of `--links` (router.py). All begin a
round at one instant; its seconds run until the last of them has its estimate: encode, send, receive, check, decode, add up.

* ideal      RTT + 8 · bytes / rate, with the bytes that each replica's ledger counted as sent. For Direct these are M − 1 packets, because
             each uplink must carry one to everybody; for gloo's all-reduce 2 (M − 1) / M tensors, what a ring moves. It is generous: headers (4 %
             at an MTU of 1500) are not in it, and no exchange of two hops can have a single RTT.
* paced      the connections share the rate that they are told (`TorchGroup.from_world(uplink=...)`)
* plain      TCP alone decides
* all-reduce gloo's, of the same tensor in fp32: as large as the packet with Identity, eight times as large with E3M0
* idle       two seconds without traffic before each round, as there are between outer rounds of training
* CPU        of a replica, as a share of the time of the round. There are M processes and the router on this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from namespaces import Namespaces, missing
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from rounds import ALL_REDUCE, Case, Part
from router import Router

from thinwire.comm import Link

SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 40_000_000)
LONGEST = 2.6  # seconds of an ideal round; longer cases are left out
LIMIT_SECONDS = 240.0  # for all cases of one group size
EXCHANGES = ("Direct()", "TwoShot()")  # of these `Fastest` chooses
DENSE, FOUR_BITS = "Identity()", "E3M0()"


def cases(link: Link, size: int, sizes: list[int], rounds: int) -> list[Case]:
    """The cases that are measured between `size` replicas, small packets first."""
    rate, found = link.bits_per_second, []
    for nbytes in sizes:
        seconds = 2 * link.delay_seconds + (size - 1) * 8 * nbytes / rate
        if seconds > LONGEST:
            continue
        count = rounds if seconds < 0.5 else max(1, rounds // 2)
        found += [Case(exchange, DENSE, nbytes, count, rate) for exchange in EXCHANGES]
        found += [Case("Direct()", DENSE, nbytes, count), Case(ALL_REDUCE, DENSE, nbytes, count)]
        if nbytes == 1_000_000:
            found += [Case("Direct()", DENSE, nbytes, rounds // 2, pace, idle_seconds=2.0) for pace in (rate, None)]
        if nbytes in (1_000_000, 10_000_000) and seconds < LONGEST / 4:
            found += [Case(exchange, FOUR_BITS, nbytes, count, rate) for exchange in EXCHANGES]
            found += [Case(ALL_REDUCE, FOUR_BITS, nbytes, max(1, rounds // 4))]
    return found


def measure(link: Link, size: int, wanted: list[Case], port: int) -> Iterator[dict[str, Any]]:
    """A row for each case. Raises `RuntimeError` if a replica ends early."""
    router = Router(link)
    rtt = 2 * link.delay_seconds
    program = [sys.executable, str(Path(__file__).with_name("rounds.py"))]
    with Namespaces(size, router) as space, TemporaryFile("w+") as errors:
        limit = Timer(LIMIT_SECONDS, space.end_processes)
        limit.start()
        parts = [Part(rank, size, space.addresses[0], port, rtt, tuple(wanted)) for rank in range(size)]
        running = [space.start(p.rank, [*program, json.dumps(asdict(p))], errors=errors) for p in parts]
        lines = [process.stdout.readline() if process.stdout else "" for process in running]
        limit.cancel()
        if not all(lines):
            errors.seek(0)
            raise RuntimeError(f"replica {lines.index('')} ended early: {''.join(errors.readlines()[-1:]).strip()}")
    replicas = [json.loads(line) for line in lines]
    for case, *measured in zip(wanted, *replicas, strict=True):
        yield row(link, size, case, measured) | {"router": router.said}


def row(link: Link, size: int, case: Case, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each round: from the instant when the last replica began to the one when the last had its estimate."""
    spans = [replica["spans"] for replica in measured]
    seconds = [max(end for _, end in each) - max(begin for begin, _ in each) for each in zip(*spans, strict=True)]
    numel = measured[0]["numel"]
    ring = round(2 * (size - 1) / size * 4 * numel)
    sent = ring if case.exchange == ALL_REDUCE else max(max(replica["sent_nbytes"]) for replica in measured)
    ideal = 2 * link.delay_seconds + link.serialisation_seconds(sent)
    median = statistics.median(seconds)
    return {
        "link": str(link), "replicas": size, **asdict(case), "numel": numel, "sent_nbytes": sent, "ideal_seconds": ideal,
        "seconds": median, "spread": [min(seconds), max(seconds)], "all_seconds": seconds, "of_ideal": median / ideal,
        "rtts": median / (2 * link.delay_seconds) if link.delay_seconds else None,
        "cpu_share": statistics.mean(sum(replica["cpu_seconds"]) for replica in measured) / sum(seconds),
    }  # fmt: skip


def name(case: dict[str, Any]) -> str:
    """A row's exchange, as the table has it."""
    pace = "" if case["exchange"] == ALL_REDUCE else ", paced" if case["uplink"] else ", plain"
    return case["exchange"].removesuffix("()") + pace + (", idle" if case["idle_seconds"] else "")


def table(rows: list[dict[str, Any]]) -> Table:
    view = Table(title="Seconds of an exchange (emulated)")
    for column in [
        "link",
        "replicas",
        "packet",
        "codec",
        "exchange",
        "seconds",
        "spread",
        "ideal",
        "of ideal",
        "RTT",
        "CPU",
    ]:
        view.add_column(column, justify="left" if column in ("codec", "exchange") else "right")
    last = None
    for each in rows:
        low, high = each["spread"]
        if last != (last := (each["link"], each["replicas"])):
            view.add_section()
        view.add_row(
            each["link"], str(each["replicas"]), f"{each['nbytes'] / 1e6:g} MB", each["codec"].removesuffix("()"), name(each),
            f"{each['seconds']:.4f}", f"{low:.4f} … {high:.4f}", f"{each['ideal_seconds']:.4f}", f"{each['of_ideal']:.2f}",
            "–" if each["rtts"] is None else f"{each['rtts']:.2f}", f"{each['cpu_share']:.0%}",
        )  # fmt: skip
    return view


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "400mbit,10ms 50mbit,40ms"
    parser.add_argument("--links", nargs="+", default=default.split(), help=f"RATE,DELAY each way (default: {default})")
    parser.add_argument("--replicas", default="2,3,4", help="group sizes (default: %(default)s)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a packet (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=9, help="of small packets; of large ones half (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: two replicas, one link, small packets")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/exchange.json)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if reason := missing():
        raise SystemExit(f"exchange.py cannot run here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, as with Ctrl-C
    links, counts = [Link.parse(text) for text in options.links], [int(text) for text in options.replicas.split(",")]
    sizes = [int(float(text)) for text in options.sizes.split(",")]
    if options.quick:
        links, counts, sizes = links[:1], counts[:1], sizes[:3]
    result = {"benchmark": "exchange", "word": "emulated", "seed": 0, **provenance(), "rows": []}
    port = 29500
    for link in links:
        for count in counts:
            port += 1
            rows = list(measure(link, count, cases(link, count, sizes, options.rounds), port))
            result["rows"] += rows
            print(f"{link}, {count} replicas: done{_doubt(link, rows)}", file=sys.stderr, flush=True)
    Console(width=150).print(table(result["rows"]))
    print(f"written: {save('exchange', result, options.into)}")


def _doubt(link: Link, rows: list[dict[str, Any]]) -> str:
    """What speaks against these rows: a router that was late more than a tenth of the round trip, one time in a hundred."""
    late = rows[0]["router"]["late_seconds"]["p99"]
    worth = late <= 0.2 * link.delay_seconds
    return (
        "" if worth else f"; the router was {late * 1e3:.1f} ms late (p99): this machine is too busy for these figures"
    )


if __name__ == "__main__":
    main()
