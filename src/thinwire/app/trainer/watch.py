"""What is watched beside training: open files, and the run folder."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.app.records.events import EventLog
from thinwire.app.records.printable import quoted, reason
from thinwire.app.records.units import text_of_seconds
from thinwire.files import HeldFolder

LOOK_SECONDS = 5.0  # seconds between two looks
QUIET_SECONDS = 60.0  # seconds without an event after which it is told; twice the longest time so far, if that is more
FULL_SHARE = 0.8  # share of the allowed open files above which a warning is logged
_FILES = Path("/proc/self/fd")


@contextmanager
def watching(look: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """A context in which a thread called `name` calls `look` every `seconds`, until it returns True. The thread ends with the context."""
    over = threading.Event()

    def body() -> None:
        while look() is not True and not over.wait(seconds):
            pass

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class FolderWatch:
    """Tells of a run folder what its replicas cannot: they write their warnings there. `look` often; it looks every `LOOK_SECONDS`.

    A disk that takes no more is told, and told again when it does. So are events that stand still while the replicas live. A folder that was
    renamed or deleted sets `stop`; `problem` then has the reason, for the command's last words.
    """

    def __init__(self, folder: Path, say: Callable[[str], object], stop: threading.Event) -> None:
        self.problem = ""
        self._folder, self._say, self._stop = folder, say, stop
        self._held = HeldFolder(folder)
        self._looked = self._heard = time.monotonic()
        self._full, self._patience = False, QUIET_SECONDS
        self._begin = self._nbytes = self._events()

    def look(self) -> None:
        """Look, if it is time."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or self.problem:
            return
        self._looked = now
        place = self._held.where()
        if place != self._folder.absolute():
            self._tell_of_move(place)
            return
        try:
            self._held.try_to_write()
        except OSError as error:
            if not self._full:
                self._say(
                    f"warning: {self._folder} can no longer be written ({reason(error)}): events and checkpoints are lost while training goes on; "
                    "free some space there, or stop the run"
                )
            self._full = True
            return
        if self._full:
            self._full, self._heard = False, now
            self._say(f"{self._folder} can be written again; the next checkpoint is whole")
        self._tell_of_silence(now)

    def _tell_of_move(self, place: Path | None) -> None:
        if place is None:
            self.problem = f"{self._folder} was deleted while its run trained, and nothing can be written there: the run has stopped; start it again."
        else:
            self.problem = (
                f"{self._folder} was renamed to {place} while its run trained: the run has stopped, and its last checkpoint is there; "
                f"resume it with {quoted(place)} as its folder."
            )
        self._say(f"warning: {self.problem.replace('has stopped', 'stops')}")
        self._stop.set()

    def _tell_of_silence(self, now: float) -> None:
        nbytes = self._events()
        if nbytes != self._nbytes:
            self._patience = max(self._patience, 2 * (now - self._heard))
            self._nbytes, self._heard = nbytes, now
        elif now - self._heard > self._patience:
            quiet = f"for {text_of_seconds(now - self._heard)}, though its process lives"
            if nbytes == self._begin:
                self._say(
                    f"waiting: no replica has begun {quiet}: it loads model and data, or waits for another replica"
                )
            else:
                self._say(
                    f"warning: no replica has written an event {quiet}: a long step, an evaluation, or the disk of {self._folder}"
                )
            self._patience = 2 * (now - self._heard)

    def _events(self) -> int:
        """Bytes of all events."""
        nbytes = 0
        for path in self._folder.glob("events/*.jsonl"):
            with suppress(OSError):  # it has gone meanwhile
                nbytes += path.stat().st_size
        return nbytes

    def close(self) -> None:
        """Let the folder go."""
        self._held.close()


def warn_of_open_files(log: EventLog) -> Callable[[], bool]:
    """A function for `watching` that logs one warning when most of the files are open that this process may open.

    At the limit gloo, which keeps every connection of a stranger, ends the process. The limit is raised to the system's
    maximum.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS reports no limit, but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def look() -> bool:
        try:
            number = len(list(_FILES.iterdir()))
        except OSError:  # the system does not list them
            return True
        if not 0 < FULL_SHARE * most <= number:
            return False
        log.emit(
            "warning", 0,
            message=f"{number} of at most {most} files of this process are open, and at the limit it ends. Somebody "
            "else may connect to its ports: let only the other replicas reach them (thinwire doctor --firewall "
            "ADDRESS ...), and raise the limit (ulimit -Hn)",
        )  # fmt: skip
        return True

    return look
