"""What all members conclude from their claims; by hand, and as laws on any claims."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.concord import Claim, grow, reconcile

claims = st.builds(
    Claim,
    turn=st.integers(0, 3), chain=st.sampled_from("ab"), fragment=st.integers(-1, 2), weight=st.sampled_from([0.0, 1.0, 2.5]),
    step=st.integers(0, 9), fresh=st.booleans(), finishing=st.booleans(),
)  # fmt: skip


def claim(turn: int, chain: str = "a", **facts: object) -> Claim:
    return Claim(**({"turn": turn, "chain": chain, "fragment": 0, "weight": 1.0} | facts))  # type: ignore[arg-type]


def test_all_alike_are_sound_and_counted() -> None:
    concord = reconcile([claim(4, step=9)] * 3)
    assert (concord.sound, concord.behind, concord.weights) == ((0, 1, 2), (), (1.0, 1.0, 1.0))
    assert (concord.turn, concord.step, concord.fragment) == (4, 9, 0)


def test_the_round_is_about_what_the_farthest_has_ready() -> None:
    concord = reconcile([claim(3, fragment=1, step=10), claim(3, fragment=2, step=15), claim(3, fragment=2, step=15)])
    assert (concord.fragment, concord.step, concord.counted) == (2, 15, (1, 2))
    assert reconcile([claim(3, fragment=1), claim(3, fragment=2)]).fragment == 1  # equally far: the lowest rank's
    nothing = claim(3, fragment=2, step=15, weight=0.0)
    assert reconcile([claim(3, fragment=1, step=10), nothing]).counted == (0,)
    assert reconcile([nothing]).fragment == -1


def test_a_late_replica_counts_and_takes_over() -> None:
    concord = reconcile([claim(2, "old"), claim(6), claim(6)])
    assert concord.behind == (0,) and concord.sound == (1, 2) and concord.counted == (0, 1, 2)


def test_what_was_carried_counts_in_the_round_of_its_fragment() -> None:
    late = claim(4, fragment=2, step=8, carried={"1": 3.0})
    concord = reconcile([claim(4, fragment=1, step=9), late])
    assert (concord.fragment, concord.weights) == (1, (1.0, 3.0))
    assert reconcile([claim(4, fragment=0, step=9), late]).counted == (0,)
    assert reconcile([claim(4, fragment=1, step=9), dataclasses.replace(late, fresh=True)]).counted == (0,)


def test_a_newcomer_counts_nothing() -> None:
    concord = reconcile([claim(0, "random", fresh=True, step=99), claim(0)])
    assert (concord.sound, concord.behind, concord.counted, concord.step) == ((1,), (0,), (1,), 0)


def test_when_all_are_new_the_first_one_gives() -> None:
    concord = reconcile([claim(0, chain, fresh=True) for chain in "aba"])
    assert (concord.sound, concord.behind, concord.fragment) == ((0, 2), (1,), -1)


def test_the_majority_is_right() -> None:
    assert reconcile([claim(5, "drifted"), claim(5, "b"), claim(5, "b")]).behind == (0,)
    assert reconcile([claim(5, "x"), claim(5, "y")]).sound == (0,)  # no majority: the lowest rank


def test_a_random_weight_never_outvotes_training() -> None:
    """A restart with new weights and a large turn of its own is still fresh."""
    concord = reconcile([claim(9, "r", fresh=True), claim(9, "r", fresh=True), claim(3)])
    assert concord.sound == (2,) and concord.turn == 3


@given(st.lists(claims, min_size=1, max_size=5))
def test_laws(members: list[Claim]) -> None:
    concord = reconcile(members)
    assert concord.sound and sorted(concord.sound + concord.behind) == list(range(len(members)))
    assert len({members[rank].chain for rank in concord.sound}) == 1
    trained = [m for m in members if not m.fresh]
    if trained:
        assert concord.turn == max(m.turn for m in trained)
        assert all(not members[rank].fresh for rank in concord.sound + concord.counted)
    assert all(members[rank].fragment == concord.fragment >= 0 for rank in concord.counted)
    assert bool(concord.counted) == any(not m.fresh and m.fragment >= 0 and m.weight > 0 for m in members)


@given(st.lists(claims, min_size=1, max_size=3))
def test_the_order_of_members_decides_only_ties(members: list[Claim]) -> None:
    several = [reconcile(list(order)) for order in itertools.permutations(members)]
    assert len({(concord.turn, concord.step) for concord in several}) == 1


def test_the_end() -> None:
    one, none = claim(3, fragment=1, finishing=True), claim(3, fragment=-1, weight=0.0, finishing=True)
    assert reconcile([one, one]).last == 1 and reconcile([one, one]).wanted == -1
    assert reconcile([one, claim(3, fragment=1)]).last == -1  # somebody still trains
    differing = reconcile([one, claim(3, fragment=0, weight=0.0, finishing=True)])  # and may have some of 1 left
    assert (differing.last, differing.wanted, differing.over) == (-1, 0, False)
    assert (reconcile([one, none]).last, reconcile([one, none]).wanted) == (-1, 1)
    assert reconcile([none, none]).over and not reconcile([none, one]).over


def test_claims_survive_their_journey_and_nothing_else_does() -> None:
    sent = claim(3, weight=2.5, step=7)
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
        good | {"weight": float("nan")},
        good | {"weight": -1},
        good | {"weight": float("inf")},
        good | {"chain": "a" * 65},
        good | {"carried": [1.0]},
        good | {"carried": {"-1": 1.0}},
        good | {"carried": {"1": 0}},
        good | {"carried": {"1": float("nan")}},
        good | {"carried": {"1": "2"}},
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
