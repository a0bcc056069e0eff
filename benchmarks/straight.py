"""A star over the hub or a mesh of straight streams: is the chosen one the faster? Emulated.

    sudo python benchmarks/straight.py                        # about three minutes
    sudo python benchmarks/straight.py --only fast            # one place of the hub
    sudo python benchmarks/straight.py --replicas 2 --rate 50 --rounds 9

Replicas and a hub in a network namespace each, a user-space router between them (router.py). Each replica listens, measures as in a run
(thinwire docs secure), and says what it chooses for packets of each size that all send to all. Then rounds are forced over the hub and
straight in turn; seconds are from the instant when all begin to the one when all have all packets, the median over rounds.

* fast   the hub has 1 Gbit/s and adds no delay: a star sends each packet once over a replica's uplink, a mesh once to each receiver
* slow   the hub's uplink has the replicas' rate, and carries every packet to every receiver
* far    the hub has 1 Gbit/s and is 100 ms away

`streams` counts those that a replica has had: 4 to each other if none has ended before its time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from namespaces import Namespaces, missing
from provenance import provenance, save
from router import Router

from thinwire.comm import Link

HUB = 1e9  # bits per second
DELAY = 0.02  # seconds from a replica's uplink to whoever receives
# The hub's rate (None: the replicas'), and its delay.
PLACES = {"fast": (HUB, 0.0), "slow": (None, 0.0), "far": (HUB, 0.1)}
SIZES = (100_000, 1_000_000)
IDLE_SECONDS = 0.3
PORT, OWN_PORT = 29530, 29540


def member(token: str, rank: int, size: int, address: str, folder: str) -> None:
    """One replica: JSON lines on stdin ask, JSON lines on stdout answer."""
    import torch
    from rounds import instant

    from thinwire.net import join
    from thinwire.net.star_or_mesh import Measured
    from thinwire.net.straight import Straight

    def say(told: Any) -> None:
        print(json.dumps(told), flush=True)

    honest, carry, streams = Measured.straight, Straight._carry, 0

    async def counted(straight: Straight, path: Any) -> None:
        nonlocal streams
        streams += 1
        await carry(straight, path)

    Straight._carry = counted  # type: ignore[method-assign]
    group = join(token, f"r-{rank}", size, folder, listen=f"{address}:{OWN_PORT}")
    began = time.monotonic()
    while f"the worst of {size * (size - 1)})" not in group.describe():
        time.sleep(0.05)
    say({"measured_seconds": time.monotonic() - began, "said": group.describe()})
    found, _ = group._link.straight._found  # type: ignore[misc]  # it is there now
    say({str(nbytes): _predicted(found, nbytes, size - 1, honest) for nbytes in SIZES} | {"found": found})
    peers = [peer for peer in range(size) if peer != group.rank]
    tag = 0
    for line in sys.stdin:
        asked = json.loads(line)
        Measured.straight = lambda *_, straight=asked["straight"]: straight  # type: ignore[method-assign]
        packet, tag = torch.full((asked["nbytes"],), group.rank, dtype=torch.uint8), tag + 1
        buffers = {peer: torch.empty(asked["nbytes"], dtype=torch.uint8) for peer in peers}
        begin = instant(group, asked["idle"])  # type: ignore[arg-type]  # any group will do
        time.sleep(max(0.0, begin - time.monotonic()))
        before = group.sent_straight
        group.post(tag, dict.fromkeys(peers, packet), buffers).wait()
        assert all(buffer[0] == buffer[-1] == peer for peer, buffer in buffers.items())
        seconds = time.monotonic() - begin
        say({"seconds": seconds, "straight_nbytes": group.sent_straight - before, "streams": streams})
    os._exit(0)


def _predicted(found: Any, nbytes: int, receivers: int, straight: Any) -> dict[str, Any]:
    return {
        "mesh": found.mesh_seconds(nbytes, receivers),
        "star": found.star_seconds(nbytes),
        "chosen": "mesh" if straight(found, nbytes, receivers) else "star",
    }


class Replicas:
    """Replicas at a hub, over a router."""

    def __init__(self, size: int, rate: float, place: str) -> None:
        self.size, self.rate, (hub, self.delay) = size, rate, PLACES[place]
        self.hub_rate = hub or rate
        self.router = Router(Link(HUB))
        self.space = Namespaces(size + 1, self.router)
        self.folder, self.errors = TemporaryDirectory(), TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.running: list[subprocess.Popen[str]] = []
        self.streams = 0

    def __enter__(self) -> Replicas:
        self.space.__enter__()
        self.router.shape([Link(self.rate, DELAY)] * self.size + [Link(self.hub_rate, self.delay)])
        folder = Path(self.folder.name)
        listen = f"{self.space.addresses[-1]}:{PORT}"
        thinwire = str(Path(sys.executable).with_name("thinwire"))
        command = [
            thinwire,
            "hub",
            "--out",
            str(folder / "hub"),
            "--listen",
            listen,
            "--uses",
            str(self.size),
            "--json",
        ]
        hub = self.space.start(self.size, command, errors=self.errors)
        assert hub.stdout is not None
        token = next(json.loads(line)["token"] for line in hub.stdout if line.startswith("{"))
        for rank in range(self.size):
            given = [token, str(rank), str(self.size), self.space.addresses[rank], str(folder / f"keys-{rank}")]
            command = [sys.executable, __file__, "--member", *given]
            self.running.append(self.space.start(rank, command, errors=self.errors))
        return self

    def __exit__(self, *_: object) -> None:
        self.space.close()
        self.errors.close()
        self.folder.cleanup()

    def hear(self) -> list[Any]:
        """A line of each. Raises `RuntimeError` if one has ended."""
        lines = [process.stdout.readline() if process.stdout else "" for process in self.running]
        if not all(lines):
            self.errors.seek(0)
            raise RuntimeError(f"a replica has ended: {self.errors.read()[-2000:]}")
        return [json.loads(line) for line in lines]

    def exchange(self, nbytes: int, straight: bool) -> float:
        """Seconds until the last replica has all packets."""
        order = json.dumps({"nbytes": nbytes, "straight": straight, "idle": IDLE_SECONDS + 4 * (DELAY + self.delay)})
        for process in self.running:
            print(order, file=process.stdin, flush=True)
        told = self.hear()
        assert all((one["straight_nbytes"] > nbytes) is straight for one in told), told
        self.streams = max(int(one["streams"]) for one in told)
        return max(float(one["seconds"]) for one in told)


def measured(size: int, rate: float, place: str, rounds: int) -> dict[str, Any]:
    """The rows of one place of the hub."""
    with Replicas(size, rate, place) as replicas:
        begun, chosen = replicas.hear(), replicas.hear()
        assert all(one == chosen[0] for one in chosen)
        rows = []
        for nbytes in SIZES:
            replicas.exchange(nbytes, False), replicas.exchange(nbytes, True)  # warm
            turns = [(replicas.exchange(nbytes, False), replicas.exchange(nbytes, True)) for _ in range(rounds)]
            star, mesh = (statistics.median(each) for each in zip(*turns))
            rows.append({
                "nbytes": nbytes, "star_seconds": star, "mesh_seconds": mesh, "turns": turns,
                "faster": "mesh" if mesh < star else "star", **{f"{k}_predicted": v for k, v in chosen[0][str(nbytes)].items()},
            })  # fmt: skip
        report = replicas.router.shape([Link(rate, DELAY)] * size + [Link(replicas.hub_rate, replicas.delay)])
    return {
        "hub": place, "replicas": size, "bits_per_second": rate, "hub_bits_per_second": replicas.hub_rate,
        "measured": chosen[0]["found"], "measuring_seconds": max(one["measured_seconds"] for one in begun),
        "late_seconds": report["late_seconds"], "streams": replicas.streams, "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PLACES), help="one place of the hub")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s of each replica's uplink")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, for each size")
    parser.add_argument("--out", type=Path, help="the JSON (default: benchmarks/results/straight.json)")
    parser.add_argument("--member", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.member:
        token, rank, size, *rest = asked.member
        member(token, int(rank), int(size), *rest)
    if reason := missing():
        raise SystemExit(f"straight.py cannot run here: {reason}")
    result: dict[str, Any] = {"benchmark": "straight", "word": "emulated", **provenance(), "places": []}
    for place in (asked.only,) if asked.only else PLACES:
        found = measured(asked.replicas, 1e6 * asked.rate, place, asked.rounds)
        result["places"].append(found)
        for row in found["rows"]:
            print(
                f"{place} hub, {row['nbytes']} bytes: star {row['star_seconds']:.2f} s ({row['star_predicted']:.2f} predicted), mesh "
                f"{row['mesh_seconds']:.2f} s ({row['mesh_predicted']:.2f}); chosen {row['chosen_predicted']}, faster {row['faster']}",
                flush=True,
            )
        print(
            json.dumps({k: found[k] for k in ("measured", "measuring_seconds", "late_seconds", "streams")}), flush=True
        )
        path = save("straight", result, asked.out)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
