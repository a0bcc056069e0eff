"""Replicas that hold the simplest possible rounds with each other, for tests of memberships.

A round is a view, an all-gather of bytes and a joint vote. No replica announces the end of a round: a
replica that missed some learns the number of the last one from the statuses of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.comm.group import gather
from thinwire.errors import LinkError, PacketError, UndecidedError

ROUNDS = 5


@dataclass
class RoundLog:
    decided: dict[str, bool] = field(default_factory=dict)  # by view: the outcome that this replica learned
    heard: dict[str, list[str]] = field(default_factory=dict)  # by view: whose bytes arrived
    members: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    undecided: int = 0
    rebuilt: int = 0
    round: int = 0


def hold_rounds(membership, rounds, log, seconds=120.0, vote=20.0, ready=lambda number: True, tries=200):
    """Holds rounds until round `rounds` is over. `ready(round)` is the vote of this replica."""
    for _ in range(tries):
        view = membership.next_view({"round": log.round}, seconds)
        log.round = max(member.status["round"] for member in view.members)
        if log.round >= rounds:
            view.close()
            return log
        own = next(m for m in view.members if m.name == membership.name)
        if own.status["round"] < log.round:
            pass  # it has missed a round; in training it would catch up now
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
    """Checks that all replicas learned the same outcome of a view, and that a commit implies that all bytes arrived everywhere."""
    for view in {view for log in logs for view in log.decided}:
        answers = {log.decided[view] for log in logs if view in log.decided}
        assert len(answers) == 1, f"view {view} was decided in two ways"
        if answers == {True}:
            assert len({tuple(log.heard[view]) for log in logs if view in log.heard}) == 1


def hold_rounds_of_all(cluster, replicas, rounds=ROUNDS, **settings):
    """Lets `replicas` hold rounds until `rounds` are over. Returns their logs or errors."""
    logs = {name: RoundLog() for name in replicas}

    def run(name):
        return hold_rounds(cluster.membership(name, **settings), rounds, logs[name])

    results = cluster.play({name: run for name in replicas})
    check_one_outcome(logs.values())
    return results, logs


def finished(result):
    return isinstance(result, RoundLog) and result.round == ROUNDS
