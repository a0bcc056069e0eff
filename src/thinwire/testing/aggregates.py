"""The laws of an aggregate alone, on drawn values; and how an exchange calls it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.errors import ConfigurationError
from thinwire.exchange.products import inner_products
from thinwire.pieces.aggregate import Aggregate, Values
from thinwire.rng import Key
from thinwire.testing.codecs import law
from thinwire.testing.toy import same_bits

NUMEL = 96
SIZES = (3, 5, 7, 11, 4, 2, 1)


def drawn(codec: Codec, begin: int = 0, end: int = NUMEL, size: int = 7) -> list[Values]:
    """The packets of `size` replicas for a range of drawn values, some of which are 0."""
    found = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank)
        x = (torch.randn(NUMEL, generator=generator) * (torch.rand(NUMEL, generator=generator) > 0.3))[begin:end]
        found.append(packet(x.contiguous(), rank, codec))
    return found


def packet(x: Tensor, rank: int, codec: Codec) -> Values:
    """The packet of flat fp32 `x` from replica `rank`."""
    payload, key = torch.empty(codec.nbytes(len(x)), dtype=torch.uint8), Key(sender=rank)
    codec.encode(x, payload, key)
    return Values(codec, payload, key, len(x))


def for_round(aggregate: Aggregate, values: Sequence[Values]) -> Aggregate:
    """The aggregate that an exchange calls range by range in a round with these whole packets."""
    if not aggregate.needs_products:
        return aggregate
    before = aggregate.init(values[0].numel, len(values))
    after = {name: torch.zeros_like(kept) for name, kept in before.items()}
    rows = torch.stack([one.decoded() for one in values])
    return aggregate.given(inner_products(aggregate.measured(rows, before, after)), Key(seed=3))


def estimate(aggregate: Aggregate, values: Sequence[Values], weights: Sequence[float] | None = None) -> Tensor:
    """The estimate from whole packets, as an exchange makes it."""
    out = torch.zeros(values[0].numel)
    for_round(aggregate, values).into(out, values, weights)
    return out


def accepts(aggregate: Aggregate, size: int) -> bool:
    """Whether `size` replicas are enough for `aggregate`."""
    try:
        aggregate.check(size)
    except ConfigurationError:
        return False
    return True


def fitting_size(aggregate: Aggregate) -> int:
    """A number of replicas that `aggregate` accepts, small if possible."""
    found = [size for size in SIZES if accepts(aggregate, size)]
    law(found, f"check refuses groups of {', '.join(map(str, sorted(SIZES)))} replicas")
    return found[0]


# ---- laws


def aggregate_depends_on_values_alone(aggregate: Aggregate) -> None:
    """The same packets give the same finite bits again, and the packets stay as they were."""
    said = drawn(Identity(), size=fitting_size(aggregate))
    before = [one.payload.clone() for one in said]
    found = estimate(aggregate, said)
    law(torch.isfinite(found).all(), "finite values give an estimate that is not")
    law(same_bits(estimate(aggregate, said), found), "the same packets give other bits")
    law(all(torch.equal(one.payload, kept) for one, kept in zip(said, before)), "it changes the packets")


def aggregate_by_ranges(aggregate: Aggregate) -> None:
    """An exchange calls it range by range: a range alone gives the bits that it has in the whole."""
    size, out = fitting_size(aggregate), torch.zeros(NUMEL)
    whole = drawn(Identity(), size=size)
    called = for_round(aggregate, whole)
    for begin, end in ((0, 1), (1, 64), (64, NUMEL)):
        called.into(out[begin:end], drawn(Identity(), begin, end, size))
    law(same_bits(out, estimate(aggregate, whole)), "ranges alone give other bits than the whole")


def aggregate_weighs(aggregate: Aggregate) -> None:
    """If the membership may change, deltas have weights: equal ones give the estimate without weights, one of 1 that packet alone."""
    if aggregate.needs_fixed_group:
        return
    said = drawn(Identity(), size=4)
    close = torch.allclose(estimate(aggregate, said, [0.25] * 4), estimate(aggregate, said), rtol=1e-5, atol=1e-6)
    law(close, "equal weights give another estimate than no weights")
    alone = torch.allclose(estimate(aggregate, said, [0.0, 1.0, 0.0, 0.0]), estimate(aggregate, said[1:2]), atol=1e-6)
    law(alone, "a packet with all the weight gives another estimate than it gives alone")


def linear_aggregate_adds_parts(aggregate: Aggregate) -> None:
    """An aggregate that declares `linear` is, from its estimates of two parts weighted by their replicas, that of the whole."""
    if not aggregate.linear:
        return
    said = drawn(Identity())
    parts = 3 / 7 * estimate(aggregate, said[:3]) + 4 / 7 * estimate(aggregate, said[3:])
    close = torch.allclose(parts, estimate(aggregate, said), rtol=1e-5, atol=1e-6)
    law(close, "declares linear: the estimates of two parts do not make that of the whole")


def aggregate_tolerates_liars(aggregate: Aggregate) -> None:
    """With NaN or huge values from as many replicas as it `tolerates`, the estimate stays in the honest values' reach."""
    size = next((size for size in (11, 7, 5, 3) if accepts(aggregate, size) and aggregate.tolerates(size)), 0)
    liars = aggregate.tolerates(size) if size else 0
    honest = drawn(Identity(), size=size)[: size - liars]
    for lie in (float("nan"), 1e12, 1e30) if liars else ():
        lies = [
            Values(Identity(), torch.full((NUMEL,), lie).view(torch.uint8), Key(sender=rank), NUMEL)
            for rank in range(size - liars, size)
        ]
        found, reach = estimate(aggregate, honest + lies), max(float(one.decoded().norm()) for one in honest)
        law(
            float(found.norm()) <= 100 * reach,
            f"declares that it tolerates {liars} of {size}: values of {lie:g} from so many decide the estimate",
        )


LAWS = (
    aggregate_depends_on_values_alone, aggregate_by_ranges, aggregate_weighs, linear_aggregate_adds_parts, aggregate_tolerates_liars,
)  # fmt: skip
