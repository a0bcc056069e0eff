"""`thinwire lighthouse`: the server at which the replicas of an elastic run find each other."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from thinwire.app.cli import options
from thinwire.app.records.printable import quoted
from thinwire.app.trainer.signals import asked_to_end
from thinwire.errors import ConfigurationError
from thinwire.membership.channel import LIGHTHOUSE_PORT, secret_in
from thinwire.membership.registry import HEARTBEAT_TIMEOUT
from thinwire.membership.server import Lighthouse


@dataclass(frozen=True)
class Options:
    """The options of `thinwire lighthouse`."""

    host: str = "127.0.0.1"
    """The address of this machine to listen at, in a network that you trust. Default: reachable from this machine only."""
    port: int = LIGHTHOUSE_PORT
    """The port to listen at. 0: any free port."""
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    """Seconds without a heartbeat after which a replica counts as dead. `thinwire doctor RUN` prints the value for a run."""
    secret: Path | None = None
    """The file with the run secret; created (mode 0600) if it is missing. Copy it to every machine: replicas without it are refused."""
    json: bool = False
    """Stdout ends with one JSON object, as soon as it listens."""


def main(arguments: Sequence[str]) -> int:
    asked = options.ask(
        Options,
        "thinwire lighthouse",
        arguments,
        "Run the server at which the replicas of an elastic run find each other, until interrupted.",
    )
    if not 0 < asked.heartbeat_timeout < 86_400:
        raise ConfigurationError(
            f"--heartbeat-timeout {asked.heartbeat_timeout}: a positive number of seconds is needed."
        )
    if not asked.host:  # as of an unset variable of a shell; a socket would listen at every address
        raise ConfigurationError("--host '': an address of this machine is needed; 0.0.0.0 stands for all of them.")
    if not 0 <= asked.port < 65536:
        raise ConfigurationError(f"--port {asked.port}: 0 to 65535 is needed.")
    secret = secret_in(asked.secret, make=True) if asked.secret else b""
    console = options.console(asked.json)
    say = options.teller(console)

    with (
        asked_to_end() as ended,
        closing(Lighthouse(asked.host, asked.port, asked.heartbeat_timeout, secret, say)) as one,
    ):
        for line in _lines(asked, one):
            say(line)
        if asked.json:
            print(json.dumps({"address": one.address, "port": one.port}), flush=True)
        while not ended:
            time.sleep(0.2)
    return 0


def _lines(asked: Options, lighthouse: Lighthouse) -> list[str]:
    held = f" --secret {quoted(asked.secret)}" if asked.secret else ""
    only = "nothing is encrypted, and the replicas' own ports are open: trusted networks or tunnels only."
    return [
        f"lighthouse at {lighthouse.address}",
        f"a replica without a heartbeat for {asked.heartbeat_timeout:g} s counts as dead",
        f"replicas join by: thinwire train RUN.toml --lighthouse {_reached_at(lighthouse)} --name NAME{held}",
        f"only replicas with the secret in {asked.secret} are admitted: copy it to every machine; {only}"
        if asked.secret
        else f"warning: anybody who reaches this port can end a run or join it; give --secret FILE. And {only}",
        *([] if _only_here(asked.host) else ["open the port only to the replicas"]),
        "Ctrl-C ends it; replicas keep their groups, and find a new one at the same address",
    ]


def _only_here(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _reached_at(lighthouse: Lighthouse) -> str:
    """The address for others; if it listens at every address, the machine's name."""
    try:
        everywhere = ipaddress.ip_address(lighthouse.host).is_unspecified
    except ValueError:
        everywhere = False
    return f"{socket.gethostname()}:{lighthouse.port}" if everywhere else lighthouse.address
