"""A replica and a lighthouse of unlike releases: served where their ranges of messages meet, refused with both ranges where they do not."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from thinwire.errors import LinkError
from thinwire.membership import Lighthouse
from thinwire.membership.channel import (
    HELLO,
    INTRODUCTION,
    MAGIC,
    OTHER_VERSION,
    PROOF,
    SPOKEN,
    TAKEN,
    WELCOME,
    Channel,
    mac,
)
from thinwire.version import LIGHTHOUSE_MESSAGES

SECRET, LIFE = bytes(range(32)), "f" * 16
HERE = LIGHTHOUSE_MESSAGES
FAR = HERE.newest + 2, HERE.newest + 3
MEETING = [(HERE.oldest, HERE.newest + 1), (HERE.oldest - 1, HERE.oldest), (0, 1 << 15)]
APART = [FAR, (HERE.newest, HERE.oldest - 1)]
LIMIT = 600.0  # ends a hang


def dialled(lighthouse: Lighthouse, spoken: tuple[int, int]) -> tuple[bytes, bytes]:
    """The response of a lighthouse on a replica with this range, and its first message. The replica says nothing else if it finds that the ranges
    do not meet."""
    with socket.create_connection((lighthouse.host, lighthouse.port), timeout=LIMIT) as line:
        hello = line.recv(HELLO.size, socket.MSG_WAITALL)
        said = SPOKEN.pack(MAGIC, *spoken)
        if spoken in MEETING:
            said += struct.pack("<64s16s32s", b"oslo", LIFE.encode(), secrets.token_bytes(32))
            said += mac(SECRET, "replica", hello, said)
        line.sendall(said)
        return line.recv(WELCOME.size, socket.MSG_WAITALL), hello


@pytest.mark.parametrize("spoken", MEETING)
def test_a_lighthouse_serves_a_replica_whose_range_meets_its_own(spoken: tuple[int, int]) -> None:
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, SECRET)
    welcome, hello = dialled(lighthouse, spoken)
    lighthouse.close()
    assert (
        WELCOME.unpack(welcome)[:2] == (TAKEN, 5.0)
        and len(hello) == 40
        and SPOKEN.unpack_from(hello) == (MAGIC, HERE.oldest, HERE.newest)
    )


@pytest.mark.parametrize("spoken", APART)
def test_a_lighthouse_names_both_ranges_where_they_do_not_meet(spoken: tuple[int, int]) -> None:
    told: list[str] = []
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, SECRET, told.append)
    welcome, _ = dialled(lighthouse, spoken)
    lighthouse.close()
    assert welcome == WELCOME.pack(OTHER_VERSION, 0.0, bytes(PROOF))
    (line,) = [one.split(" ", 2)[2] for one in told]
    assert line == (
        f"refused: somebody at 127.0.0.1 (it speaks messages {spoken[0]} to {spoken[1]}, this side {HERE}. Install one release on both, or one "
        "that speaks a version of each)"
    )


def answered(spoken: tuple[int, int], meet: Callable[[int], None]) -> tuple[bytes, str]:
    """What a replica sends to a lighthouse with this range and the secret, and what it raises."""
    heard, raised = [], ""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer() -> None:
            line, _ = false.accept()
            with line:
                hello = SPOKEN.pack(MAGIC, *spoken) + bytes(32)
                line.sendall(hello)
                heard.append(said := line.recv(INTRODUCTION.size, socket.MSG_WAITALL))
                welcome = struct.pack("<Id", TAKEN, 5.0)
                if len(said) == INTRODUCTION.size:
                    line.sendall(welcome + mac(SECRET, "lighthouse", hello, said[:-PROOF], welcome))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            meet(false.getsockname()[1])
        except LinkError as error:
            raised = str(error)
        thread.join(LIMIT)
    return heard[0], raised


def meet(port: int) -> None:
    Channel("127.0.0.1", port, "oslo", LIFE, SECRET, LIMIT).close()


@pytest.mark.parametrize("spoken", MEETING)
def test_a_replica_uses_a_lighthouse_whose_range_meets_its_own(spoken: tuple[int, int]) -> None:
    said, raised = answered(spoken, meet)
    assert not raised and said.startswith(SPOKEN.pack(MAGIC, HERE.oldest, HERE.newest))


@pytest.mark.parametrize("spoken", APART)
def test_a_replica_names_both_ranges_and_tells_the_lighthouse_its_own(spoken: tuple[int, int]) -> None:
    """It says nothing else, neither its name nor a proof."""
    said, raised = answered(spoken, meet)
    assert said == SPOKEN.pack(MAGIC, HERE.oldest, HERE.newest)
    assert f"speaks messages {spoken[0]} to {spoken[1]}, this side {HERE}. Install one release on both" in raised
