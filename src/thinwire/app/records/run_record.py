"""A run folder read back: its settings, its replicas, and the numbers that follow from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.app.records.clocks import Offset
from thinwire.app.records.events import event_files
from thinwire.app.records.losses import JUMPED, named_losses, outcome, useless
from thinwire.app.records.participation import (
    Participation,
    Steps,
    how_many,
    jumped_by_all,
    merge_rounds,
    numbers,
)
from thinwire.app.records.replica_record import Evaluations, Note, ReplicaRecord
from thinwire.app.records.run_file import read_run_file
from thinwire.app.records.samples import samples_of, text_of_samples
from thinwire.app.records.score import Score, score_of
from thinwire.app.records.sessions import number, whole
from thinwire.app.records.start import Start
from thinwire.app.records.summary import Summary
from thinwire.app.records.units import NOTHING, text_of_nbytes, text_of_seconds
from thinwire.errors import DataError, MissingError
from thinwire.files import contents, parsed

PROVENANCES = ("measured", "emulated", "simulated", "predicted")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run folder, read back. `remarks` name its irregularities."""

    folder: Path
    settings: Mapping[str, Any]
    replicas: tuple[ReplicaRecord, ...]
    summary: Summary
    status: (
        str  # "finished", "no result: why", "diverged: why", "jumped: why", "stopped: why" or "still running or killed"
    )
    remarks: tuple[str, ...]

    @classmethod
    def load(cls, folder: str | Path) -> RunRecord:
        """Read `folder`. Raises `DataError` if it is no run or holds no event yet."""
        global _latest
        folder = Path(folder)
        paths = event_files(folder)
        files = [path.stat() for path in (*paths, folder / "run.toml", folder / "summary.json") if path.exists()]
        state = folder.absolute(), tuple(paths), tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in files)
        if _latest and _latest[0] == state:  # a command asks several times, and a long run takes seconds to read
            return _latest[1]
        if not paths:
            why = "is no run folder: it has no events/*.jsonl" if folder.exists() else "does not exist"
            raise MissingError(f"{folder} {why}. Give the folder that `thinwire train` wrote.")
        records = ReplicaRecord.load_all(paths)
        read = {record.called for record in records}
        unread = [path for path in paths if path.stem not in read and path.stat().st_size]
        there = sum(1 for _ in folder.glob("events/*.jsonl"))
        newest = (
            [f"{there:,} event files are there; the newest {len(paths):,} were read."] if there > len(paths) else []
        )
        damaged = [f"{path} is damaged: it holds no start of a run." for path in unread]
        if not records and damaged:
            raise DataError(f"{' '.join(damaged)} One JSON object per line is needed; restore it, or give another run.")
        if not records:
            raise DataError(f"{folder} holds no event yet: its run was never started, or only just. Try again later.")
        replicas = tuple(sorted(records, key=lambda record: (record.replica, record.name)))
        settings, remarks = _settings(folder, replicas[0].start.run)
        summary, more = _summary(folder, replicas)
        taken = sum(len(record.step) for record in replicas)
        skipped = sum(record.skipped for record in replicas) / taken if taken else 0.0
        loss, known = summary.eval_loss, _evaluations(replicas)
        trained = [(float(record.loss[0]), float(record.smooth[-1])) for record in replicas if len(record.loss)]
        status = outcome(_status(replicas), loss, known, replicas[0].start.uniform, skipped, trained)
        return cls(
            folder, settings, replicas, summary, status, (*remarks, *newest, *damaged, *more, *_remarks(replicas))
        )

    @property
    def start(self) -> Start:
        """What its first replica told when it began."""
        return self.replicas[0].start

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def evaluations(self) -> Evaluations:
        """The evaluations of the first replica that evaluated: the anchors are the same on all."""
        return _evaluations(self.replicas)

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """What a run that clips and adds noise has promised: the weakest of what its replicas said when they ended."""
        said = [end.get("privacy") for end in _ends(self.replicas)]
        whole = [one for one in said if isinstance(one, dict) and math.isfinite(number(one.get("epsilon")))]
        return max(whole, key=lambda one: number(one["epsilon"]), default=None)

    @property
    def named_samples(self) -> str:
        """Which samples were lost with which replica, and which went to others."""
        return text_of_samples(_ends(self.replicas))

    @property
    def steps(self) -> list[Steps]:
        """The steps of each replica of an elastic run; empty for a fixed group, in which every replica takes every step."""
        return [replica.steps for replica in self.replicas] if _elastic(self.replicas) else []

    @property
    def rates(self) -> list[float]:
        """The rate of each replica's link in bits per second; empty if one is not known."""
        rates = [replica.start.bits_per_second for replica in self.replicas]
        return rates if all(map(math.isfinite, rates)) else []

    @property
    def bits_per_second(self) -> float | None:
        """The rate of the slowest link, if it is known."""
        return min(self.rates, default=None)

    def score(self, best: float | None = None) -> Score:
        """One number with named parts; `best` is the least evaluation loss of the runs that it is shown beside."""
        said = self.summary
        loss, best = (math.inf, 0.0) if useless(self.status) else (said.eval_loss, best)
        return score_of(self.replicas, said.bits_per_parameter_per_step, said.taking_part, loss, best)

    def of_command(self, began: float, seconds: float) -> RunRecord:
        """This record with the time of the whole command, if it has trained: see `ReplicaRecord.time_of_command`."""
        if not any(opened >= began for replica in self.replicas for opened in replica.opened):
            return self
        time = _mean_time([replica.time_of_command(began, seconds) for replica in self.replicas])
        return replace(self, summary=replace(self.summary, time=time))

    @property
    def clocks(self) -> dict[str, Offset]:
        """How far replicas' clocks are ahead of the first one's, by name. A replica whose messages do not tell is left out."""
        return {replica.called: replica.clock for replica in self.replicas if replica.clock}

    @property
    def notes(self) -> list[Note]:
        own = [note for replica in self.replicas for note in replica.notes]
        return sorted([*own, *_membership_notes(self.replicas)], key=lambda note: note.seconds)


