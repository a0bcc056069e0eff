"""The ledger alone, with members that train, die, return, freeze and join at random: each sample is trained once or named as lost."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data_ledger import Claim, DataLedger, LeasedReader, ReadCount, in_order
from thinwire.data_ledger.layout import decode, digest, encode
from thinwire.data_ledger.ranges import total, union
from thinwire.errors import DataError


def ledger_of(names: str, samples: int = 20, fragments: int = 1, ahead: int = 2, patience: int = 1) -> DataLedger:
    return DataLedger(samples, 7, len(names), fragments, ahead, patience).begin(names)


def claim(ledger: DataLedger, name: str, begin: int, end: int) -> Claim:
    lease = ledger.lease(name)
    assert lease is not None
    return Claim(lease.serial, lease.version, ((begin, end),))


def at(ledger: DataLedger, **counts: int) -> dict[str, ReadCount]:
    leases = {name: ledger.lease(name) for name in counts}
    return {
        name: ReadCount(lease.serial, lease.version, counts[name]) if lease else ReadCount()
        for name, lease in leases.items()
    }


def test_a_fixed_group_reads_equal_parts_of_every_epoch() -> None:
    ledger = ledger_of("ab")
    a, b = ledger.leases
    assert ledger.positions(a, 0, 25) == ((0, 10), (20, 30), (40, 45))
    assert ledger.positions(b, 8, 12) == ((18, 20), (30, 32))
    assert sorted([*ledger.read(a, 0, 10), *ledger.read(b, 0, 10)]) == list(range(20))


def test_a_second_pass_of_an_inner_step_reads_its_micro_batches_again() -> None:
    """As SAM does: nothing is counted twice. What begins again holds none of them."""
    reader = LeasedReader(0, 1, 6, samples=100)  # inner steps of three micro-batches
    reader.connect("replica-0", 1, lambda: None)
    ledger = reader.template(1, 4, 1).begin(["replica-0"])
    reader.adopt(ledger)
    for step in range(3):
        micros = range(3 * step, 3 * step + 3)
        first, second = ([reader.micro_batch(micro, 2).tolist() for micro in micros] for _ in range(2))
        assert first == second and len({sample for micro in first for sample in micro}) == 6
        assert reader.count == reader.in_flight == 6 * (step + 1) and len(reader._micros) == 3
    reader.begin_again(ledger)
    reader.micro_batch(8, 2)
    assert reader.count == reader.in_flight == 2


def test_samples_of_a_dead_replica_pass_to_the_others() -> None:
    ledger = ledger_of("ab")
    ledger, _ = ledger.commit(0, {"a": claim(ledger, "a", 0, 3), "b": claim(ledger, "b", 0, 4)}, at(ledger, a=3, b=4))
    assert (ledger.trained, ledger.lost) == (7, 0)
    ledger, named = ledger.commit(0, {"a": claim(ledger, "a", 3, 5)}, at(ledger, a=5))
    assert not named.returned  # b may still return
    ledger, named = ledger.commit(0, {"a": claim(ledger, "a", 5, 6)}, at(ledger, a=6))
    assert named.returned == (("b", (14, 20)),) and not named.lost
    a = ledger.lease("a")
    assert a and ledger.lease("b") is None and ledger.positions(a, 6, 16) == ((6, 10), (14, 20)) == a.ranges
    assert ledger.positions(a, 16, 40) == ((20, 44),)
    assert not ledger.admits("b", 0, Claim(0, 0, ((4, 6),)))  # b's claim comes too late


def test_a_joiner_gets_a_part_of_the_remaining_samples() -> None:
    ledger = ledger_of("ab")
    present = at(ledger, a=3, b=4) | {"c": ReadCount()}
    ledger, _ = ledger.commit(0, {"a": claim(ledger, "a", 0, 3)}, present)
    kept = [ledger.positions(lease, lease.first, lease.tail_at) for lease in ledger.leases]
    assert [total(r) for r in kept] == [2 + 4, 6 + 4, 3] or sum(total(r) for r in kept) == 17
    assert union(r for k in kept for r in k) == ((3, 20),)
    a = ledger.lease("a")
    assert a and a.fences == (5,) and a.serial == 0 and ledger.lease("c").serial == 1  # type: ignore[union-attr]
    assert ledger.admits("a", 0, Claim(0, 0, ((3, 5),))) and not ledger.admits("a", 0, Claim(0, 0, ((3, 6),)))


def test_samples_in_only_some_anchors_are_lost_if_their_reader_leaves() -> None:
    ledger = ledger_of("ab", fragments=2, patience=0)
    ledger, _ = ledger.commit(0, {"b": claim(ledger, "b", 0, 4)}, at(ledger, a=4, b=4))
    ledger, _ = ledger.commit(1, {"b": claim(ledger, "b", 0, 3)}, at(ledger, a=4, b=4))
    assert ledger.trained == 3
    ledger, named = ledger.commit(0, {"a": claim(ledger, "a", 0, 4)}, at(ledger, a=4))
    assert named.lost == (("b", (13, 14)),) and named.returned == (("b", (14, 20)),) and ledger.lost == 1


def test_samples_missing_from_a_claim_are_named_as_lost() -> None:
    ledger = ledger_of("a")
    ledger, named = ledger.commit(0, {"a": Claim(0, 0, ((0, 2), (5, 7)))}, at(ledger, a=7))
    assert named.trained == (("a", (0, 2)), ("a", (5, 7))) and named.lost == (("a", (2, 5)),)
    assert (ledger.trained, ledger.lost) == (4, 3)
    assert not ledger.admits("a", 0, Claim(0, 0, ((6, 8),))), "counted twice"


def test_an_absent_member_keeps_what_it_may_be_reading() -> None:
    """A joiner gets a part of what remains beyond the lease that the absent one read along when it left."""
    ledger = ledger_of("abc", samples=60, patience=0)
    ledger, _ = ledger.commit(0, {}, at(ledger, a=0, b=0))  # c's samples pass to the others
    ledger = dataclasses.replace(ledger, patience=3)
    lease = ledger.lease("a")
    assert lease and lease.tail_at == 30
    after, _ = ledger.commit(0, {}, at(ledger, b=4) | {"d": ReadCount()})
    assert after.admits("a", 0, claim(ledger, "a", 0, 30)) and not after.admits("a", 0, claim(ledger, "a", 0, 31))
    assert after.will_split(["b", "d", "e"]) and not after.will_split(["a", "b", "d"])


def reading(ledger: DataLedger, name: str = "a") -> LeasedReader:
    reader = LeasedReader(7, 2, 2, ledger.samples)
    reader.connect(name, ledger.fragments, lambda: None)
    reader.adopt(ledger)
    return reader


def samples_of(ledger: DataLedger, name: str, begin: int, end: int) -> list[int]:
    lease = ledger.lease(name)
    assert lease
    return ledger.read(lease, begin, end).tolist()


def test_samples_drawn_ahead_of_a_split_are_drawn_anew() -> None:
    """Those up to the fence stay this replica's, so a reader that has drawn no further goes on."""
    ledger = ledger_of("ab", samples=100)
    for ahead, anew in ((4, False), (20, True)):
        reader = reading(ledger)
        reader.draw(ahead)
        reader.trained(4)
        split, _ = ledger.commit(0, {}, at(ledger, a=4, b=0) | {"c": ReadCount()})
        reader.adopt(split)
        assert (reader.generation, reader.count) == (int(anew), 4)
        assert reader.draw(40).tolist() == samples_of(split, "a", 4, 44)


