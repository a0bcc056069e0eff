"""Law 8: the promises of a codec about its bytes and values. Each function tests one promise, and raises `BrokenLawError`."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import NonFiniteError, PacketError
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.testing.values import draw, encoded, gaussian, roundtrip

CLAIMS = {
    "exact": "it decodes to what was encoded",
    "odd": "q(−x) = −q(x)",
    "idempotent": "q(q(x)) = q(x)",
    "contractive": "‖q(x) − x‖ ≤ ‖x‖ on all input",
    "unbiased": "the mean of q(x) over keys is x",
    "local": "what a block of `block` values (without that attribute: one value) holds changes nothing in the others",
    "drawn": "the bytes depend on the key, though the values are not unbiased",
    "refuses": "bytes that no encoding makes are a PacketError",
    "shared": "all senders of a round draw alike",
}


class BrokenLawError(AssertionError):
    """A piece does not keep a law, or a claim of its own."""


def law(holds: object, broken: str) -> None:
    """Raise `BrokenLawError(broken)` unless it `holds`."""
    if not bool(holds):
        raise BrokenLawError(broken)


def size_is_known(codec: Codec, n: int) -> None:
    """The payload has `nbytes(n)` bytes, and all of them are written, so that no earlier bytes of the buffer are sent."""
    x, payloads = gaussian(n), []
    for garbage in (0x00, 0xFF):
        payload = torch.full((codec.nbytes(n),), garbage, dtype=torch.uint8)
        codec.encode(x, payload, Key())
        payloads.append(payload)
    law(
        torch.equal(*payloads),
        "encode leaves bytes of the payload as they were, or draws by something else than the key",
    )
    says_how_many(codec, x)
    law(codec.nbytes(0) == 0, f"nbytes(0) is {codec.nbytes(0)}: nothing has no bytes")


def says_how_many(codec: Codec, x: Tensor) -> None:
    """For a codec that `varies`: zeros follow the used bytes, and the bytes behind them change no value."""
    payload, outs = torch.full((codec.nbytes(len(x)),), 0xA5, dtype=torch.uint8), []
    used = codec.encode(x, payload, Key())
    if not codec.varies:
        law(used is None, "encode says how many bytes count: declare that it `varies`")
        return
    law(used is not None and 0 <= used <= len(payload), f"varies: {used} of {len(payload)} bytes count")
    law(not payload[used:].any(), "varies: what is behind the bytes that count is not zero")
    for end in (used, len(payload)):
        for behind in (0x00, 0xFF):
            payload[used:] = behind
            outs.append(torch.zeros_like(x))
            codec.decode_add(payload[:end], outs[-1], Key())
    law(all(same_bits(outs[0], out) for out in outs), "varies: what is behind the bytes that count changes the values")


def keeps_claims(codec: Codec, claims: Collection[str], data: str, n: int, error: float | None = None) -> None:
    """`claims`, and with `error` ‖q(x) − x‖² ≤ error·‖x‖², on `n` values of `data`."""
    x = draw(data, n)
    kept = x.clone()
    q = roundtrip(codec, x)
    law(same_bits(x, kept), "encode changed its input")
    law(torch.isfinite(q).all(), "finite values decode to some that are not")
    law("exact" not in claims or torch.equal(q, x), "claims exact: what was decoded is not what was encoded")
    law("odd" not in claims or torch.equal(roundtrip(codec, -x), -q), "claims odd: q(−x) is not −q(x)")
    law("idempotent" not in claims or torch.equal(roundtrip(codec, q), q), "claims idempotent: q(q(x)) is not q(x)")
    off, size = (q.double() - x).square().sum(), x.double().square().sum()
    law("contractive" not in claims or off <= size, "claims contractive: worse than sending nothing")
    law(
        error is None or off <= error * size * (1 + 1e-6),
        f"{float(off / size):.3g} of the energy is lost, above {error}",
    )


def decoding_adds(codec: Codec, data: str) -> None:
    """`decode_add` accumulates in fp32 onto what is there, and depends on the bytes only."""
    x, base = draw(data, 1000) / 4, gaussian(1000)
    payload = torch.empty(codec.nbytes(1000), dtype=torch.uint8)
    codec.encode(x, payload, Key(3))
    kept, out = payload.clone(), base.clone()
    codec.decode_add(payload, out, Key(3))
    law(torch.equal(out, base + roundtrip(codec, x, Key(3))), "decode_add does not add what it decodes to")
    law(torch.equal(payload, kept), "decode_add changed the payload")


def decoding_weighs(codec: Codec, data: str) -> None:
    """`decode_add` multiplies by `weight`, to the rounding of one product."""
    x = draw(data, 1000) / 4
    once, weighed = roundtrip(codec, x, Key(3)), torch.zeros(1000)
    payload = torch.empty(codec.nbytes(1000), dtype=torch.uint8)
    codec.encode(x, payload, Key(3))
    codec.decode_add(payload, weighed, Key(3), 0.3)
    # a subnormal factor is coarse
    law(torch.allclose(weighed, once * 0.3, rtol=3e-7, atol=2.0**-140), "decode_add does not multiply by its weight")


def knows_values_apart(codec: Codec, data: str) -> None:
    """With `few` values: those that `sent` writes have the bits that `decode_add` decodes, with any weight, and others are 0."""
    x, n = draw(data, 1000) / 4, 1000
    payload = torch.empty(codec.nbytes(n), dtype=torch.uint8)
    codec.encode(x, payload, Key(3))
    for weight in (1.0, 0.3):
        apart, whole = _sent(codec, payload, n, Key(3), weight), torch.zeros(n)
        codec.decode_add(payload, whole, Key(3), weight)
        law(apart is None or same_bits(apart, whole), "sent gives other values than decode_add")


def _sent(codec: Codec, payload: Tensor, n: int, key: Key, weight: float) -> Tensor | None:
    """The `n` values of which a codec sends `few`."""
    count = codec.few(n)
    if count is None:
        return None
    index, values = torch.full((count,), -1), torch.full((count,), torch.nan)
    codec.sent(payload, n, index, values, key, weight)
    inside = all(0 <= int(i) < n for i in (*index[:1], *index[-1:]))
    law(inside and bool((index[1:] > index[:-1]).all()), f"sent: {count} ascending indices below {n} are due")
    return torch.zeros(n).index_add_(0, index, values)


def cuts_at_the_grain(codec: Codec, data: str) -> None:
    """With a `grain`: parts that are cut there and coded one by one have the same values, in as many bytes."""
    if codec.grain is None:
        return
    cut = 3 * codec.grain
    x = draw(data, cut + 65)
    parts = torch.cat([roundtrip(codec, part, Key(3)) for part in (x[:cut], x[cut:])])
    law(
        same_bits(parts, roundtrip(codec, x, Key(3))),
        f"grain {codec.grain}: parts decode to other values than the whole",
    )
    more = codec.nbytes(cut) + codec.nbytes(65) - codec.nbytes(cut + 65)
    law(more == int(codec.varies), f"grain {codec.grain}: parts have {more} bytes more")


def blocks_are_local(codec: Codec) -> None:
    """The values of one block do not change the others: an outlier affects its own block only."""
    block = getattr(codec, "block", 1)
    x = gaussian(3 * block)
    loud = x.clone()
    loud[block] = 1e30
    q, p = roundtrip(codec, x), roundtrip(codec, loud)
    alike = torch.equal(q[:block], p[:block]) and torch.equal(q[2 * block :], p[2 * block :])
    law(alike, f"claims local: an outlier in one block of {block} changes another")


def unbiased(codec: Codec, data: str) -> None:
    """The mean over many keys is x within the statistical error: in each value, and in their sum."""
    x, trials = draw(data, 257).double(), 500
    drawn = torch.stack([roundtrip(codec, x.float(), Key(round=trial)) for trial in range(trials)]).double()
    off, spread = drawn.mean(0) - x, drawn.std(0) / trials**0.5
    # A value that moves once in thousands of trials shows no spread: a dozen moves more or less, of its block's size.
    most = torch.cat([part.abs().max().expand(len(part)) for part in torch.split(x, getattr(codec, "block", 257))])
    rare = 12 * most / trials
    law(
        (off.abs() <= 5.5 * spread + rare).all(),
        "claims unbiased: the mean over 500 keys of some value is not that value",
    )
    law(off.sum().abs() <= 5 * spread.norm() + rare.norm(), "claims unbiased: the mean over 500 keys has another sum")


def key_is_all_the_chance(codec: Codec, claims: Collection[str]) -> None:
    """The same key makes the same bytes; another seed, round, fragment or (unless the codec claims `shared`) sender makes others. A codec
    without random numbers makes the same for every key.
    """
    x = gaussian(1000)
    first = encoded(codec, x, Key(1, 2, 3, 4))
    law(encoded(codec, x, Key(1, 2, 3, 4)) == first, "the same key makes other bytes: chance comes from elsewhere")
    others = [Key(0, 2, 3, 4), Key(1, 0, 3, 4), Key(1, 2, 0, 4), Key(1, 2, 3, 0)]
    made = len({first, *(encoded(codec, x, key) for key in others)})
    due = 5 - ("shared" in claims) if {"unbiased", "drawn"} & set(claims) else 1
    law(
        made == due,
        f"five keys make {made} different packets, {due} by its claims ({', '.join(sorted(claims)) or 'none'})",
    )


def refuses_what_is_not_finite(codec: Codec) -> None:
    """NaN and infinities are refused before they are sent."""
    for value in (torch.nan, torch.inf, -torch.inf):
        x = gaussian(130)
        x[77] = value
        try:
            encoded(codec, x)
        except NonFiniteError:
            continue
        raise BrokenLawError(f"encode takes {value}: raise NonFiniteError, as `thinwire.codecs.check_finite` does")


def survives_any_bytes(codec: Codec, n: int = 257) -> None:
    """Bytes of a hostile peer decode to something, the same each time, or are a `PacketError` that leaves `out` as it was."""
    generator = torch.Generator().manual_seed(n)
    for _ in range(20):
        payload = torch.randint(0, 256, (codec.nbytes(n),), dtype=torch.uint8, generator=generator)
        outs = []
        for _ in range(2):
            out = torch.ones(n)
            try:
                codec.decode_add(payload, out, Key())
            except PacketError:
                law(torch.equal(out, torch.ones(n)), "a PacketError has changed what was to be added to")
            outs.append(out)
        law(same_bits(*outs), "the same bytes decode to other values")
        with suppress(PacketError):
            _sent(codec, payload, n, Key(), 1.0)


def adds_on_the_way(codec: Codec) -> None:
    """A `linear` codec: the estimate is what one replica would send of the mean, and the mean of what all have sent."""
    if not codec.linear:
        return
    xs = [gaussian(900) for _ in range(4)]
    for key in (Key(), Key(3, 1, 2)):
        estimate, sent = summed(codec, xs, key)
        alone, [own] = summed(codec, [torch.stack(xs).mean(0)], key)
        law(same_bits(alone, own), "linear: one replica alone sends something else than the estimate")
        law(torch.allclose(estimate, alone, rtol=1e-4, atol=1e-5), "linear: the estimate is not that of the mean")
        mean = torch.stack(sent).mean(0)
        law(
            torch.allclose(estimate, mean, rtol=1e-4, atol=1e-5),
            "linear: the estimate is not the mean of what was sent",
        )


def summed(codec: Codec, xs: list[Tensor], key: Key) -> tuple[Tensor, list[Tensor]]:
    """An all-reduce by hand: the estimate, and what each has sent."""
    means: list[Tensor] = []
    codes: list[Tensor] = []
    n = xs[0].numel()
    for size in codec.sizes(n):
        codes = [codec.project(x, tuple(means), key) for x in xs]
        law(all(c.shape == (size,) and c.dtype == torch.float32 for c in codes), f"linear: {size} fp32 values are due")
        means.append(torch.stack(codes).mean(0))
    return codec.expand(tuple(means), n, key), [codec.expand((*means[:-1], code), n, key) for code in codes]
