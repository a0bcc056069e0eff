"""The member that averages packets beside a hub, in a process of its own: the hub itself reads no packet, and needs no torch.

python -m thinwire.lm.reducing FOLDER REPLICAS [WORD]     beside the hub in FOLDER, until stdin ends
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from thinwire.catalogue.parsing import parse
from thinwire.comm.secure import invite, join
from thinwire.comm.secure.invitations import opened_state
from thinwire.comm.secure.state import REDUCER
from thinwire.comm.with_hub import WithHub
from thinwire.errors import LinkError, PacketError
from thinwire.exchange.reducer import Reducer

KEYS, LOG = "reducer-keys", "reducer.txt"
_PAUSE = 1.0  # seconds after a refusal


def word_of(word: str) -> str:
    """What all members of a group say that has a reducer, where they would say `word`: no other group takes them for its own."""
    return f"{word} with a reducer"


def average(folder: Path, replicas: int, word: str) -> str:
    """Join the next group of `replicas` replicas at the hub in `folder`, and average their packets until one of them leaves. What became of it, in
    words. Raises `LinkError`, `PacketError`.
    """
    with opened_state(folder) as state:
        listens = state.meta("listen") or "127.0.0.1"
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(
        listens, listens
    )  # the hub may not reach itself by the address that it tells others
    token = replace(invite(folder, seconds=600.0, name=REDUCER), host=own)
    group = join(str(token), REDUCER, replicas + 1, folder / KEYS, word_of(word), threading.TIMEOUT_MAX, place=1)
    _say(f"averages for {', '.join(group.names[:-1])}")
    reducer = Reducer(WithHub(group), parse)
    end = reducer.run()
    return f"{reducer.rounds} rounds; {end}"


@contextmanager
def reducing(folder: Path, replicas: int, word: str = "") -> Iterator[None]:
    """Within: a process averages for one group after another at the hub in `folder`; what it does stands there in `LOG`."""
    command = [sys.executable, "-m", "thinwire.lm.reducing", str(folder), str(replicas), word]
    with (folder / LOG).open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    try:
        yield
    finally:
        assert process.stdin
        process.stdin.close()
        process.wait()


def _say(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), line, flush=True)


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # whoever started this has ended, or wants it to end


def main() -> None:
    """Average for one group after another."""
    folder, replicas, word = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    while True:
        try:
            _say(average(folder, replicas, word))
        except (LinkError, PacketError) as error:
            _say(f"refused: {error}")
            time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
