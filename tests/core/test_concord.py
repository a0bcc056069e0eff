"""What all members conclude from their claims; by hand, and as laws on any claims."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.elastic.plan import Claim, grow, reconcile

ORDER = (1, 2, 0)
brings = st.dictionaries(st.sampled_from("012"), st.sampled_from([0.0, 1.0, 2.5]))
claims = st.builds(
    Claim,
    turn=st.integers(0, 3), chain=st.sampled_from("ab"), step=st.integers(0, 9), fresh=st.booleans(), finishing=st.booleans(), brings=brings,
)  # fmt: skip


def claim(turn: int, chain: str = "a", **facts: object) -> Claim:
    return Claim(**({"turn": turn, "chain": chain, "brings": {"0": 1.0}} | facts))  # type: ignore[arg-type]


def test_all_alike_are_sound_and_counted() -> None:
    concord = reconcile([claim(4, step=9)] * 3, ORDER)
    assert (concord.sound, concord.behind, concord.weights) == ((0, 1, 2), (), (1.0, 1.0, 1.0))
    assert (concord.turn, concord.step, concord.fragment, concord.whole) == (5, 9, 0, 3.0)


def test_fragments_take_turns() -> None:
    """Turns 3, 4, 5 are of fragments 1, 2, 0."""
    both = {"1": 1.0, "2": 1.0}
    assert reconcile([claim(3, brings=both), claim(3, brings=both)], ORDER).fragment == 1
    concord = reconcile([claim(4, brings=both), claim(4, brings={"0": 1.0, "2": 1.0})], ORDER)
    assert (concord.turn, concord.fragment, concord.counted) == (4, 2, (0, 1))
    concord = reconcile([claim(3, brings={"0": 1.0}), claim(3, brings={})], ORDER)  # nobody has what is next
    assert (concord.turn, concord.fragment, concord.counted) == (5, 0, (0,))
    assert reconcile([claim(4, brings={"1": 1.0})], ORDER).turn == 6  # the next time that it is its turn
    nothing = reconcile([claim(4, brings={})] * 2, ORDER)
    assert (nothing.turn, nothing.fragment, nothing.counted) == (4, -1, ())
    broken = reconcile([claim(4, brings={"2": 0.0}), claim(4, brings={"0": 1.0})], ORDER)
    assert (broken.turn, broken.fragment, broken.counted) == (4, 2, ())  # the turn is used up


def test_the_mean_is_over_all_who_train() -> None:
    one, none, fresh = claim(5), claim(5, brings={}), claim(0, fresh=True)
    assert reconcile([one, none, none], ORDER).whole == 3.0 and reconcile([one, none, fresh], ORDER).whole == 2.0
    tokens = reconcile([claim(5, brings={"0": 10.0}), claim(5, brings={"0": 20.0}), none], ORDER)
    assert tokens.whole == 45.0  # who has nothing of it now counts as the others do, in the mean


def test_a_late_replica_counts_and_takes_over() -> None:
    concord = reconcile([claim(2, "old"), claim(6), claim(6)], ORDER)
    assert concord.behind == (0,) and concord.sound == (1, 2) and concord.counted == (0, 1, 2)


def test_what_came_too_late_counts_when_its_turn_comes() -> None:
    late = claim(2, brings={"1": 3.0})
    assert reconcile([claim(5), late], ORDER).counted == (0,)
    concord = reconcile([claim(6, brings={"1": 1.0}), late], ORDER)
    assert (concord.fragment, concord.weights) == (1, (1.0, 3.0))
    assert reconcile([claim(6, brings={"1": 1.0}), dataclasses.replace(late, fresh=True)], ORDER).counted == (0,)


def test_nothing_counts_when_somebody_sound_knows_that_the_run_has_ended() -> None:
    ended = claim(6, finishing=True, over=True, step=90)
    concord = reconcile([claim(5, "old"), ended], ORDER)
    assert (concord.over, concord.counted, concord.behind, concord.step, concord.turn) == (True, (), (0,), 90, 6)
    further = reconcile([claim(7, "further"), ended], ORDER)  # they were cut off, and held more rounds: theirs is right
    assert not further.over and further.counted == (0, 1) and further.behind == (1,)


def test_a_newcomer_counts_nothing() -> None:
    concord = reconcile([claim(0, "random", fresh=True, step=99), claim(0)], ORDER)
    assert (concord.sound, concord.behind, concord.counted, concord.step) == ((1,), (0,), (1,), 0)


def test_when_all_are_new_the_first_one_gives() -> None:
    concord = reconcile([claim(0, chain, fresh=True) for chain in "aba"], ORDER)
    assert (concord.sound, concord.behind, concord.fragment) == ((0, 2), (1,), -1)


def test_the_majority_is_right() -> None:
    assert reconcile([claim(5, "drifted"), claim(5, "b"), claim(5, "b")], ORDER).behind == (0,)
    assert reconcile([claim(5, "x"), claim(5, "y")], ORDER).sound == (0,)  # no majority: the lowest rank


def test_a_random_weight_never_outvotes_training() -> None:
    """A restart with new weights and a large turn of its own is still fresh."""
    concord = reconcile([claim(9, "r", fresh=True), claim(9, "r", fresh=True), claim(5)], ORDER)
    assert concord.sound == (2,) and concord.turn == 5


@given(st.lists(claims, min_size=1, max_size=5))
def test_laws(members: list[Claim]) -> None:
    concord = reconcile(members, ORDER)
    assert concord.sound and sorted(concord.sound + concord.behind) == list(range(len(members)))
    assert len({members[rank].chain for rank in concord.sound}) == 1
    trained = [m for m in members if not m.fresh]
    if trained:
        assert 0 <= concord.turn - max(m.turn for m in trained) < 3
        assert all(not members[rank].fresh for rank in concord.sound + concord.counted)
    ready = {key for m in trained for key in m.brings}
    assert (concord.fragment >= 0) == bool(ready) and (not ready or str(concord.fragment) in ready)
    assert not ready or (ORDER[concord.turn % 3] == concord.fragment and concord.whole >= sum(concord.weights))
    assert not (concord.over and ready)


@given(st.lists(claims, min_size=1, max_size=3))
def test_the_order_of_members_decides_only_ties(members: list[Claim]) -> None:
    several = [reconcile(list(order), ORDER) for order in itertools.permutations(members)]
    assert len({(concord.turn, concord.step) for concord in several}) == 1


def test_the_end() -> None:
    one, both, none = (claim(5, brings=b, finishing=True) for b in ({"0": 1.0}, {"0": 1.0, "1": 1.0}, {}))
    ends = {
        "last": reconcile([one, one], ORDER),
        "more": reconcile([one, both], ORDER),
        "over": reconcile([none, none], ORDER),
    }
    assert {name: (end.fragment, end.last, end.over) for name, end in ends.items()} == {
        "last": (0, True, False), "more": (0, False, False), "over": (-1, True, True),
    }  # fmt: skip
    training = reconcile([one, claim(5)], ORDER)
    assert not training.last and not training.over
    assert not reconcile([none, claim(2, "old", brings={}, finishing=True)], ORDER).over  # it may get something back


def test_claims_survive_their_journey_and_nothing_else_does() -> None:
    sent = claim(3, brings={"2": 2.5}, step=7)
    assert Claim.of(sent.facts(), "replica-1") == sent
    good = sent.facts()
    bad: list[dict[str, object]] = [
        {},
        good | {"more": 1},
        good | {"turn": -1},
        good | {"turn": True},
        good | {"turn": "3"},
    ]
    bad += [
        good | {"chain": "a" * 65},
        good | {"turn": 1 << 31},
        good | {"turn": 10**400},
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
        with pytest.raises(tw.PeerError, match="replica-1 made a claim"):
            Claim.of(facts, "replica-1")


def test_a_chain_tells_what_happened() -> None:
    anchor = torch.arange(5.0)
    chain = grow("start", 3, 1, anchor)
    assert chain == grow("start", 3, 1, anchor.clone())
    moved = anchor.clone()
    moved[4] = torch.nextafter(moved[4], torch.tensor(9.0))
    others = {
        grow("other", 3, 1, anchor),
        grow("start", 4, 1, anchor),
        grow("start", 3, 0, anchor),
        grow("start", 3, 1, moved),
    }
    assert chain not in others and len(others) == 4
    assert dataclasses.replace(claim(1), chain=chain).chain == chain