def test_a_reader_that_is_loaded_begins_behind_what_has_landed() -> None:
    """Its delta was counted after its checkpoint. A loader must draw again in each case."""
    ledger = ledger_of("ab", samples=100)
    reader = reading(ledger)
    reader.draw(4)
    reader.trained()
    state = reader.state()
    after, _ = ledger.commit(0, {"a": claim(ledger, "a", 0, 8)}, at(ledger, a=8, b=0))
    for known, count in ((None, 4), (after, 8)):
        again = reading(ledger)
        again.draw(6)
        assert again.load(state, ledger, known) and (again.count, again.generation) == (count, 1)
        assert again.draw(2).tolist() == samples_of(ledger, "a", count, count + 2)
        assert again.holds == [((0, 4),)]
    early = reading(ledger)  # it learns of the commit only after it has loaded
    early.draw(4)
    early.trained()
    early.adopt(after)
    assert (early.count, early.generation) == (8, 1)
    assert early.draw(2).tolist() == samples_of(ledger, "a", 8, 10)
    gone, _ = after.commit(0, {}, at(after, b=0))
    gone, _ = gone.commit(0, {}, at(gone, b=0))
    again = reading(ledger)
    assert not again.load(state, ledger, gone) and again.generation == 1 and not again.in_flight


@pytest.mark.parametrize("members", [3, 9])
def test_a_group_may_have_more_members_than_samples(members: int) -> None:
    names = "abcdefghi"[:members]
    ledger = ledger_of(names, samples=2)
    read = [r for lease in ledger.leases for r in ledger.positions(lease, 0, 2)]
    assert total(union(read)) == 2 * members
    with pytest.raises(DataError, match="9 samples given, 2 needed"):
        LeasedReader(0, 1, 1, samples=2).open(9)


