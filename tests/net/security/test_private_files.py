"""One rule for all files with secrets: nobody but their owner may read or change them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.app.cli.token import token_of
from thinwire.comm.private_files import read_private
from thinwire.errors import ConfigurationError
from thinwire.membership.channel import secret_in
from thinwire.net import Hub, Token, admit
from thinwire.net.enrol import Enrolment
from thinwire.net.invitations import opened_state

Use = Callable[[], object]


@pytest.fixture(params=["run secret", "token", "member's key", "authority's key", "members of a hub"])
def secret(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Use]:
    """A file with a secret, and its use."""
    token = tmp_path / "token"
    with Hub(tmp_path / "hub") as hub:
        token.write_text(str(hub.invite(1)))
        if request.param == "member's key":
            admit(token.read_text(), "oslo", tmp_path / "keys")
    token.chmod(0o600)
    if request.param == "run secret":
        secret_in(tmp_path / "secret", make=True)
        return tmp_path / "secret", lambda: secret_in(tmp_path / "secret")
    if request.param == "token":
        return token, lambda: token_of(f"@{token}")
    if request.param == "member's key":
        return tmp_path / "keys/oslo/key.pem", lambda: Enrolment(
            Token.read(token.read_text()), "oslo", tmp_path / "keys"
        )
    file = "authority.key" if request.param == "authority's key" else "hub.sqlite"

    def use() -> None:
        with opened_state(tmp_path / "hub"):
            Hub(tmp_path / "hub").close()

    return tmp_path / "hub" / file, use


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_secret_that_others_may_read_or_change_is_refused(secret: tuple[Path, Use], mode: int) -> None:
    path, use = secret
    use()
    path.chmod(mode)
    with pytest.raises(
        ConfigurationError, match=f"others may read or change {re.escape(str(path))} .*chmod 600 {re.escape(str(path))}"
    ):
        use()


def test_a_link_to_a_secret_counts_as_its_file_and_a_pipe_of_this_user_is_read(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("secret")
    file.chmod(0o600)
    link.symlink_to(file)
    assert read_private(link, "a secret") == b"secret"
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_private(link, "a secret")
    os.mkfifo(pipe, 0o600)
    assert read_private(pipe, "a secret") == b""  # nobody writes, and nobody waits
    read, write = os.pipe()
    writer = threading.Timer(0.05, lambda: (os.write(write, b"secret"), os.close(write)))
    writer.start()
    assert read_private(Path(f"/dev/fd/{read}"), "a secret") == b"secret"
    writer.join()
    os.close(read)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("secret")
    file.chmod(0o600)
    os.chown(file, 12345, 12345)
    assert read_private(file, "a secret") == b"secret"  # root reads the files of others
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigurationError, match="another user owns"):
        read_private(file, "a secret")
