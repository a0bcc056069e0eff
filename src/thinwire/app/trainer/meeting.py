"""Where the replicas of a run meet: the store of torch.distributed, a lighthouse or a hub, given to each process on its command line."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from thinwire.app.records.published import PublishedFolder
from thinwire.app.trainer.launch import place_of_rank
from thinwire.app.trainer.member import MemberSpec, heartbeat_timeout
from thinwire.app.trainer.place import ElasticPlace, Place, Stop
from thinwire.app.trainer.run import Run
from thinwire.comm import parse_link
from thinwire.comm.private_files import read_private
from thinwire.membership import Lighthouse, LighthouseRendezvous
from thinwire.membership.channel import secret_in
from thinwire.membership.registry import MemberRegistry
from thinwire.registered import setting

HUB, TOKEN, KEYS = "hub", "token", "keys"  # in the run folder: the hub's own folder, and in that its files
OWN_HUB, FIXED_HUB, WORLD = "own-hub", "fixed-hub", "world"
_WAIT_SECONDS = 600.0  # seconds to wait for the other replicas of this machine


@dataclass(frozen=True)
class Process:
    """What a launcher tells the process of a replica beside its meeting place. `stop` is set when the launcher is gone, too."""

    folder: Path
    name: str
    index: int  # its number among the replicas of this machine
    resume: bool
    stop: Stop


class Meeting(ABC):
    """A meeting place of replicas."""

    elastic: ClassVar[bool] = False  # whether replicas may leave and return
    hub_in_launcher: ClassVar[bool] = False  # whether a fixed group cannot go on without the process that started it

    @abstractmethod
    def words(self) -> list[str]:
        """Words for the command line of a replica; `meeting_of` reads them."""

    @abstractmethod
    def place(self, run: Run, process: Process) -> AbstractContextManager[Place | ElasticPlace]:
        """A context with the place of the replica that is this process. Raises `ConfigurationError` if it cannot have one."""

    def variables(self, index: int) -> dict[str, str]:
        """What replica number `index` of this machine finds in its environment."""
        return {}

    def away(self) -> str:
        """Why nobody answers at its address, and which that is; empty if somebody does, if it was asked just now, or is on this machine."""
        return ""


@dataclass(frozen=True)
class World(Meeting):
    """The store of torch.distributed, which rank 0 of `replicas` serves at `port` of this machine."""

    port: int = 0
    replicas: int = 0

    def words(self) -> list[str]:
        """See `Meeting`: the environment says the rest."""
        return [WORLD]

    def variables(self, index: int) -> dict[str, str]:
        """What torchrun would set."""
        of_rank = {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(self.replicas)}
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return of_rank | at

    def place(self, run: Run, process: Process) -> AbstractContextManager[Place]:
        """See `Meeting`."""
        return place_of_rank(run, process.folder, process.resume, process.stop)


@dataclass(frozen=True)
class FixedHub(Meeting):
    """The hub of a fixed group, in the process that started its replicas; its files are in the run folder."""

    hub_in_launcher: ClassVar[bool] = True

    def words(self) -> list[str]:
        """See `Meeting`."""
        return [FIXED_HUB]

    @contextmanager
    def place(self, run: Run, process: Process) -> Iterator[Place]:
        """See `Meeting`."""
        from thinwire.app.trainer.secure import join_for, replicas_of  # it needs the extra `secure`

        folder, hub = process.folder, process.folder / HUB
        token = read_private(hub / TOKEN, "the join token").decode()
        with join_for(run, token, process.name, hub / KEYS, str(folder), _WAIT_SECONDS) as group:
            yield Place(replicas_of(run, group), folder, process.resume, gpu=process.index, stop=process.stop)


class ElasticMeeting(Meeting):
    """A meeting place whose members may leave and return."""

    elastic: ClassVar[bool] = True

    @abstractmethod
    def member(self, run: Run, name: str) -> MemberSpec:
        """The member called `name`. Raises `ConfigurationError` if it cannot be one."""

    def place(self, run: Run, process: Process) -> AbstractContextManager[ElasticPlace]:
        """See `Meeting`."""
        member = self.member(run, process.name)
        return nullcontext(ElasticPlace(member, process.folder, process.resume, process.index, process.stop))


@dataclass(frozen=True)
class AtLighthouse(ElasticMeeting):
    """A lighthouse at `address`, with the run secret in the file `secret`."""

    address: str
    secret: Path | None = None

    def words(self) -> list[str]:
        """See `Meeting`."""
        return ["lighthouse", self.address, *([str(self.secret)] if self.secret else [])]

    def member(self, run: Run, name: str) -> MemberSpec:
        """See `ElasticMeeting`."""
        return MemberSpec(LighthouseRendezvous(self.address), name, secret_in(self.secret) if self.secret else b"")

    def away(self) -> str:
        """See `Meeting`."""
        return LighthouseRendezvous(self.address).away()


@dataclass(frozen=True)
class AtHub(ElasticMeeting):
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
        """See `ElasticMeeting`."""
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


def meeting_of(words: Sequence[str]) -> Meeting:
    """The meeting place that these `words()` describe."""
    kind, *rest = words
    if kind in (WORLD, FIXED_HUB):
        return World() if kind == WORLD else FixedHub()
    if kind in ("hub", OWN_HUB):
        token, keys, name = rest
        return AtHub(Path(token), Path(keys), name, kind == OWN_HUB)
    return AtLighthouse(rest[0], *map(Path, rest[1:]))


@contextmanager
def own_meeting(run: Run, folder: Path) -> Iterator[Meeting]:
    """A context in which this process is the meeting place of `run`, whose replicas are all processes of this machine."""
    carrier, replicas = run.placement.carrier, run.placement.replicas
    if carrier == "secure":
        averages = setting("reduce").reducing if run.needs_hub else lambda *about, **how: nullcontext()
        with _own_hub(folder, replicas), averages(folder / HUB, replicas, str(folder), orphan_seconds=0.0):
            yield FixedHub()
        return
    if not run.placement.elastic:
        yield World(_free_port(), replicas)
        return
    timeout = heartbeat_timeout(run.make_strategy().schedule, run.placement.link)
    log = folder / "logs" / "lighthouse.txt"
    log.touch()

    def tell(line: str) -> None:
        with suppress(OSError), log.open("a") as lines:  # on a full disk the replicas need it all the same
            lines.write(line + "\n")

    if carrier == "elastic":
        secret = folder / "secret"
        lighthouse = Lighthouse("127.0.0.1", 0, timeout, secret_in(secret, make=True), tell)
        try:
            yield AtLighthouse(lighthouse.address, secret)
        finally:
            lighthouse.close()
        return
    with _own_hub(folder, replicas, registry=lambda: MemberRegistry(timeout, tell)):
        yield AtHub(folder / HUB / TOKEN, folder / HUB / KEYS, here=True)


@contextmanager
def _own_hub(folder: Path, replicas: int, **how: Any) -> Iterator[None]:
    """A context in which this process is the hub of `replicas` on this machine, and serves what the run in `folder` publishes."""
    from thinwire.net import Hub  # it needs the extra `secure`
    from thinwire.net.keys import write_private

    with Hub(folder / HUB, published=PublishedFolder(folder), **how) as hub:
        write_private(folder / HUB / TOKEN, f"{hub.invite(replicas)}\n".encode())
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