def test_names_are_sorted_by_the_numbers_in_them() -> None:
    assert in_order(["r-10", "r-9", "r-1b", "oslo"]) == ["oslo", "r-1b", "r-9", "r-10"]


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_an_encoded_ledger_decodes_to_itself_and_damage_is_refused(seed: int) -> None:
    ledger = RandomCommits(random.Random(seed), commits=6).run()
    data = encode(ledger)
    assert decode(data) == ledger and digest(decode(data)) == digest(ledger)
    chance = random.Random(seed)
    cut = chance.randrange(len(data))
    with pytest.raises(DataError, match="cannot be read"):
        decode(data[:cut])
    damaged = bytearray(data)
    damaged[cut] ^= 1 << chance.randrange(8)
    with contextlib.suppress(DataError):
        assert encode(decode(bytes(damaged))) == damaged


def test_a_false_length_is_refused() -> None:
    data = encode(ledger_of("a"))
    # the position of the number of ranges; counts of holes and fences, and the landed rounds, follow it
    ranges = len(data) - 8 - 12
    with pytest.raises(DataError, match="cut short"):
        decode(data[:ranges] + b"\xff" * 4 + data[ranges + 4 :])


# ---- members that come and go at random


@dataclass
class Member:
    """A replica, reduced to its reads: `inside[f]` has the positions in its parameters, but not in the anchor, of fragment f."""

    reader: LeasedReader
    inside: list[Counter[int]]
    generation: int = 0
    drawn: list[int] = field(default_factory=list)  # samples that were drawn in this generation, and are not trained
    waits: dict[int, tuple[Claim, Counter[int]]] = field(default_factory=dict)
    frozen: int = 0
    saved: tuple[dict[str, Any], list[Counter[int]], DataLedger] | None = None


