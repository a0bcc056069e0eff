"""The real command `thinwire hub`, whose stdout nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from group_laws import free_port

from thinwire.cli import main
from thinwire.comm.secure import Token, admit


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["text", "json"])
def test_a_hub_whose_stdout_was_closed_before_the_token_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], json: tuple[str, ...]
) -> None:
    """A line on stderr says how to get a token, and a machine joins with it."""
    for attempt in range(9):  # the next port may be taken
        folder = tmp_path / f"hub-{attempt}"
        reader, writer = os.pipe()
        os.close(reader)
        at = ("--listen", f"127.0.0.1:{free_port()}", "--out", str(folder), *json)
        command = [sys.executable, "-m", "thinwire", "hub", *at]
        process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert process.stderr
        told = next((line for line in process.stderr if "nobody reads its stdout" in line), "")
        if told:
            break
        process.stderr.close()
        process.wait()
    try:
        assert f"thinwire hub invite --out {folder}" in told
        assert main(["hub", "invite", "--out", str(folder)]) == 0
        (token,) = filter(Token.is_one, capsys.readouterr().out.split())
        assert admit(token, "oslo", tmp_path / "keys").credentials.certificate
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 0 and "Error" not in rest, rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [('[data]\ntext = ["/data/law.txt"]', "names files in text"), ("[data", "cannot be read")],
    ids=["names a text", "no TOML"],
)
def test_a_run_file_that_members_would_refuse_is_refused_by_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    """Before a token is made, which a member would use in vain."""
    (tmp_path / "run.toml").write_text(text)
    assert main(["hub", "--run-file", str(tmp_path / "run.toml"), "--out", str(tmp_path / "hub")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "hub").exists()
