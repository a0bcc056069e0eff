"""The cost of a killed replica for the others, beside torchft's own DiLoCo: three replicas on an emulated link. Emulated.

    sudo python benchmarks/elastic.py                # about four minutes
    sudo python benchmarks/elastic.py --quick        # about one and a half: a smoke run

Three processes and a lighthouse each have a network namespace. `tc tbf` shapes what leaves a namespace to 20 Mbit/s, alike for both
methods. Once a minute (and once in the window) the third process is killed with kill -9, and restarted two seconds later.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elastic_replica import Part
from namespaces import Bridge, Namespaces, missing
from provenance import installed, provenance, save
from rich.console import Console
from rich.table import Table

NAMES = ("a", "b", "c")
PORT = 29510
AWAY = 2.0  # seconds from the kill to the restart
LIMIT = 120.0  # seconds until all three take part
Line = dict[str, Any]


def run(space: Namespaces, bridge: Bridge, method: str, window: float, megabits: float, folder: Path) -> list[Line]:
    """Kills one replica in a window of `window` seconds. Returns all lines that the replicas wrote, and a line for the kill."""
    bridge.shape(None)
    lighthouse = f"{space.addresses[0]}:{PORT}"
    torchft = ["torchft_lighthouse", "--bind", f"{space.addresses[0]}:{PORT}", "--min_replicas", "2"]
    torchft += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "5000"]
    own = ["-m", "thinwire", "lighthouse", "--host", space.addresses[0], "--port", str(PORT), "--json"]
    with (folder / "errors").open("w") as errors:
        command = (
            [sys.executable, *own]
            if method == "thinwire"
            else [str(Path(sys.executable).with_name(torchft[0])), *torchft[1:]]
        )
        space.start(0, command, errors=errors)
        time.sleep(3.0)
        program = [sys.executable, str(Path(__file__).with_name("elastic_replica.py"))]

        def start(place: int) -> Any:
            file = str(folder / f"{method}-{NAMES[place]}")
            part = Part(method, NAMES[place], space.addresses[place + 1], lighthouse, file, megabits * 1e6)
            return space.start(place + 1, [*program, json.dumps(asdict(part))], errors=errors)

        processes = [start(place) for place in range(3)]

        def rest(seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
            """Sleeps, and restarts processes that end by themselves."""
            until = time.monotonic() + seconds
            while time.monotonic() < until and not done():
                for place, process in enumerate(processes):
                    if process.poll() not in (None, -signal.SIGKILL):
                        processes[place] = start(place)
                time.sleep(0.1)
            return done()

        rest(LIMIT, lambda: sum(line["kind"] == "start" for line in lines(folder, method)) >= 3)
        (folder / "go").touch()
        if not rest(LIMIT, lambda: _all_in(lines(folder, method))):
            said = (folder / "errors").read_text()[-300:]
            raise RuntimeError(f"not all took part within {LIMIT:.0f} s: {said}")
        bridge.shape(megabits * 1e6)
        begin = time.monotonic()
        rest(window / 3)
        processes[2].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        rest(AWAY)
        processes[2] = start(2)
        rest(begin + window - time.monotonic())
        end = time.monotonic()
        space.end_processes()
    mark = {"kind": "window", "begin": begin, "end": end, "killed": killed, "back": killed + AWAY}
    return [mark, *lines(folder, method)]


def lines(folder: Path, method: str) -> list[Line]:
    whole = [text for file in sorted(folder.glob(f"{method}-*")) for text in file.read_text().split("\n")[:-1]]
    return [json.loads(text) for text in whole]


def _all_in(written: list[Line]) -> bool:
    return sum(line["kind"] == "round" and line["good"] and line["members"] == 3 for line in written) >= 6


def row(method: str, written: list[Line], part: Part) -> dict[str, Any]:
    """Returns the figures of the window."""
    window, rest = written[0], [line for line in written[1:] if line["kind"] != "start"]
    inside = [line for line in rest if window["begin"] <= line["at"] <= window["end"]]
    still, inner, wall, dropped = [], 0.0, 0.0, 0
    for name in NAMES[:2]:
        steps = [line for line in inside if line["name"] == name and line["kind"] == "step"]
        gaps = [b["at"] - a["at"] for a, b in pairwise(steps)]
        still.append(max(gaps, default=window["end"] - window["begin"]) - part.step_seconds)
        inner += sum(line["inner"] for line in steps)
        wall += window["end"] - window["begin"]
        dropped += sum(line["kind"] == "round" and not line["good"] for line in inside if line["name"] == name)
    own = [line for line in rest if line["name"] == "c" and line["at"] < window["killed"]]
    last = max((line["at"] for line in own if line["kind"] == "round" and line["good"]), default=0.0)
    again = [
        line["at"] for line in inside
        if line["kind"] == "round" and line["good"] and line["members"] == 3 and line["at"] > window["back"]
        and line["name"] == "c"
    ]  # fmt: skip
    # A failed round resets torchft's fragment, and loses the training of a period; in Thinwire the delta is sent in the next round.
    lost = 0.0 if method == "thinwire" else dropped / 2 * part.every / part.fragments
    return {
        "method": method,
        "survivors_lost_steps": lost,
        "killed_lost_steps": sum(line["kind"] == "step" and line["at"] > last for line in own),
        "rounds_failed": dropped / 2,
        "standstill_seconds": max(still),
        "standstill_steps": max(still) / part.step_seconds,
        "return_seconds": min(again) - window["back"] if again else None,
        "utilization": inner / wall,
        "steps_per_second": sum(one["kind"] == "step" and one["name"] in NAMES[:2] for one in inside) / wall,
        "errors": [line["reason"] for line in inside if line["kind"] == "failed"][:3],
    }


def table(rows: list[dict[str, Any]], megabits: float) -> Table:
    view = Table(title=f"One kill a minute among three replicas, emulated {megabits:g} Mbit/s")
    columns = "method|steps lost by survivors|by the killed|rounds failed|longest standstill, s|in steps|returner counted after, s|utilization"
    for column in columns.split("|"):
        view.add_column(column, justify="left" if column == "method" else "right")
    for one in rows:
        if "problem" in one:
            view.add_row(one["method"], one["problem"])
            continue
        back = one["return_seconds"]
        view.add_row(
            one["method"], f"{one['survivors_lost_steps']:.0f}", f"{one['killed_lost_steps']:.0f}", f"{one['rounds_failed']:.1f}",
            f"{one['standstill_seconds']:.2f}", f"{one['standstill_steps']:.1f}", "not within the window" if back is None else f"{back:.1f}",
            f"{one['utilization']:.1%}",
        )  # fmt: skip
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="windows of half a minute, once")
    parser.add_argument("--repeats", type=int, default=1, help="windows of each method (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s (default: %(default)s)")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/elastic.json)")
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"elastic.py cannot run here: {reason}")
    if installed("torchft") is None:
        raise SystemExit("elastic.py needs torchft, for its lighthouse too: pip install thinwire[rivals]")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the namespaces, as Ctrl-C does
    window, part, each = 30.0 if options.quick else 60.0, Part("", "", "", "", "", 0.0), []
    result = {"benchmark": "elastic", "word": "emulated", **provenance()}
    result["setting"] = {
        "window_seconds": window,
        "megabits_per_second": options.rate,
        "away_seconds": AWAY,
        **asdict(part),
    }
    for _ in range(options.repeats):
        for method in ("thinwire", "torchft"):
            bridge = Bridge()
            with TemporaryDirectory() as folder, Namespaces(4, bridge) as space:
                try:
                    each.append(row(method, run(space, bridge, method, window, options.rate, Path(folder)), part))
                except (RuntimeError, OSError) as error:
                    each.append({"method": method, "problem": str(error)})
                print(each[-1], file=sys.stderr, flush=True)
    result["each"] = each
    result["rows"] = [_median([one for one in each if one["method"] == method]) for method in ("thinwire", "torchft")]
    Console(width=170).print(table(result["rows"], options.rate))
    print(f"written: {save('elastic', result, options.into)}")


def _median(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each figure over the repeats that have it."""
    good = [one for one in several if "problem" not in one]
    if not good:
        return several[0]
    figures = {}
    for key, value in good[0].items():
        values = [one[key] for one in good if isinstance(one[key], int | float)]
        figures[key] = statistics.median(values) if values else value
    return figures


if __name__ == "__main__":
    main()
