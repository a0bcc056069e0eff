"""Checks of a machine for a run: processors, memory, network, disk. Each check gives a `CheckResult`."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import distributed as dist

from thinwire.app.records.printable import reason
from thinwire.app.records.units import text_of_nbytes, text_of_rate, text_of_seconds
from thinwire.comm.torch import connect
from thinwire.errors import LinkError
from thinwire.files import existing
from thinwire.version import __version__

# module: extra
EXTRAS = {
    "pyarrow": "parquet",
    "transformers": "hf",
    "grpc": "secure",
    "peft": "lora",
    "tensorboard": "tensorboard",
    "zstandard": "zstd",
}
ROUND_TRIP_NBYTES = 4 << 20
ROUND_TRIP_LIMIT = 20.0  # seconds for the self-test of gloo; a busy machine needs some of them


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. `do` is advice for a problem."""

    what: str
    level: Literal["ok", "warning", "problem"]
    says: str
    do: str = ""


def warn_unless(good: bool, what: str, says: str, do: str) -> CheckResult:
    """The result of a check; `do` is shown only if it is not `good`."""
    return CheckResult(what, "ok", says) if good else CheckResult(what, "warning", says, do)


def offers() -> Iterator[CheckResult]:
    """Versions, processors, memory, extras."""
    yield CheckResult(
        "thinwire", "ok", f"{__version__} · Python {platform.python_version()} · torch {torch.__version__}"
    )
    yield CheckResult("cores", "ok", f"{cores()} · torch uses {torch.get_num_threads()} thread(s) here")
    total, available = memory()
    says = f"{text_of_nbytes(total)}, {text_of_nbytes(available)} free"
    yield warn_unless(available > 2 << 30, "memory", says, "the demo takes about 1 GB: end something large")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        yield CheckResult("GPU", "ok", ", ".join(f"{p.name} ({text_of_nbytes(p.total_memory)})" for p in names))
    else:
        yield CheckResult("GPU", "ok", "none that torch can use: training runs on the CPU")
    absent = [extra for module, extra in EXTRAS.items() if importlib.util.find_spec(module) is None]
    present = [module for module in EXTRAS if importlib.util.find_spec(module) is not None]
    says = f"{', '.join(present) or 'none'} installed" + (f"; not installed: {', '.join(absent)}" if absent else "")
    yield CheckResult(
        "extras", "ok", says, f"where wanted: pip install 'thinwire[{','.join(absent)}]'" if absent else ""
    )


def network() -> Iterator[CheckResult]:
    """Backends, interfaces, a round trip, and the shaping of a link."""
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
    if "gloo" in backends:
        yield CheckResult("torch.distributed", "ok", ", ".join(backends))
    else:
        advice = "replicas as processes need gloo: install a torch that has it"
        yield CheckResult("torch.distributed", "problem", ", ".join(backends) or "no backend", advice)
    found = [f"{name} {' '.join(addresses) or 'without address'}" for name, addresses in interfaces().items()]
    yield warn_unless(
        bool(found), "interfaces", "; ".join(found) or "none found", "replicas as processes need at least lo"
    )
    if "gloo" in backends:
        yield round_trip()
    yield shaping()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> tuple[int, int]:
    """Total bytes, and bytes that a program can get."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return (int(lines["MemTotal"].split()[0]) << 10, int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total


def memory_of_each(sharing: int = 1) -> int:
    """Bytes that each of `sharing` replicas on this machine can get: of the GPUs, if torch sees any, otherwise of the host."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] // -(-sharing // torch.cuda.device_count())
    return memory()[1] // sharing


