"""The figures of a soak: how many faults and rounds, who took part, what was lost, and how soon replicas returned."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stage import Stage


def rounds_of(stage: Stage) -> Iterator[dict[str, Any]]:
    """Yields what each replica says of each round that exchanged something."""
    yield from (line for name in stage.names for line in stage.lines(name, "round") if line["fragment"] >= 0)


def shares(stage: Stage) -> tuple[float, float]:
    """Returns the shares of the living replicas that were members, and that were counted, over all committed rounds.

    A replica is living in a round if during all of it its process ran, was not frozen and had a link.
    """
    living, members, counted = 0, 0, 0
    rounds = {(line["round"], tuple(line["members"])): line for line in rounds_of(stage) if line["committed"]}
    for line in rounds.values():
        began, ended = line["at"] - line["seconds_spent"], line["at"]
        out = {name for name, since, until in stage.out if since < ended and until > began}
        there = set(stage.names) - out
        living += len(there)
        members += len(there.intersection(line["members"]))
        counted += len(there.intersection(line["counted"]))
    return members / living, counted / living


def returns(stage: Stage) -> list[float]:
    """Returns the seconds from each restart of a replica to the first round that counted it."""
    commits = {
        name: [line["at"] for line in stage.lines(name, "commit") if name in line["counted"]] for name in stage.names
    }
    again = stage.starts[len(stage.names) :]
    return [min(later) for name, began in again if (later := [at - began for at in commits[name] if at > began])]


def figures(stage: Stage, lost: dict[str, float]) -> str:
    ids = {(line["round"], tuple(line["members"])): line["committed"] for line in rounds_of(stage)}
    finish = [line for name in stage.names for line in stage.lines(name, "finish")]
    kills = stage.done["kill -9"] + len(stage.names) * stage.done["all killed"]
    steps, (members, counted) = sum(map(stage.steps, stage.names)), shares(stage)
    text = [
        f"{sum(stage.done.values())} faults: " + ", ".join(f"{n} {kind}" for kind, n in stage.done.most_common()),
        f"rounds: {len(stage.history())} committed, {sum(not c for c in ids.values())} dropped or in doubt",
        f"of the living replicas {members:.1%} took part in a committed round, and {counted:.1%} were counted",
        f"main threads spent {sum(f['spent'] for f in finish):.2f} s of {sum(f['seconds'] for f in finish):.0f} s in departures and "
        f"landings; the longest inner step of the last lives was held up {max(f['worst'] for f in finish):.3f} s",
        f"steps lost: {sum(lost.values()):.0f} of {steps}, {sum(lost.values()) / max(1, kills):.1f} per kill; "
        f"of those never killed none ({', '.join(sorted(stage.untouched)) or 'nobody'})",
    ]
    if back := returns(stage):
        text.append(
            f"{len(back)} returns, counted again after {median(back):.1f} s (median), {max(back):.1f} s at most"
        )
    return "\n".join(text)
