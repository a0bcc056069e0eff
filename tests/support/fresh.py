"""Makes this process forget the user's own files, as if it were a new one."""

from __future__ import annotations

import sys

import pytest

from thinwire.pieces.piece import DIGEST_OF_FILE


def forget_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the modules of users' files; the next use reads and checks the file."""
    own = [name for name, module in sys.modules.items() if hasattr(module, DIGEST_OF_FILE)]
    assert own, "no file was in memory"
    for name in own:
        monkeypatch.delitem(sys.modules, name)
