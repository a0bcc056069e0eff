"""Replicas that hold rounds with each other, as plainly as can be: what the tests of rosters let happen to them.

A round: muster, everybody's bytes, a joint vote, and it counts. Nobody is told the end of a round by anybody: a
replica that missed some learns the number of the last one from the others' claims.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.comm.group import gather
from thinwire.errors import LinkError, PacketError, UndecidedError


@dataclass
class Log:
    decided: dict[str, bool] = field(default_factory=dict)  # by muster: what this replica learnt
    heard: dict[str, list[str]] = field(default_factory=dict)  # by muster: whose bytes arrived
    members: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    undecided: int = 0
    rebuilt: int = 0
    round: int = 0


def hold_rounds(roster, rounds, log, seconds=120.0, vote=20.0, ready=lambda number: True, tries=200):
    """Until round `rounds` is over; `ready(round)` is this replica's ballot."""
    for _ in range(tries):
        muster = roster.muster({"round": log.round}, seconds)
        log.round = max(member.claim["round"] for member in muster.members)
        if log.round >= rounds:
            muster.close()
            return log
        own = next(m for m in muster.members if m.name == roster.name)
        if own.claim["round"] < log.round:
            pass  # it has missed a round: in a training run it would be healed now
        log.members.append(tuple(m.name for m in muster.members))
        log.left_out += muster.left_out
        log.rebuilt += muster.rebuilt
        try:
            heard = gather(muster.group, roster.name.encode(), 64, "packet")
            log.heard[muster.id] = [text.decode() for text in heard]
            yes = ready(log.round) and log.heard[muster.id] == [m.name for m in muster.members]
            log.decided[muster.id] = muster.decide("land", yes, vote)
            log.round += log.decided[muster.id]
        except UndecidedError as error:
            log.undecided += 1
            log.failed.append(str(error))
            muster.close()
        except (LinkError, PacketError, UnicodeDecodeError) as error:
            log.failed.append(str(error))
            log.decided[muster.id] = muster.decide("land", False, vote)
            muster.close()
    raise AssertionError(f"no end after {tries} musters: {log}")


def check_one_outcome(logs):
    """Nobody learnt another answer than anybody else, and yes only where everybody's bytes had arrived everywhere."""
    for muster in {muster for log in logs for muster in log.decided}:
        answers = {log.decided[muster] for log in logs if muster in log.decided}
        assert len(answers) == 1, f"muster {muster} was decided in two ways"
        if answers == {True}:
            assert len({tuple(log.heard[muster]) for log in logs if muster in log.heard}) == 1
