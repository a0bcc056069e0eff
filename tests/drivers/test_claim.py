"""A group carries one Replica at a time."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.drivers.unequal.method import decoupled_diloco
from thinwire.lab.samples.method import plexus
from thinwire.testing.toy import adamw, batch, inner_step, toy


def attach(group, strategy=tw.diloco(every=4)):
    model = toy()
    optimizer = adamw(model)
    return model, optimizer, tw.Replica(strategy, model, optimizer, group)


def test_a_second_replica_is_refused_until_the_first_is_finished_or_closed():
    def replica(group):
        first, optimizer, attached = attach(group)
        wrapped = CountedGroup(group, Ledger())
        for other in (group, wrapped):
            with pytest.raises(
                tw.ConfigurationError,
                match=r"has not finished, or was closed with rounds in flight.*make a group for each",
            ):
                attach(other)
        inner_step(first, optimizer, *batch(0, group.rank, 1))
        attached.finish()
        _, _, attached = attach(wrapped)
        attached.close()
        attach(group)[2].close()

    tw.run_threads(2, replica)


def test_a_replica_that_was_closed_in_flight_keeps_its_claim():
    def replica(group):
        model, optimizer, attached = attach(group, tw.streaming_diloco(every=2, delay=1, fragments=1))
        for step in range(1, 3):
            inner_step(model, optimizer, *batch(0, group.rank, step))
        assert attached.in_flight
        attached.close()
        with pytest.raises(tw.ConfigurationError, match="closed with rounds in flight"):
            attach(group)

    tw.run_threads(2, replica)


def test_the_group_of_a_replica_that_was_dropped_takes_no_other():
    """Its end would have waited for messages that the first had asked for, until the time-out."""

    group, other = tw.ThreadGroup.create(2)
    with ThreadPoolExecutor() as pool:
        attaching = pool.submit(attach, other)
        first = attach(group)
        second = attaching.result()
    with pytest.warns(RuntimeWarning, match="neither finished nor closed"):
        del first, second, attaching
        gc.collect()
    for each in (group, CountedGroup(other, Ledger())):
        with pytest.raises(tw.ConfigurationError, match=r"neither finished nor closed, .* Make another group on all"):
            attach(each)
    (alone,) = tw.ThreadGroup.create(1)
    with pytest.warns(RuntimeWarning, match="neither finished nor closed"):
        attach(alone)
        gc.collect()
    attach(alone)[2].close()


def test_an_optimizer_with_a_replica_takes_no_other():
    """As after a notebook's cell that makes the group and the Replica is run again. Both would exchange, over groups of their own."""
    first, second = (tw.ThreadGroup.create(1)[0] for _ in range(2))
    model, optimizer, attached = attach(first)
    for given in (optimizer, [optimizer]):
        with pytest.raises(tw.ConfigurationError, match=r"the optimizer has a Replica .* Call finish\(\) or close\(\)"):
            tw.Replica(tw.diloco(every=4), model, given, second)
    inner_step(model, optimizer, *batch(0, 0, 1))
    assert attached.step == 1
    attached.close()
    with tw.Replica(tw.diloco(every=4), model, optimizer, second) as again:
        inner_step(model, optimizer, *batch(0, 0, 2))
    assert (attached.step, again.step) == (1, 1)


class Carrier:
    """A user's own carrier, which can be neither hashed nor referred to weakly."""

    __hash__ = None
    __slots__ = ("close", "post", "rank", "size")

    def __init__(self, group):
        self.close, self.post, self.rank, self.size = group.close, group.post, group.rank, group.size

    def __eq__(self, other):
        return True


def test_any_carrier_can_be_claimed():
    def replica(group):
        carrier = Carrier(group)
        _, _, attached = attach(carrier)
        with pytest.raises(tw.ConfigurationError, match="has not finished"):
            attach(carrier)
        attached.close()
        attach(carrier)[2].close()

    tw.run_threads(2, replica)


def test_a_replica_that_was_refused_has_no_claim():
    def replica(group):
        with pytest.raises(tw.DisagreementError):
            attach(group, tw.diloco(every=4 + group.rank))
        attach(group)[2].close()

    tw.run_threads(2, replica)


@pytest.mark.parametrize("method", [decoupled_diloco(every=4), plexus(every=4)], ids=["decoupled", "sampled"])
def test_a_method_with_messages_beside_training_claims_its_group_until_the_run_is_over(method):
    def attached(group):
        model = toy()
        return method.attach(model, adamw(model), group)

    def replica(group):
        first = attached(group)
        with pytest.raises(tw.ConfigurationError, match="has not finished"):
            attach(group)
        first.finish()
        attached(group).close()
        with pytest.raises(tw.ConfigurationError, match="has not finished, or was closed"):
            attached(group)

    tw.run_threads(2, replica)
