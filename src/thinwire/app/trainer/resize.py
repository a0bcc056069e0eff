"""Resizes a run of a fixed group: converts its newest set of checkpoints to another number of replicas.

The agreed state (anchors, outer state, counts of rounds, choices of policies) is taken over bit for bit. A replica that stays keeps
its weights, inner moments and feedback. A new one begins at the anchors, with the inner moments of a donor. Fresh moments would make
its next steps as large as the first of a run, at a learning rate that is past its warm-up. Rounds in flight had other members, so they
are dropped like failed rounds: their deltas are still in the weights of the replicas that stay, and are sent with the next delta.
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire import checkpoint
from thinwire.app.records.events import being_written
from thinwire.app.records.printable import quoted
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.trained import at_the_anchors
from thinwire.checkpoint import Checkpoint, read_tree
from thinwire.data_ledger import Claim, ReadCount, lanes_of
from thinwire.data_ledger.layout import decode, encode
from thinwire.drivers.fragment import DROPPED
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.pieces.partition import Fragment
from thinwire.pieces.schedule import Schedule
from thinwire.rng import derive
from thinwire.state_tree import Packed, pack, unpack
from thinwire.strategy import Strategy

_OF_ONE_REPLICA = ("deviation", "own", "deviation_outer.", "delta")  # state that a new replica does not have


def resize(run: Run, folder: Path, model: nn.Module) -> str:
    """Convert the checkpoints in `folder` to those of `run`, which differs in its number of replicas, and write its run file. Returns a line
    about it. The earlier checkpoints are set aside as checkpoints-1. `model` is the run's, without values.

    Raises `ConfigurationError`, `CheckpointError`, and then changes nothing.
    """
    before = Run.load(folder / "run.toml")
    old, new = before.placement.replicas, run.placement.replicas
    begun = before.changed(replicas=new, batch=run.data.batch)
    if other := run.unlike(begun):
        raise ConfigurationError(f"{folder} was begun with other settings: {other}. Resume with the run's own.")
    if any(being_written(path) for path in folder.glob("events/*.jsonl")):
        raise ConfigurationError(f"a run is active in {folder}; wait until it has stopped.")
    if run.placement.elastic:
        begun.save(folder / "run.toml")
        return (
            f"from {old} to {new} replicas: a new replica takes over the state of the others; the text is split again"
        )
    made = folder / f".checkpoints-of-{new}"
    if made.is_dir() and not (folder / "checkpoints").exists():  # killed between the two renames
        made.rename(folder / "checkpoints")
    strategy = None if run.make_method() else run.make_strategy()
    if strategy is not None and not strategy.exchange.traits.agrees:
        raise ConfigurationError(
            f"{old} replicas there, {new} given: with {run.method.label} each replica has its own weights, and a new one would have none; "
            f"resume with {old}."
        )
    if strategy is None or strategy.filters:
        raise ConfigurationError(
            f"{old} replicas there, {new} given: {run.method.label} keeps what each replica has not sent; resume with {old}."
        )
    by_tokens = before.placement.weigh == "tokens" or strategy.exchanges_gradients
    if run.data.batches and not by_tokens:
        raise ConfigurationError(
            f"batch={list(run.data.batches)} given, {before.data.batch} there: there all deltas weigh 1, and unequal micro-batches need weights from "
            "the first round on; resume with one --batch for all."
        )
    shutil.rmtree(made, ignore_errors=True)  # left by a process that was killed
    step, data = _make(made, _newest_set(folder, old), new, strategy, model, run.seed, _batches(before), _batches(run))
    aside = next(path for n in itertools.count(1) if not (path := folder / f"checkpoints-{n}").exists())
    (folder / "checkpoints").rename(aside)
    made.rename(folder / "checkpoints")
    begun.save(folder / "run.toml")
    for rank in range(new, old):  # a log without an end event would mean a killed replica
        (folder / f"events/replica-{rank}.jsonl").rename(aside / f"replica-{rank}.jsonl")
    return _line(old, new, step, data, aside.name)


def _line(old: int, new: int, step: int, data: str, aside: str) -> str:
    if new > old:
        who = ", ".join(f"replica {rank} with the inner moments of replica {rank % old}" for rank in range(old, new))
        what = f"at the agreed weights begin {who}"
    else:
        gone = ", ".join(map(str, range(new, old)))
        what = f"replica {gone} leaves, and its training since its last rounds is lost"
    return (
        f"from {old} to {new} replicas at step {step}: {what}; rounds in flight are dropped and sent again; {data}; the earlier checkpoints "
        f"are in {aside}"
    )


def _newest_set(folder: Path, replicas: int) -> list[Checkpoint]:
    """The newest set with a whole checkpoint of every replica."""
    if any(folder.glob("checkpoints/*.shard-*")):
        raise ConfigurationError(
            f"{folder} holds sharded replicas: resume with {replicas} replicas, like the run; only the number of whole replicas can change."
        )
    found: list[dict[int, Checkpoint]] = []
    for rank in range(replicas):
        own = dict[int, Checkpoint]()
        for path in checkpoint.found_in(folder / "checkpoints" / f"replica-{rank}"):
            try:
                own[checkpoint.step_of(path)] = checkpoint.read(path)
            except CheckpointError:
                continue
        found.append(own)
    common = set[int].intersection(*map(set, found))
    if not common:
        raise CheckpointError(
            f"{folder} has no step of which all {replicas} replicas have a whole checkpoint, and all are needed for another number; "
            f"bring them into one folder (thinwire checkpoints {quoted(folder)} --verify), or resume with {replicas} replicas."
        )
    return [own[max(common)] for own in found]


def _make(
    into: Path, found: Sequence[Checkpoint], new: int, strategy: Strategy, model: nn.Module, seed: int,
    before: Sequence[int], after: Sequence[int],
) -> tuple[int, str]:  # fmt: skip
    """Write the set for `new` replicas. Returns its step, and a line about the data."""
    fragments = strategy.partition.fragments(model)
    outer = [unpack(read_tree(one.path / "outer.safetensors"), "outer") for one in found]
    _check_memory(strategy, fragments, outer, new)
    gradients = strategy.exchanges_gradients
    samples, data = _samples(found, before, after, strategy)
    for rank in range(new):
        donor = rank % len(found)
        manifest, facts = dict(found[donor].manifest), dict(found[donor].manifest["facts"])
        since = [DROPPED if str(index) in facts["flights"] else value for index, value in enumerate(facts["since"])]
        manifest["facts"] = facts | {"flights": {}, "since": since, "replica": f"replica-{rank} of {new}"}
        weights, inner = (read_tree(found[donor].path / f"{name}.safetensors") for name in ("model", "inner"))
        inner = Packed(inner.json, {n: value for n, value in inner.tensors.items() if not n.startswith("notes.")})
        state = {name: value for name, value in outer[donor].items() if name.split(".", 1)[1] != "delta"}
        notes = manifest["notes"]
        other = notes.get("other_steps", 0) + (len(found) - new) * found[0].step
        manifest["notes"] = ({} if rank >= len(found) else notes) | {"other_steps": other} | samples[rank]
        if rank >= len(found):
            number = derive(seed, "random state", rank, found[0].step)
            own, numpy = torch.Generator().manual_seed(number % 2**63), np.random.RandomState(number % 2**32)
            drawn = checkpoint.pack_random(
                own.get_state(), None, numpy.get_state(legacy=False), random.Random(number).getstate()
            )
            inner = Packed(inner.json | {"random": drawn.json}, inner.tensors | drawn.tensors)
            state = _without_own(state)
            if not gradients:  # with gradients all weights are equal, and the anchors are those of the start
                there = unpack(weights, "model")
                weights = pack(there | at_the_anchors(model, there, state, fragments), "model")
        checkpoint.write(into / f"replica-{rank}", manifest, (weights, inner, pack(state, "outer")), keep=1)
    return found[0].step, data


def _batches(run: Run) -> Sequence[int]:
    """The micro-batch of each replica."""
    return [run.data.batch_of(rank) for rank in range(run.placement.replicas)]


def _samples(
    found: Sequence[Checkpoint], before: Sequence[int], after: Sequence[int], strategy: Strategy
) -> tuple[list[dict[str, Any]], str]:
    """The position in the data of each replica for the micro-batches `after`, and a line about it: the rest of the epoch is split again."""
    notes = [one.manifest["notes"].get("samples") for one in found]
    if not notes[0]:
        told = "the job reads its data independently, so that some of it may be read twice or not at all"
        return [{}] * len(after), told
    ledger = decode(bytes.fromhex(notes[0]["ledger"]))
    owners, parts = [rank for rank, lanes in enumerate(lanes_of(before)) for _ in lanes], lanes_of(after)
    places = [dict(lane) for note in notes for lane in note.get("lanes", [note])]
    begin = int(places[0]["count"]) + int(places[0]["offset"])  # the first sample of the next micro-batch in its lane
    claims, present = dict[str, Claim](), dict[str, ReadCount]()
    for number, (rank, place) in enumerate(zip(owners, places, strict=True)):
        name, one = f"replica-{number}", found[rank]
        lease, count, offset = ledger.lease(name), int(place["count"]), int(place["offset"])
        assert lease is not None  # every lane of the run has one
        low = high = count  # the weights of a replica that stays contain its training
        if rank >= len(after):
            steps, (step, rest) = _landed(one, strategy), divmod(count + offset, one.step)
            low, high = (lease.first, count) if rest else (max(lease.first, s * step - offset) for s in steps)
        claims[name] = Claim(lease.serial, lease.version, ((lease.first, low), (high, high)))
        if number < parts[-1].stop:
            present[name] = ReadCount(lease.serial, lease.version, high)
            place["count"] = high
    present |= {f"replica-{number}": ReadCount() for number in range(len(places), parts[-1].stop)}
    ledger, named = ledger.commit(0, claims, present)
    told = "the rest of the epoch is split again" + "".join(
        f", samples {first} to {last - 1} of its order are lost with replica-{owners[int(name.split('-')[1])]}"
        for name, (first, last) in named.lost
    )
    if math.gcd(*before) != math.gcd(*after):
        begin = begin // math.gcd(*before) * math.gcd(*after)
    counts = [int(place["count"]) for place in places] + [0] * parts[-1].stop
    lanes = [{"offset": begin - counts[number], "count": counts[number]} for number in range(parts[-1].stop)]
    shared = {"ledger": encode(ledger).hex()}
    unequal = len(set(after)) > 1
    noted = [{"lanes": [lanes[n] for n in part]} if unequal else lanes[part.start] for part in parts]
    return [{"samples": shared | one} for one in noted], told


def _landed(one: Checkpoint, strategy: Strategy) -> tuple[int, int]:
    """The numbers of a leaving replica's inner steps that are in all anchors, and that are in any anchor."""
    if strategy.exchanges_gradients:
        return one.step, one.step
    if not isinstance(strategy.schedule, Schedule):
        return 0, one.step
    facts, steps = one.manifest["facts"], list[int]()
    since, flights = facts["since"], facts["flights"]
    for index, last in enumerate(since):
        if str(index) in flights:  # the flight is dropped, and the round before it is the last one that landed
            earlier = range(flights[str(index)][1] - 1, 0, -1)
            last = next((s for s in earlier if index in strategy.schedule.departs(s, len(since))), 0)
        if last == DROPPED:
            return 0, one.step
        steps.append(last)
    return min(steps), max(steps)