def interfaces() -> dict[str, list[str]]:
    """Addresses by interface."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, addresses in found.items():
            try:  # SIOCGIFADDR, linux/sockios.h
                reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
            except OSError:  # down, or IPv6 only
                continue
    try:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)))
    except OSError:
        pass
    return found


def round_trip() -> CheckResult:
    """Test gloo within this process: send a byte there and back, then `ROUND_TRIP_NBYTES` one way."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported without saying so
    times: list[float] = []
    failures: list[str] = []

    def end(rank: int) -> None:
        try:
            carrier = connect(store, rank, 2, "127.0.0.1", ROUND_TRIP_LIMIT)
            byte, block = torch.zeros(1, dtype=torch.uint8), torch.zeros(ROUND_TRIP_NBYTES, dtype=torch.uint8)
            for tensor in (byte, byte, block):  # the first trip makes the connection
                began = time.perf_counter()
                first, second = (carrier.send, carrier.recv) if rank == 0 else (carrier.recv, carrier.send)
                first([tensor], 1 - rank, 0).wait()
                second([byte], 1 - rank, 0).wait()
                if rank == 0:
                    times.append(time.perf_counter() - began)
        except (RuntimeError, LinkError) as error:
            failures.append(str(error).strip().split("\n")[0])

    threads = [threading.Thread(target=end, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * ROUND_TRIP_LIMIT)
    what = "gloo round trip"
    if failures or len(times) < 3:
        advice = "replicas as processes need the loopback interface: ip link set lo up"
        return CheckResult(what, "problem", f"failed: {failures[0] if failures else 'no answer'}", advice)
    rate = text_of_rate(8 * ROUND_TRIP_NBYTES / times[2])
    return CheckResult(what, "ok", f"{text_of_seconds(times[1])}; {rate} within this machine (measured)")


def shaping() -> CheckResult:
    """Make a network namespace with a slow loopback, and remove it."""
    name = f"thinwire-doctor-{os.getpid()}"
    tbf = f"tc -n {name} qdisc add dev lo root tbf rate 10mbit burst 32kb latency 50ms"
    why = ""
    try:
        for command in (f"ip netns add {name}", tbf):
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False, timeout=60)
            if done.returncode:
                why = why or (done.stderr.strip().splitlines() or [f"{command} ended with {done.returncode}"])[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(f"ip netns del {name}".split(), capture_output=True, check=False, timeout=60)
    return warn_unless(
        not why,
        "shaped links",
        f"network namespaces with tc tbf can{'not' if why else ''} be made{f' ({why})' if why else ''}",
        "only benchmarks need them: Linux, root, and apt install iproute2; --link emulates a link without them",
    )


def disk(runs: Path) -> CheckResult:
    """The free space for run folders."""
    place = existing(runs)
    if not place.is_dir():
        return CheckResult("disk", "problem", f"{place} is a file", "train with --out FOLDER, a folder")
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        return CheckResult(
            "disk", "problem", f"{place} cannot be written", "train with --out FOLDER, a folder that can"
        )
    return warn_unless(free > 1 << 30, "disk", f"{text_of_nbytes(free)} free for {runs}", "make room for checkpoints")


def meeting_point(address: str, port: int) -> Iterator[CheckResult]:
    """Rank 0's address and port, and the address at which gloo would listen here."""
    try:
        theirs = {str(info[4][0]) for info in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:  # the latter: 10.0..1
        advice = "give --master-addr an address, or add the name to the hosts file"
        yield CheckResult("rank 0", "problem", f"{address} does not resolve ({reason(error)})", advice)
        return
    own = {a for addresses in interfaces().values() for a in addresses}
    chosen = min(theirs & own or theirs)
    with socket.socket(socket.AF_INET6 if ":" in chosen else socket.AF_INET) as probe:
        probe.settimeout(3.0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if theirs & own:
                probe.bind((chosen, port))
                yield CheckResult("rank 0", "ok", f"{address} is this machine, and port {port} is free")
            else:
                probe.connect((chosen, port))
                yield CheckResult("rank 0", "ok", f"{address}:{port} answers")
        except OSError as error:
            if theirs & own:
                advice = "end what holds it, or take another --master-port"
                yield CheckResult("rank 0", "problem", f"port {port} cannot be used here ({reason(error)})", advice)
            else:
                advice = "as it must be while rank 0 does not run; else open the port"
                yield CheckResult("rank 0", "warning", f"{address}:{port} does not answer ({reason(error)})", advice)
    try:
        here = socket.gethostbyname(socket.gethostname())
    except OSError:
        here = "nothing"
    yield warn_unless(
        here != "nothing" and not here.startswith("127."),
        "address for gloo",
        f"this machine's name resolves to {here}",
        "other machines cannot reach that: set GLOO_SOCKET_IFNAME to the interface towards them (thinwire docs machines)",
    )
