"""Bytes from a peer are hostile: they decode to the expected packet or raise `PacketError`."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import CODECS, EXCHANGES, over

import thinwire as tw
from thinwire.packet import (
    HEADER_NBYTES,
    PARTIAL,
    REFUSED,
    STOP,
    Header,
    empty_packet,
    identity,
    open_packet,
    payload,
    said_nbytes,
    seal,
)
from thinwire.testing.toy import Journey, Plan, journey, same_bits, toy, travel, weights

DUE = Header(codec=identity(tw.codecs.E3M0()), sender=3, fragment=2, round=77, part=5, numel=90, nbytes=46, step=1234)
CHECKSUM_AT = HEADER_NBYTES - 4


def sealed(header: Header = DUE, flags: int = 0, nbytes: int = DUE.nbytes) -> torch.Tensor:
    packet = empty_packet(nbytes)
    payload(packet).copy_(torch.arange(nbytes) * 37 % 256)
    seal(packet, replace(header, flags=flags))
    return packet


def resealed(packet: torch.Tensor) -> torch.Tensor:
    """Returns the packet with a checksum that fits, as a peer of another build or an attacker would send it."""
    raw = bytearray(packet.numpy().tobytes())
    raw[CHECKSUM_AT:HEADER_NBYTES] = bytes(4)
    raw[CHECKSUM_AT:HEADER_NBYTES] = struct.pack("<I", zlib.crc32(raw))
    return torch.frombuffer(raw, dtype=torch.uint8)


def tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


GOOD = sealed().numpy().tobytes()


def test_the_header_has_the_documented_layout():
    """48 bytes, little-endian, in this order. A change here needs another VERSION."""
    assert HEADER_NBYTES == 48
    head = struct.unpack("<4sHHIHHIIIQQI", GOOD[:48])
    assert head[:-1] == (b"TWPK", 1, 0, DUE.codec, 3, 2, 77, 1234, 5, 90, 46)
    assert head[-1] == zlib.crc32(GOOD[:44] + bytes(4) + GOOD[48:])
    assert (
        identity(tw.codecs.E3M0())
        == zlib.crc32(b"E3M0(block=128, scale='exponent', rounding='nearest')")
        != identity(tw.codecs.E3M0(64))
    )


@pytest.mark.parametrize("flags", [0, REFUSED, STOP, PARTIAL, REFUSED | STOP | PARTIAL])
def test_the_expected_packet_opens_and_gives_its_flags(flags):
    assert open_packet(sealed(flags=flags), DUE) == flags


def opens_or_raises(raw: bytes) -> None:
    try:
        open_packet(tensor(raw), DUE)
    except (tw.PacketError, tw.DisagreementError) as error:
        assert "replica 3" in str(error)
    else:
        assert raw == GOOD


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(raw):
    opens_or_raises(raw)


@given(st.integers(0, len(GOOD)), st.binary(max_size=12))
def test_truncated_and_extended_packets_are_refused(end, more):
    opens_or_raises(GOOD[:end] + more)


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300)
def test_packets_with_changed_bytes_are_refused(changes):
    raw = bytearray(GOOD)
    for at, byte in changes:
        raw[at] = byte
    opens_or_raises(bytes(raw))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, len(GOOD) - 1), st.integers(1, 40))
def test_packets_with_moved_bytes_are_refused(source, target, count):
    raw = bytearray(GOOD)
    piece = raw[source : source + count]
    raw[target : target + len(piece)] = piece
    opens_or_raises(bytes(raw[: len(GOOD)]))


def test_a_packet_with_any_bit_flipped_is_refused():
    for bit in range(8 * len(GOOD)):
        raw = bytearray(GOOD)
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(tw.PacketError):
            open_packet(tensor(bytes(raw)), DUE)


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES))
def test_an_unexpected_header_is_refused_though_its_checksum_fits(head):
    """Any header with a correct checksum is refused, except that of the expected packet."""
    raw = b"TWPK" + struct.pack("<H", 4) + head[6:] + GOOD[HEADER_NBYTES:]
    packet = resealed(tensor(raw))
    if bytes(packet[8:CHECKSUM_AT].tolist()) == GOOD[8:CHECKSUM_AT]:
        return
    with pytest.raises((tw.PacketError, tw.DisagreementError)):
        open_packet(packet, DUE)


@over("field", ["codec", "sender", "fragment", "round", "part", "numel", "nbytes"])
@over("value", [0, (1 << 32) - 1, (1 << 60) + 7])
def test_each_field_of_the_header_is_compared(field, value):
    """The error names the given and the expected value. A length causes no allocation, because the size was known before."""
    value &= {"numel": (1 << 64) - 1, "nbytes": (1 << 64) - 1, "sender": 0xFFFF, "fragment": 0xFFFF}.get(
        field, 0xFFFFFFFF
    )
    packet = sealed(replace(DUE, **{field: value}))
    with pytest.raises(tw.PacketError, match=rf"replica 3 sent {field} {value}, {getattr(DUE, field)} was expected"):
        open_packet(packet, DUE)


def test_a_packet_of_another_step_is_a_disagreement():
    """If the receiver states no step, a packet that states one is not the expected one."""
    with pytest.raises(
        tw.DisagreementError, match=r"replica 3 is in this round after 1235 inner steps, .* counted 1234"
    ):
        open_packet(sealed(replace(DUE, step=1235)), DUE)
    with pytest.raises(tw.PacketError, match="replica 3 sent step 1234, 0 was expected"):
        open_packet(sealed(DUE), replace(DUE, step=0))


def test_a_shorter_packet_opens_only_where_variable_sizes_are_agreed():
    """The buffer has room for the longest packet. The packet states its own length, and may lie."""
    for nbytes in (10, 30, DUE.nbytes):
        packet = sealed(replace(DUE, nbytes=nbytes), nbytes=nbytes)
        room = torch.cat([packet, torch.full((DUE.nbytes - nbytes,), 0xA5, dtype=torch.uint8)])
        assert said_nbytes(room) == packet.numel() and open_packet(room[: said_nbytes(room)], DUE, least=10) == 0
        if nbytes < DUE.nbytes:
            for wrong, least in ((packet, None), (packet, nbytes + 1), (room, 10)):
                with pytest.raises(tw.PacketError):
                    open_packet(wrong, DUE, least)
    for claimed in (0, 9, DUE.nbytes + 1, (1 << 64) - 1):
        lying = sealed(replace(DUE, nbytes=claimed))
        assert HEADER_NBYTES <= said_nbytes(lying) <= lying.numel()
        with pytest.raises(tw.PacketError):
            open_packet(lying[: said_nbytes(lying)], DUE, least=10)
    assert said_nbytes(sealed()[:20]) == 20


def test_messages_name_the_sender_and_the_problem():
    cases = {
        r"replica 3 sent 93 bytes, 94 were expected\. Do all replicas run the same strategy\?": tensor(GOOD[:-1]),
        r"replica 3 sent magic b'NOPE' version 1, .* Run the same version of Thinwire on every replica": tensor(
            b"NOPE" + GOOD[4:]
        ),
        r"the packet of replica 3 is damaged: checksum [0-9a-f]{8}, computed [0-9a-f]{8}": tensor(GOOD[:-1] + b"!"),
        r"replica 3 sent unknown flags 0x8; run the same version everywhere": sealed(flags=8),
    }
    for message, packet in cases.items():
        with pytest.raises(tw.PacketError, match=message):
            open_packet(packet, DUE)


# ---- values that no honest replica sends


class Hostile(tw.codecs.Codec):
    """A codec that after some packets sends other bytes than it encoded, with a header and a checksum that fit."""

    def __init__(self, codec: tw.codecs.Codec, after: int) -> None:
        self.codec, self.packets, self.after = codec, 0, after
        self.random = torch.Generator().manual_seed(7)

    @property
    def grain(self):
        return self.codec.grain

    @property
    def varies(self):
        return self.codec.varies

    def fitted(self, shapes):
        return Hostile(self.codec.fitted(shapes), self.after) if self.codec.needs_shapes else self

    def nbytes(self, numel):
        return self.codec.nbytes(numel)

    def decode_add(self, payload, out, key, weight=1.0):
        self.codec.decode_add(payload, out, key, weight)

    def __repr__(self) -> str:
        return repr(self.codec)

    def encode(self, x, payload, key):
        used = self.codec.encode(x, payload, key)
        self.packets += 1
        if self.packets > self.after:
            payload.copy_(torch.randint(0, 256, (payload.numel(),), generator=self.random))
            used = payload.numel()
        return used


def with_hostile(strategy: tw.Strategy, replicas: int, after: int, **plan) -> list[Journey]:
    """Runs the replicas; replica 1 is hostile."""
    own = replace(strategy, codec=Hostile(strategy.codec, after))
    plans = [Plan(own if rank == 1 else strategy, **plan) for rank in range(replicas)]
    return tw.run_threads(replicas, lambda group: travel(plans[group.rank], group), timeout=600.0)


@pytest.mark.parametrize("codec", [row.piece for row in CODECS if "refuses" not in row.claims], ids=str)
def test_hostile_values_reach_no_anchor(codec):
    """Random bytes sometimes decode to NaN, infinity and 1e38. The anchors stay finite and equal on all replicas."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(2, 1),
        partition=tw.pieces.partition.Strided(3),
        codec=codec,
        outer=tw.pieces.outer.Nesterov(),
        merge=tw.pieces.merge.Mix(0.5),
    )
    journeys = with_hostile(strategy, 3, 4, steps=8)
    for one in journeys:
        for now, first in zip(one.agreed, journeys[0].agreed):
            assert all(torch.isfinite(t).all() and same_bits(t, first[name]) for name, t in now.items())
        assert same_bits(one.final, journeys[0].final) and not same_bits(one.final, weights(toy()))
    if codec in (tw.codecs.Identity(), tw.codecs.Cast("bf16"), tw.codecs.Cast("fp16")):
        refused = journeys[0].heard("refused")
        assert any(e["by"] == [] and e["reason"] == "the anchor would not be finite" for e in refused)


