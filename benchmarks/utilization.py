"""Compute utilization on a thin link, beside DDP and torchft: two processes in two network namespaces. Emulated.

    sudo python benchmarks/utilization.py                         # about an hour
    sudo python benchmarks/utilization.py --quick                 # about a minute: a smoke run
    sudo python benchmarks/utilization.py --rates 50,floor        # Mbit/s; `floor` is 1.2 times the predicted floor

One model (7.2 million parameters), one core and one batch sequence a replica, H = 30 and τ = 5 for all that have them; the default,
`streaming_sign`, has its own H = 4 and τ = 1. Needs Linux, root and iproute2; torchft is optional (`pip install thinwire[rivals]`).
Every method has several windows at each rate, in turns with the others: the figures are medians, in brackets the least and the greatest.

* of bare      steps per second over those of the same two processes training without any exchange on the same two cores: the
               headline, because a method that slows the inner step down by using the CPU cannot hide it here
* utilization  time in inner steps / wall time. DDP exchanges within backward, so it has only the first figure
* stall        wall time outside inner steps, over 30 steps
* MB           what the interface sent, over 30 steps: packets, and the headers of TCP, IP and Ethernet, and the other side's ACKs
* CPU beside   CPU of a replica's threads other than the training one, as a share of its core
* others' CPU  everything else on that core: other programs (then the run is worth little) and the kernel's network
* floor        predicted: the rate below which no overlap can hide the method's own bytes, κ·b·N / (H·T), T the bare step
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from methods import Part
from namespaces import QUEUE_SECONDS, Bridge, Namespaces, missing
from provenance import installed, provenance, save
from rich.console import Console
from rich.table import Table

from thinwire import Strategy, data_parallel, diloco, streaming_diloco, streaming_sign
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.catalogue.parsing import parse
from thinwire.pieces.partition import BySize, Partition, Strided
from thinwire.pieces.schedule import short_first

EVERY, DELAY = 30, 5
LAYER_FRAGMENTS = 3  # as in the paper, one for three layers; 30 / 3 is whole, as torchft needs
MARGIN = 1.2  # how far above its floor a link must be before 95 % are promised
LIMIT_SECONDS = 300.0  # for one method at one rate


@dataclass(frozen=True)
class Method:
    """A row of the table. `steps` is the window at each rate in Mbit/s, the nearest one from below counts."""

    name: str
    how: str  # for methods.py
    warm: int
    steps: dict[float, int]
    nbytes_per_period: int  # predicted, sent by one replica in `EVERY` steps, headers of the packets included

    def window(self, megabits: float) -> int:
        """Steps in the window at this rate; 0 if the method is left out there, because a single exchange takes too long."""
        return self.steps[max((rate for rate in self.steps if rate <= megabits), default=min(self.steps))]


def methods(size: str) -> list[Method]:
    """Windows are whole periods where there are periods; warm-up ends where nothing is in the air."""
    model = Transformer(SIZES[size])
    numel = sum(p.numel() for p in model.parameters())

    def own(name: str, strategy: Strategy, warm: int, steps: dict[float, int]) -> Method:
        numels = [fragment.numel for fragment in strategy.partition.fragments(model)]
        nbytes = strategy.nbytes_per_period(numels, 2) * EVERY // strategy.schedule.every
        return Method(name, repr(strategy), warm, steps, nbytes)

    def streaming(partition: Partition) -> Strategy:
        offsets = short_first(EVERY, len(partition.fragments(model)), DELAY)  # the first period is steady already
        return streaming_diloco(every=EVERY, delay=DELAY, offsets=offsets, partition=partition)

    default = streaming(streaming_diloco(every=EVERY, delay=DELAY).partition)
    thirds = streaming(Strided(LAYER_FRAGMENTS))
    equal = EVERY // DELAY  # so many that the next departs when one lands: the link may be busy all the time
    sixths = streaming(BySize(equal))
    sign = streaming_sign()
    fp32 = 4 * numel
    return [
        Method("bare", "bare", 2, {0: EVERY}, 0),
        own("Thinwire streaming_diloco", default, DELAY - 1, {0: 2 * EVERY}),
        own("Thinwire streaming_sign", sign, sign.schedule.every, {0: 2 * EVERY}),
        own("Thinwire streaming_diloco, 3 layers a fragment", thirds, EVERY // (LAYER_FRAGMENTS + 1), {0: 2 * EVERY}),
        own(f"Thinwire streaming_diloco, BySize({equal})", sixths, DELAY - 1, {0: 2 * EVERY}),
        own("Thinwire diloco (fp32)", diloco(every=EVERY), 2, {0: 0, 10: EVERY}),
        own("Thinwire data_parallel (fp32)", data_parallel(), 1, {0: 0, 20: 2, 100: 4}),
        Method("torchft DiLoCo, streaming (fp32)", "torchft", EVERY // LAYER_FRAGMENTS,
               {0: 2 * EVERY // LAYER_FRAGMENTS, 10: EVERY}, fp32),
        Method("torch DDP (fp32)", "ddp", 2, {0: 0, 10: 4, 100: 6}, EVERY * fp32),
    ]  # fmt: skip


def both(link: Namespaces, bridge: Bridge, part: Part, bits_per_second: float | None) -> list[dict[str, Any]]:
    """Run one method in both namespaces and return what each replica measured. Raises `RuntimeError` if one ends early."""
    program = [sys.executable, str(Path(__file__).with_name("methods.py"))]
    parts = [replace(part, rank=rank, interface=link.interfaces[rank]) for rank in (0, 1)]
    deadline = Timer(LIMIT_SECONDS, link.end_processes)
    deadline.start()
    with TemporaryFile("w+") as errors:
        try:
            bridge.shape(None)
            running = [link.start(p.rank, [*program, json.dumps(asdict(p))], p.rank, errors) for p in parts]
            _hear(running)  # both stand and are warm
            if bits_per_second is not None:
                bridge.shape(bits_per_second)
            _tell(running)
            measured = _hear(running)
            bridge.shape(None)
            _tell(running)
            for process in running:
                process.wait(timeout=30)
            return measured
        except (OSError, RuntimeError) as error:
            errors.seek(0)
            raise RuntimeError(f"{error} {''.join(errors.readlines()[-1:]).strip()}") from error
        finally:
            deadline.cancel()
            link.end_processes()


def _hear(running: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    lines = [process.stdout.readline() if process.stdout else "" for process in running]
    if not all(lines):
        raise RuntimeError(f"replica {lines.index('')} ended early, or took more than {LIMIT_SECONDS:.0f} s.")
    return [json.loads(line) for line in lines]


def _tell(running: list[subprocess.Popen[str]]) -> None:
    for process in running:
        print("go", file=process.stdin, flush=True)


def summary(method: Method, megabits: float | None, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The row without what needs the bare step. Means of the two replicas, over `EVERY` steps where it says `_per_period`."""
    periods = replicas[0]["steps"] / EVERY
    wall = statistics.mean(r["wall_seconds"] for r in replicas)
    inner = None if method.how == "ddp" else statistics.mean(r["inner_seconds"] for r in replicas)
    row: dict[str, Any] = {
        "method": method.name,
        "how": method.how,
        "megabits_per_second": megabits,
        "steps": replicas[0]["steps"],
        "steps_per_second": replicas[0]["steps"] / wall,
        "utilization": None if inner is None else inner / wall,
        "stall_seconds_per_period": None if inner is None else (wall - inner) / periods,
        "inner_step_seconds": None if inner is None else inner / replicas[0]["steps"],
        "predicted_nbytes_per_period": method.nbytes_per_period,
        "wire_nbytes_per_period": statistics.mean(r["wire_nbytes"] for r in replicas) / periods,
        "beside_cpu": statistics.mean(
            (r["cpu_seconds"] - r["training_thread_cpu_seconds"]) / r["wall_seconds"] for r in replicas
        ),
        "others_cpu": statistics.mean(r["others_cpu_seconds"] / r["wall_seconds"] for r in replicas),
        "replicas": replicas,
    }
    if "counted_nbytes" in replicas[0]:
        row["counted_nbytes_per_period"] = statistics.mean(r["counted_nbytes"] for r in replicas) / periods
        row["headers_and_acks"] = row["wire_nbytes_per_period"] / row["counted_nbytes_per_period"] - 1
    return row


