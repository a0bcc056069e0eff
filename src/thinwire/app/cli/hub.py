"""`thinwire hub`: the server at which the replicas of a run meet over open networks."""

from __future__ import annotations

import math
import re
import resource
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv6Address
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from thinwire.app.cli import options
from thinwire.app.cli.streams import unread
from thinwire.app.cli.token import set_up_grpc
from thinwire.app.records.printable import printable, quoted
from thinwire.app.records.published import PublishedFolder
from thinwire.app.trainer.signals import asked_to_end
from thinwire.errors import ConfigurationError
from thinwire.files import write_whole
from thinwire.membership.registry import HEARTBEAT_TIMEOUT, MemberRegistry
from thinwire.net.token import HUB_PORT, MOST_USES
from thinwire.registered import setting

PUBLISH_NBYTES = 64 << 30
_FOR = {  # the verbs that take an option, where not all do
    **dict.fromkeys(("listen", "address", "run_file", "published", "publishers", "publish_bytes"), ("run",)),
    **dict.fromkeys(("reduce", "elastic", "heartbeat_timeout"), ("run",)),
    **dict.fromkeys(("uses", "hours", "name", "group"), ("run", "invite")),
    "now": ("rotate",),
}


@dataclass(frozen=True)
class Options:
    """The options of `thinwire hub`."""

    do: tyro.conf.Positional[Literal["run", "list", "invite", "revoke", "rotate"]] = "run"
    """run: start the hub, until interrupted. The others change its folder, while it runs or not. list: its members and elastic runs. invite: a
    new token. revoke: end a member's rights. rotate: begin to replace the hub's authority, and, when all members have a certificate of the new
    one, end the old one."""
    who: tyro.conf.Positional[str | None] = None
    """The name of the member to revoke. Only for revoke."""
    out: Path = Path("hub")
    """The hub's folder, with its keys. Anybody who can read it can act as the hub."""
    listen: str | None = None
    """HOST:PORT to listen at; machines that join need the next port, too. Default: the earlier address of this folder's hub, or 127.0.0.1:29530."""
    address: str | None = None
    """The host that replicas dial, if it is not the one of --listen: a public name or address, without a port. Default: the host of --listen."""
    run_file: Path | None = None
    """A run file for machines that join without one. Default: the run file that this folder holds, if any; otherwise each member gives its own."""
    published: Path | None = None
    """A run folder on this machine, trained with --publish, whose versions members and followers may fetch (thinwire follow). Default: the hub
    serves no versions."""
    publishers: tuple[str, ...] = ()
    """The replicas of one run, elsewhere, that may publish through this hub (thinwire join --publish): members and followers may fetch what they
    send. Default: nobody may."""
    publish_bytes: int = PUBLISH_NBYTES
    """Most bytes of a version of one publisher; three versions may be in the hub's folder."""
    uses: int = 1
    """Number of replicas that may join with the token."""
    hours: float = 24.0
    """Hours for which the token is valid."""
    reduce: int | None = None
    """Number of replicas whose packets are averaged here; their run file has exchange = 'Star("hub")' (thinwire docs secure). Default: the hub
    forwards packets, and reads none."""
    elastic: bool = False
    """Replicas may die, return and join late (thinwire docs elastic). Default: the replicas of a run are the same from begin to end."""
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    """Elastic: seconds without a heartbeat after which a replica counts as dead. `thinwire doctor RUN` prints the value for a run."""
    name: str | None = None
    """The only name that may join with the token. Default: any name."""
    group: tuple[str, ...] = ()
    """The only runs that replicas with the token may join: names, as in thinwire join --group. Default: any run. With --reduce: the one run
    whose packets are averaged."""
    now: bool = False
    """With rotate: end the old authority even if some members have no certificate of the new one; they then need a new token."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.ask(
        Options,
        "thinwire hub",
        arguments,
        "Run the server that all replicas dial: it admits them by a token, and forwards their messages.",
    )
    try:
        return _do(asked)
    except sqlite3.Error as error:  # a full disk, a damaged file
        raise OSError(f"{asked.out / 'hub.sqlite'}: {error}") from None


def _do(asked: Options) -> int:
    if not 1 <= asked.uses <= MOST_USES or not 0 < asked.hours < math.inf:
        raise ConfigurationError(
            f"--uses {asked.uses} --hours {asked.hours}: 1 to {MOST_USES:,} uses and a positive time are needed."
        )
    if (asked.do == "revoke") != (asked.who is not None):
        given = "revoke without a name" if asked.who is None else f"{asked.who!r} with {asked.do}"
        raise ConfigurationError(
            f"{given}: revoke, and only that, needs a member's name; write thinwire hub revoke NAME --out FOLDER."
        )
    for option, verbs in _FOR.items():
        if asked.do not in verbs and getattr(asked, option) != getattr(Options, option):
            raise ConfigurationError(
                f"--{option.replace('_', '-')} with {asked.do}: only {' and '.join(verbs)} can use it; leave it out."
            )
    console = options.console(asked.json)
    if asked.do == "list":
        return _list(asked, console)
    set_up_grpc()
    if asked.do == "invite":
        from thinwire.net import invite

        return _told(asked, console, str(invite(asked.out, asked.uses, 3600 * asked.hours, asked.name, asked.group)))
    if asked.do == "rotate":
        from thinwire.net.invitations import rotate

        ended, behind = rotate(asked.out, asked.now)
        console.print(_rotated(ended, behind, asked.out), soft_wrap=True, highlight=False)
        return options.answer(asked.json, {"ended": ended, "behind": behind})
    if asked.do == "revoke":
        from thinwire.net.invitations import opened_state

        with opened_state(asked.out) as state:
            left = state.revoke(asked.who or "")
        more = f"; its token, which could have admitted {left} more, has ended" if left else ""
        console.print(
            f"{asked.who} is revoked: a running hub removes it at once{more}", soft_wrap=True, highlight=False
        )
        return options.answer(asked.json, {"revoked": asked.who})
    return _run(asked, console)


def _run(asked: Options, console: Console) -> int:
    from thinwire.app.records.uploaded import UploadedVersions
    from thinwire.net import Hub
    from thinwire.net.frames import MEMBERS
    from thinwire.net.invitations import has_run
    from thinwire.net.keys import private_folder

    fresh = not has_run(asked.out)
    (host, port), reached_at = _listen(asked, fresh), _reached_at(asked)
    _check_publishers(asked)
    if not 0 < asked.heartbeat_timeout < 86_400:
        raise ConfigurationError(
            f"--heartbeat-timeout {asked.heartbeat_timeout}: a positive number of seconds is needed."
        )
    if asked.reduce is not None and len(asked.group) > 1:
        raise ConfigurationError(
            f"--reduce with --group {' '.join(asked.group)}: one run is needed; leave the others out."
        )
    if asked.reduce is not None and (asked.elastic or not 1 <= asked.reduce < MEMBERS):
        raise ConfigurationError(
            f"--reduce {asked.reduce}{' --elastic' * asked.elastic}: the number of replicas of a fixed group is needed, 1 to {MEMBERS - 1}."
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if asked.run_file:
        from thinwire.app.trainer.secure import run_of_hub

        run_of_hub(asked.run_file, asked.elastic)
    folder = private_folder(asked.out)

    def say(line: str) -> None:
        console.print(printable(line), soft_wrap=True, highlight=False)

    if asked.run_file:
        _keep_run_file(asked.run_file, folder, say)
    if asked.published and not (asked.published / "published").exists():
        say(f"{asked.published} has no versions yet; followers wait until a run there, with --publish, has written one")

    registry = (lambda: MemberRegistry(asked.heartbeat_timeout)) if asked.elastic else None
    published = PublishedFolder(asked.published) if asked.published else None
    publishers = UploadedVersions(folder, asked.publishers, asked.publish_bytes) if asked.publishers else None
    with (
        asked_to_end() as ended,
        Hub(
            folder, host, port, reached_at, registry=registry, published=published, publishers=publishers, say=say
        ) as hub,
    ):
        say(
            f"hub at {hub.host}:{hub.port}{_reach(hub.host, hub.dialled)}; machines that join need port {hub.join_port}, too"
        )
        say(f"its keys and its state are in {folder}; its refusals are in {folder / 'audit.txt'}")
        if fresh:
            _told_or_kept(asked, console, str(hub.invite(asked.uses, 3600 * asked.hours, asked.name, asked.group)))
        else:
            say(f"admitted members may come again; for others: thinwire hub invite --out {quoted(folder)}")
        with _reducing(asked, folder, say):
            while not ended:
                time.sleep(0.2)
    return 0


def _reach(host: str, dialled: str | None) -> str:
    """The machines that reach a hub at `host`, whose tokens hold the host `dialled`, for messages."""
    if host != dialled:
        return f", which replicas dial at {dialled} (--address)"
    own = host in ("localhost", "::1") or host.startswith("127.")
    return ", which this machine alone can reach (--listen, --address)" if own else ""


def _keep_run_file(given: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Copy the run file into the hub's folder. Raises `ConfigurationError` if it would replace one that a person has written or changed there."""
    from thinwire.net.state import HubState

    kept, new = folder / "run.toml", given.read_bytes()
    before = kept.read_bytes() if kept.exists() else new
    if kept.exists() and kept.samefile(given):
        return
    with closing(HubState(folder)) as state:
        if before != new and state.meta("run file") != sha256(before).hexdigest():
            raise ConfigurationError(
                f"{kept} is no copy that this hub has made, and {given} would replace it; leave --run-file out to use it, or rename it."
            )
        write_whole(kept, new)
        state.keep("run file", sha256(new).hexdigest())
    if before != new:
        say(f"{given} replaces the run file for machines that join without one")


