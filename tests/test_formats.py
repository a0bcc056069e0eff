"""Every format and every protocol states its number. Nothing was released, so each is 1; a made-up 2 is refused by both numbers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire import checkpoint, packet
from thinwire.app.records.published import Publication, Resource
from thinwire.comm import state_transfer
from thinwire.data_ledger import layout
from thinwire.data_ledger.ledger import DataLedger
from thinwire.lab.experts.ensemble import Expert
from thinwire.membership import channel
from thinwire.membership.view import difference
from thinwire.net import Token, frames, joining, versions
from thinwire.net.versions import FRAMES
from thinwire.state_tree import pack
from thinwire.version import JOIN_REQUESTS, LIGHTHOUSE_MESSAGES, PROTOCOLS, Protocols, common


def of_packet(_: Path) -> None:
    due = packet.Header(codec=1, sender=0, fragment=0, round=0, part=0, numel=4, nbytes=4)
    sealed = packet.empty_packet(4)
    packet.seal(sealed, due)
    sealed[4] += 1
    packet.open_packet(sealed, due)


def of_state_transfer(_: Path) -> None:
    donor, taker = tw.ThreadGroup.create(2, 60.0)
    state_transfer._send(donor, [1], struct.pack("<4sIQ", state_transfer.MAGIC, 2, 9))
    state_transfer.take(taker, 0, 100)


def of_checkpoint(folder: Path) -> None:
    manifest = {"thinwire": "", "step": 1, "strategy": "", "facts": {}, "frozen": True, "notes": {}}
    checkpoint.read(
        checkpoint.write(folder, {"format": 2, **manifest}, [pack({"x": torch.zeros(1)}, "x")] * 3, 3), hashes=False
    )


def of_data_ledger(_: Path) -> None:
    raw = bytearray(layout.encode(DataLedger(100, 7, 1, 1, 4, 4).begin(["oslo"])))
    raw[4] += 1
    layout.decode(bytes(raw))


def of_published_list(_: Path) -> None:
    said = json.loads(Publication(3, 9, False, Resource("0" * 64, 5), ()).written())
    Publication.read(json.dumps(said | {"format": said["format"] + 1}))


def of_expert(folder: Path) -> None:
    about = asdict(Expert(folder.name, "0" * 64, "", 1, 1, 0, 0.0))
    (folder / "expert.json").write_text(json.dumps({"format": 2, **about}))
    Expert.read(folder)


def of_frame(_: Path) -> None:
    frames.opened(frames.head(frames.LEAVE, 0, 0, 2), 0, [frames.LEAVE], 1)


def of_token(_: Path) -> None:
    Token.read("tw2" + str(Token("hub.example", 1, 2, bytes(32), bytes(8), bytes(16))).removeprefix("tw1"))


FORMATS: dict[str, tuple[Callable[[Path], None], type[tw.ThinwireError], str]] = {
    "packet": (of_packet, tw.PacketError, r"version 2, b'TWPK' version 1 is needed"),
    "state transfer": (of_state_transfer, tw.PacketError, r"version 2, 9 bytes; b'TWHO', 1 and"),
    "checkpoint": (
        of_checkpoint,
        tw.CheckpointError,
        r"has format 2, this version reads 1; use the version that wrote",
    ),
    "data ledger": (of_data_ledger, tw.DataError, r"format 2; b'tdlg', format 1 is needed"),
    "published list": (of_published_list, tw.PacketError, r"its format is 2, this version reads 1"),
    "expert": (of_expert, tw.CheckpointError, r"is of format 2 .*: format 1 and"),
    "frame": (of_frame, tw.PacketError, r"a frame has version 2, and this connection uses version 1"),
    "join token": (of_token, tw.ConfigurationError, r"it begins with tw1\."),
}


@pytest.mark.parametrize("name", FORMATS)
def test_another_format_is_refused_by_both_numbers(name: str, tmp_path: Path) -> None:
    read, error, told = FORMATS[name]
    with pytest.raises(error, match=told):
        read(tmp_path)


def by_metadata(kind: str) -> Callable[[Protocols], str]:
    def unlike(there: Protocols) -> str:
        (key, _), *_ = versions.stated(kind)
        try:
            assert versions.agreed_from(((key, str(there)),), kind) == 1
        except versions.Refused as error:
            return str(error)
        return ""

    return unlike


def by_protocols(there: Protocols) -> str:
    fits = common([Protocols.parse(str(there)), PROTOCOLS])
    return "" if fits else difference({"protocols": str(there)}, {"protocols": str(PROTOCOLS)})


UNLIKE: dict[str, tuple[Protocols, Callable[[Protocols], str]]] = {
    **{kind: (versions.RANGES[kind], by_metadata(kind)) for kind in versions.RANGES},
    "requests to join": (JOIN_REQUESTS, lambda there: joining._unlike("this side", str(there).encode(), "the hub")),
    "messages of a lighthouse": (
        LIGHTHOUSE_MESSAGES,
        lambda there: channel.unlike(channel.SPOKEN.pack(channel.MAGIC, there.oldest, there.newest)),
    ),
    "protocols of replicas": (PROTOCOLS, by_protocols),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_range_that_meets_this_one_is_served_and_another_is_named_beside_it(name: str) -> None:
    here, unlike = UNLIKE[name]
    assert (here.oldest, here.newest) == (1, 1)
    assert not unlike(here) and not unlike(Protocols(1, 2, "0.2.0"))
    for there in (Protocols(2, 2, "0.2.0"), Protocols(2, 3, "0.3.0"), Protocols(0, 0, "0.0.1")):
        told = unlike(there)
        assert f"{there.oldest} to {there.newest}" in told and str(here) in told
    assert unlike(Protocols(2, 1, "0.2.0"))  # no range at all


def test_the_newest_number_of_both_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.RANGES, FRAMES, Protocols(1, 2, "0.2.0"))
    (key, _), *_ = versions.stated()
    for there, due in ((Protocols(1, 1, "0.1.0"), 1), (Protocols(1, 3, "0.3.0"), 2), (Protocols(2, 3, "0.3.0"), 2)):
        assert versions.agreed_from(((key, str(there)),), FRAMES) == due
