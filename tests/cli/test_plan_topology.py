"""`thinwire plan topology`: graphs side by side."""

from __future__ import annotations

import json

import pytest

from thinwire.cli import main


def test_graphs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "topology", "--replicas", "7", "--model", "nano", "--json"]) == 0
    told = capsys.readouterr()
    rows = {row["topology"]: row for row in json.loads(told.out.splitlines()[-1])["rows"]}
    assert "RandomPairs()" not in rows and "RandomRegular(degree=3)" not in rows  # seven are odd
    ring, complete = rows["Ring()"], rows["Complete()"]
    assert (ring["neighbours"], complete["neighbours"]) == ("2", "6") and complete["second"] == 0
    assert complete["sent_nbytes"] == 3 * ring["sent_nbytes"] and ring["link_nbytes"] == complete["link_nbytes"]
    assert "predicted" in told.err


def test_who_talks_to_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "topology", "one-peer-exponential", "ring", "--replicas", "4", "--model", "nano", "--explain"])
        == 0
    )
    said = capsys.readouterr().out
    assert "round 1: 0 -> 2" in said and "  0 -> 1, 3" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["random_pairs", "--replicas", "5"], "an even number is needed"),
        (["ring", "--model", "huge"], "model='huge': one of"),
        (["ring", "--strategy", "diloco"], "takes no topology"),
        (["rong"], "did you mean"),
    ],
    ids=str,
)
def test_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "topology", *given]) == 2
    assert said in capsys.readouterr().err
