"""docs/simulate.md shows what the commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.app.cli import main

PAGE = (Path(__file__).parents[3] / "docs/simulate.md").read_text()


@pytest.mark.parametrize(
    "command",
    [
        "pipeline --stages 8 --micro-batches 32 --forward-seconds 1 --hop-seconds 1",
        "fabric --leaves 8 --spines 8 --hosts 4 --flows 3",
        "stragglers",
        "disrupted",
        "sampled",
        "overlap --ranks 8 --produce-seconds 1 --send-seconds 0.5",
    ],
)
def test_outputs_on_the_page_are_those_of_the_commands(command, capsys):
    block = PAGE.split(f"thinwire simulate {command}\n")[1].split("```text\n")[1].split("```")[0]
    assert main(["simulate", *command.split()]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[: len(block.splitlines())] == [" ".join(line.split()) for line in block.splitlines()]