def _check_publishers(asked: Options) -> None:
    from thinwire.net.fetch import FOLLOWER
    from thinwire.net.keys import check_name

    for name in asked.publishers:
        if check_name(name).startswith(FOLLOWER):
            raise ConfigurationError(f"--publishers {name}: a follower receives only; name replicas of the run.")
    if asked.publishers and asked.published:
        raise ConfigurationError(
            "--published with --publishers: one source of versions is needed; a replica on this machine may publish as the others do."
        )
    if asked.publish_bytes < 1:
        raise ConfigurationError(f"--publish-bytes {asked.publish_bytes}: a positive number of bytes is needed.")


def _reducing(asked: Options, folder: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
    if asked.reduce is None:
        return nullcontext()
    averaging = setting("reduce")
    say(f"it averages packets of {asked.reduce} replicas; its log is {folder / averaging.LOG}")

    def ended(code: int) -> None:
        say(
            f"warning: the reducer's process has ended (exit code {code}), and without it no group goes on or begins: see the end of "
            f"{folder / averaging.LOG}, and start this hub again"
        )

    context: AbstractContextManager[None] = averaging.reducing(folder, asked.reduce, "".join(asked.group), ended)
    return context


def _listen(asked: Options, fresh: bool) -> tuple[str, int]:
    if asked.listen is None:
        return ("127.0.0.1", HUB_PORT) if fresh else ("", 0)
    said, _, port = asked.listen.rpartition(":")
    host = _host(said)
    if not (host and port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65535):
        raise ConfigurationError(f"--listen {asked.listen!r}: HOST:PORT is needed, such as 0.0.0.0:{HUB_PORT}.")
    return host, int(port)


def _host(said: str) -> str:
    """The host, without the brackets of IPv6; empty if no socket would take it, such as 10.0..1."""
    try:
        said.encode("idna")
    except UnicodeError:
        return ""
    return said.strip("[]")


def _reached_at(asked: Options) -> str | None:
    """The host of --address. A token holds it, and replicas dial it with the ports of --listen."""
    if asked.address is None:
        return None
    host = _host(asked.address)
    if not re.fullmatch(r"[\w.-]{1,253}", host, re.ASCII):
        try:
            IPv6Address(host)
        except ValueError:
            raise ConfigurationError(
                f"--address {asked.address!r}: a host name or an IP address is needed, without a port, such as hub.example; the port is that "
                "of --listen."
            ) from None
    return host


def _told(asked: Options, console: Console, token: str) -> int:
    from thinwire.net.fetch import FOLLOWER

    times = "once" if asked.uses == 1 else f"{asked.uses} times"
    who = f" by {asked.name}" if asked.name else ""
    where = f" for {', '.join(asked.group)}" if asked.group else ""
    console.print(f"join token, valid for {asked.hours:g} hours, to use {times}{who}{where}; keep it like a password:")
    console.print(f"  {token}", soft_wrap=True, highlight=False, markup=False)
    if (asked.name or "").startswith(FOLLOWER):
        use = f"a follower fetches by: thinwire follow TOKEN --name {asked.name} --out FOLDER"
    else:
        use = "a replica joins by: thinwire join TOKEN [run.toml] --name NAME"
    console.print(use, soft_wrap=True, highlight=False, markup=False)
    return options.answer(asked.json, {"token": token})


def _told_or_kept(asked: Options, console: Console, token: str) -> None:
    """`_told` of a hub that serves. If nobody reads its stdout any more, a line on stderr says how to get a token."""
    _told(asked, console, token)
    if unread():
        options.advise(
            f"the hub serves, but nobody reads its stdout; for a join token: thinwire hub invite --out {quoted(asked.out)}"
        )


def _rotated(ended: bool, behind: list[str], folder: Path) -> str:
    names, own = ", ".join(behind), quoted(folder)
    if ended:
        lost = f"; a new token is needed by {names}" if behind else ""
        return f"the old authority and its tokens have ended{lost}: thinwire hub invite --out {own}"
    if not behind:
        return f"a new authority is made; to end the old one: thinwire hub rotate --out {own}"
    return (
        f"a new authority is made; without a certificate of it yet: {names}. A member gets one when it connects. "
        f"Then, to end the old one: thinwire hub rotate --out {own} (without them: --now)"
    )


def _list(asked: Options, console: Console) -> int:
    from thinwire.net.invitations import opened_state

    with opened_state(asked.out) as state:
        members, invitations, runs = state.members(), state.invitations(), state.runs()
        bound = {one.name: state.bound(one.name) for one in members}
    table = options.table("")
    for column in ("member", "key", "joined", "runs", "state"):
        table.add_column(column)
    for one in members:
        joined = time.strftime("%Y-%m-%d %H:%M", time.gmtime(one.joined))
        of = ", ".join(bound[one.name]) or "any"
        table.add_row(one.name, one.key.hex()[:16], joined, of, "revoked" if one.revoked else "may connect")
    console.print(table)
    for run in runs:
        there = ", ".join(run.names) or "nobody"
        console.print(f"elastic run {run.name or 'without a name'}: {there}", soft_wrap=True, highlight=False)
    console.print(
        f"unused tokens: {len(invitations)}; members that they can admit: {sum(one[0] for one in invitations)}",
        highlight=False,
    )
    facts = {
        "members": [
            {"name": one.name, "key": one.key.hex(), "joined": one.joined, "revoked": one.revoked, "runs": bound[one.name]}
            for one in members
        ],
        "runs": [{"name": run.name, "begun_by": run.begun_by, "present": run.names} for run in runs],
        "open": [{"uses": uses, "expires": at, "name": name} for uses, at, name in invitations],
    }  # fmt: skip
    return options.answer(asked.json, facts)
