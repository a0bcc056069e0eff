"""A hub that averages, as a thread beside those of the replicas: it gives the same bits as a replica that averages, and refuses bad packets."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire.catalogue.parsing import parse
from thinwire.comm import CountedGroup, Ledger, Link
from thinwire.comm.group import WrappedGroup
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import PIECE_NUMEL, cut, packets_nbytes
from thinwire.lab.star import reducer
from thinwire.lab.star.exchange import DECLARED_NBYTES, DECLARED_TAG, Star, declare
from thinwire.lab.star.reducer import Declared, Reducer
from thinwire.lab.star.with_hub import WithHub
from thinwire.packet import HEADER_NBYTES, REFUSED
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.testing.exchanges import Went, deltas, rounds
from thinwire.testing.toy import Plan, same_bits, travel


def at_a_hub(replica, size, most_nbytes=1 << 30, wrap=lambda group: group):
    """Runs `replica(group)` for each replica and the hub's rounds, all as threads. Returns the results, and how the hub ended."""

    def member(group):
        seen = WithHub(group)
        if group.rank < size:
            return replica(seen)
        hub = Reducer(wrap(seen), parse, most_nbytes)
        end = hub.run()
        return f"{hub.rounds} rounds; {end}"

    return tw.run_threads(size + 1, member, timeout=600.0)


@pytest.mark.parametrize("feedback", [None, Feedback()], ids=str)
@pytest.mark.parametrize(
    "codec", [tw.codecs.E3M0(4), tw.codecs.Sign(), tw.codecs.Int(4, 16, "fp32", "stochastic"), tw.lab.codecs.Entropy(tw.codecs.E3M0(4))], ids=str
)  # fmt: skip
def test_a_hub_averages_to_the_bits_of_a_replica(codec, feedback, small):
    """Laws 1, 5 and 7: bits, bytes and flags are equal. A round that one replica refuses changes nothing at the hub either."""
    x = deltas(3, 100, 4)
    x[1, 2, 77] = torch.nan
    ledgers = [Ledger() for _ in range(3)]

    def replica(group, star):
        context = SendContext(CountedGroup(group, ledgers[group.rank]) if star.traits.needs_hub else group)
        seen, state = [], star.init(codec, 100, group.rank, 3)
        for number in range(4):
            seen.append(Went(context, star, codec, x[number, group.rank], state, number))
            state = state if seen[-1].refused else seen[-1].state
        context.close(wait=True)
        return seen

    plain = [
        tw.run_threads(3, lambda group, star=Star(center, feedback): replica(group, star), 600.0) for center in (0, 2)
    ]
    room = Declared(codec, feedback, 100, Key()).nbytes(3)  # the fragment needs exactly the bytes that the hub has
    *seen, end = at_a_hub(lambda group: replica(group, Star("hub", feedback)), 3, room)
    assert end.startswith("4 rounds; ")
    for number in range(4):
        for rank, went in enumerate(one[number] for one in seen):
            assert went.refused == (number == 1) and not went.state
            assert went.flags == (0, 0, REFUSED * (number == 1))
            for other in () if went.refused else plain:
                assert same_bits(went.estimate, other[rank][number].estimate)
                assert same_bits(went.sent, other[rank][number].sent)
    assert not same_bits(seen[0][0].estimate, seen[0][2].estimate)
    messages = cut(codec, 0, 100)
    up, down = packets_nbytes(messages), packets_nbytes(messages, marks=3)
    assert len(messages) > 1 or codec.grain is None
    assert Star("hub").nbytes_sent(codec, 100, 3) == up
    for ledger in ledgers:
        assert ledger.sent("declared") == DECLARED_NBYTES and set(ledger.as_dict()["sent"]["packet"]) == {"3"}
        assert ledger.sent("packet") == 4 * up or (codec.varies and ledger.sent("packet") < 4 * up)
        assert ledger.received() == 4 * down or (codec.varies and ledger.received() < 4 * down)


