"""The elastic runs at one hub: each has a name, and a separate registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from thinwire.errors import LinkError
from thinwire.net.audit import AuditLog
from thinwire.net.grouping import HubGroups
from thinwire.net.requests import RequestHandler
from thinwire.net.state import HubState

TICK = 0.05  # seconds between two ticks of a registry
RUNS = 64  # most runs in progress at one hub


class HubRuns:
    """The registries of runs with members, now or at the end of the hub's previous process.

    Args:
        make: makes the registry of a run.
        state: keeps the runs.
        audit: gets a line for each run that begins.
        lost: called with name and incarnation of a member whose heartbeats have stopped.
    """

    def __init__(
        self, make: Callable[[], RequestHandler], state: HubState, audit: AuditLog, lost: Callable[[str, str], object]
    ) -> None:
        self._make, self._state, self._audit, self._lost = make, state, audit, lost
        self._registries: dict[str, RequestHandler] = {}
        self._streams: dict[str, int] = {}  # number of streams that use each registry
        self._revoked: Collection[str] = ()
        for run in state.runs():
            if run.present:
                self._open(run.name)

    @contextmanager
    def used(self, run: str, member: str) -> Iterator[RequestHandler]:
        """A context with the registry of `run`, which is made if needed. Raises `LinkError` if there are too many runs."""
        if run not in self._registries:
            if len(self._registries) >= RUNS:
                raise LinkError(
                    f"{len(self._registries)} runs are in progress at this hub, at most {RUNS} are possible"
                )
            self._state.use_run(run, member, self._registries)
            self._open(run)
            self._audit("began", f"the run {run}".strip(), f"by {member}")
        self._streams[run] += 1
        try:
            yield self._registries[run]
        finally:
            self._streams[run] -= 1

    def revoke(self, names: Collection[str]) -> None:
        """Tell all runs the names of revoked members."""
        self._revoked = names
        for registry in self._registries.values():
            registry.revoke(names)

    async def ticking(self, groups: HubGroups) -> None:
        """Call `tick` of each registry regularly, drop those of runs without members, and end vain waits for a group."""
        while True:
            for run, registry in self._registries.items():
                with self._audit.repeated(f"the state of the run {run}".strip()):
                    registry.tick()
            self._drop_empty()
            groups.end_vain_waits(self._nobody_comes)
            await asyncio.sleep(TICK)

    def _nobody_comes(self, waiting: Collection[str]) -> bool:
        return any(registry.nobody_comes(waiting) for registry in self._registries.values())

    def _open(self, run: str) -> None:
        self._registries[run] = registry = self._make()
        self._streams[run] = 0
        registry.lost = self._lost
        registry.reported = lambda name, text: self._audit("reports", name, text)
        registry.revoke(self._revoked)
        registry.remember(self._state.kept_run(run))

    def _drop_empty(self) -> None:
        for run, registry in list(self._registries.items()):
            if registry.empty and not self._streams[run]:
                del self._registries[run], self._streams[run]
