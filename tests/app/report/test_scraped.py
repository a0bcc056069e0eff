"""`thinwire top` of a run on another machine, read from its metrics endpoint, and `top` as an HTML page."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.app.cli import main
from thinwire.app.report.scraped import MISSED, ScrapedTop, is_address
from thinwire.app.report.trackers import following
from thinwire.errors import DataError

pytest.importorskip("prometheus_client")


def test_top_shows_a_run_behind_an_endpoint(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, said = make_run(tmp_path / "a<b>run", replicas=2, steps=40), list[str]()
    with following("prometheus=0", run, {}, said.append) as follower:
        assert follower is not None
        follower.update()
        address = said[0].partition("http://")[2].removesuffix("/metrics")
        assert main(["top", address, "--json", "--page", str(tmp_path / "top.html")]) == 0
        told = capsys.readouterr()
        facts = json.loads(told.out)
        assert facts["step"] == 40 and facts["run"] == run.name
        assert [one["name"] for one in facts["replicas"]] == ["replica-0", "replica-1"]
        assert all(one["loss"] > 0 and one["nbytes"] > 0 and one["state"] == "trains" for one in facts["replicas"])
        assert "step 40, 2 replicas" in told.err
        page = (tmp_path / "top.html").read_text()
        assert 'http-equiv="refresh"' in page and "a&lt;b&gt;run" in page and "a<b>run" not in page
        top = ScrapedTop(f"http://{address}/metrics")
        for second in range(5):
            top.read(100.0 + second)
        assert {one["state"] for one in top.facts(1e4)["replicas"]} != {"trains"}
        # no step was taken meanwhile
        assert {one["tokens_per_second"] for one in top.facts(104.0)["replicas"]} == {0.0}
    for _ in range(MISSED):  # the run has ended, and its endpoint with it
        assert not top.over
        top.read(200.0)
    assert top.over
    assert main(["top", address]) == 1 and "cannot be read" in capsys.readouterr().err


def test_addresses_are_recognised_and_unreachable_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(map(is_address, ("127.0.0.1:9100", "[::1]:80", "http://x/metrics", "oslo.example:1")))
    assert not any(map(is_address, ("runs/first", "runs", "a b:1", "C:\\runs")))
    for wrong in ("ftp://x", "http://", "http://x:99999999", "http://["):
        assert main(["top", wrong]) == 2
        assert f"top {wrong}: a run folder, HOST:PORT" in capsys.readouterr().err
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(DataError, match="a run that trains"):
            ScrapedTop(f"127.0.0.1:{nobody.getsockname()[1]}").read(0.0)


def test_the_page_of_a_finished_run_does_not_refresh(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replicas=2, steps=20)
    assert main(["top", str(run), "--page", str(tmp_path / "top.html")]) == 0
    page = (tmp_path / "top.html").read_text()
    assert "refresh" not in page and "step 20" in page
