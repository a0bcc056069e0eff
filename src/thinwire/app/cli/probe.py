"""`thinwire probe`: measure links and machines, and write files for `thinwire plan`."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from thinwire.app.cli import checks as here
from thinwire.app.cli import options
from thinwire.app.plan.compute import probe_machine
from thinwire.app.plan.links import store
from thinwire.app.plan.machine import Machine
from thinwire.app.plan.probe import Probe, probe_links
from thinwire.app.plan.search import codecs
from thinwire.app.records.units import text_of_count, text_of_nbytes, text_of_rate, text_of_seconds
from thinwire.app.trainer import launch
from thinwire.app.trainer.place import device_of
from thinwire.app.trainer.run import Run
from thinwire.comm import Group, Link, LinkedGroup, gather, run_threads
from thinwire.comm.group import TIMEOUT
from thinwire.errors import ConfigurationError
from thinwire.files import check_place

MOST_THREADS = 128  # replicas of an emulated link


@dataclass(frozen=True)
class Options:
    """The options of `thinwire probe`."""

    run: tyro.conf.Positional[Path | None] = None
    """A run file: its model, sequence and precision are timed. Default: the defaults of `thinwire train`."""
    what: Literal["all", "links", "machine"] = "all"
    """Measure only the links, or only this machine."""
    out: Path = Path()
    """The folder for links.toml, links.samples.json and machine.toml (under torchrun: NAME.toml for every machine, written by rank 0)."""
    model: str | None = None
    """The model to time. Default: the run file's."""
    job: str | None = None
    """A job file of your own, whose step is timed. Default: the run file's."""
    sequence: int | None = None
    """Tokens per sequence. Default: the run file's."""
    link: str | None = None
    """No torchrun: measure this emulated link, such as 50mbit,30ms, between threads. Default: the links between the processes that torchrun
    started; none without torchrun."""
    replicas: int = 2
    """Number of replicas, with --link or under torchrun (one rank of each is measured)."""
    seconds: float = 0.5
    """Approximate seconds of a train of blocks; a micro-batch may take twice as long."""
    trips: int = 20
    """Number of round trips per pair."""
    name: str | None = None
    """Name of this machine. Default: its host name."""
    timeout: float = TIMEOUT
    """Seconds to wait for a silent replica."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    about = "Measure links and machines, for `thinwire plan`."
    asked = options.ask(Options, "thinwire probe", arguments, about)
    run = Run.load(asked.run) if asked.run else Run()
    changes = {"model": asked.model, "job": asked.job, "sequence": asked.sequence}
    run = run.changed(**{key: value for key, value in changes.items() if value is not None}).counted_in_samples()
    name, console = asked.name or socket.gethostname() or "here", options.console(asked.json)
    if not re.fullmatch(r"[\w.-]{1,60}", name):
        raise ConfigurationError(
            f"--name {name!r}: letters, digits, dots and dashes are needed, at most 60; it names a file."
        )
    emulated = Link.parse(asked.link) if asked.link is not None else None
    if emulated and asked.replicas > MOST_THREADS:
        raise ConfigurationError(
            f"--replicas {asked.replicas} with --link: at most {MOST_THREADS} threads are measured."
        )
    place = launch.torchrun_place()
    if place is not None and emulated is not None:
        raise ConfigurationError(
            "--link under torchrun: the real links between its processes are measured; leave --link out."
        )
    if place is None and emulated is None and asked.what == "links":
        raise ConfigurationError(
            "a link needs two replicas: start one process on each machine with torchrun (thinwire docs plan), or give --link 50mbit,30ms "
            "to measure an emulated link."
        )
    check_place(asked.out / "machine.toml")  # before minutes of measuring
    asked.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if place is not None:
        with launch.joined(place[1], asked.timeout) as group:
            probe, machines = _over(group, asked, run, name)
        if place[0] != 0:
            return 0
    else:
        probe = _emulated(emulated, asked) if emulated and asked.what != "machine" else None
        machines = []
        if asked.what != "links":
            memory = here.memory_of_each()
            machines = [probe_machine(run, name, memory, codecs(run), 2 * asked.seconds, asked.out)]
    if probe:
        found["links"] = _write_links(probe, asked, console, "emulated" if emulated else "measured")
    for machine in machines:
        path = asked.out / (f"{machine.name}.toml" if len(machines) > 1 else "machine.toml")
        machine.save(
            path,
            f"The machine {machine.name}, measured by `thinwire probe` on {_today()}. Edit freely: thinwire docs plan.",
        )
        found.setdefault("machines", []).append(str(path))
        console.print(_machine_table(machine))
        if machine.codecs:  # no plan can be made for a run like codistill's, whose replicas hold different models
            console.print(_codec_table(machine))
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    if probe is None and asked.what == "all":
        console.print(
            "no links measured: start one process on each machine by torchrun, or give --link", highlight=False
        )
    return options.answer(asked.json, found)


def _over(group: Group, asked: Options, run: Run, name: str) -> tuple[Probe | None, list[Machine]]:
    """Measure the links, then all machines at once, as in training. Every rank's results are sent to all."""
    if torch.cuda.is_available():  # all that follows is of the current GPU
        torch.cuda.set_device(device_of(launch.local_rank()))
    probe = probe_links(group, name, asked.seconds, asked.trips) if asked.what != "machine" else None
    if asked.what == "links":
        return probe, []
    names = [text.decode() for text in gather(group, name.encode()[:80], 80, "probe")]
    share = here.memory_of_each(names.count(names[group.rank]))  # ranks of one machine divide its memory
    unique = probe.links.names[group.rank] if probe else f"{name}-{group.rank}"
    own = probe_machine(run, unique, share, codecs(run), 2 * asked.seconds, asked.out)
    path = asked.out / f".machine-{group.rank}.toml"
    own.save(path)
    text = path.read_bytes()
    path.unlink()
    machines = []
    for rank, told in enumerate(gather(group, text, 1 << 20, "probe")):
        path = asked.out / f".machine-{group.rank}-{rank}.toml"
        path.write_bytes(told)
        machines.append(Machine.load(path))
        path.unlink()
    return probe, machines