def _check_memory(
    strategy: Strategy, fragments: Sequence[Fragment], outer: Sequence[Mapping[str, Tensor]], new: int
) -> None:
    """Check that a new replica can take over the exchange's state: it must be agreed, and have the same size for any number of replicas."""
    for index, fragment in enumerate(fragments):
        prefix = f"{index}.exchange."
        held = [{n.removeprefix(prefix): t for n, t in one.items() if n.startswith(prefix)} for one in outer]
        alike = all(one.keys() == held[0].keys() and all(torch.equal(one[n], held[0][n]) for n in one) for one in held)
        if any(name.startswith(f"{index}.aggregate.") for one in outer for name in one):
            raise ConfigurationError(
                f"{new} replicas given, {len(outer)} there: {strategy.aggregate} keeps a state for each replica; resume with {len(outer)}."
            )
        codec = strategy.codec.fitted(fragment.shapes)
        due = [strategy.exchange.init(codec, fragment.numel, rank, new) for rank in range(new)]
        fits = all({n: t.numel() for n, t in one.items()} == {n: t.numel() for n, t in held[0].items()} for one in due)
        if not alike or not fits:
            raise ConfigurationError(
                f"{new} replicas given, {len(outer)} there: {strategy.exchange} keeps what each replica has not sent, which depends on "
                f"their number; resume with {len(outer)}."
            )


def _without_own(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A new replica's state from a donor's: the agreed state, with empty feedback."""
    kept: dict[str, Tensor] = {}
    for name, value in state.items():
        what = name.split(".", 1)[1]
        if not what.startswith(_OF_ONE_REPLICA):
            kept[name] = torch.zeros_like(value) if what.startswith("feedback.") else value
    return kept
