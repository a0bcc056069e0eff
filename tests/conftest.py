"""What all tests share: one thread for torch, so that results and times do not depend on the machine's cores, and where there
is no GPU Triton's interpreter in its place: Triton asks for it when it is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
