"""The fixtures of tests/support/leaks.py report what a test leaves behind, and wait for what is about to end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"

LEAVES = """
    import os, socket, subprocess, sys, threading
    import leaks, pytest

    leaks.TURNS = 30  # every leak outlasts these checks

    kept, stop = [], threading.Event()
    SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]

    def start(command):
        kept.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def test_thread():
        threading.Thread(target=stop.wait, name="Tabitha", daemon=True).start()

    def test_process():
        start(SLEEP)

    def test_grandchild():
        subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.Popen({SLEEP})"], check=True)

    def test_file(tmp_path):
        kept.append(open(tmp_path / "Felix", "w"))

    def test_socket():
        kept.append(socket.create_server(("127.0.0.1", 0)))

    def test_pipe():
        kept.append(os.pipe())

    @pytest.fixture(scope="module")
    def lasting(tmp_path_factory):
        kept.append(open(tmp_path_factory.mktemp("module") / "Molly", "w"))

    def test_module(lasting):
        pass
"""

INTERRUPTED = """
    import os, signal, threading

    def test_that_is_interrupted():
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
"""

CLEAN = """
    import os, socket, subprocess, sys, threading
    import pytest

    def test_what_is_ending():
        begun, end = threading.Event(), threading.Event()

        def run():
            begun.set()
            end.wait()
            sum(range(10**6))

        threading.Thread(target=run).start()
        assert begun.wait(600)
        end.set()  # not joined

    def test_what_was_dropped():
        box = [socket.create_server(("127.0.0.1", 0))]
        box.append(box)  # until the garbage collector runs

    def test_a_process_that_has_ended(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    @pytest.mark.leaves(files="pipe:", why="a test wants it")
    def test_excused():
        os.pipe()

    @pytest.fixture(scope="module")
    def child():
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        yield
        process.communicate()

    def test_of_a_wider_fixture(child):
        pass

    @pytest.fixture(scope="session")
    def late(tmp_path_factory):
        with open(tmp_path_factory.mktemp("session") / "Sally", "w"):
            yield

    def test_of_a_fixture_of_the_session(late):
        pass
"""


def _pytest(folder: Path, *files: str) -> tuple[int, str]:
    for number, text in enumerate(files):
        (folder / f"test_{number}.py").write_text(textwrap.dedent(text))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    leaves\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "leaks",
        "-p",
        "no:cacheprovider",
        "-rE",
        "--import-mode=importlib",
    ]
    done = subprocess.run(
        [*command, "-W", "ignore", str(folder)],
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_leaks_of_every_kind_are_reported_also_after_an_interrupt(tmp_path):
    code, said = _pytest(tmp_path, LEAVES, INTERRUPTED)
    assert code == 2 and "7 passed, 7 errors" in said and "! KeyboardInterrupt !" in said, said
    for kind in ("thread", "process", "grandchild", "file", "socket", "pipe", "module"):
        assert f"ERROR at teardown of test_{kind} " in said, said
    for words in ("the thread Tabitha is still running", "in wait", "time.sleep(3600)"):
        assert words in said, said
    for words in ("Felix is still open", "1 of socket:[", "2 of pipe:[", "Molly is still open"):
        assert words in said, said


def test_threads_and_processes_that_are_ending_are_not_reported(tmp_path):
    code, said = _pytest(tmp_path, CLEAN)
    assert code == 0 and "6 passed" in said, said
