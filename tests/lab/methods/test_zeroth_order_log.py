"""Just One Byte: replicas that join, leave, fail and return have the bits that the log gives."""

from __future__ import annotations

import math
import threading

import pytest
from loops import LOOPS, ToyRun, attach, train_toys, train_until
from torch import Tensor

import thinwire as tw
from thinwire.lab.methods import Log
from thinwire.lab.methods.zeroth_order import apply
from thinwire.testing.toy import same_bits, toy, weights

METHOD = LOOPS["just_one_byte"]


def replayed(log: Log, upto: int | None = None) -> Tensor:
    model = toy()
    for iteration, entry in enumerate(log.entries[:upto]):
        apply([p.detach() for p in model.parameters() if p.requires_grad], entry, METHOD.seed, iteration)
    return weights(model)


def test_the_replayed_log_has_the_bits_of_the_run():
    replicas = train_toys(METHOD, 3, steps=6)
    log = replicas[1].attached.log
    assert all(same_bits(replayed(log, upto), replicas[2].weights[upto - 1]) for upto in range(1, 7))
    again = Log.load(*log.state())
    assert again == log and again.chain(4) == log.chain(4) != log.chain(5)
    assert log.state()[0]["codes"].numel() == 6 * 3 * METHOD.samples


@pytest.mark.parametrize("snapshot", [0, 3])
def test_a_late_replica_needs_only_the_log(snapshot):
    """It begins with the first weights or with a checkpoint of iteration 3."""
    early, late = tw.ThreadGroup.create(2, 20.0), tw.ThreadGroup.create(3, 20.0)
    run, seen = ToyRun(METHOD, names=("a", "b")), {}

    def replica(group: tw.Group) -> None:
        rank = group.rank
        if rank < 2:
            trained = attach(run, early[rank])
            train_until(run, trained, early[rank], 5)
            trained.attached.meet(late[rank], ("a", "b", "late"))
        else:
            trained = joined(late[2])
        train_until(run, trained, late[rank], 9)
        seen[rank] = trained

    def joined(group: tw.Group):
        alone = tw.ThreadGroup.create(1, 20.0)[0]
        trained = attach(ToyRun(METHOD, names=("late",)), alone)
        if snapshot:
            done = train_toys(METHOD, 2, steps=3, names=("a", "b"))  # the same run up to iteration 3
            trained = attach(ToyRun(METHOD, names=("late",)), alone, done[0].attached.model)
            trained.attached.load_state(*done[0].attached.state())
        trained.attached.meet(group, ("a", "b", "late"))
        return trained

    tw.run_threads(3, replica)
    assert same_bits(weights(seen[2].attached.model), weights(seen[0].attached.model))
    assert seen[2].attached.log == seen[0].attached.log and len(seen[2].attached.log.entries) == 9
    given = next(e for e in seen[0].events if e["event"] == "given")
    assert given["nbytes"] < 1000 and given["to"] == ["late"]
    assert [e.names for e in seen[0].attached.log.entries] == [("a", "b")] * 5 + [("a", "b", "late")] * 4


class FailingLink:
    """A group whose link fails in iteration `at`: replica 1's packet reaches replica 2, which applies it, but not replica 0."""

    def __init__(self, group: tw.Group, at: int, applied: threading.Event) -> None:
        self.group, self.rank, self.size, self.at, self.posts, self.applied = (
            group,
            group.rank,
            group.size,
            at,
            0,
            applied,
        )

    def post(self, tag, send, recv, purpose="packet", sized=None):
        if purpose == "packet":
            self.posts += 1
            if self.posts > self.at and self.rank == 1:
                self.group.post(tag, {2: send[2]}, {}, purpose)
                assert self.applied.wait(600.0)  # keep the link until replica 2 has all packets
                raise tw.LinkError("torn")
            if self.posts > self.at + 1:  # only replica 2 gets this far
                self.applied.set()
                raise tw.LinkError("torn")
        return self.group.post(tag, send, recv, purpose, sized)

    def close(self):
        self.group.close()