def test_training_at_a_hub_equals_training_with_a_replica_as_center():
    """Fragments take turns and are in the air together. The anchors of every step equal those of a run with a replica as the center."""
    made = {
        center: Plan(
            tw.streaming_diloco(
                every=4, fragments=2, delay=2, codec=tw.codecs.E3M0(4), exchange=Star(center, Feedback())
            )
        )
        for center in (1, "hub")
    }
    plain = tw.run_threads(2, lambda group: travel(made[1], group), timeout=600.0)
    *seen, end = at_a_hub(lambda group: travel(made["hub"], group), 2)
    assert "closed its group" in end
    for one, other in zip(seen, plain):
        assert len(one.agreed) == len(other.agreed) > 5
        assert same_bits(one.final, other.final)
        assert all(same_bits(a[name], b[name]) for a, b in zip(one.agreed, other.agreed) for name in a)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (b"x", "cannot be read"),
        (b'{"fragment": 1e999}', "cannot be read"),
        (b"[" * DECLARED_NBYTES, "cannot be read"),
        (b'{"fragment": 0, "codec": "E3M0()", "feedback": "None", "numel": -1, "seed": 0, "round": 0}', "out of range"),
        (b'{"fragment": 0, "codec": "open(1)", "feedback": "None", "numel": 1, "seed": 0, "round": 0}', "cannot be read"),
        (b'{"fragment": 0, "codec": "Feedback()", "feedback": "None", "numel": 1, "seed": 0, "round": 0}', "names no codec"),
        (b'{"fragment": 0, "codec": "E3M0()", "feedback": "None", "numel": 1e9, "seed": 0, "round": 0}', "out of range"),
        (b'{"fragment": 0, "codec": "E3M0()", "feedback": "None", "numel": 999999999999, "seed": 0, "round": 0}', "bytes left"),
    ],
)  # fmt: skip
def test_a_hub_refuses_invalid_declarations_before_it_allocates(told, reason):
    def replica(group):
        message = torch.frombuffer(bytearray(told.ljust(DECLARED_NBYTES)), dtype=torch.uint8)
        with pytest.raises(tw.LinkError):  # the hub leaves, perhaps before this replica has declared
            group.post(DECLARED_TAG, {2: message}, {}).wait()
            group.post(0, {}, {2: torch.empty(1, dtype=torch.uint8)}).wait()

    with pytest.raises(tw.PacketError, match=reason):
        at_a_hub(replica, 2)


class Damaging(WrappedGroup):
    """Changes a bit of each packet that is sent, and leaves out its last `short` bytes."""

    short = 0

    def post(self, tag, send, recv, *more):
        if tag != DECLARED_TAG:
            send = {peer: packet[: len(packet) - self.short].clone() for peer, packet in send.items()}
            for packet in send.values():
                packet[HEADER_NBYTES] ^= 1
        return self.group.post(tag, send, recv, *more)


@pytest.mark.parametrize("change", ["declares another codec", "damages a packet", "sends another size"])
def test_a_member_that_sends_invalid_packets_is_named(change):
    def replica(group):
        liar = group.rank == 1
        codec = tw.codecs.Sign() if liar and change.startswith("declares") else tw.codecs.E3M0()
        if liar and not change.startswith("declares"):
            group = Damaging(group)
            group.short = int(change.startswith("sends"))
        context = SendContext(group)
        with pytest.raises(tw.LinkError):
            Went(context, Star("hub"), codec, torch.ones(100), {})
        context.close(wait=True)

    with pytest.raises(tw.PacketError, match=r"replicas 0 and 1 declare|replica 1") as told:
        at_a_hub(replica, 2)
    assert "replica 0 sent" not in str(told.value)


@pytest.mark.parametrize(("center", "name"), [(1, "replica 1"), ("hub", "the hub")])
def test_a_damaged_mean_is_refused_by_the_name_of_its_center(center, name):
    def replica(group):
        liar = group.rank == center
        context = SendContext(Damaging(group) if liar else group)
        with nullcontext() if liar else pytest.raises(tw.PacketError, match=f"the packet of {name} is damaged"):
            Went(context, Star(center), tw.codecs.E3M0(), torch.ones(100), {})
        context.close(wait=True)

    if center == "hub":
        at_a_hub(replica, 2, wrap=Damaging)
    else:
        tw.run_threads(2, replica)


def test_a_star_predicts_its_bytes_and_state():
    codec, link = tw.codecs.E3M0(4), Link(8e3, 0.5)
    messages = cut(codec, 0, 101)  # one value in the last grain
    up, down, alone = packets_nbytes(messages), packets_nbytes(messages, marks=3), packets_nbytes(messages, marks=1)
    star, hub = Star(1), Star("hub")
    assert [star.nbytes_sent(codec, 101, 3, rank) for rank in (None, 0, 1, 2)] == [2 * down, up, 2 * down, up]
    assert [star.owns(codec, 101, rank, 3) for rank in range(3)] == [0, 101, 0] and hub.owns(codec, 101, 1, 3) == 0
    assert star.seconds(codec, 101, 3, link) == link.seconds(up) + link.seconds(2 * down)
    assert hub.seconds(codec, 101, 3, link) == link.seconds(up) + link.seconds(3 * down)
    assert hub.seconds(codec, 101, 1, link) == link.seconds(up) + link.seconds(alone)
    assert Star() == Star(0) and Star().nbytes_sent(codec, 101, 2) == packets_nbytes(messages, marks=2) > up
    assert Star().seconds(codec, 101, 1, link) == 0.0 == Star().nbytes_sent(codec, 101, 1)
    assert not star.needs_fixed_group and "averages the packets" in hub.needs_fixed_group
    assert "keeps what its center holds back" in Star(1, Feedback()).needs_fixed_group


class Long(tw.codecs.Identity):
    """A codec with a text of so many characters."""

    count = 0

    def __repr__(self):
        return "L" * self.count


