"""Replicas that hold rounds with each other, as plainly as can be: what the tests of memberships let happen to them.

A round: view, everybody's bytes, a joint vote, and it counts. Nobody is told the end of a round by anybody: a
replica that missed some learns the number of the last one from the others' statuses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.comm.group import gather
from thinwire.errors import LinkError, PacketError, UndecidedError


@dataclass
class Log:
    decided: dict[str, bool] = field(default_factory=dict)  # by view: what this replica learnt
    heard: dict[str, list[str]] = field(default_factory=dict)  # by view: whose bytes arrived
    members: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    undecided: int = 0
    rebuilt: int = 0
    round: int = 0


def hold_rounds(membership, rounds, log, seconds=120.0, vote=20.0, ready=lambda number: True, tries=200):
    """Until round `rounds` is over; `ready(round)` is this replica's ballot."""
    for _ in range(tries):
        view = membership.next_view({"round": log.round}, seconds)
        log.round = max(member.status["round"] for member in view.members)
        if log.round >= rounds:
            view.close()
            return log
        own = next(m for m in view.members if m.name == membership.name)
        if own.status["round"] < log.round:
            pass  # it has missed a round: in a training run it would be healed now
        log.members.append(tuple(m.name for m in view.members))
        log.left_out += view.left_out
        log.rebuilt += view.rebuilt
        try:
            heard = gather(view.group, membership.name.encode(), 64, "packet")
            log.heard[view.id] = [text.decode() for text in heard]
            yes = ready(log.round) and log.heard[view.id] == [m.name for m in view.members]
            log.decided[view.id] = view.decide("land", yes, vote)
            log.round += log.decided[view.id]
        except UndecidedError as error:
            log.undecided += 1
            log.failed.append(str(error))
            view.close()
        except (LinkError, PacketError, UnicodeDecodeError) as error:
            log.failed.append(str(error))
            log.decided[view.id] = view.decide("land", False, vote)
            view.close()
    raise AssertionError(f"no end after {tries} views: {log}")


def check_one_outcome(logs):
    """Nobody learnt another answer than anybody else, and yes only where everybody's bytes had arrived everywhere."""
    for view in {view for log in logs for view in log.decided}:
        answers = {log.decided[view] for log in logs if view in log.decided}
        assert len(answers) == 1, f"view {view} was decided in two ways"
        if answers == {True}:
            assert len({tuple(log.heard[view]) for log in logs if view in log.heard}) == 1
