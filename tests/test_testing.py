"""`thinwire.testing.check` accepts sound pieces, and each law rejects the piece that breaks it."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import thinwire as tw
from thinwire.catalogue.parsing import parse
from thinwire.exchange import Arriving, Range
from thinwire.testing import BrokenLawError, check

EXAMPLE = Path(__file__).parents[1] / "examples/own_pieces.py"
SLOW = pytest.mark.slow


OURS = [
    *(tw.codecs.E3M0(8), tw.pieces.outer.Nesterov(), tw.diloco(every=4), tw.lab.robust.coordinates.Median()),
    *(
        pytest.param(piece, marks=SLOW)
        for piece in (
            tw.exchange.TwoShot(),
            tw.lab.codecs.LowRank(1),
            tw.lab.codecs.Each(tw.codecs.RandomK(0.5, tw.codecs.Identity())),
            tw.lab.robust.by_products.Krum(1),
            tw.lab.robust.pre_aggregation.StaticClipping(tw.lab.robust.coordinates.Median()),
            *(tw.pieces.partition.Sequential(2), tw.pieces.schedule.Every(4, 2), tw.pieces.merge.Eager()),
            *(tw.pieces.policies.DenseUntil(2), tw.pieces.transforms.Signs(), tw.pieces.inner_optimizers.SGD(0.9)),
        )
    ),
]


@pytest.mark.parametrize("piece", OURS, ids=str)
def test_pieces_of_the_library_pass(piece):
    checked = check(piece)
    assert checked.piece == piece and "resumed is never stopped" in checked.laws


@pytest.mark.parametrize(
    "text",
    [
        *("Truncated(2)", "RoundedOnce()"),
        *(pytest.param(text, marks=SLOW) for text in ("Smoothed(0.5)", "DirectBelow(64)")),
    ],
)
def test_pieces_of_the_example_pass(text):
    assert len(check(parse(f"{EXAMPLE}:{text}", own_files=True)).laws) >= 8


# ---- pieces that break one law each


@dataclass(frozen=True)
class Plain(tw.codecs.Codec):
    """An Identity codec; each subclass breaks one law."""

    grain: ClassVar[int | None] = 1

    def nbytes(self, numel):
        return 4 * numel

    def encode(self, x, payload, key):
        tw.codecs.Identity().encode(x, payload, key)

    def decode_add(self, payload, out, key, weight=1.0):
        tw.codecs.Identity().decode_add(payload, out, key, weight)


@dataclass(frozen=True)
class Claiming(Plain):
    claims = frozenset({"exact"})

    def decode_add(self, payload, out, key, weight=1.0):
        out.add_(payload.view(torch.float32).abs().mul_(weight))


@dataclass(frozen=True)
class Garbage(Plain):
    def nbytes(self, numel):
        return 5 * numel

    def encode(self, x, payload, key):
        super().encode(x, payload[: 4 * x.numel()], key)

    def decode_add(self, payload, out, key, weight=1.0):
        super().decode_add(payload[: 4 * out.numel()], out, key, weight)


@dataclass(frozen=True)
class Overwriting(Plain):
    def decode_add(self, payload, out, key, weight=1.0):
        out.zero_()
        super().decode_add(payload, out, key, weight)


@dataclass(frozen=True)
class Weightless(Plain):
    def decode_add(self, payload, out, key, weight=1.0):
        super().decode_add(payload, out, key)


@dataclass(frozen=True)
class Cut(Plain):
    """Its scale depends on the whole tensor, so it cannot be cut at any grain."""

    def encode(self, x, payload, key):
        most = x.abs().max() if x.numel() else 1.0
        super().encode(torch.where(x.abs() == most, x, x * 0), payload, key)


@dataclass(frozen=True)
class Lucky(Plain):
    """Its packets depend on the round, which it does not declare."""

    def encode(self, x, payload, key):
        super().encode(x * (1 + key.round % 2), payload, key)


@dataclass(frozen=True)
class Infinite(Plain):
    def encode(self, x, payload, key):
        super().encode(x.nan_to_num(), payload, key)


@dataclass(frozen=True)
class Misspelt(Plain):
    claims = frozenset({"contractiv"})


@dataclass(frozen=True)
class InPlace(tw.pieces.outer.Outer):
    def step(self, anchor, delta, state):
        return anchor.sub_(delta), state


@dataclass(frozen=True)
class NotLinear(tw.pieces.outer.Outer):
    linear = True

    def step(self, anchor, delta, state):
        return anchor - delta.sign(), state


@dataclass(frozen=True)
class Whole(tw.pieces.outer.Outer):
    """Declares `elementwise`, but subtracts the mean of the delta."""

    elementwise = True

    def step_into(self, anchor, delta, state, moved, after):
        torch.sub(anchor, delta - delta.mean(), out=moved)


@dataclass(frozen=True)
class Remembering(tw.pieces.outer.Outer):
    """Keeps state that no checkpoint contains."""

    kept: list = field(default_factory=list, compare=False, repr=False)

    def step(self, anchor, delta, state):
        self.kept.append(1)
        return anchor - delta * len(self.kept), state


@dataclass(frozen=True)
class Around(tw.exchange.Exchange):
    """A Direct exchange; each subclass breaks one law."""

    def depart(self, round_, state):
        return tw.exchange.Direct().depart(round_, state)

    def arrive(self, departure):
        return tw.exchange.Direct().arrive(departure)

    def nbytes_sent(self, codec, numel, size, rank=None):
        return tw.exchange.Direct().nbytes_sent(codec, numel, size, rank)

    def seconds(self, codec, numel, size, link):
        return tw.exchange.Direct().seconds(codec, numel, size, link)


@dataclass(frozen=True)
class Mispredicting(Around):
    def nbytes_sent(self, codec, numel, size, rank=None):
        return super().nbytes_sent(codec, numel, size, rank) + 1


@dataclass(frozen=True)
class Selfish(Around):
    """Every replica uses only its own delta."""

    def arrive(self, departure):
        arriving = Arriving(tw.exchange.Direct().arrive(departure))
        for begin, _, own in arriving:
            yield Range(begin, own.clone(), own)
        return arriving.arrival


@dataclass(frozen=True)
class Weighing(tw.pieces.aggregate.Aggregate):
    """A mean; each subclass breaks one law."""

    linear = True

    def into(self, out, values, weights=None):
        tw.pieces.aggregate.Mean().into(out, values, weights)


@dataclass(frozen=True)
class Unweighted(Weighing):
    def into(self, out, values, weights=None):
        super().into(out, values)


@dataclass(frozen=True)
class Largest(Weighing):
    """Declares `linear`, but takes the largest of all values."""

    needs_fixed_group = "has no weights"

    def into(self, out, values, weights=None):
        out.copy_(torch.stack([one.decoded() for one in values]).max(0).values)


@dataclass(frozen=True)
class Normed(Weighing):
    """Declares nothing of products, but divides by the norm of the range."""

    def into(self, out, values, weights=None):
        super().into(out, values, weights)
        out.div_(out.norm())


@dataclass(frozen=True)
class Trusting(Weighing):
    def tolerates(self, size):
        return 1


@pytest.mark.parametrize(
    ("piece", "law"),
    [
        (Claiming(), "keeps claims”: claims exact"),
        (Garbage(), "size is known"),
        (Overwriting(), "decoding adds"),
        (Weightless(), "decoding weighs"),
        (Cut(), "cuts at the grain"),
        (Lucky(), "key is all the chance"),
        (Infinite(), "refuses what is not finite"),
        (Misspelt(), "claims are known"),
        (InPlace(), "outer keeps its word”: step changes its input"),
        (NotLinear(), "outer keeps its word”: declares linear"),
        (Whole(), "outer by ranges"),
        (Remembering(), "outer keeps its word”: the same step again"),
        (Mispredicting(), "predicted is counted"),
        (Selfish(), "exact values give the mean"),
        (Unweighted(), "aggregate weighs"),
        (Largest(), "linear aggregate adds parts"),
        (Normed(), "aggregate by ranges"),
        (Trusting(), "aggregate tolerates liars"),
        (torch.nn.Linear(1, 1), "is a value"),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else "",
)
def test_each_law_rejects_the_piece_that_breaks_it(piece, law):
    with pytest.raises(BrokenLawError) as caught:
        check(piece)
    assert f"breaks the law “{law}" in str(caught.value)


def test_a_piece_that_cannot_be_checked_alone_is_refused():
    with pytest.raises(tw.ConfigurationError, match="put another piece into a Strategy"):
        check(tw.lab.topology.Ring())


def test_the_page_lists_every_declaration_of_a_protocol():
    """docs/own-pieces.md names each attribute that a protocol defines with a default."""
    page = (EXAMPLE.parents[1] / "docs/own-pieces.md").read_text()
    table = page.split("## What a piece declares")[1].split("## Test the laws")[0]
    known = set(re.findall(r"`(\w+)`", table))
    for protocol in (
        tw.codecs.Codec,
        tw.exchange.Exchange,
        tw.pieces.aggregate.Aggregate,
        tw.pieces.outer.Outer,
        tw.pieces.merge.Merge,
        tw.pieces.policy.Policy,
        tw.pieces.filters.Filter,
    ):
        own = {name for name in vars(protocol) if not name.startswith("_")} - protocol.__abstractmethods__
        # methods that do work, not declarations
        work = {
            "check",
            "init",
            "fitted",
            "step",
            "step_into",
            "into",
            "leave",
            "signal",
            "settle",
        }
        assert own - work <= known, (protocol, own - work - known)


def test_the_page_lists_what_a_piece_must_define():
    """docs/own-pieces.md names each protocol by its whole path, and exactly the methods that it leaves to a piece."""
    page = (EXAMPLE.parents[1] / "docs/own-pieces.md").read_text()
    table = page.split("## What a piece must define")[1].split("## What a piece declares")[0]
    rows = re.findall(r"^\| `thinwire\.([\w.]+)` \| (.*?) \| (.*?) ?\|$", table, re.MULTILINE)
    assert len(rows) == 9
    for path, needed, more in rows:
        protocol = operator.attrgetter(path)(tw)
        names = set(re.findall(r"`(\w+)`", needed))
        assert all(hasattr(protocol, name) for name in names | set(re.findall(r"`(\w+)`", more))), path
        assert protocol.__abstractmethods__ in (frozenset(), names), path
