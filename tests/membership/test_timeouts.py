"""The timeout model: monotone in its inputs, and never zero."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.membership import Timeouts
from thinwire.membership.timeouts import grace_seconds

plans = st.fixed_dictionaries(
    {
        "every": st.integers(1, 1000),
        "delay": st.integers(0, 1000),
        "step_seconds": st.floats(1e-4, 100),
        "nbytes": st.integers(0, 10**11),
    }
)
links = st.builds(Link, st.floats(1e3, 1e12), st.floats(0, 2))


@given(plans, st.none() | links)
def test_timeouts_are_in_ascending_order(plan, link):
    """A lost heartbeat ends no member, a vote outlasts a transfer, and a view outlasts everything inside it."""
    d = Timeouts.of(**plan, link=link)
    assert 2 * d.heartbeat_interval < d.heartbeat_timeout and d.transfer < d.vote
    assert d.view > d.grace + d.heartbeat_timeout + d.connect
    assert d.view > plan["every"] * plan["step_seconds"]
    if link is not None:
        assert d.transfer >= 4 * link.seconds(plan["nbytes"]) and d.connect >= 80 * link.delay_seconds


@given(plans, links, st.floats(1, 100), st.integers(0, 10**9))
def test_a_worse_link_or_more_bytes_allow_more_time(plan, link, times, more):
    worse = Link(link.bits_per_second / times, link.delay_seconds * times)
    here = asdict(Timeouts.of(**plan, link=link))
    for other in (
        Timeouts.of(**plan, link=worse),
        Timeouts.of(**plan | {"nbytes": plan["nbytes"] + more}, link=link),
    ):
        for name in ("heartbeat_timeout", "connect", "transfer", "vote"):
            assert asdict(other)[name] >= here[name]
        assert other.grace <= here["grace"]  # a longer flight leaves less slack


@given(plans, links, st.integers(0, 1000))
def test_more_slack_is_more_grace(plan, link, more):
    longer = plan | {"delay": plan["delay"] + more}
    assert Timeouts.of(**longer, link=link).grace >= Timeouts.of(**plan, link=link).grace


def test_without_a_link_timeouts_are_the_floor():
    d = Timeouts.of(every=1, delay=0, step_seconds=1e-3, nbytes=0)
    assert (d.heartbeat_timeout, d.grace, d.connect, d.transfer, d.vote) == (5.0, 2.0, 10.0, 10.0, 15.0)
    assert Timeouts.of(every=20, delay=20, step_seconds=1.0, nbytes=10**9).grace == 20.0


def figures(*plan, grace=None):
    d = Timeouts.of(*plan, grace=grace)
    return d.heartbeat_timeout, d.grace, d.connect, d.transfer, d.vote, d.view


def test_timeouts_match_the_docstrings_figures():
    link = Link.parse("10mbit,100ms")  # 12.5 MB fly 10 s and 0.1 s delay; rtt 0.2, queue 0.8388608
    assert Timeouts.of(1, 0, 1.0, 0).heartbeat_interval == 1.0
    due = (3 * 2.0388608, 20 - 10.1 - 2, 10.5165824, 4 * 10.3, 4 * 10.3 + 5)
    assert figures(60, 20, 1.0, 12_500_000, link) == pytest.approx((*due, 60 + due[0] + due[1] + 2 * due[2]))
    assert figures(200, 20, 1.0, 12_500_000, link)[1] == 20.0  # a tenth of the period
    far = Link.parse("10mbit,1s")  # rtt 2, the same queue
    due = (3 * 3.8388608, 2.0, 82.5165824, 12.0, 30.5165824)
    assert figures(4, 1, 0.5, 0, far) == pytest.approx((*due, 2 + due[0] + due[1] + 2 * due[2]))
    assert figures(4, 1, 0.5, 0, None, grace="20 steps")[1] == 10.0


@pytest.mark.parametrize(
    "change",
    [
        {"grace": 0},
        {"view": float("inf")},
        {"vote": 1.0},
        {"heartbeat_timeout": 1.5},
        {"connect": True},
        {"transfer": "9"},
    ],
)
def test_overrides_apply_and_invalid_ones_are_refused(change):
    assert [*asdict(Timeouts()).values()] == [1.0, 5.0, 10.0, 10.0, 10.0, 15.0, 60.0]
    assert replace(Timeouts(), grace=3).grace == 3
    least = replace(Timeouts(), heartbeat_timeout=2.0, vote=10.0)  # as long as two heartbeats, and as a transfer
    assert (least.heartbeat_timeout, least.vote) == (2.0, 10.0)
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        replace(Timeouts(), **change)


@pytest.mark.parametrize(
    "change", [{"every": -1}, {"step_seconds": float("nan")}, {"nbytes": -1}, {"delay": float("inf")}]
)
def test_invalid_plans_are_refused(change):
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        Timeouts.of(**{"every": 1, "delay": 0, "step_seconds": 1.0, "nbytes": 1} | change)


def test_a_grace_is_printed_in_words():
    said = [grace_seconds(text, 0.5) for text in ("5s", "1.5 s", "500ms", "20 steps", "1 step", "2 min")]
    assert said == [5.0, 1.5, 0.5, 10.0, 0.5, 120.0]
    for text in ("", "5", "0s", "-1s", "5 weeks", "s"):
        with pytest.raises(ConfigurationError, match="a time or a number of steps is needed"):
            grace_seconds(text, 0.5)