@pytest.mark.parametrize("codec", [row.piece for row in CODECS if "refuses" in row.claims], ids=str)
def test_hostile_indices_end_training_with_a_message(codec):
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(2), codec=codec)
    with pytest.raises(tw.PacketError, match=r"indices are not ascending|a coded payload|coded indices"):
        with_hostile(strategy, 2, 2)


class Damaging:
    """A group that damages packets on the way."""

    def __init__(self, group: tw.Group) -> None:
        self.group, self.rank, self.size, self.close = group, group.rank, group.size, group.close

    def post(self, tag, send, recv, purpose="packet", sized=None):
        if purpose in ("packet", "site"):
            send = {peer: packet.clone() for peer, packet in send.items()}
            for packet in send.values():
                packet[-1] ^= 1
        return self.group.post(tag, send, recv, purpose, sized)


@pytest.mark.parametrize("exchange", [row.piece for row in EXCHANGES], ids=str)
def test_a_damaged_packet_ends_training_with_a_message(exchange):
    """No replica decides on a round with damaged bytes: it raises `PacketError`, names the sender, and changes nothing."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(2), exchange=exchange)
    replicas = sum(map(len, exchange.ranks)) if isinstance(exchange, tw.exchange.Hierarchy) else 2
    # 0: replica 1 passes on packets within its site.
    with pytest.raises(tw.PacketError, match=r"the packet of replica [01] is damaged"):
        journey(strategy, replicas, wrap=lambda group: Damaging(group) if group.rank == 1 else group)
