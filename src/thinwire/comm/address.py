"""The addresses that gloo (torch 2.13) writes into a store. They are checked before gloo reads them, because others may write there.

Of rank r under the key `0/r`: the length of the machine's name (8 bytes), the name, the length of an address (8 bytes),
the address (a `sockaddr_storage` of 128 bytes and 8 more), and for each rank a number of 8 bytes. gloo does
not check them: other bytes end the process (SIGSEGV), or use up its memory.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # exported without saying so

from thinwire.errors import LinkError

NAME_NBYTES = 255  # the longest name of a machine
_ADDRESS_NBYTES = 136
_NUMBER = struct.Struct("=Q")
_FAMILIES = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}  # the position of the address


def parse(blob: bytes, size: int) -> tuple[str, int]:
    """The host and port that gloo wrote for a group of `size`. Raises `LinkError` for bytes that gloo must not read."""
    try:
        (name,) = _NUMBER.unpack_from(blob, 0)
        (address,) = _NUMBER.unpack_from(blob, 8 + min(name, NAME_NBYTES))
        whole = 16 + name + address + 8 * size
        if name > NAME_NBYTES or address != _ADDRESS_NBYTES or len(blob) != whole:
            raise ValueError
        sockaddr = blob[16 + name : 16 + name + address]
        numbers = struct.unpack_from(f"={size}q", blob, whole - 8 * size)
        (family,) = struct.unpack_from("=H", sockaddr)
        if family not in _FAMILIES or any(not 0 <= number < 1 << 31 for number in numbers):
            raise ValueError
        host = socket.inet_ntop(family, sockaddr[_FAMILIES[family]])
    except (ValueError, struct.error):
        raise LinkError(
            f"{len(blob)} bytes were found instead of the address at which gloo of a member listens, in a group of {size}. "
            "Somebody else writes into this store, or that member runs another version of torch."
        ) from None
    return host, int.from_bytes(sockaddr[2:4], "big")


class CheckedAddresses(Store):
    """A view of `store` for one group of `size` members, which checks what gloo reads. `own`: the address of this member's gloo, if it
    has the known form; if another version of torch writes another form, nothing is checked.
    """

    def __init__(self, store: Store, size: int) -> None:
        super().__init__()
        self._store, self._size = store, size
        self.own: tuple[str, int] | None = None

    def set(self, key: str, value: bytes | str) -> None:
        with suppress(LinkError):
            self.own = parse(value.encode() if isinstance(value, str) else value, self._size)
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken, too

    def get(self, key: str) -> bytes:
        value = bytes(self._store.get(key))
        if self.own is not None:
            parse(value, self._size)
        return value

    def wait(self, keys: Sequence[str], seconds: timedelta | None = None) -> None:
        if seconds is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), seconds)
