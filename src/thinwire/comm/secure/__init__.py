"""Replicas on networks that nobody owns: mutual TLS over gRPC, through a hub that all dial, with one token to join.

    with thinwire.comm.secure.join(token, name="oslo", size=2) as group:
        ...                                # a `Group`, as any other

`thinwire hub` starts the hub and prints the token. docs/secure.md says what a stranger, a member and the hub can do.
"""

from thinwire.errors import ConfigurationError

try:
    from thinwire.comm.secure.group import SecureGroup, admit, join
    from thinwire.comm.secure.hub import Hub
    from thinwire.comm.secure.invitations import invite
    from thinwire.comm.secure.token import Token
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"thinwire.comm.secure needs {error.name}, which is not installed: pip install 'thinwire[secure]'"
    ) from None

__all__ = ["Hub", "SecureGroup", "Token", "admit", "invite", "join"]
