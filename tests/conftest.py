"""What all tests share: one thread for torch, so that results and times do not depend on the machine's cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
