"""The round plan that all members compute from their statuses: examples, and laws for any statuses."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.plan import MemberStatus, reconcile

ORDER = (1, 2, 0)
brings = st.dictionaries(st.sampled_from("012"), st.sampled_from([0.0, 1.0, 2.5]))
statuses = st.builds(
    MemberStatus,
    round=st.integers(0, 3), state_digest=st.sampled_from("ab"), step=st.integers(0, 9), fresh=st.booleans(), finishing=st.booleans(), brings=brings,
)  # fmt: skip


def status(number: int, state_digest: str = "a", **facts: object) -> MemberStatus:
    return MemberStatus(**({"round": number, "state_digest": state_digest, "brings": {"0": 1.0}} | facts))  # type: ignore[arg-type]


def test_equal_statuses_are_all_sound_and_counted() -> None:
    plan = reconcile([status(4, step=9)] * 3, ORDER)
    assert (plan.sound, plan.behind, plan.weights) == ((0, 1, 2), (), (1.0, 1.0, 1.0))
    assert (plan.round, plan.step, plan.fragment, plan.whole) == (5, 9, 0, 3.0)


def test_rounds_take_fragments_in_turn() -> None:
    """Rounds 3, 4 and 5 have fragments 1, 2 and 0."""
    both = {"1": 1.0, "2": 1.0}
    assert reconcile([status(3, brings=both), status(3, brings=both)], ORDER).fragment == 1
    plan = reconcile([status(4, brings=both), status(4, brings={"0": 1.0, "2": 1.0})], ORDER)
    assert (plan.round, plan.fragment, plan.counted) == (4, 2, (0, 1))
    plan = reconcile([status(3, brings={"0": 1.0}), status(3, brings={})], ORDER)  # no member has the next fragment
    assert (plan.round, plan.fragment, plan.counted) == (5, 0, (0,))
    assert reconcile([status(4, brings={"1": 1.0})], ORDER).round == 6  # the next round of that fragment
    nothing = reconcile([status(4, brings={})] * 2, ORDER)
    assert (nothing.round, nothing.fragment, nothing.counted) == (4, -1, ())
    broken = reconcile([status(4, brings={"2": 0.0}), status(4, brings={"0": 1.0})], ORDER)
    assert (broken.round, broken.fragment, broken.counted) == (4, 2, ())  # the round number is used up


def test_the_mean_is_over_all_that_train() -> None:
    one, none, fresh = status(5), status(5, brings={}), status(0, fresh=True)
    assert reconcile([one, none, none], ORDER).whole == 3.0 and reconcile([one, none, fresh], ORDER).whole == 2.0
    tokens = reconcile([status(5, brings={"0": 10.0}), status(5, brings={"0": 20.0}), none], ORDER)
    assert tokens.whole == 45.0  # a member without a delta in this round counts with the mean weight of the others


def test_a_late_replica_counts_and_takes_over_the_state() -> None:
    plan = reconcile([status(2, "old"), status(6), status(6)], ORDER)
    assert plan.behind == (0,) and plan.sound == (1, 2) and plan.counted == (0, 1, 2)


def test_a_late_delta_counts_in_its_fragments_next_round() -> None:
    late = status(2, brings={"1": 3.0})
    assert reconcile([status(5), late], ORDER).counted == (0,)
    plan = reconcile([status(6, brings={"1": 1.0}), late], ORDER)
    assert (plan.fragment, plan.weights) == (1, (1.0, 3.0))
    assert reconcile([status(6, brings={"1": 1.0}), dataclasses.replace(late, fresh=True)], ORDER).counted == (0,)


def test_no_delta_counts_once_a_sound_member_knows_the_end() -> None:
    ended = status(6, finishing=True, over=True, step=90)
    plan = reconcile([status(5, "old"), ended], ORDER)
    assert (plan.over, plan.counted, plan.behind, plan.step, plan.round) == (True, (), (0,), 90, 6)
    # the others were cut off and have held more rounds, so their state is the right one
    further = reconcile([status(7, "further"), ended], ORDER)
    assert not further.over and further.counted == (0, 1) and further.behind == (1,)


def test_a_newcomer_has_no_delta_to_count() -> None:
    plan = reconcile([status(0, "random", fresh=True, step=99), status(0)], ORDER)
    assert (plan.sound, plan.behind, plan.counted, plan.step) == ((1,), (0,), (1,), 0)


def test_among_newcomers_the_first_gives_the_state() -> None:
    plan = reconcile([status(0, state_digest, fresh=True) for state_digest in "aba"], ORDER)
    assert (plan.sound, plan.behind, plan.fragment) == ((0, 2), (1,), -1)


def test_the_majoritys_state_digest_is_sound() -> None:
    assert reconcile([status(5, "drifted"), status(5, "b"), status(5, "b")], ORDER).behind == (0,)
    # without a majority, the lowest rank decides
    assert reconcile([status(5, "x"), status(5, "y")], ORDER).sound == (0,)


def test_fresh_members_never_outvote_trained_ones() -> None:
    """A member that restarted with new weights and states a large round number is still fresh."""
    plan = reconcile([status(9, "r", fresh=True), status(9, "r", fresh=True), status(5)], ORDER)
    assert plan.sound == (2,) and plan.round == 5


@given(st.lists(statuses, min_size=1, max_size=5))
def test_plans_satisfy_the_laws_for_any_statuses(members: list[MemberStatus]) -> None:
    plan = reconcile(members, ORDER)
    assert plan.sound and sorted(plan.sound + plan.behind) == list(range(len(members)))
    assert len({members[rank].state_digest for rank in plan.sound}) == 1
    trained = [m for m in members if not m.fresh]
    if trained:
        assert 0 <= plan.round - members[plan.sound[0]].round < 3
        assert all(not members[rank].fresh for rank in plan.sound + plan.counted)
    ready = {key for m in trained for key in m.brings}
    assert (plan.fragment >= 0) == bool(ready) and (not ready or str(plan.fragment) in ready)
    assert not ready or (ORDER[plan.round % 3] == plan.fragment and plan.whole >= sum(plan.weights))
    assert not (plan.over and ready)


@given(st.lists(statuses, min_size=1, max_size=3))
def test_the_order_of_members_decides_only_ties(members: list[MemberStatus]) -> None:
    several = [reconcile(list(order), ORDER) for order in itertools.permutations(members)]
    assert len({plan.step for plan in several}) == 1


LIES: list[dict[str, object]] = [
    {"round": (1 << 30) - 1}, {"round": 0}, {"step": 10**6}, {"over": True, "finishing": True}, {"state_digest": "lie"},
    {"over": True, "round": 10**6, "state_digest": "lie"}, {"fresh": True, "step": 10**6}, {"run": "another"},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("rank", range(4))
def test_no_word_of_one_member_changes_what_a_majority_agrees_on(lie: dict[str, object], rank: int) -> None:
    """Three that agree plan the same round at the same step, whatever a fourth reports; it can only bring its own delta."""
    honest = [status(7, "a", step=step, brings={"1": 1.0}) for step in (30, 32, 32)]
    plan = reconcile([*honest[:rank], dataclasses.replace(status(7, brings={}), **lie), *honest[rank:]], ORDER)
    ranks = tuple(r for r in range(4) if r != rank)
    assert set(ranks) <= set(plan.sound) and plan.counted == ranks
    assert (plan.step, plan.over, plan.ended, plan.fragment) == (32, False, False, 1)


def test_an_end_needs_two_words_or_a_note() -> None:
    over = status(6, "end", finishing=True, over=True, brings={})
    late = [status(5, "old"), status(5, "old")]
    assert not reconcile([over, *late], ORDER).over  # one of three says so
    noted = reconcile([over, *late], ORDER, final={"end"})
    assert noted.ended and noted.sound == (0,) and noted.counted == ()
    assert not reconcile([status(6, "lie", over=True), *late], ORDER, final={"end"}).over
    assert reconcile([over, over, *late], ORDER).ended


def test_the_run_is_over_once_no_member_brings_a_delta() -> None:
    one, both, none = (status(5, brings=b, finishing=True) for b in ({"0": 1.0}, {"0": 1.0, "1": 1.0}, {}))
    ends = {
        "last": reconcile([one, one], ORDER),
        "more": reconcile([one, both], ORDER),
        "over": reconcile([none, none], ORDER),
    }
    assert {name: (end.fragment, end.over) for name, end in ends.items()} == {
        "last": (0, False), "more": (0, False), "over": (-1, True),
    }  # fmt: skip
    training = reconcile([one, status(5)], ORDER)
    assert not training.over
    # A member may still get its delta back.
    assert not reconcile([none, status(2, "old", brings={}, finishing=True)], ORDER).over


def test_statuses_survive_serialisation_and_malformed_ones_are_refused() -> None:
    sent = status(3, brings={"2": 2.5}, step=7)
    assert MemberStatus.of(sent.facts(), "replica-1") == sent
    good = sent.facts()
    bad: list[dict[str, object]] = [
        {},
        good | {"more": 1},
        good | {"round": -1},
        good | {"round": True},
        good | {"round": "3"},
    ]
    bad += [
        good | {"state_digest": "a" * 65},
        good | {"round": 1 << 31},
        good | {"round": 10**400},
        good | {"step": 1 << 40},
        good | {"record": "a" * 8193},
        good | {"suspect": "a" * 65},
        good | {"brings": {"\u0661": 1.0}},
        good | {"brings": {"1": 1e18}},
        good | {"brings": [1.0]},
        good | {"brings": {"-1": 1.0}},
        good | {"brings": {"1" * 5000: 1.0}},
        good | {"brings": {"1": -1}},
        good | {"brings": {"1": float("inf")}},
        good | {"brings": {"1": float("nan")}},
        good | {"brings": {"1": "2"}},
    ]
    for facts in bad:
        with pytest.raises(tw.PeerError, match="replica-1 sent a status"):
            MemberStatus.of(facts, "replica-1")


def test_a_state_digest_is_that_of_all_that_a_member_can_receive() -> None:
    """Whoever has the tensors and the record computes the same digest; any other value, outer state or record has another one."""

    def state(
        anchor: float = 1.0, outer: float = 0.5, who: tuple[str, ...] = ("a", "b"), number: int = 3
    ) -> GlobalState:
        held = GlobalState([torch.zeros(2), torch.zeros(3)], [{}, {"momentum": torch.zeros(3)}], round=number)
        held.commit(1, torch.full((3,), anchor), {"momentum": torch.full((3,), outer)}, who)
        return held

    digests = {state().state_digest, state(1.5).state_digest, state(outer=0.0).state_digest}
    digests |= {state(who=("a",)).state_digest, state(number=4).state_digest}
    assert len(digests) == 5 and state().state_digest == state().computed_digest() in digests


@given(st.lists(st.sampled_from([None, 1.0, 2.5]), min_size=1, max_size=5), st.sets(st.integers(0, 4)))
def test_a_plan_without_some_deltas_is_that_in_which_they_were_not_brought(
    weights: list[float | None], ranks: set[int]
) -> None:
    """All train, so those that are not counted stay in the mean with the mean weight of the others."""
    members = [status(5, brings={} if weight is None else {"0": weight}) for weight in weights]
    plan = reconcile(members, ORDER).without(ranks)
    due = [0.0 if rank in ranks else weight or 0.0 for rank, weight in enumerate(weights)]
    counted = [weight for weight in due if weight]
    assert list(plan.weights) == due
    if counted:
        less = reconcile([status(5, brings={"0": weight} if weight else {}) for weight in due], ORDER)
        assert plan.whole == pytest.approx(less.whole) == pytest.approx(sum(counted) / len(counted) * len(members))
