"""Invitations to a hub and access to its state, whether it runs or not."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.errors import ConfigurationError
from thinwire.net.keys import Authorities, Authority, check_name
from thinwire.net.state import HubState
from thinwire.net.token import MOST_USES, Token


def invite(
    folder: Path, uses: int = 1, seconds: float = 86_400.0, name: str | None = None, runs: Collection[str] = ()
) -> Token:
    """A new invitation of the hub in `folder`, whether it runs or not.

    Args:
        folder: the hub's folder.
        uses: number of members that may join with it.
        seconds: seconds for which it is valid.
        name: the only member that may use it; None: any.
        runs: names of the only runs that its members may join; empty: any.

    Raises:
        ConfigurationError: there is no hub in `folder`, or a number is out of range.

    >>> import tempfile
    >>> from thinwire.net import Hub
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Hub(Path(folder)).close()
    ...     invite(Path(folder), uses=2).host
    '127.0.0.1'
    """
    if not 1 <= uses <= MOST_USES or not seconds > 0:
        raise ConfigurationError(
            f"uses={uses}, seconds={seconds}: 1 to {MOST_USES:,} uses and a positive time are needed."
        )
    with opened_state(folder) as state:
        host, ports = state.meta("host"), state.meta("ports")
        if host is None or ports is None:
            raise ConfigurationError(
                f"the hub in {folder} never ran; start it first: thinwire hub --out {shlex.quote(str(folder))}"
            )
        number, secret = state.invite(
            uses, seconds, None if name is None else check_name(name), [*map(check_name, runs)]
        )
        port, join_port = map(int, ports.split())
        return Token(host, port, join_port, Authority(folder).fingerprint, number, secret)


def rotate(folder: Path, now: bool = False) -> tuple[bool, list[str]]:
    """Begin or end the replacement of the authority of the hub in `folder`. Returns whether it has ended, and the members without a
    certificate of the new one.

    Connected members get one at once. The end waits for the others, unless `now`. Raises `ConfigurationError` if there is no hub.
    """
    with opened_state(folder) as state:
        authorities = Authorities(folder)
        if authorities.next is None:
            authorities = authorities.begun()
            behind, ended = state.behind(authorities.issuer.fingerprint), False
        else:
            behind = state.behind(authorities.issuer.fingerprint)
            ended = now or not behind
            if ended:
                authorities.replaced()
                state.end_invitations()
        state.keep("rotated", str(time.time()))  # a running hub notices the change
        return ended, behind


def has_run(folder: Path) -> bool:
    """Whether the hub in `folder` has ever listened. One whose port was taken has not, and its token was never shown."""
    if not (folder / "authority.pem").exists():
        return False
    with opened_state(folder) as state:
        return state.meta("ports") is not None


@contextmanager
def opened_state(folder: Path) -> Iterator[HubState]:
    """The state of the hub in `folder`, whether it runs or not. Raises `ConfigurationError` if there is none."""
    if not (folder / "authority.pem").exists():
        raise ConfigurationError(f"{folder} holds no hub; thinwire hub --out {shlex.quote(str(folder))} makes one.")
    state = HubState(folder)
    try:
        yield state
    finally:
        state.close()
