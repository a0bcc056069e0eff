"""The compiled loops for the CPU have the bits of the reference, compile ahead of the first round and allocate nothing."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import profiled
import pytest
import torch
from numba.core import caching
from numba.core.registry import CPUDispatcher
from pieces import CODECS, over

import thinwire as tw
from thinwire import kernels
from thinwire.codecs import base, warm_up
from thinwire.codecs.layout import ascending_nbytes, low_bits, packed_nbytes
from thinwire.kernels import cpu_block as cpu
from thinwire.kernels import cpu_sparse, reference
from thinwire.kernels import numba_support as compiled
from thinwire.rng import Key
from thinwire.testing.toy import same_bits

SIZES = [0, 1, 2, 7, 31, 129, 1000, 4095, 4097, 12_301]
_draw = torch.Generator().manual_seed(5)


def gaussian(n: int) -> torch.Tensor:
    return torch.randn(n, generator=_draw)


DATA = {
    "gaussian": gaussian,
    "all magnitudes": lambda n: torch.ldexp(gaussian(n), (torch.arange(n) * 7 % 250 - 140).int()),
    "denormals": lambda n: gaussian(n) * 1e-40,
    "minus zeros": lambda n: -torch.zeros(n),
    "largest": lambda n: torch.full((n,), -3.4028234663852886e38),
    "few values": lambda n: (gaussian(n) * 2).round() / 2,  # ties, in rounding and among the largest
}
everything = over("data", DATA)
codecs = pytest.mark.parametrize("row", CODECS, ids=str)


@pytest.fixture
def by_reference(monkeypatch):
    """Call a function with the reference instead of the kernels."""

    def run(function):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_of", lambda device: reference)
            return function()

    return run


@codecs
@everything
def test_codecs_have_the_bytes_of_the_reference(row, data, by_reference):
    """Payloads begin at odd addresses. All sizes have normal values; the other values have a size with several blocks and a rest."""
    for n in SIZES if data == "gaussian" else (129, 4097):
        x, base = DATA[data](n), gaussian(n)

        def coded(x=x, base=base, n=n):
            payload = torch.full((row.piece.nbytes(n) + 4,), 0xA5, dtype=torch.uint8)[4:]
            row.piece.encode(x, payload, Key(3))
            once, weighed = base.clone(), base.clone()
            row.piece.decode_add(payload, once, Key(3))
            row.piece.decode_add(payload, weighed, Key(3), 0.37)
            return payload, once, weighed

        for got, due in zip(coded(), by_reference(coded)):
            assert same_bits(got, due), n


@pytest.mark.parametrize("row", [row for row in CODECS if "refuses" not in row.claims], ids=str)
@over("n", [1, 130, 5000])
def test_any_bytes_decode_as_by_the_reference(row, n, by_reference):
    """The random bytes include invalid codes and scales. NaN may differ in its bits."""
    payload = torch.randint(0, 256, (row.piece.nbytes(n),), generator=_draw, dtype=torch.uint8)
    base = gaussian(n)

    def decoded():
        out = base.clone()
        row.piece.decode_add(payload, out, Key(3), -1.5)
        return out

    got, due = decoded(), by_reference(decoded)
    assert same_bits(torch.where(got.isnan(), 7.0, got), torch.where(due.isnan(), 7.0, due))


@codecs
def test_strided_and_misaligned_tensors_have_the_same_bytes(row):
    """The reference takes the tensors that no kernel accepts."""
    n = 300
    x, base = gaussian(n), gaussian(n)
    straight = torch.empty(row.piece.nbytes(n), dtype=torch.uint8)
    row.piece.encode(x, straight, Key(3))
    due = base.clone()
    row.piece.decode_add(straight, due, Key(3), 0.5)
    for room in (
        torch.zeros(1 + len(straight), dtype=torch.uint8)[1:],
        torch.zeros(3 * len(straight), dtype=torch.uint8)[::3],
    ):
        row.piece.encode(x.repeat_interleave(2)[::2], room, Key(3))
        assert torch.equal(room, straight)
        out = base.repeat_interleave(2)[::2]
        row.piece.decode_add(room, out, Key(3), 0.5)
        assert same_bits(out.contiguous(), due)


@codecs
def test_buffers_that_do_not_fit_are_refused(row):
    """A kernel checks no size and would write beyond the end."""
    payload = torch.empty(row.piece.nbytes(100), dtype=torch.uint8)
    wrong = [
        (gaussian(100).double(), payload),
        (gaussian(100).view(10, 10), payload),
        (gaussian(100), torch.empty(len(payload) - 1, dtype=torch.uint8)),
        (gaussian(100), torch.empty(len(payload), dtype=torch.int8)),
    ]
    for x, room in wrong:
        with pytest.raises(tw.ConfigurationError, match="flat fp32 and flat uint8 of"):
            row.piece.encode(x, room, Key())
        refused = tw.PacketError if row.piece.varies and len(room) < len(payload) else tw.ConfigurationError
        with pytest.raises(refused, match=r"coded|flat fp32 and flat uint8 of"):
            row.piece.decode_add(room.zero_(), x, Key())


# ---- single loops


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 12, 20, 33])
def test_pack_and_unpack_match_the_reference(width):
    for count in (0, 1, 2, 7, 8, 1001):
        numbers = torch.randint(0, 1 << width, (count,), generator=_draw)
        packed = [torch.full((packed_nbytes(count, width),), 0xA5, dtype=torch.uint8) for _ in range(2)]
        back = torch.empty_like(numbers)
        cpu.pack(numbers, packed[0], width)
        reference.pack(numbers, packed[1], width)
        cpu.unpack(packed[0], back, width)
        assert torch.equal(*packed) and torch.equal(back, numbers)


@pytest.mark.parametrize("numel", [1, 64, 65, 1000, 40_000])
@over("count", [1, 2, 64, 130, 1000])
def test_codes_of_ascending_indices_are_read_and_refused_as_by_the_reference(numel, count):
    """Any bit of a code may be wrong: then the number of set bits, their order, or the last index may be."""
    count = min(count, numel)
    low = low_bits(count, numel)
    index = torch.randperm(numel, generator=_draw)[:count].sort().values
    packed = [torch.full((ascending_nbytes(count, numel),), 0xA5, dtype=torch.uint8) for _ in range(2)]
    cpu.pack_ascending(index, packed[0], low)
    reference.pack_ascending(index, packed[1], low)
    assert torch.equal(*packed)
    wrong = torch.randint(0, 8 * len(packed[0]), (60,), generator=_draw).tolist()
    verdicts = []
    for bit in (None, *wrong):
        code = packed[0].clone()
        if bit is not None:
            code[bit // 8] ^= 1 << bit % 8
            code[-bit % len(code)] ^= bit % 3  # often none, so that the number of bits may be right again
        found = [torch.zeros(count, dtype=torch.int64) for _ in range(2)]
        good = [kernels_.unpack_ascending(code, into, low, numel) for kernels_, into in zip((cpu, reference), found)]
        assert good[0] == good[1] and (not good[0] or torch.equal(*found))
        verdicts.append(good[0])
    assert verdicts[0] and not all(verdicts)
    assert cpu.unpack_ascending(packed[0], index.clone(), low, int(index[-1])) is False


@everything
def test_add_sent_and_divide_sent_match_the_reference(data):
    """With few values, all and one. Afterwards the values are zeros."""
    for n in SIZES:
        found = []
        for kernels_ in (cpu, reference):
            _draw.manual_seed(5)
            total, counted = torch.zeros(n + 1)[1:], torch.zeros(n)
            for turn in range(3):
                values = DATA[data](n).nan_to_num() * (torch.arange(n) * 2654435761 % 97 < (5, 97, 1)[turn])
                kernels_.add_sent(values, total, counted, (0.5, 0.3, 1.0)[turn])
                assert same_bits(values, torch.zeros(n))
            kernels_.divide_sent(total, counted)
            found.append((total, counted))
        assert same_bits(found[0][1], found[1][1]) and same_bits(found[0][0], found[1][0])


@everything
def test_mean_sent_matches_add_sent_and_divide_sent(data):
    """Three packets with common and own elements, some of which are zeros; and none with an element."""
    for n in SIZES:
        kept = min(n, 1 + n // 3)
        index = torch.cat([torch.randperm(n, generator=_draw)[:kept].sort().values for _ in range(3)])
        values, weights = DATA[data](3 * kept) / 4, torch.tensor([0.5, 0.3, 0.0])
        values[::5] = 0.0
        found = torch.full((n,), 7.0), torch.full((n,), 7.0)
        for kernels_, out in zip((cpu, reference), found):
            kernels_.mean_sent(index, values, weights, out)
        total, counted = torch.zeros(n), torch.zeros(n)
        for places, some, weight in zip(index.view(3, -1), values.view(3, -1), weights.tolist()):
            cpu.add_sent(torch.zeros(n).index_copy_(0, places, some), total, counted, weight)
        cpu.divide_sent(total, counted)
        assert same_bits(found[0], total) and same_bits(found[1], total)


@everything
@over("threshold", [-1.0, 0.0, 1e-40, 0.5, 1.7, 3.5e38, float("inf"), float("nan")])
def test_the_indices_of_values_above_a_threshold(data, threshold):
    for n in SIZES:
        x = DATA[data](n)
        x[::9], x[1::9] = float("nan"), float("inf")
        for room in (0, n // 3, n):
            index, due = torch.zeros(room, dtype=torch.int64), (x.abs() > threshold).nonzero().view(-1)
            bits, some = cpu_sparse._bits(x), torch.zeros(room, dtype=torch.int32)
            found = cpu_sparse._select_above(bits, cpu_sparse._threshold(threshold), index.numpy(), some.numpy())[0]
            assert found == len(due)
            assert torch.equal(index[:found], due[:room])
            assert torch.equal(some[:found].view(torch.float32), x[due[:room]])


@pytest.mark.parametrize(
    ("chunk", "count"), [(1, 1), (7, 7), (64, 3), (256, 10), (4096, 64), (5000, 4999), (10**9, 0.01), (10**9, 0.4)]
)
@everything
def test_select_largest_matches_the_reference(data, chunk, count):
    """The first of equal values counts. The largest size takes a sample, which data of few or equal values mislead, and
    each chunk the one before it, which those of another scale mislead."""
    for n in (*SIZES[1:], 70_001):
        x = DATA[data](n) * torch.tensor([1.0, 0.001, 0.5])[torch.arange(n) // 2048 % 3]
        size = min(chunk, n) if isinstance(count, float) else chunk
        kept = max(1, int(count * size)) if isinstance(count, float) else count
        index = torch.full((n // size * kept - (-kept * (n % size) // size),), -1)
        due = index.clone()
        assert cpu.select_largest(x, size, kept, index) and reference.select_largest(x, size, kept, due)
        assert torch.equal(index, due), n
    x[n // 2] = float("nan")
    assert not cpu.select_largest(x, size, kept, index) and not reference.select_largest(x, size, kept, due)


@pytest.mark.parametrize("density", [0.0, 1e-4, 0.01, 0.3, 1.0])
def test_select_drawn_matches_the_reference(density):
    for n in (*SIZES, 100_001):
        for stream in (0, 2**63 - 1):
            index, due = (torch.empty(int(density * n), dtype=torch.int64) for _ in range(2))
            cpu.select_drawn(stream, n, index)
            reference.select_drawn(stream, n, due)
            assert torch.equal(index, due), n


@everything
def test_nesterov_matches_the_formula(data):
    """Every product and sum is rounded, also in place. The result says whether all values are finite."""
    for n in SIZES:
        anchor, delta, momentum = gaussian(n), DATA[data](n) / 4, gaussian(n)
        velocity = momentum * 0.9 + delta
        moved = anchor - (velocity * 0.9 + delta) * 0.4
        for module in (cpu, reference):
            into = torch.empty(n), torch.empty(n)
            assert module.nesterov(anchor, delta, momentum, 0.4, 0.9, *into) == bool(moved.isfinite().all())
            assert same_bits(into[0], moved) and same_bits(into[1], velocity)
            own = anchor.clone(), momentum.clone()
            module.nesterov(own[0], delta, own[1], 0.4, 0.9, *own)
            assert same_bits(own[0], moved) and same_bits(own[1], velocity)
    delta[-1] = float("nan")
    assert not cpu.nesterov(anchor, delta, momentum, 0.4, 0.9, *into)


# ---- choice, compilation and memory


def test_the_kernels_depend_on_device_and_layout():
    """Contiguous tensors on the CPU have compiled loops; strided tensors and other devices have the reference."""
    x = torch.zeros(8)
    assert kernels.of(x, x) is cpu and kernels.of(x, x[::2]) is reference
    assert kernels.of(torch.zeros(8, device="meta")) is reference


MODULES = tuple(
    f"thinwire.{name}"
    for name in (
        *(f"kernels.{one}" for one in ("numba_support", "cpu_dense", "cpu_sparse", "cpu_block")),
        "lab.codecs.cpu_levels",
    )
)


def import_again() -> list[CPUDispatcher]:
    """Import the modules again, as in a process that has encoded nothing yet, and return their compiled functions."""
    for name in MODULES:
        sys.modules.pop(name, None)
    modules = [importlib.import_module(name) for name in MODULES]
    return [value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)]


def forget():
    """Forgets the kernels of each device, and which codecs are warm."""
    kernels._of.cache_clear()
    base._warm.cache_clear()


@pytest.fixture
def fresh_kernels(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
        package, _, module = name.rpartition(".")
        monkeypatch.setattr(sys.modules[package], module, sys.modules[name])
    forget()
    yield import_again()
    forget()


@pytest.mark.parametrize(
    "codec",
    [
        tw.codecs.E3M0(),
        tw.codecs.Int(8, 32, "fp32", "stochastic"),
        tw.codecs.Cast(),
        tw.lab.codecs.Levels(),
        tw.codecs.Sign(),
        tw.codecs.TopK(0.01),
        tw.codecs.ChunkedTopK(values=tw.codecs.Sign()),
    ],
    ids=str,
)
def test_a_warmed_up_codec_compiles_nothing_when_used(codec, fresh_kernels):
    """`warm_up` compiles only the functions that the codec needs."""
    warm_up(codec)
    before = [len(function.signatures) for function in fresh_kernels]
    assert 0 < sum(before) < len(fresh_kernels)
    for n in (1, 1000, 200_001):
        payload = torch.empty(codec.nbytes(n), dtype=torch.uint8)
        codec.encode(gaussian(n), payload, Key())
        codec.decode_add(payload, gaussian(n), Key(), 0.5)
    assert [len(function.signatures) for function in fresh_kernels] == before


@pytest.mark.parametrize("strategy", [tw.diloco(every=1, codec=tw.codecs.E2M1()), tw.streaming_sign(every=2)])
def test_a_replica_compiles_nothing_while_it_trains(strategy, fresh_kernels):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (group,) = tw.ThreadGroup.create(1)
    with tw.Replica(strategy, model, optimizer, group):
        before = [len(function.signatures) for function in fresh_kernels]
        for _ in range(5):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        assert [len(function.signatures) for function in fresh_kernels] == before and sum(before) > 0


def test_functions_compile_without_a_cache_folder(monkeypatch):
    """A container without a home directory has no such folder: functions compile in each process."""
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    def double(x):
        return x + x

    assert compiled.compiled(double)(np.float32(2)) == 4


@pytest.mark.parametrize(
    "codec",
    [
        tw.codecs.E3M0(),
        tw.codecs.E4M3(scale="bf16"),
        tw.codecs.Int(2, 32, "fp32", "stochastic"),
        tw.codecs.Identity(),
        tw.codecs.Cast(),
        tw.codecs.Cast("fp16"),
        tw.lab.codecs.Levels(),
        tw.codecs.Sign(),
    ],
    ids=str,
)
def test_encoding_and_decoding_allocate_no_tensors(codec, alone):
    """Torch's allocator profile counts tensors. Tracemalloc, which also counts numba's arrays, bounds other memory by a stripe.

    It covers 1000 encodings and decodings.
    """
    allocated, most = alone(profiled.of_a_codec, codec, 1 << 17, 1000)
    assert allocated == [4]  # the one that the measurement makes itself
    assert most < 110_000 < (1 << 17)
