"""A run that is resumed with other numbers of replicas reads every window of an epoch.

Windows whose updates are in no anchor when a replica leaves are read again, all others once.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.cli import main
from thinwire.checkpoint import newest
from thinwire.data_ledger import FixedReader
from thinwire.data_ledger.layout import decode

SMALL = ["--model", "nano", "--batch", "2", "--sequence", "64", "--eval-batches", "1", "--carrier", "threads"]


@pytest.mark.parametrize(
    ("method", "lost", "returned"),
    [
        (["--strategy", "diloco", "--every", "2"], 0, 4),  # no anchor has step 9 of the two leaving replicas
        (["--every", "2", "--delay", "1", "--fragments", "1"], 4, 4),  # one of two anchors has step 8
    ],
)
def test_two_then_three_then_one_replica_read_each_window_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: list[str], lost: int, returned: int
) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    read, lock, micro_batch = list[tuple[str, int, list[int]]](), threading.Lock(), FixedReader.micro_batch

    def noted(self: FixedReader, micro: int, number: int) -> Any:
        samples = micro_batch(self, micro, number)
        with lock:
            read.append((self._name, micro, samples.tolist()))
        return samples

    monkeypatch.setattr(FixedReader, "micro_batch", noted)
    text, run, sessions = tmp_path / "text.txt", tmp_path / "run", list[list[tuple[str, int, list[int]]]]()
    text.write_text("".join(f"line {i}: {i * i % 97} thin\n" for i in range(180)))
    begin = [
        "train",
        *SMALL,
        *method,
        "--checkpoint-every",
        "50",
        "--replicas",
        "2",
        "--steps",
        "6",
        "--text",
        str(text),
        "--out",
        str(run),
    ]
    for command in (
        begin,
        ["resume", str(run), "--replicas", "3", "--steps", "9"],
        ["resume", str(run), "--replicas", "1", "--steps", "40"],
    ):
        assert main(command) == 0
        sessions.append(sorted(read))
        read.clear()
    found, _ = newest(run / "checkpoints" / "replica-0")
    assert found is not None
    ledger = decode(bytes.fromhex(found.manifest["notes"]["samples"]["ledger"]))
    first, second, third = ([w for _, _, windows in session for w in windows] for session in sessions)
    assert (len(first), len(second)) == (24, 18) and (ledger.lost, ledger.trained) == (lost, 24 + 18 - lost - returned)
    assert 42 < ledger.samples < ledger.trained + len(third)
    left = [w for name, micro, windows in sessions[1] if name != "replica-0" and micro == 8 for w in windows]
    rest = third[: ledger.samples - ledger.trained - lost]  # the rest of the epoch
    counts = Counter(first + second + rest)
    assert set(counts) == set(range(ledger.samples)), "a window was left out"
    again = {w for w, number in counts.items() if number > 1}
    assert len(again) == returned and again <= set(left) and max(counts.values()) <= 2
