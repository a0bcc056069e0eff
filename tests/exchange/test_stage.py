"""Tags of messages, and which of them are counted."""

from __future__ import annotations

from itertools import product

import torch

import thinwire as tw
from thinwire.comm.group import TAGS
from thinwire.exchange import Round, SendContext
from thinwire.exchange.stage import Stage
from thinwire.rng import Key


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


def test_only_bytes_that_leave_a_site_are_counted():
    def replica(group):
        context, codec, counts = SendContext(group), tw.codecs.Identity(), []
        for number, exchange in enumerate((tw.exchange.Direct(), tw.exchange.Hierarchy((2,)))):
            key = Key(0, 0, number, group.rank)
            round_ = Round(context, codec, 10, key, lambda begin, end: torch.ones(end - begin))
            exchange.arrive(exchange.depart(round_, {}), lambda *_: None)
            counts.append(round_.nbytes_sent)
        context.close()
        return counts

    assert tw.run_threads(2, replica) == [[tw.exchange.Direct().nbytes_sent(tw.codecs.Identity(), 10, 2), 0]] * 2