class RandomCommits:
    """A random sequence of commits. It counts the samples in the anchors itself, independently of the ledger."""

    def __init__(self, chance: random.Random, commits: int = 60) -> None:
        self.chance, self.commits = chance, commits
        self.fragments, self.samples = chance.choice([1, 1, 2, 3]), chance.choice([5, 40, 200])
        self.step = chance.choice([1, 3])
        names = ["replica-0", "replica-1", "replica-2"][: chance.randint(1, 3)]
        self.ledger = DataLedger(
            self.samples, 1, len(names), self.fragments, 4 * self.step, chance.randint(0, 3)
        ).begin(names)
        self.anchors = [Counter[int]() for _ in range(self.fragments)]
        self.trained, self.lost, self.returned, self.number = Counter[int](), Counter[int](), 0, 0
        self.members = {name: self.member(name) for name in names}
        self.dead: dict[str, Member] = {}

    def member(self, name: str) -> Member:
        reader = LeasedReader(1, 3, self.step, self.samples)
        reader.connect(name, self.fragments, lambda: None)
        reader.adopt(self.ledger)
        return Member(reader, [Counter() for _ in range(self.fragments)])

    def train(self, member: Member) -> None:
        """One inner step. A loader may have drawn ahead, and draws anew only when the generation changes."""
        reader = member.reader
        if reader.read_count.serial < 0:
            return
        if reader.generation != member.generation:
            reader.restart()
            member.generation, member.drawn = reader.generation, []
        while len(member.drawn) < self.step or self.chance.random() < 0.2:
            member.drawn += reader.draw(self.step).tolist()
        reader.trained(self.step)
        fresh = [position for begin, end in reader.fresh() for position in range(begin, end)]
        trained, member.drawn = member.drawn[: self.step], member.drawn[self.step :]
        due = self.ledger.order.samples_at(np.array(fresh)).tolist()
        assert sorted(trained) == sorted(due), "trained on samples that it does not report"
        for inside in member.inside:
            inside.update(fresh)

    def bring(self, member: Member, fragment: int) -> None:
        if fragment not in member.waits and member.inside[fragment]:
            member.waits[fragment] = member.reader.claim(fragment), Counter(member.inside[fragment])

    def begin_again(self, member: Member) -> None:
        member.waits.clear()
        member.inside = [Counter() for _ in range(self.fragments)]
        member.reader.begin_again(self.ledger)

    def die_or_come_back(self) -> None:
        chance = self.chance
        if chance.random() < 0.15 and len(self.members) > 1:
            name = chance.choice(list(self.members))
            self.dead[name] = self.members.pop(name)
        if chance.random() < 0.15 and self.dead:
            name = chance.choice(list(self.dead))
            saved = self.dead.pop(name).saved
            back = self.members[name] = self.member(name)
            if saved is not None and chance.random() < 0.8:
                state, inside, ledger = saved
                back.inside = copy.deepcopy(inside)
                if not back.reader.load(state, ledger, self.ledger):
                    self.begin_again(back)
                lease = self.ledger.lease(name)
                # Its delta was counted after its checkpoint, so its parameters restart at the anchor.
                for fragment in range(self.fragments):
                    before = ledger.lease(name)
                    if lease and before and lease.landed[fragment] > before.landed[fragment]:
                        back.inside[fragment].clear()
                        back.reader.dropped(fragment)
                back.saved = saved
        if chance.random() < 0.06 and len(self.members) + len(self.dead) < 6:
            name = f"new-{self.number}"
            self.members[name] = self.member(name)
        for member in self.members.values():
            if chance.random() < 0.08:
                member.frozen = chance.randint(1, 8)
            if chance.random() < 0.3:
                member.saved = member.reader.state(), copy.deepcopy(member.inside), self.ledger
            lease = self.ledger.lease(member.reader.name)
            if lease and member.reader.read_count.version == lease.version and not member.frozen:
                assert member.reader.count >= lease.high, "reads again what has landed"

    def round(self) -> None:
        chance, fragment = self.chance, self.number % self.fragments
        self.number += 1
        self.die_or_come_back()
        for member in self.members.values():
            for _ in range(chance.randint(0, 4)):
                self.train(member)
            member.frozen = max(0, member.frozen - 1)
        here = {name: member for name, member in self.members.items() if not member.frozen}
        if not here:
            return
        for member in here.values():
            self.bring(member, fragment)
        statuses = {name: (member.reader.read_count, member.waits.get(fragment)) for name, member in here.items()}
        for member in here.values():  # training continues during the round
            for _ in range(chance.choice([0, 0, 1, 6])):
                self.train(member)
        claims = {
            n: brought[0]
            for n, (_, brought) in statuses.items()
            if brought and self.ledger.admits(n, fragment, brought[0])
        }
        if chance.random() < 0.2:  # a failed round changes nothing
            return
        for name in claims:
            member, brought = here[name], statuses[name][1]
            assert brought is not None
            self.anchors[fragment] += brought[1]
            member.inside[fragment] -= brought[1]
            member.reader.landed(fragment, brought[0])
        self.ledger, named = self.ledger.commit(
            fragment, claims, {name: reading for name, (reading, _) in statuses.items()}
        )
        for settled, ranges in ((self.trained, named.trained), (self.lost, named.lost)):
            for _, (begin, end) in ranges:
                settled.update(range(begin, end))
        self.returned += total(r for _, r in named.returned)
        for name, member in here.items():
            lease, (reading, brought) = self.ledger.lease(name), statuses[name]
            refused = brought is not None and name not in claims
            member.waits.pop(fragment, None)
            if refused or lease is None or not lease.reads_alike(reading, reading.count):
                self.begin_again(member)
            member.reader.adopt(self.ledger)

    def run(self) -> DataLedger:
        for _ in range(self.commits):
            self.round()
            self.check()
        return self.ledger

    def check(self) -> None:
        """Compares the ledger with the samples that were really added to the anchors."""
        ledger = self.ledger
        assert all(number == 1 for anchor in self.anchors for number in anchor.values()), "trained twice"
        assert all(number == 1 for number in (self.trained + self.lost).values()), "named twice"
        kept = Counter[int]()
        end = ledger.tail_from + 3 * ledger._block
        for lease in ledger.leases:
            for begin, stop in ledger.positions(
                lease, lease.first, lease.tail_at + 3 * (ledger._block // len(ledger.leases) + 1)
            ):
                kept.update(range(begin, stop))
        everywhere = Counter(set.intersection(*(set(anchor) for anchor in self.anchors)))
        assert all(number == 1 for number in kept.values()), "two have it"
        settled = set(everywhere) - set(kept)
        assert not settled & set(self.lost) and ledger.trained == len(settled), "called lost, and is in all anchors"
        assert settled == set(self.trained), "named as trained, and is not in all anchors"
        assert ledger.lost == len(self.lost) and not set(self.lost) & set(kept)
        missing = set(range(end)) - settled - set(self.lost) - set(kept)
        assert not missing, f"{len(missing)} samples are nobody's"


@pytest.mark.parametrize("seed", range(25))
def test_each_sample_is_trained_once_or_named_as_lost(seed: int) -> None:
    RandomCommits(random.Random(seed)).run()


@pytest.mark.slow
def test_each_sample_is_trained_once_or_named_in_2000_runs() -> None:
    lost = trained = returned = 0
    for seed in range(1000, 3000):
        commits = RandomCommits(random.Random(seed))
        ledger = commits.run()
        lost, trained, returned = lost + ledger.lost, trained + ledger.trained, returned + commits.returned
    assert trained > 100_000 and lost > 1000 and returned > 1000


def test_reading_needs_no_memory_for_the_order_of_the_epoch() -> None:
    ledger = DataLedger(10**12, 3, 3, 4, 100, 8).begin(["a", "b", "c"])
    lease = ledger.leases[1]
    found = ledger.read(lease, 10**11, 10**11 + 1000)
    assert len(np.unique(found)) == 1000 and found.min() >= 0 and found.max() < 10**12 and (found % 3 == 1).all()
