"""The stage of stage.py with straight streams: replicas listen, each behind a relay, which can lose its route in silence."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from faults import Fault
from group_laws import free_port
from stage import HubStage, run_replica
from tcp_proxy import Proxy

from thinwire.net import Token

LEAST, MOST = 10_000, 100_000  # bytes in a round: more than pings, less than one message of a measurement


def run_straight(*arguments: str) -> None:
    """Runs a replica for which any announced measurement chooses straight streams, whatever else this machine does."""
    from thinwire.net.star_or_mesh import Measured

    Measured.straight = lambda self, nbytes, receivers: True  # type: ignore[method-assign]
    run_replica(*arguments)


class StraightStage(HubStage):
    """Replicas of the names `listening` listen; others dial them."""

    kinds: ClassVar[dict[str, int]] = {**HubStage.kinds, "straight route lost": 5}
    runs = staticmethod(run_straight)
    listening = "abc"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        token = dataclasses.replace(Token.read(self.address), host="127.0.0.1")
        self.ports = {name: free_port() for name in self.listening}
        self.routes = {name: Proxy(dataclasses.replace(token, port=port)) for name, port in self.ports.items()}

    def more(self, name: str) -> list[str]:
        if name not in self.listening:
            return []
        return [f"127.0.0.1:{self.ports[name]} 127.0.0.1:{self.routes[name].token.port}"]

    def fault(self, fault: Fault) -> None:
        if fault.kind != "straight route lost":
            super().fault(fault)
            return
        self.done[fault.kind] += 1
        self.routes[fault.name].forget(refuse=True)
        self.elapse(fault)
        self.routes[fault.name].mend()

    def until_straight(self, names: str) -> None:
        """Waits until each of these has sent packets straight in a round from now on."""
        now = time.monotonic()

        def sends(name: str) -> bool:
            sent = [line["straight"] for line in self.commits(name, now)]
            return any(LEAST < after - before < MOST for before, after in pairwise(sent))

        self.until(lambda: all(map(sends, names)), f"not all of {names} send straight")

    def clear(self) -> None:
        try:
            super().clear()
        finally:
            for route in self.routes.values():
                route.close()
