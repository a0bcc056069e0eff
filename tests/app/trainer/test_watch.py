"""The periodic checks of a process while it trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.app.trainer import watch


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list the open files of a process")
def test_many_open_files_warn_once_and_raise_the_limit(monkeypatch, tmp_path):
    """gloo keeps every connection of a stranger open, and ends the process at the limit."""
    limits, said = [(64, 100)], []
    monkeypatch.setattr(watch.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(watch.resource, "setrlimit", lambda which, both: limits.append(both))
    monkeypatch.setattr(watch, "_FILES", tmp_path)
    look = watch.warn_of_open_files(SimpleNamespace(emit=lambda kind, step, **fields: said.append((kind, fields))))
    assert limits[-1] == (100, 100)
    for number in range(79):
        (tmp_path / str(number)).touch()
    assert not look() and not said  # it checks again
    (tmp_path / "one more").touch()
    assert look() and len(said) == 1
    kind, fields = said[0]
    assert kind == "warning" and "80 of at most 100 files of this process are open" in fields["message"]
    assert "thinwire doctor --firewall" in fields["message"]
