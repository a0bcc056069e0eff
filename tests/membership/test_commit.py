"""The commit protocol has one outcome in every order of steps, deaths and timeouts, for two and three members."""

from __future__ import annotations

from itertools import product

import pytest

from thinwire.errors import LinkError
from thinwire.membership.commit import NO, YES, All, Put, Settle, Wait, ballot, ballot_of, carry_out, keys_of


@pytest.mark.parametrize(
    ("key", "due"),
    [("v/land/0", ("v/land", 0)), ("land/12", ("land", 12)), ("land/99999", ("land", 99999)), ("land/100000", None)]
    + [(key, None) for key in ("7", "land", "land/", "land/outcome", "land/02", "land/-1", "land/1 ")],
)
def test_the_key_of_a_ballot_ends_with_the_rank_of_its_member(key, due):
    assert ballot_of(key) == due


def steps_of(protocol, rank, votes, heard):
    """Returns the next step of a member that was sent `heard` so far, or its answer."""
    steps = protocol("q", rank, len(votes), votes[rank])
    try:
        step = next(steps)
        for came in heard:
            step = steps.send(came)
        return step
    except StopIteration as end:
        return end.value


def do(step, vote_store, size):
    """Returns all possible results of `step` now, as (answer, vote_store after it). A deadline may come at any time."""
    match step:
        case Put(key, value):
            return [(None, vote_store | {(key, value.encode())})]
        case All(keys):
            values = {dict(vote_store).get(key) for key in keys}
            return [(None not in values and len(values) == 1, vote_store)]
        case Settle(key, value):
            there = dict(vote_store).get(key)
            return [(there, vote_store)] if there is not None else [(value, vote_store | {(key, value)})]
        case Wait(key):
            there = dict(vote_store).get(key)
            _, ballots = keys_of("q", size)
            cast = {dict(vote_store).get(ballot) for ballot in ballots}
            answer = YES if len(cast) == 1 else NO
            settled = [(answer, vote_store | {(key, answer)})] if there is None and None not in cast else []
            return [(None, vote_store), *settled] + ([(there, vote_store)] if there is not None else [])
    raise AssertionError(step)


def explore(protocol, votes, faults=True):
    """Returns every reachable state: (the vote_store, the answer of each member; None if it died)."""
    start = (frozenset(), tuple(() for _ in votes))
    found, todo = {start}, [start]
    while todo:
        vote_store, members = todo.pop()
        for rank, heard in enumerate(members):
            if heard is None:
                continue
            step = steps_of(protocol, rank, votes, heard)
            after = (
                [] if isinstance(step, bool) else [(b, (*heard, came)) for came, b in do(step, vote_store, len(votes))]
            )
            if isinstance(step, Wait) and not faults:
                after = after[1:]
            for next_vote_store, told in [*after, *([(vote_store, None)] if faults else [])]:
                state = (next_vote_store, (*members[:rank], told, *members[rank + 1 :]))
                if state not in found:
                    found.add(state)
                    todo.append(state)
    return found


def answers(protocol, votes, members):
    told = [steps_of(protocol, rank, votes, heard) for rank, heard in enumerate(members) if heard is not None]
    return {answer for answer in told if isinstance(answer, bool)}


@pytest.mark.parametrize("votes", [v for size in (2, 3) for v in product((True, False), repeat=size)])
def test_every_execution_has_one_outcome_and_commit_needs_all_votes(votes):
    outcome, _ = keys_of("q", len(votes))
    said = set()
    for vote_store, members in explore(ballot, votes):
        here = answers(ballot, votes, members)
        assert len(here) <= 1 and (not here or here == {dict(vote_store).get(outcome) == YES})
        said |= here
    assert said == ({True, False} if all(votes) else {False})  # a death or a deadline may prevent the commit


@pytest.mark.parametrize("size", [2, 3])
def test_all_yes_votes_commit_without_deaths_and_timeouts(size):
    votes = (True,) * size
    ends = [m for _, m in explore(ballot, votes, faults=False) if len(answers(ballot, votes, m)) and all(m)]
    assert ends and all(answers(ballot, votes, members) == {True} for members in ends)


def forgetful(question, rank, size, yes):
    """A wrong protocol: at the deadline it assumes that the answer is no."""
    outcome, ballots = keys_of(question, size)
    yield Put(ballots[rank]) if yes else Settle(outcome, NO)
    if yes and not (yield All(ballots)):
        return bool((yield Wait(outcome)) == YES)
    return bool((yield Settle(outcome, YES)) == YES)


def test_the_search_finds_a_protocol_with_two_outcomes():
    states = explore(forgetful, (True, True))
    assert any(len(answers(forgetful, (True, True), members)) > 1 for _, members in states)


class Dict:
    """A vote_store for one member at a time, whose waits return at once."""

    def __init__(self, fails_at=None):
        self.written, self.done, self.fails_at = {}, [], fails_at

    def _do(self, what):
        self.done.append(what)
        if what == self.fails_at:
            raise LinkError("gone")

    def put(self, key, value="1"):
        self._do("put")
        self.written[key] = b""

    def all(self, keys):
        self._do("all")
        return all(key in self.written for key in keys)

    def settle(self, key, value):
        self._do("settle")
        return self.written.setdefault(key, value)

    def wait(self, key, seconds):
        self._do(("wait", seconds))
        return self.written.get(key)


def test_the_protocol_steps_are_carried_out_on_a_store():
    vote_store = Dict()
    assert carry_out(ballot("q", 0, 2, True), vote_store, 7.0) is False  # no other member voted
    assert vote_store.done == ["put", "all", ("wait", 7.0), "all", "settle"]
    assert carry_out(ballot("q", 1, 2, True), vote_store, 7.0) is False  # too late: the outcome is already decided
    assert carry_out(ballot("r", 1, 2, False), vote_store, 7.0) is False
    assert carry_out(ballot("s", 0, 1, True), vote_store, 7.0) is True
    with pytest.raises(LinkError):
        carry_out(ballot("t", 0, 2, True), Dict(fails_at="all"), 1.0)
