"""A fixture of the tests of exchanges."""

from __future__ import annotations

import pytest

from thinwire.exchange import chunks


@pytest.fixture
def small(monkeypatch):
    """Messages of 64 bytes and pieces of 8 elements, so that a toy tensor is cut like a large model."""
    monkeypatch.setattr(chunks, "MESSAGE_NBYTES", 64)
    monkeypatch.setattr(chunks, "PIECE_NUMEL", 8)
    chunks._cut.cache_clear()
    yield
    chunks._cut.cache_clear()
