"""Tags of messages, what a packet holds, also where its encoding fails, and which messages are counted."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import thinwire as tw
from thinwire.comm.group import TAGS
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import cut
from thinwire.exchange.stage import MOST_STAGES, Stage, heard, tag_of
from thinwire.packet import HEADER_NBYTES, REFUSED, STOP, Header, identity, open_packet, read_header
from thinwire.rng import Key
from thinwire.testing.values import encoded


def test_concurrent_messages_have_distinct_tags():
    def replica(group):
        context, codec, tags = SendContext(group), tw.codecs.Identity(), []
        for number, fragment, stage in product((0, 1, 2), (0, 1, 6, 1023), (0, 1, 31)):
            round_ = Round(context, codec, 0, Key(0, fragment, number), lambda begin, end: torch.zeros(end - begin))
            tags += [Stage(round_, codec, stage)._tag(index) for index in (0, 1, 6, 511)]
        context.close()
        return tags

    (tags,) = tw.run_threads(1, replica)
    assert len(set(tags)) == len(tags) == 144 and 0 <= min(tags) <= max(tags) < TAGS


def test_a_tag_has_nine_bits_of_the_index_five_of_the_stage_ten_of_the_fragment_and_the_round_above():
    assert [tag_of(Key(fragment=f, round=r), s, i) for f, r, s, i in ((0, 0, 0, 1), (0, 0, 1, 0), (1, 0, 0, 0))] == [
        1,
        1 << 9,
        1 << 14,
    ]
    assert tag_of(Key(round=1), 0) == 1 << 24 and tag_of(Key(round=65), 0) == 1 << 24
    last = tag_of(Key(fragment=1023, round=63), MOST_STAGES - 1, 511)
    assert last == TAGS - 1 == tag_of(Key(fragment=2047, round=127), 31, 1023)


SHORT = tw.lab.codecs.Levelled((tw.codecs.Identity(), tw.codecs.Cast()), level=1)


@pytest.mark.parametrize("codec", [tw.codecs.Cast(), SHORT], ids=str)
@pytest.mark.parametrize(("bad", "flags"), [(None, 0), (None, STOP), (torch.nan, REFUSED), ("fails", REFUSED)], ids=str)
def test_a_packet_says_what_it_holds(codec, bad, flags, small):
    """It has two ranges where the codec does not vary, and the second cannot be encoded. Marks follow the payload."""
    (group,) = tw.ThreadGroup.create(1)
    context, values = SendContext(group), torch.linspace(-1, 1, 20).bfloat16().float()
    if isinstance(bad, float):
        values[13] = bad

    def signal(begin: int, end: int) -> torch.Tensor:
        if end > 13 and bad == "fails":
            raise OSError("no more")
        return values[begin:end]

    round_ = Round(context, codec, 20, Key(1, 2, 3, 0), signal, step=9)
    (message,) = cut(codec, 0, 20)[:1]
    stage = Stage(round_, codec, 4, marks=3, passes=6)
    given = 0 if flags == REFUSED else flags
    outgoing = stage.write(5, message, signal, Key(1, 2, 3, 7), given, (REFUSED, 0, STOP))
    assert round_.outgoing == [outgoing] and outgoing.flags == flags
    if bad == "fails":
        with pytest.raises(OSError, match="no more"):
            outgoing.wait()
    packet = outgoing.packet if bad == "fails" else outgoing.wait()
    coded = bytes([1] if codec == SHORT else []) + encoded(tw.codecs.Cast(), values[: message.numel].nan_to_num())
    nbytes = message.nbytes if flags == REFUSED else len(coded)
    due = Header(identity(codec), 7, 2, 3, (6 << 24) + 5, message.numel, nbytes + 3, flags, 9)
    assert read_header(packet) == due and open_packet(packet, due) == flags
    assert packet[HEADER_NBYTES + nbytes :].tolist() == [REFUSED, 0, STOP] == heard(packet, 3, 7)
    assert bytes(packet[HEADER_NBYTES:][:nbytes].tolist()) == (bytes(nbytes) if flags == REFUSED else coded)
    context.close()


def test_a_packet_without_room_for_its_number_is_not_sent():
    (group,) = tw.ThreadGroup.create(1)
    context, codec = SendContext(group), tw.codecs.Cast()
    round_ = Round(context, codec, 2, Key(round=1 << 32), lambda begin, end: torch.zeros(end - begin))
    with pytest.raises(tw.PacketError, match="a packet cannot be written"):
        Stage(round_, codec).write(0, *cut(codec, 0, 2), round_.signal, round_.key, 0)
    with pytest.raises(tw.PacketError, match="a packet cannot be written"):
        round_.outgoing[0].wait()
    context.close()


@pytest.mark.parametrize("mark", [8, 16 | REFUSED, 0xFF])
def test_unknown_flags_that_a_replica_forwards_are_refused(mark):
    packet = torch.zeros(HEADER_NBYTES + 6, dtype=torch.uint8)
    packet[-4:] = torch.tensor([0, REFUSED, STOP, REFUSED | STOP])
    assert heard(packet, 4, 1) == [0, REFUSED, STOP, REFUSED | STOP] and heard(packet, 2, 1) == [STOP, REFUSED | STOP]
    packet[-1] = mark
    with pytest.raises(tw.PacketError, match=r"replica 1 forwarded unknown flags \[0, 1, 2, \d+\]"):
        heard(packet, 4, 1)


def test_only_bytes_that_leave_a_site_are_counted():
    def replica(group):
        context, codec, counts = SendContext(group), tw.codecs.Identity(), []
        for number, exchange in enumerate((tw.exchange.Direct(), tw.exchange.Hierarchy((2,)))):
            key = Key(0, 0, number, group.rank)
            round_ = Round(context, codec, 10, key, lambda begin, end: torch.ones(end - begin))
            assert list(exchange.arrive(exchange.depart(round_, {})))
            round_.close()
            counts.append(round_.nbytes_sent)
        context.close()
        return counts

    assert tw.run_threads(2, replica) == [[tw.exchange.Direct().nbytes_sent(tw.codecs.Identity(), 10, 2), 0]] * 2


def test_messages_that_lie_there_are_counted_where_an_earlier_one_is_missing(small):
    """Of five messages each, replica 1 sends one and closes its group; those of replica 2 are there, the last with another step."""
    groups, codec, stages = tw.ThreadGroup.create(3, 0.01), tw.codecs.Identity(), []  # what is awaited is there
    messages = cut(codec, 0, 80)
    for group in groups:
        round_ = Round(
            SendContext(group), codec, 80, Key(sender=group.rank), lambda begin, end: torch.ones(end - begin)
        )
        stages.append(Stage(round_, codec))
    stages[0].expect({1: messages, 2: messages})
    assert len(messages) == 5 and stages[0].receive(5) == {} and stages[0].number == 0
    for rank, index in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)):
        round_ = stages[rank].round
        stages[0].round.step, round_.step = 4, 4 + (index == 4)
        stages[rank].send(index, messages[index], [0], round_.signal, round_.key).wait_sent()
    groups[1].close()
    assert stages[0].receive(0) == {1: 0, 2: 0}
    with pytest.raises(tw.LinkError, match="replica 1 closed its group"):
        stages[0].receive(1)
    assert [list(one.packets) for one in stages[0]._expected] == [[1, 2], [2, 1], [1, 2], [2, 1], [1, 2]]
    Stage(stages[0].round, codec, 9, marks=7).expect({1: (), 2: messages[:1]})
    one, two, marked = stages[0].round.record("abc", 0.0, over=False).received
    assert (one.peer, one.there, one.parts) == ("b", 1, 5) and (two.peer, two.there, two.parts) == ("c", 4, 5)
    size = HEADER_NBYTES + 64
    assert (one.nbytes, two.nbytes, marked.nbytes, marked.peer) == (5 * size, 5 * size, size + 7, "c")
    for stage in stages:
        stage.round.context.close()


def test_a_forwarded_packet_names_its_author_and_bytes_are_the_only_message_of_their_stage():
    groups, codec = tw.ThreadGroup.create(3, 0.01), tw.codecs.Identity()  # what is awaited is there
    messages, size = cut(codec, 0, 4), HEADER_NBYTES + 16
    rounds = [
        Round(SendContext(group), codec, 4, Key(sender=group.rank), lambda begin, end: torch.arange(begin, end).float())
        for group in groups
    ]
    said, heard_of = Stage(rounds[2], codec, 1), Stage(rounds[1], codec, 1)
    passing, expecting = (Stage(rounds[rank], codec, 3, passes=1) for rank in (1, 0))
    heard_of.expect({2: messages})
    expecting.expect({1: messages})
    said.send(0, *messages, [1], rounds[2].signal, rounds[2].key).wait_sent()
    assert heard_of.receive(0) == {2: 0}
    passing.pass_on(0, *messages, heard_of.packet(0, 2), [0])
    rounds[1].outgoing[0].wait_sent()
    assert expecting.receive(0, {1: 2}) == {1: 0} and expecting.packet(0, 1).equal(heard_of.packet(0, 2))
    with pytest.raises(tw.PacketError, match="sent sender 2, 1 was expected"):
        expecting.receive(0)
    assert [round_.nbytes_sent for round_ in rounds] == [0, size, size]
    told, hearing = (Stage(rounds[rank], codec, 5, purpose="products") for rank in (0, 1))
    hearing.expect({0: messages})
    told.send_bytes(*messages, torch.arange(16).byte(), [1])
    rounds[0].outgoing[0].wait_sent()
    assert hearing.receive(0) == {0: 0} and hearing.packet(0, 0)[HEADER_NBYTES:].tolist() == list(range(16))
    assert rounds[0].nbytes_sent == 0, "a packet of another purpose"
    for round_ in rounds:
        round_.context.close()


def test_a_shorter_packet_of_a_codec_that_varies_is_counted_as_it_is():
    messages, stages = cut(SHORT, 0, 16), []
    for group in tw.ThreadGroup.create(2, 0.01):  # what is awaited is there
        key = Key(sender=group.rank)
        stages.append(
            Stage(Round(SendContext(group), SHORT, 16, key, lambda begin, end: torch.ones(end - begin)), SHORT)
        )
    stages[0].expect({1: messages})
    stages[1].send(0, *messages, [0], stages[1].round.signal, stages[1].round.key).wait_sent()
    assert stages[0].receive(0) == {1: 0} and stages[0].packet(0, 1).numel() == HEADER_NBYTES + 33
    assert [flow.nbytes for flow in stages[0].round.record("ab", 0.0, over=True).received] == [HEADER_NBYTES + 33]
    for stage in stages:
        stage.round.context.close()
