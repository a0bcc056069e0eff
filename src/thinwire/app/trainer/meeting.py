"""The meeting place of an elastic run's replicas: a lighthouse or a hub, given to each process on its command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thinwire.app.records.published import PublishedFolder
from thinwire.app.trainer.member import MemberSpec, heartbeat_timeout
from thinwire.app.trainer.run import Run
from thinwire.comm import parse_link
from thinwire.comm.private_files import read_private
from thinwire.membership import Lighthouse, LighthouseRendezvous
from thinwire.membership.channel import secret_in
from thinwire.membership.registry import MemberRegistry

HUB, TOKEN, KEYS = "hub", "token", "keys"  # in the run folder: the hub's own folder, and in that its files
OWN_HUB = "own-hub"


class Meeting(Protocol):
    """A meeting place of replicas."""

    def words(self) -> list[str]:
        """Words for the command line of a replica; `meeting_of` reads them."""

    def member(self, run: Run, name: str) -> MemberSpec:
        """The member called `name`. Raises `ConfigurationError` if it cannot be one."""

    def away(self) -> str:
        """Why nobody answers at its address, and which that is; empty if somebody does, or if it was asked just now."""


@dataclass(frozen=True)
class AtLighthouse:
    """A lighthouse at `address`, with the run secret in the file `secret`."""

    address: str
    secret: Path | None = None

    def words(self) -> list[str]:
        """See `Meeting`."""
        return ["lighthouse", self.address, *([str(self.secret)] if self.secret else [])]

    def member(self, run: Run, name: str) -> MemberSpec:
        """See `Meeting`."""
        return MemberSpec(LighthouseRendezvous(self.address), name, secret_in(self.secret) if self.secret else b"")

    def away(self) -> str:
        """See `Meeting`."""
        return LighthouseRendezvous(self.address).away()


@dataclass(frozen=True)
class AtHub:
    """The run `run` at the hub whose token is in the file `token`; `keys` keeps the replicas' keys. `here`: the hub is the run's
    own, on this machine, and serves the run folder.
    """

    token: Path
    keys: Path
    run: str = ""
    here: bool = False

    def words(self) -> list[str]:
        """See `Meeting`."""
        return [OWN_HUB if self.here else "hub", str(self.token), str(self.keys), self.run]

    def member(self, run: Run, name: str) -> MemberSpec:
        """See `Meeting`."""
        from thinwire.net import Token  # it needs the extra `secure`
        from thinwire.net.enrol import Enrolment
        from thinwire.net.rendezvous import HubRendezvous

        uplink = parse_link(run.placement.uplink)
        rate = uplink.bits_per_second if uplink else None
        enrolment = Enrolment(
            Token.read(read_private(self.token, "the join token").decode("ascii", "replace")), name, self.keys
        )
        rendezvous = HubRendezvous(enrolment, self.run, rate)
        return MemberSpec(rendezvous, name, uploader=None if self.here else rendezvous.uploader)

    def away(self) -> str:
        """See `Meeting`: `thinwire join` has reached it."""
        return ""


def meeting_of(words: Sequence[str]) -> Meeting:
    """The meeting place that these `words()` describe."""
    kind, *rest = words
    if kind in ("hub", OWN_HUB):
        token, keys, name = rest
        return AtHub(Path(token), Path(keys), name, kind == OWN_HUB)
    return AtLighthouse(rest[0], *map(Path, rest[1:]))


@contextmanager
def own_meeting(run: Run, folder: Path) -> Iterator[Meeting]:
    """A context in which this process is the lighthouse or the hub of `run`, whose replicas are all on this machine."""
    timeout = heartbeat_timeout(run.make_strategy().schedule, run.placement.link)
    log = folder / "logs" / "lighthouse.txt"
    log.touch()

    def tell(line: str) -> None:
        with suppress(OSError), log.open("a") as lines:  # on a full disk the replicas need it all the same
            lines.write(line + "\n")

    if run.placement.carrier == "elastic":
        secret = folder / "secret"
        lighthouse = Lighthouse("127.0.0.1", 0, timeout, secret_in(secret, make=True), tell)
        try:
            yield AtLighthouse(lighthouse.address, secret)
        finally:
            lighthouse.close()
        return
    from thinwire.net import Hub
    from thinwire.net.keys import write_private

    served = PublishedFolder(folder)
    with Hub(folder / HUB, registry=lambda: MemberRegistry(timeout, tell), published=served) as hub:
        write_private(folder / HUB / TOKEN, f"{hub.invite(run.placement.replicas)}\n".encode())
        yield AtHub(folder / HUB / TOKEN, folder / HUB / KEYS, here=True)