def measure(
    link: Namespaces, bridge: Bridge, rates: list[str], chosen: list[Method], part: Part, windows: int
) -> Iterator[dict[str, Any]]:
    """One row for each window: at every rate all methods in turn, `windows` times. Bare runs before each turn and at the end."""
    bare, *rest = chosen
    steps: list[float] = []
    port = part.port

    def row(method: Method, megabits: float | None) -> dict[str, Any]:
        nonlocal port
        port += 2
        count = method.window(megabits or 0)
        if method.how == "torchft" and installed("torchft") is None:
            return {"method": method.name, "megabits_per_second": megabits, "problem": "not installed"}
        if not count:
            return {"method": method.name, "megabits_per_second": megabits, "problem": "left out, too long"}
        asked = replace(part, method=method.how, warm=method.warm, steps=count, port=port)
        try:
            measured = both(link, bridge, asked, None if megabits is None else megabits * 1e6)
        except RuntimeError as error:
            return {"method": method.name, "megabits_per_second": megabits, "problem": f"failed: {error}"}
        return summary(method, megabits, measured)

    for rate in rates:
        megabits = None if rate == "floor" else float(rate)
        for _ in range(windows):
            result = row(bare, None)
            steps.append(1 / result["steps_per_second"])
            yield result
            if megabits is None:
                megabits = MARGIN * rest[0].nbytes_per_period * 8 / EVERY / statistics.median(steps) / 1e6
            for method in rest:
                yield row(method, megabits)
    yield row(bare, None)


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add to every row its share of bare (the mean of the bare runs before and after it) and its floor; return the bare step."""
    bare = {index: row["steps_per_second"] for index, row in enumerate(rows) if row["method"] == "bare"}
    step = statistics.median(1 / rate for rate in bare.values())
    for index, row in enumerate(rows):
        if "problem" not in row:
            around = bare[max(i for i in bare if i <= index)], bare[min(i for i in bare if i >= index)]
            row["of_bare"] = row["steps_per_second"] / statistics.mean(around)
            row["floor_megabits_per_second"] = row["predicted_nbytes_per_period"] * 8 / EVERY / step / 1e6
    seconds = [1 / rate for rate in bare.values()]
    return {"step_seconds": step, "spread": [min(seconds), max(seconds)], "runs": len(seconds)}


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method at each rate: the medians of its windows, the spread of two figures, and the windows themselves."""
    together: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault((row["megabits_per_second"], row["method"]), []).append(row)
    result = []
    for windows in together.values():
        row = next((row for row in windows if "problem" in row), windows[0])
        if "problem" not in row:
            numbers = [name for name, value in row.items() if isinstance(value, float)]
            row = row | {name: statistics.median(window[name] for window in windows) for name in numbers}
            for name in {"of_bare", "utilization"} & set(numbers):
                row[f"{name}_spread"] = [pick(window[name] for window in windows) for pick in (min, max)]
            del row["replicas"]  # each window has its own
            row["windows"] = windows
        result.append(row)
    return result