def test_an_iteration_that_reached_one_replica_is_taken_from_its_log():
    """Replica 2 has all three packets and applies them; replica 0 lacks one and takes the iteration from replica 2's log."""
    first, second = tw.ThreadGroup.create(3, 60.0), tw.ThreadGroup.create(2, 60.0)
    run, seen, applied = ToyRun(METHOD, names=("a", "b", "c")), {}, threading.Event()

    def replica(group: tw.Group) -> None:
        trained = attach(run, FailingLink(first[group.rank], 3, applied))
        with pytest.raises(tw.LinkError):
            train_until(run, trained, first[group.rank], 8)
        first[group.rank].close()
        seen[group.rank] = trained.attached.step, trained
        if group.rank != 1:
            trained.attached.meet(second[group.rank // 2], ("a", "c"))
            train_until(run, trained, second[group.rank // 2], 8)

    tw.run_threads(3, replica)
    assert [seen[rank][0] for rank in (0, 1, 2)] == [3, 3, 4]
    survivors = [seen[rank][1] for rank in (0, 2)]
    assert same_bits(*(weights(trained.attached.model) for trained in survivors))
    assert survivors[0].attached.log.entries[3].names == ("a", "b", "c")
    assert survivors[0].attached.log.entries[4].names == ("a", "c")


def test_a_replica_that_iterated_alone_is_refused():
    """Both replicas made iterations without the other, so their logs differ."""
    both, alone, again = tw.ThreadGroup.create(2, 20.0), tw.ThreadGroup.create(1), tw.ThreadGroup.create(2, 20.0)
    run = ToyRun(METHOD, names=("a", "b"))

    def replica(group: tw.Group) -> None:
        trained = attach(run, both[group.rank])
        train_until(run, trained, both[group.rank], 2)
        if group.rank:
            trained.attached.meet(alone[0], ("b",))
            train_until(run, trained, group=alone[0], upto=4)
        trained.attached.meet(again[group.rank], ("a", "b")) if group.rank else _one_more(run, trained, again[0])

    def _one_more(run, trained, group):
        solo = tw.ThreadGroup.create(1)[0]
        trained.attached.meet(solo, ("a",))
        train_until(run, trained, solo, 3)
        trained.attached.meet(group, ("a", "b"))

    with pytest.raises(tw.DisagreementError, match="continued separately"):
        tw.run_threads(2, replica)


def test_a_joining_replica_with_other_first_weights_is_refused():
    both, again = tw.ThreadGroup.create(2, 20.0), tw.ThreadGroup.create(3, 20.0)
    run = ToyRun(METHOD, names=("a", "b"))

    def replica(group: tw.Group) -> None:
        if group.rank < 2:
            trained = attach(run, both[group.rank])
            train_until(run, trained, both[group.rank], 2)
        else:
            trained = attach(ToyRun(METHOD, names=("c",)), tw.ThreadGroup.create(1)[0], toy(5))
        trained.attached.meet(again[group.rank], ("a", "b", "c"))

    with pytest.raises(tw.DisagreementError, match="'c' began with other weights"):
        tw.run_threads(3, replica)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors, facts: facts.pop("members"),
        lambda tensors, facts: facts.update(members=[]),
        lambda tensors, facts: facts.update(samples="many"),
        lambda tensors, facts: tensors.update(codes=tensors["codes"][1:]),
        lambda tensors, facts: tensors["lrs"].fill_(math.nan),
        lambda tensors, facts: tensors.update(members=tensors["members"] + 9),
        lambda tensors, facts: tensors.update(members=tensors["members"] - 1),
    ],
)
def test_an_invalid_log_is_refused(spoil):
    tensors, facts = train_toys(METHOD, 2, steps=3)[0].attached.log.state()
    spoil(tensors, facts)
    with pytest.raises(tw.CheckpointError, match="cannot be read"):
        Log.load(tensors, facts)
