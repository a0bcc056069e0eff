"""The member that averages packets beside a hub, in a separate process: the hub itself reads no packet, and needs no torch.

python -m thinwire.lab.star.reducing FOLDER REPLICAS ORPHAN_SECONDS [WORD]     beside the hub in FOLDER, until stdin has a line
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from thinwire.catalogue.parsing import parse
from thinwire.errors import LinkError, PacketError
from thinwire.files import lock
from thinwire.lab.star.reducer import Reducer
from thinwire.lab.star.with_hub import WithHub
from thinwire.net import SecureGroup, invite, join
from thinwire.net.frames import with_reducer
from thinwire.net.invitations import opened_state
from thinwire.net.state import REDUCER

KEYS, LOG = "reducer-keys", "reducer.txt"
_PAUSE = 1.0  # seconds after a refusal
_ORPHAN_SECONDS = 600.0  # seconds that it waits for a killed hub to come back


def joined(folder: Path, replicas: int, word: str) -> SecureGroup:
    """The next group of `replicas` replicas at the hub in `folder`, with this process as the last member. Raises `LinkError`."""
    with opened_state(folder) as state:
        listens = state.meta("listen") or "127.0.0.1"
    # the hub's public address may not be reachable from the hub's machine
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listens, listens)
    token = replace(invite(folder, seconds=600.0, name=REDUCER), host=own)
    return join(str(token), REDUCER, replicas + 1, folder / KEYS, with_reducer(word), threading.TIMEOUT_MAX, place=1)


def average(group: SecureGroup) -> str:
    """Average the packets of a group's replicas until one of them leaves; return a line about it. Raises `PacketError`."""
    _say(f"averages for {', '.join(group.names[:-1])}")
    reducer = Reducer(WithHub(group), parse)
    end = reducer.run().partition(". ")[0]  # without the advice, which is for replicas
    return f"{reducer.rounds} rounds; {end}"


@contextmanager
def reducing(
    folder: Path, replicas: int, word: str, ended: Callable[[int], object] = lambda code: None,
    orphan_seconds: float = _ORPHAN_SECONDS,
) -> Iterator[None]:  # fmt: skip
    """A context in which a process averages for one group after another at the hub in `folder`; its log is `LOG` there. `ended` is called
    with its exit code, on another thread, if the process ends by itself. After the death of this process it averages for `orphan_seconds`
    at most.
    """
    command = [
        sys.executable,
        "-m",
        "thinwire.lab.star.reducing",
        str(folder),
        str(replicas),
        str(orphan_seconds),
        word,
    ]
    with (folder / LOG).open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    asked = threading.Event()

    def watch() -> None:
        code = process.wait()
        if not asked.is_set():
            ended(code)

    watching = threading.Thread(target=watch, name="thinwire-reducer", daemon=True)
    watching.start()
    try:
        yield
    finally:
        asked.set()
        assert process.stdin
        with suppress(OSError):  # the process has ended by itself
            process.stdin.write(b"end")
            process.stdin.close()
        watching.join()


def _say(line: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), line, flush=True)


class _Process:
    """This process, which ends when stdin has a line; if its hub was killed, it ends when its group has ended."""

    def __init__(self, folder: Path, orphan_seconds: float) -> None:
        self._orphan_seconds = orphan_seconds
        self._lock = (folder / "reducer.lock").open("w")
        self._averages = self._orphan = False
        threading.Thread(target=self._look_at_stdin, daemon=True).start()
        lock(self._lock)  # the reducer of a killed hub may still average for the same group

    def serve(self, folder: Path, replicas: int, word: str) -> None:
        while not self._orphan:
            try:
                group = joined(folder, replicas, word)
                self._averages = True
                _say(average(group))
            except (LinkError, PacketError) as error:
                _say(f"refused: {error}")
                time.sleep(_PAUSE)
            self._averages = False

    def _look_at_stdin(self) -> None:
        if not sys.stdin.buffer.read() and self._averages:
            self._orphan = True
            time.sleep(self._orphan_seconds)
        os._exit(0)


def main() -> None:
    """Average for one group after another."""
    folder = Path(sys.argv[1])
    _Process(folder, float(sys.argv[3])).serve(folder, int(sys.argv[2]), "".join(sys.argv[4:]))


if __name__ == "__main__":
    main()