def table(rows: list[dict[str, Any]], bare: dict[str, Any]) -> Table:
    low, high = bare["spread"]
    view = Table(title=f"Two replicas, emulated link; bare step {bare['step_seconds']:.3f} s ({low:.3f} … {high:.3f})")
    columns = "Mbit/s|method|windows|steps|of bare|utilization|stall s|MB sent|floor Mbit/s|CPU beside|others' CPU"
    for column in columns.split("|"):
        view.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        megabits = row["megabits_per_second"]
        rate = "–" if megabits is None else f"{megabits:.3g}"
        if row["method"] == rows[1]["method"]:
            view.add_section()
        if "problem" in row:
            view.add_row(rate, f"{row['method']}: {row['problem']}")
            continue
        timed = row["utilization"] is not None

        def spread(name: str, row: dict[str, Any] = row) -> str:
            low, high = row[f"{name}_spread"]
            return f"{row[name]:.1%} ({low:.1%} … {high:.1%})"

        view.add_row(
            rate, row["method"], str(len(row["windows"])), str(row["steps"]), spread("of_bare"),
            spread("utilization") if timed else "–",
            f"{row['stall_seconds_per_period']:.2f}" if timed else "–",
            f"{row['wire_nbytes_per_period'] / 1e6:.2f}", f"{row['floor_megabits_per_second']:.2f}",
            f"{row['beside_cpu']:.1%}", f"{row['others_cpu']:.0%}",
        )  # fmt: skip
    return view


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100,20,10,floor", help="Mbit/s, or `floor` (default: %(default)s)")
    parser.add_argument("--methods", default="", help="only rows whose name contains one of these words, bare always")
    parser.add_argument("--windows", type=int, default=3, help="of each method at each rate (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 100 Mbit/s, one short window")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/utilization.json)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if reason := missing():
        raise SystemExit(f"utilization.py cannot run here: {reason}")
    if installed("torchft") is None:
        print("torchft is not installed: its column stays empty. `pip install thinwire[rivals]`", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, as with Ctrl-C
    rates, windows = (["100"], 1) if options.quick else (options.rates.split(","), options.windows)
    part = Part("", 0, Namespaces(2).addresses, 29500, "", 0, 0, EVERY, DELAY, LAYER_FRAGMENTS)
    chosen = methods(part.size)
    if options.quick:
        short = {"bare": 10, "torchft": 10, "ddp": 2}
        chosen = [replace(m, steps={0: short.get(m.how, min(EVERY, max(m.steps.values())))}) for m in chosen]
    words = [word for word in options.methods.split(",") if word]
    chosen = [m for m in chosen if m.name == "bare" or not words or any(word in m.name for word in words)]
    result = {"benchmark": "utilization", "word": "emulated", "seed": part.seed, **provenance()}
    result["setting"] = {
        "every": EVERY, "delay": DELAY, "batch": part.batch, "size": part.size, "optimizer": "AdamW", "queue_seconds": QUEUE_SECONDS,
        "strategies": {m.name: repr(parse(m.how)) for m in chosen if m.how not in ("bare", "ddp", "torchft")},
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    bridge = Bridge()
    with Namespaces(2, bridge) as link:
        for row in measure(link, bridge, rates, chosen, part, windows):
            rows.append(row)
            print(_progress(row), file=sys.stderr, flush=True)
    result["bare"] = compare(rows)
    result["rows"] = medians(rows)
    Console(width=170).print(table(result["rows"], result["bare"]))
    print(f"written: {save('utilization', result, options.into)}")


def _progress(row: dict[str, Any]) -> str:
    rate = "" if row["megabits_per_second"] is None else f" at {row['megabits_per_second']:.3g} Mbit/s"
    told = row.get("problem") or f"{row['steps_per_second']:.2f} steps a second"
    return f"{row['method']}{rate}: {told}"


if __name__ == "__main__":
    main()
