"""`thinwire hub` as a separate process, which a test can kill."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from group_laws import free_port

from thinwire.net import Token, invite


class HubProcess:
    """Runs the real command in `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        while True:  # finds two consecutive free ports
            port = free_port()
            self._command = [sys.executable, "-m", "thinwire", "hub", "--out", str(folder), *options]
            self.folder = folder
            if self._start("--listen", f"127.0.0.1:{port}"):
                return

    def _start(self, *more: str) -> bool:
        self.process = subprocess.Popen(
            [*self._command, *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout
        for line in self.process.stdout:
            if "hub at" in line:
                self.said = line
                return True
        self.close()
        return False

    def kill(self) -> None:
        """Kills the process, as a power cut would."""
        self.process.kill()
        self.close()

    def restart(self) -> None:
        """Restarts the hub in the same folder at the same ports."""
        assert self._start()

    def replace(self, standby: Path) -> None:
        """Kills the process, and starts another hub in `standby`, a copy of its folder that was made while it ran, at the same ports."""
        shutil.copytree(self.folder, standby)
        self.kill()
        self._command[self._command.index(str(self.folder))], self.folder = str(standby), standby
        self.restart()

    def invite(self, uses: int) -> Token:
        return invite(self.folder, uses)

    def close(self) -> None:
        self.process.terminate()
        if self.process.stdout:
            self.process.stdout.close()
        self.process.wait()
