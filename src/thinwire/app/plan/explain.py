"""Explains a plan in words: the rank of each setting, and the methods that were refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thinwire.app.plan import cost
from thinwire.app.plan.compute import shape_of
from thinwire.app.plan.search import ruled_out
from thinwire.app.plan.setting import Setting, Task
from thinwire.app.plan.sharding import FP32, Shards, traffic
from thinwire.app.records.units import text_of_nbytes, text_of_rate, text_of_seconds, text_of_share
from thinwire.comm import Link
from thinwire.registered import PLANS, registered

MOST_NAMED = 5  # of one kind are named
NO_LOSS = "the laws predict losses of language models, and none of a job"
USELESS_UTILIZATION = 0.5  # utilization below which something is refused outright


def sentence(setting: Setting, best: Setting) -> str:
    """One sentence that explains the rank of a setting."""
    run, pace = setting.run, setting.pace
    if run.placement.replicas == 1:
        return "One replica alone: nothing is sent, and an outer step on its own deltas is a gain; but the work is not shared."
    schedule = run.make_strategy().schedule
    flight, window = text_of_seconds(setting.flight_seconds), text_of_seconds(schedule.delay * setting.step_seconds)
    if schedule.every == 1:
        why = f"every step waits {text_of_seconds(pace.stall_seconds)} for the gradients"
    elif not schedule.delay:
        why = (
            f"every {schedule.every} steps all wait {text_of_seconds(schedule.every * pace.stall_seconds)} for a round"
        )
    elif pace.latest_seconds <= 1e-3 * setting.step_seconds:
        why = f"a fragment flies {flight} and has {window}, so no replica waits"
    elif pace.wire_use > 0.97:
        why = "the slowest wire is busy all the time: no overlap can hide more"
    else:
        why = f"a fragment flies {flight} and has only {window}: the latest lands {text_of_seconds(pace.latest_seconds)} late"
    if pace.taken >= 0.01:
        why += f", and the work of its rounds takes {text_of_share(pace.taken)} of the time of the cores that train"
    if setting is best:
        return f"The best: {why}; {text_of_share(pace.utilization)} of the time is training."
    slower = setting.tokens_per_second / best.tokens_per_second - 1
    learns = setting.density / best.density - 1
    parts = [f"{100 * abs(slower):.0f} % {'more' if slower > 0 else 'fewer'} tokens/s"] if abs(slower) >= 0.005 else []
    parts += (
        [f"{100 * abs(learns):.0f} % {'more' if learns > 0 else 'less'} learnt from each token"]
        if abs(learns) >= 0.005
        else []
    )
    if best.run.placement.replicas == 1:
        parts += [f"{text_of_rate(setting.bits_per_second)} of traffic where it sends nothing"]
    else:
        sent = setting.bits_per_second / best.bits_per_second
        parts += [f"{sent:{'.2g' if sent < 99.5 else '.0f'}} × the traffic"] if not 0.67 < sent < 1.5 else []
    return f"{why[0].upper()}{why[1:]}; beside the best: {', '.join(parts) or 'the same in all that is predicted'}."


def refused(task: Task, best: Setting) -> list[cost.Refusal]:
    """Methods that are not tried over these links, with the numbers that say why."""
    if len(task.links) < 2 or task.base.model.job:  # the layers of a job's model are not known
        return []
    shape, run = shape_of(task.base), best.run
    machine = task.machine(best.places[0])
    micro = machine.micro_seconds(shape, run.data.sequence, run.data.largest_batch)
    found = [cost.tensor_parallel(task.links, shape, run.data.sequence, run.data.largest_batch, micro)]
    for refusals in registered(PLANS).values():
        found += refusals(task, best, micro)
    return found


def warnings(task: Task, best: Setting) -> list[str]:
    """Warnings about the best setting: each has a name and one line."""
    links = task.links
    said = [str(warning) for warning in dict.fromkeys((*best.loss.warnings, *best.warnings))]
    chosen = set(best.places)
    if len(chosen) == 1 and len(links) > 1:
        said.append(
            f"one-replica-alone: by these figures no second machine helps a step of {text_of_seconds(best.step_seconds)}; plan a larger batch or "
            "model, or faster links, for replicas that gain from each other"
        )
    for a, b in links.asymmetric():
        if {a, b} <= chosen and len(chosen) > 1:
            there, back = links.alone[a, b].bits_per_second, links.alone[b, a].bits_per_second
            said.append(
                f"asymmetric-link: {links.names[a]} → {links.names[b]} carries {text_of_rate(there)}, the way back "
                f"{text_of_rate(back)} ({links.word}); "
                "every replica sends as much as it receives, so the slower way counts"
            )
    said += (
        [f"sizes-vary: {best.strategy.bound}, and so are the times and memory that follow from it"]
        if best.strategy.bound
        else []
    )
    said += [f"method-refused: {method}: {why}" for method, why in ruled_out(task.base, task.methods).items()]
    said += _of_the_run(task, best)
    left: dict[str, list[str]] = {}
    for place in sorted(set(range(len(links))) - chosen):
        small = task.limit_nbytes([task.machine(place)]) < best.memory_nbytes
        why = "too little memory for this setting" if small else "would hold the others up more than help"
        left.setdefault(why, []).append(links.names[place])
    said += [f"left-out: {few(names)}: {why}" for why, names in left.items()]
    rates = [task.machine(place).flops_per_second for place in best.places]
    if max(rates) > 1.2 * min(rates):
        slow = task.machine(best.places[rates.index(min(rates))]).name
        said.append(
            f"unequal-machines: all wait for {slow} in every round; the fastest idles {100 - 100 * min(rates) / max(rates):.0f} % (predicted)"
        )
    if best.pace.taken > cost.DEAR:
        rounds = f"{len(best.traffic)} rounds in {best.strategy.schedule.every} steps of {text_of_seconds(best.step_seconds)}"
        said.append(
            f"rounds-are-dear: the work of {rounds} takes {text_of_share(best.pace.taken)} of the time of the cores that train; a larger batch, "
            "fewer fragments or a larger H costs less (predicted)"
        )
    if best.strategy.anchors == "disk":
        said.append(_on_disk(task, best))
    if best.memory_nbytes > 0.9 * best.memory_limit:
        said.append("memory-is-tight: within a tenth of the limit, which is how far predictions may be off")
    named = [warning.partition(":")[0] for warning in said]
    kept = [warning for i, warning in enumerate(said) if named[:i].count(named[i]) < MOST_NAMED]
    return kept + [f"{name}: and {n - MOST_NAMED} more" for name, n in Counter(named).items() if n > MOST_NAMED]


def _of_the_run(task: Task, best: Setting) -> list[str]:
    """The links that the run file sets itself, where they are not those of the plan."""
    links, placement = task.links.among(best.places).alone.values(), task.base.placement
    if not links or task.links.word == "emulated":  # the plan writes the emulated link
        return []
    given = {name: getattr(placement, name) for name in ("link", "uplink") if getattr(placement, name) != "none"}
    rates = {str(link) for link in links} | {str(Link(link.bits_per_second)) for link in links}
    return [
        f"{name}-stays: the run file keeps {name} = {text}, and these figures do not count it"
        for name, text in given.items()
        if text not in rates
    ]


def _on_disk(task: Task, best: Setting) -> str:
    """What lies on disk, and the traffic of the disk beside what the slowest one was measured to do."""
    file = sum(nbytes for (place, _), nbytes in best.memory.kept.items() if place == "disk")
    period = best.strategy.schedule.every * best.step_seconds / best.pace.utilization
    needed = 2 * file / period  # every fragment is read and written once in a period
    measured = [task.machine(place).disk_nbytes_per_second for place in best.places]
    slowest = min((rate for rate in measured if rate), default=None)
    carries = f"the disk does {text_of_nbytes(slowest)}/s" if slowest else "the disk was not measured"
    late = " and is too slow, so departures will wait" if slowest and slowest < needed else ""
    return (
        f"anchors-on-disk: host memory does not hold them; {text_of_nbytes(file)} are in a file, read and written once every "
        f"{text_of_seconds(period)}: {text_of_nbytes(needed)}/s; {carries}{late} (predicted)"
    )


def few(names: Sequence[str]) -> str:
    """The first of many names.

    >>> few("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def shards(
    task: Task, best: Setting, asked: Shards | None, levels: Sequence[int]
) -> list[tuple[Shards, int, list[float]]]:
    """Ways to shard over a replica's ranks: the bytes that a rank keeps (weights, gradients, moments), and those that it sends on each
    level in an inner step."""
    ranks, parameters = task.ranks, shape_of(task.base).parameters()
    known = [(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)]
    found = []
    for way in dict.fromkeys([*(Shards(*each) for each in known), *([asked] if asked else [])]):
        sent = [0.0] * len(levels)
        for phase in traffic(way, parameters, ranks, levels, FP32, best.run.data.accumulate):
            sent[phase.level] += phase.nbytes
        found.append((way, way.nbytes(parameters, FP32), sent))
    return found
