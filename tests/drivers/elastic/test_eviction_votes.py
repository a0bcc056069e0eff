"""One member's records and votes, by hand: what it says and hears, who must leave, and what it reports of a round."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from thinwire.app.diagnosis import Record, Rules
from thinwire.drivers.elastic.eviction import EvictionVoter, _read
from thinwire.drivers.elastic.plan import MemberStatus
from thinwire.errors import DisagreementError, LinkError

NAMES = ("amber", "birch", "cedar")


class Closed:
    """What a voter uses of a view and of a membership: names, rules, and whether it was closed."""

    clock = staticmethod(time.monotonic)

    def __init__(self, name: str = "amber", evict: Rules | None = None) -> None:
        self.name, self.evict, self.least, self.closed = name, evict, 2, False
        self.members = [SimpleNamespace(name=one) for one in NAMES]

    def close(self) -> None:
        self.closed = True


def votes(finishing: bool = False) -> list[MemberStatus]:
    return [MemberStatus(0, "", suspect=whom, finishing=finishing) for whom in ("cedar", "cedar", "")]


def voter(name: str, evict: Rules | None) -> tuple[EvictionVoter, Closed, list[tuple[str, dict[str, object]]]]:
    membership, events = Closed(name, evict), []
    told = EvictionVoter(membership, lambda event, **fields: events.append((event, fields)), time.monotonic)
    return told, membership, events


def test_a_majority_evicts_and_the_others_are_told_why():
    judge, membership, events = voter("amber", Rules())
    view = Closed()
    assert judge.judge(view, votes()) == "cedar was evicted (by their records); the next round is without it"
    assert events == [("evicted", {"name": "cedar", "by": ["amber", "birch"], "reason": "by their records"})]
    assert view.closed and not membership.closed and judge.put_out == {"cedar"} and judge.suspect == ""


def test_the_evicted_member_leaves_with_the_reason():
    judge, membership, _ = voter("cedar", Rules())
    with pytest.raises(DisagreementError, match="'cedar' was evicted by amber, birch: by their records"):
        judge.judge(Closed(), votes())
    assert membership.closed


@pytest.mark.parametrize(("evict", "finishing"), [(None, False), (Rules(), True)])
def test_nobody_leaves_without_rules_or_once_a_member_has_finished(evict, finishing):
    judge, _, events = voter("amber", evict)
    view = Closed()
    assert judge.judge(view, votes(finishing)) == "" and not events and not view.closed and not judge.put_out


def test_only_a_member_s_own_record_is_read():
    record = Record("amber", 1, 7, 0.1, True)
    text = json.dumps(record.facts())
    assert _read(text, "amber") == record
    assert [_read(one, "birch") for one in (text, "", "{", "3")] == [None] * 4


@pytest.mark.parametrize(("number", "fails", "reported"), [(7, False, 1), (1025, False, 0), (1025, True, 1)])
@pytest.mark.parametrize("evict", [None, Rules()])
def test_a_record_goes_into_the_next_status_once_and_is_reported_if_due(number, fails, reported, evict):
    """All first rounds are reported, later ones if their number is due or they failed. Without rules nothing is said."""
    says, _, events = voter("amber", evict)
    made = lambda names, seconds, over: Record("amber", 0, number, seconds, over)  # noqa: E731
    round_ = SimpleNamespace(record=made, own_failure=lambda: None)
    if fails:
        with pytest.raises(LinkError), says.watches(round_, Closed()):
            raise LinkError("birch has left")
    else:
        with says.watches(round_, Closed()):
            pass
    assert [event for event, _ in events] == ["wire"] * reported
    first, second = says.says(), says.says()
    assert second == {"record": "", "suspect": ""}
    assert (_read(first["record"], "amber") is not None) is (evict is not None)
