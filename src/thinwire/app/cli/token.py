"""How a command takes a join token: as a word, from a file, or from standard input; and the TLS of the verbs that take one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from thinwire.comm.private_files import read_private
from thinwire.errors import ConfigurationError

_MOST_NBYTES = 4096  # of a file; a token is shorter


def takes_token(given: str) -> bool:
    """Whether `token_of` reads `given` from elsewhere."""
    return given == "-" or given.startswith("@")


def token_of(given: str) -> str:
    """The token in FILE for `@FILE`, on standard input for `-`; any other word is the token. Users of the same machine see the arguments
    of its processes, but neither of these. Raises `ConfigurationError`.
    """
    if not takes_token(given):
        return given
    path = Path(given[1:])
    try:
        text = (
            sys.stdin.read(_MOST_NBYTES)
            if given == "-"
            else read_private(path, "the join token", _MOST_NBYTES).decode()
        )
    except (OSError, ValueError, AttributeError) as error:  # `sys.stdin` is None if it is closed
        raise ConfigurationError(
            f"no join token can be read from {'standard input' if given == '-' else path} ({error}); write the token that `thinwire hub` "
            "printed there, or give the word itself."
        ) from None
    return text.strip()


def set_up_grpc() -> None:
    """Have gRPC accept only TLS 1.3, and print nothing. It reads these variables when it is imported, and has no options for it."""
    os.putenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")  # of TLS 1.2, and a P-256 key cannot use it
    # it would print a line for each stranger; the hub counts them, and all other errors are raised
    os.putenv("GRPC_VERBOSITY", "NONE")
