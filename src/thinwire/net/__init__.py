"""The secure carrier for open networks: mutual TLS over gRPC, through a hub that all dial, with one token to join.

    with thinwire.net.join(token, name="oslo", size=2) as group:
        ...                                # a `Group`, like any other

`thinwire hub` starts the hub and prints the token. docs/secure.md describes the rights of a stranger, a member and the hub. The
names are loaded at their first use, because a hub's process needs no torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from thinwire.errors import ConfigurationError

if TYPE_CHECKING:
    from thinwire.net.fetch import PublishedAtHub as PublishedAtHub
    from thinwire.net.group import SecureGroup as SecureGroup
    from thinwire.net.group import admit as admit
    from thinwire.net.group import join as join
    from thinwire.net.hub import Hub as Hub
    from thinwire.net.invitations import invite as invite
    from thinwire.net.token import Token as Token

# With it gRPC starts threads in a fork, such as a process of a data loader, and these may abort it.
os.putenv("GRPC_ENABLE_FORK_SUPPORT", "0")

_HOMES = {
    **dict.fromkeys(("SecureGroup", "admit", "join"), "group"),
    "PublishedAtHub": "fetch",
    "Hub": "hub",
    "invite": "invitations",
    "Token": "token",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("grpc", "cryptography"):
            raise
        raise ConfigurationError(
            f"{__name__} needs {error.name}, which is not installed: pip install 'thinwire[secure]'"
        ) from None
