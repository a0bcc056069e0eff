"""The invitation of a hub as one word for pasting: the hub's address, its authority's fingerprint, and a secret."""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass

from thinwire.errors import ConfigurationError

HUB_PORT = 29530  # unless `thinwire hub` is given another
MOST_USES = 1_000_000
_PREFIX = "tw1."
_LAYOUT = struct.Struct("<32s8s16sHH")
_LONGEST_HOST = 253


@dataclass(frozen=True)
class Token:
    """An invitation to join a hub, once or a stated number of times. Keep it like a password.

    Args:
        host: the host at which the hub is reached.
        port, join_port: the hub's port for members, and its port for joining.
        authority: SHA-256 of the certificate of the hub's authority.
        invitation: names the invitation at the hub.
        secret: 16 random bytes.

    >>> token = Token("hub.example", 29530, 29531, bytes(32), bytes(8), bytes(16))
    >>> Token.read(str(token)) == token
    True
    """

    host: str
    port: int
    join_port: int
    authority: bytes
    invitation: bytes
    secret: bytes

    def __str__(self) -> str:
        packed = _LAYOUT.pack(self.authority, self.invitation, self.secret, self.port, self.join_port)
        return _PREFIX + base64.urlsafe_b64encode(packed + self.host.encode("ascii")).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"Token({self.host}:{self.port})"  # the secret belongs in no log

    @property
    def where(self) -> str:
        """The hub, with the address that members dial, for messages."""
        return f"the hub at {self.host}:{self.port}"

    @classmethod
    def is_one(cls, text: str) -> bool:
        """Whether `text` looks like a token."""
        return text.strip().startswith(_PREFIX)

    @classmethod
    def read(cls, text: str) -> Token:
        """Parse a token. Raises `ConfigurationError`."""
        text = text.strip()
        try:
            if not text.startswith(_PREFIX) or len(text) > 1000:
                raise ValueError
            rest = text.removeprefix(_PREFIX)
            raw = base64.b64decode(rest + "=" * (-len(rest) % 4), altchars=b"-_", validate=True)
            authority, invitation, secret, port, join_port = _LAYOUT.unpack_from(raw)
            host = raw[_LAYOUT.size :].decode("ascii")
            if not 0 < len(host) <= _LONGEST_HOST or not host.isprintable() or set(host) & set(" /\\@"):
                raise ValueError
        except (ValueError, struct.error, binascii.Error):
            raise ConfigurationError(
                f"a join token of {len(text)} characters cannot be read; the whole word that `thinwire hub` or "
                f"`thinwire hub invite` printed is needed: it begins with {_PREFIX}"
            ) from None
        return cls(host, port, join_port, authority, invitation, secret)