_latest: tuple[object, RunRecord] | None = None  # the record that was read last, and the files that it was read from


def best_loss(records: Sequence[RunRecord]) -> float | None:
    """The least evaluation loss of several runs side by side; None for one alone."""
    evaluated = [record for record in records if record.summary.eval_loss is not None]
    losses = [record.summary.eval_loss or 0.0 for record in evaluated if not useless(record.status)]
    return min(filter(math.isfinite, losses), default=None) if len(evaluated) > 1 else None


def text_of_privacy(privacy: Mapping[str, Any] | None) -> str:
    """The guarantee of differential privacy in words; empty if there is none."""
    if privacy is None:
        return ""
    values = {name: number(privacy.get(name)) for name in ("epsilon", "epsilon_of_packets", "delta", "rounds")}
    return (
        f"({values['epsilon']:.3g}, {values['delta']:.3g})-differentially private for a whole {privacy.get('unit')} towards all who see the "
        f"model, after {values['rounds']:.0f} rounds; ε = {values['epsilon_of_packets']:.3g} towards peers, who see its packets."
    )


def _ends(replicas: Sequence[ReplicaRecord]) -> list[Mapping[str, Any]]:
    """The summaries with which replicas ended, of those that have."""
    return [replica.end for replica in replicas if replica.end is not None]