def _emulated(link: Link, asked: Options) -> Probe:
    """Measure threads of this process on emulated links."""

    def body(group: Group) -> Probe:
        linked = LinkedGroup(group, link)
        return probe_links(linked, f"replica-{group.rank}", asked.seconds, asked.trips)

    return run_threads(asked.replicas, body, asked.timeout)[0]


def _write_links(probe: Probe, asked: Options, console: Console, word: str) -> dict[str, Any]:
    links = dataclasses.replace(probe.links, word=word)
    path, raw = asked.out / "links.toml", asked.out / "links.samples.json"
    comment = (
        f"Links between {len(links)} replicas, {word}; written by `thinwire probe` on {_today()}.\n"
        "alone: rate and one-way delay (half a round trip) without other traffic; together: every replica sends to every other.\n"
        "Edit freely: thinwire docs plan."
    )
    links.save(path, comment)
    store(raw, json.dumps(probe.samples) + "\n")
    table = Table("from", "to", "rate", "delay", "together", title=f"Links ({word})")
    for (a, b), link in sorted(links.alone.items()):
        together = text_of_rate(links.together.get((a, b)))
        table.add_row(
            links.names[a],
            links.names[b],
            text_of_rate(link.bits_per_second),
            text_of_seconds(link.delay_seconds),
            together,
        )
    console.print(table)
    latency, rate = (probe.round.latency_seconds, probe.round.bits_per_second) if probe.round else (None, None)
    says = f"{text_of_seconds(latency)}, and for its bytes {text_of_rate(rate)} a replica ({word})"
    console.print(f"a round, every replica to every other, takes {says}", highlight=False)
    console.print(f"written: {path}, {raw}", soft_wrap=True, highlight=False)
    rows = [
        {"from": links.names[a], "to": links.names[b], "bits_per_second": link.bits_per_second, "delay_seconds": link.delay_seconds,
         "together_bits_per_second": links.together.get((a, b))}
        for (a, b), link in sorted(links.alone.items())
    ]  # fmt: skip
    return {
        "file": str(path),
        "samples": str(raw),
        "word": word,
        "link": rows,
        "round": {"latency_seconds": latency, "bits_per_second": rate},
    }


def _machine_table(machine: Machine) -> Table:
    title = f"{machine.name}: {machine.model}, sequences of {machine.sequence} (measured)"
    table = Table("micro-batch", "seconds", "tokens/s", "peak memory", title=title)
    for step in machine.steps:
        tokens = f"{step.batch * machine.sequence / step.seconds:,.0f}"
        table.add_row(str(step.batch), text_of_seconds(step.seconds), tokens, text_of_nbytes(step.peak_nbytes))
    update, disk = text_of_seconds(machine.update_seconds), text_of_nbytes(machine.disk_nbytes_per_second)
    table.caption = f"update {update}; disk {disk}/s; a replica's process before it has a model {text_of_nbytes(machine.base_nbytes)}"
    return table


def _codec_table(machine: Machine) -> Table:
    kinds = (("", machine.codecs), (" on the GPU", machine.on_gpu))
    rows = [(f"{name}{where}", timed) for where, codecs in kinds for name, timed in codecs.items()]
    fragments = [f"of {text_of_count(speed.parameters)}" for speed in rows[0][1]]
    table = Table("codec", *fragments, title="Codecs, encode / decode (measured)")
    table.caption = "million parameters a second, for fragments of so many parameters"
    for name, timed in rows:
        table.add_row(name, *(f"{speed.encode / 1e6:,.0f} / {speed.decode / 1e6:,.0f}" for speed in timed))
    return table


def _today() -> str:
    return time.strftime("%Y-%m-%d")