def test_a_fragment_is_declared_in_one_message():
    """Its bytes and tag are part of the wire format. It is sent once, and has 4,096 characters at most."""
    told, codec = [], Long()
    group = SimpleNamespace(rank=0, size=2, post=lambda *given: told.append(given))

    def declared(fragment, codec, feedback=None, number=5):
        declare(Round(context, codec, 10, Key(3, fragment, number), lambda begin, end: None), feedback)

    context = SendContext(group)
    declared(1, tw.codecs.Sign(), Feedback())
    declared(1, tw.codecs.Sign(), Feedback(), 6)
    ((tag, sent, due, purpose),) = told
    assert (tag, list(sent), due, purpose) == (28 << 9, [2], {}, "declared")
    body = f'{{"codec": "{tw.codecs.Sign()}", "feedback": "{Feedback()}", "numel": 10, "seed": 3, "fragment": 1, "round": 5}}'
    assert sent[2].numpy().tobytes() == body.encode().ljust(4096)
    Long.count = 4096 - len('{"codec": "", "feedback": "None", "numel": 10, "seed": 3, "fragment": 2, "round": 5}')
    declared(2, codec)
    assert len(told) == 2 and told[1][1][2].numpy().tobytes().endswith(b'"round": 5}')
    Long.count += 1
    with pytest.raises(
        tw.ConfigurationError, match=r"with fragment 3 in 4097 characters: .*described in 4096 characters"
    ):
        declared(3, codec)


def test_a_changed_fragment_declaration_is_refused():
    def replica(group):
        context = SendContext(group)
        context.declared[0] = {"codec": "Sign()"}, None
        with pytest.raises(
            tw.ConfigurationError, match=r"before \{'codec': 'Sign\(\)'\}; a hub needs fragments that stay"
        ):
            declare(Round(context, tw.codecs.E3M0(), 10, Key(), lambda begin, end: torch.zeros(end - begin)), None)
        context.close(wait=True)

    tw.run_threads(1, replica)


@pytest.mark.parametrize(("name", "least"), [("numel", 0), ("seed", -(2**63)), ("fragment", 0), ("round", -(2**63))])
def test_numbers_of_a_fragment_are_read_within_their_range(name, least):
    told = {"codec": "E3M0()", "feedback": "None", "numel": 8, "seed": 3, "fragment": 1, "round": 2}
    for number in (least, 2**63 - 1):
        found = Declared.of(json.dumps(told | {name: number}).encode(), parse, 1)
        numbers = (found.numel, found.key.seed, found.key.fragment, found.key.round)
        assert numbers == tuple({"numel": 8, "seed": 3, "fragment": 1, "round": 2, name: number}.values())
    for number in (least - 1, 2**63):
        with pytest.raises(
            tw.PacketError, match="replica 1 declared of a fragment cannot be read: a number is out of range"
        ):
            Declared.of(json.dumps(told | {name: number}).encode(), parse, 1)


@pytest.mark.parametrize(("codec", "parts"), [(tw.codecs.E3M0(4), 1), (tw.codecs.TopK(0.1), 3)], ids=str)
def test_a_hub_computes_the_memory_of_a_fragment(codec, parts):
    """It counts the packets of two rounds from and to all, two parts in fp32, the largest message, and with feedback two states."""
    numel = 3 * PIECE_NUMEL
    messages = cut(codec, 0, numel)
    packets = 2 * 4 * packets_nbytes(messages, marks=3)
    floats = 2 * parts * PIECE_NUMEL + max(message.numel for message in messages)
    assert Declared(codec, None, numel, Key()).nbytes(3) == packets + 4 * floats
    assert Declared(codec, Feedback(), numel, Key()).nbytes(3) == packets + 4 * (floats + 2 * numel)


def test_a_fragment_is_declared_once(monkeypatch):
    assert reducer.FRAGMENTS == 256
    monkeypatch.setattr(reducer, "FRAGMENTS", 2)

    def member(group):
        hub = Reducer(group, parse)
        assert hub._free == 16 << 30
        for fragment in (0, 7):
            hub._hear(0, b'{"fragment": %d}' % fragment)
        for fragment in (0, 8):
            with pytest.raises(tw.PacketError, match=f"replica 0 declared fragment {fragment} twice, or more than 2"):
                hub._hear(0, b'{"fragment": %d}' % fragment)
        hub._context.close(wait=True)

    tw.run_threads(2, member)


def test_strategies_that_a_hub_cannot_run_are_refused():
    with pytest.raises(tw.ConfigurationError, match=r"Star\('hub'\) needs a hub that averages"):
        rounds(Star("hub"), tw.codecs.E3M0(), deltas(2, 10))
    with pytest.raises(tw.ConfigurationError, match="the mean of packets in one codec"):
        tw.Strategy(exchange=Star("hub"), policy=tw.pieces.policies.DenseUntil(3))
    with pytest.raises(tw.ConfigurationError, match="the rank of a replica, or 'hub'"):
        Star("center")
    with pytest.raises(tw.ConfigurationError, match=r"a center in 0\.\.1 is needed"):
        Star(2).check_size(2)