def _settings(folder: Path, logged: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    path = folder / "run.toml"
    try:
        return read_run_file(path)[0], []
    except FileNotFoundError:
        return logged, ["There is no run.toml; the settings are those of the event log."]
    except (OSError, ValueError) as error:
        return logged, [f"run.toml cannot be read ({error}); the settings are those of the event log."]


def _elastic(replicas: Sequence[ReplicaRecord]) -> bool:
    return replicas[0].start.elastic


def _membership_notes(replicas: Sequence[ReplicaRecord]) -> list[Note]:
    """Notes on an elastic run: which replicas joined and left, and which rounds were dropped."""
    if not _elastic(replicas):
        return []
    notes: list[Note] = []
    participation, asked = Participation(1), replicas[0].start.replicas
    for seen in merge_rounds(seen for replica in replicas for seen in replica.rounds):
        joined, left = participation.take(seen)
        for kind, names in (("joined", joined), ("left", left)):
            if names:
                there = f"{', '.join(names)}; {how_many(seen.members, asked)}"
                notes.append(Note(seen.seconds, seen.number, NOTHING, kind, there))
        if seen.committed is False and seen.reason:
            what = f"round {seen.number}, fragment {seen.fragment}: {seen.reason}"
            notes.append(Note(seen.seconds, seen.number, NOTHING, "dropped", what))
    for replica in replicas:
        for before, after in zip(replica.incarnations, replica.incarnations[1:]):
            away = f"its process ended; back after {text_of_seconds(after.begin - before.end)}"
            notes.append(Note(before.end, before.step, replica.called, "away", away))
    return notes


def _evaluations(replicas: Sequence[ReplicaRecord]) -> Evaluations:
    return next((r.evaluations for r in replicas if len(r.evaluations.step)), replicas[0].evaluations)


def _ended(replicas: Sequence[ReplicaRecord]) -> bool:
    """Whether the run has ended, perhaps without replicas that were lost; one that has begun again has had more sessions."""
    latest = 0 if _elastic(replicas) else max(replica.sessions for replica in replicas)
    return any(
        replica.end is not None and replica.stopped is None and replica.sessions >= latest for replica in replicas
    )


def _status(replicas: Sequence[ReplicaRecord]) -> str:
    reasons = [replica.stopped for replica in replicas if replica.stopped is not None]
    if reasons and not (_elastic(replicas) and _ended(replicas)):
        return f"stopped: {reasons[0]}"
    return (_jump(replicas) or "finished") if _ended(replicas) else "still running or killed"


def _jump(replicas: Sequence[ReplicaRecord]) -> str:
    """The status of an elastic run of whose steps most were trained by nobody, as after a false word about the others' step; "" for others.

    A replica that joined late, or is slow, jumps over steps that replicas with logs elsewhere trained: their rounds account for these.
    """
    steps = [replica.steps for replica in replicas] if _elastic(replicas) else []
    last, alone = max((each.at for each in steps), default=0), jumped_by_all(steps)
    if 2 * alone <= last:
        return ""
    here, start = {replica.called for replica in replicas}, replicas[0].start
    seen = [each for replica in replicas for each in replica.rounds]
    if any(not here.issuperset(each.members) for each in seen):
        rounds, every = max(each.number for each in seen), number(start.made_of.get("every"))
        if not 2 * rounds * every < last * max(1, len(start.fragments)):  # also if nobody knows
            return ""
    return f"{JUMPED}: {alone:,} of {last:,} steps were trained by nobody"


def _summary(folder: Path, replicas: Sequence[ReplicaRecord]) -> tuple[Summary, list[str]]:
    """The run's own summary at its end; without one, a summary from its events."""
    computed = _computed(replicas)
    said = _ends(replicas)
    elastic = _elastic(replicas)
    if not said or (len(said) < len(replicas) and not (elastic or _ended(replicas))):
        remark = "There is no end event, so the run is still active or was killed; the numbers are from its events."
        return computed, [remark]
    means = {key: _mean([summary.get(key) for summary in said]) for key in said[0]}
    for key in ("wire_bytes_sent", "bits_per_parameter_per_step"):
        if key in means:  # every shard of a replica sends its own
            means[key] = number(means[key]) * len(replicas) / computed.replicas
    walls = [wall for summary in said if math.isfinite(wall := number(summary.get("wall_seconds")))]
    means |= {"wall_seconds": max(walls)} if walls else {}
    if _unlike(replicas):
        ended = [replica for replica in replicas if replica.end is not None]
        names = [f"{replica.called} ({replica.start.run.get('model')})" for replica in ended]
        means["losses"] = dict(zip(names, (end.get("eval_loss") for end in said)))
    if elastic:  # each told of itself alone
        means |= {"tokens": computed.tokens, "steps": computed.steps}
    without = "" if elastic else ", ".join(replica.name for replica in replicas if replica.end is None)
    remark = f"There is no end event of {without}: lost, or still active. The numbers are those of the others."
    return _overlaid(computed, {**_summary_file(folder), **means}), [remark] if without else []


def _mean_time(times: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    return {what: sum(time[what] for time in times) / len(times) for what in times[0]}


def _mean(values: Sequence[object]) -> object:
    numbers = [number(value) for value in values]
    return values[0] if any(math.isnan(value) for value in numbers) else sum(numbers) / len(numbers)


def _overlaid(summary: Summary, said: Mapping[str, object]) -> Summary:
    """`summary` with those of its fields that `said` has in the right type."""
    changed: dict[str, Any] = {}
    for item in fields(Summary):
        value = said.get(item.name)
        if item.name in ("living", "taking_part", "rounds_committed", "deltas_clipped") or item.name.startswith(
            ("steps_", "samples_")
        ):
            continue  # nobody can tell them alone
        if item.name == "losses":
            changed[item.name] = named_losses(value)
        elif item.name == "time":  # the command's own, which its file tells
            parts = {what: number(spent) for what, spent in value.items()} if isinstance(value, dict) else {}
            known = parts.keys() == summary.time.keys() and all(0 <= spent < math.inf for spent in parts.values())
            changed |= {item.name: parts} if known and parts["elapsed"] >= summary.time["elapsed"] else {}
        elif item.name == "provenance":
            changed |= {item.name: value} if value in PROVENANCES else {}
        elif item.name != "strategy" and not math.isnan(number(value)):
            whole = isinstance(getattr(summary, item.name), int) and math.isfinite(number(value))
            changed[item.name] = int(number(value)) if whole else number(value)
    return replace(summary, **changed)


def _summary_file(folder: Path) -> Mapping[str, object]:
    try:
        said = parsed(json.loads, contents(folder / "summary.json"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _computed(replicas: Sequence[ReplicaRecord]) -> Summary:
    """The summary that follows from the events alone."""
    start = replicas[0].start
    evaluated = _evaluations(replicas).loss
    elastic = _elastic(replicas)
    steps = (max if elastic else min)((int(r.step[-1]) if len(r.step) else 0) for r in replicas)
    parameters = start.parameters
    count = len(replicas) if elastic else len({r.replica for r in replicas})
    nbytes = sum(r.nbytes_sent for r in replicas) / count
    used = [r.compute_utilization for r in replicas if math.isfinite(r.compute_utilization)]
    return Summary(
        strategy=start.strategy,
        replicas=count,
        steps=steps,
        tokens=sum(int(r.tokens.sum()) for r in replicas),
        parameters=parameters,
        eval_loss=float(evaluated[-1]) if len(evaluated) else None,
        wire_bytes_sent=round(nbytes),
        wire_bytes_foreseen=round(sum(r.foreseen for r in replicas) / count),
        deltas_clipped=sum(r.clipped for r in replicas),
        bits_per_parameter_per_step=8 * nbytes / (parameters * steps) if parameters and steps else math.nan,
        compute_utilization=float(np.mean(used)) if used else math.nan,
        wall_seconds=max(r.wall_seconds for r in replicas),
        stall_seconds=float(np.mean([r.stall_seconds for r in replicas])),
        provenance=start.provenance,
        time=_mean_time([r.time for r in replicas]),
        **_membership(replicas),
        **samples_of(_ends(replicas), _computed_samples(replicas)),
    )


def _computed_samples(replicas: Sequence[ReplicaRecord]) -> int | None:
    """Sequences of text that the replicas of an elastic run have trained, counted or not; None for other runs."""
    run = replicas[0].start.run
    if not _elastic(replicas) or run.get("job") or not whole(run.get("sequence")):
        return None
    return sum(int(r.tokens.sum()) for r in replicas) // whole(run.get("sequence"))


def _membership(replicas: Sequence[ReplicaRecord]) -> dict[str, Any]:
    """The numbers of an elastic run that no replica can tell alone."""
    if not _elastic(replicas):
        return {}
    rounds = merge_rounds(seen for replica in replicas for seen in replica.rounds)
    incarnations = {replica.called: replica.incarnations for replica in replicas}
    seen = numbers(rounds, incarnations, len(replicas[0].start.fragments))
    steps = {f"steps_{own}": sum(getattr(r.steps, own) for r in replicas) for own in ("trained", "jumped", "counted")}
    return {"living": seen.living, "taking_part": seen.taking_part, "rounds_committed": seen.committed, **steps}


def _unlike(replicas: Sequence[ReplicaRecord]) -> bool:
    """Whether every replica has trained and evaluated a model of its own, by what they said."""
    ends = _ends(replicas)
    return bool(ends) and all(end.get("eval_of") == "each" for end in ends)


def _remarks(replicas: Sequence[ReplicaRecord]) -> list[str]:
    remarks, expected = [], replicas[0].start.replicas
    count = len({replica.replica for replica in replicas})
    if count < expected and not _elastic(replicas):
        remarks.append(f"{count} of {expected} replicas left an event log.")
    weights = {str(end.get("weights")) for end in _ends([replica for replica in replicas if replica.stopped is None])}
    if len(weights) > 1 and len(replicas) == count and not _unlike(replicas):
        remarks.append("The replicas ended with different outer weights: at least one had not heard the last rounds.")
    damaged = sum(replica.damaged for replica in replicas)
    if damaged:
        remarks.append(f"{damaged} damaged line{'s were' if damaged > 1 else ' was'} passed over in the event logs.")
    lost = [lost for replica in replicas for lost in replica.lost]
    if lost:
        seconds = sum(item.span.end - item.span.begin for item in lost)
        remarks.append(
            f"{sum(item.steps for item in lost)} inner steps ({text_of_seconds(seconds)}, "
            f"{text_of_nbytes(sum(item.nbytes for item in lost))}), all replicas together, were lost in restarts and "
            "repeated; the numbers do not count them twice."
        )
    return remarks
