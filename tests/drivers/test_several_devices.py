"""A model whose layers lie on two devices, one of them emulated: the same bits as on one, through checkpoints too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "support" / "second_device.py"


def test_a_model_on_two_devices_has_the_bits_of_the_same_model_on_one(tmp_path):
    done = subprocess.run([sys.executable, PROGRAM, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert all(told["trained"].values()) and all(told["resumed"].values()) and len(told["resumed"]) == 7, told
