"""The report page: its contents, escaping, bounds on its size, and that a browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.report import timeline
from thinwire.app.report.charts import link_chart, loss_chart, typical_window
from thinwire.app.report.report import write_report
from thinwire.app.report.timeline import Bars, joined, timeline_chart
from thinwire.errors import DataError

Make = Callable[..., Path]
HOSTILE = "<img src=x onerror=\"document.body.dataset.pwned='yes'\"></script><script>document.body.dataset.pwned='yes'</script>"
SECTIONS = ("loss", "timeline", "link", "distributions", "wire", "fragments", "notes", "settings")


def own_text(page: str) -> str:
    """Returns the page without scripts (Plotly among them) and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def text_of(*runs: Path) -> str:
    """The text of the page of runs."""
    return own_text(write_report([RunRecord.load(run) for run in runs], runs[0] / "page.html").read_text())


def test_the_page_has_every_section_and_number(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=150, killed_at=120)
    out = write_report([RunRecord.load(run)], tmp_path / "deep" / "report.html")
    text = own_text(out.read_text())
    assert all(f'id="section-{name}"' in text for name in SECTIONS) and 'id="headline"' in text
    for what, value in RunRecord.load(run).summary.figures():
        assert what in text and value in text
    assert text.count("emulated") >= 6
    for expected in ("E3M0(block=128)", "AMD EPYC 7B13", "3f1c2aa", "blocks 1, 5", "from step 100", "lost in restarts"):
        assert expected in text, expected
    assert list(out.parent.iterdir()) == [out]


def test_two_runs_are_shown_side_by_side_with_differences_marked(make_run: Make, tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, steps=60, rate=rate) for name, rate in (("thin", 1e7), ("wide", 1e8))]
    text = text_of(*folders)
    assert "2 runs side by side" in text and text.count('class="chart"') == 1 + 5 * 2
    assert re.search(r'<tr class="differs"><th>rate</th>.*10 Mbit/s.*100 Mbit/s', text)
    assert "<tr><th>every</th>" in text


def test_several_runs_have_a_page_beside_that_of_the_first(make_run: Make, tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, steps=20) for name in ("first", "second"))
    assert main(["report", str(first)]) == 0
    page = (first / "report.html").read_bytes()
    assert main(["report", str(first), str(second)]) == 0
    assert (first / "report.html").read_bytes() == page and not (second / "report.html").exists()
    assert "2 runs side by side" in (first / "comparison.html").read_text()


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path, write_events: Any, start: Any) -> None:
    write_events(tmp_path / "events" / "replica-0.jsonl", [start(0, 1, link=None)])
    text = text_of(tmp_path)
    assert "still running or killed" in text and "measured" in text


def test_a_page_of_one_site_names_its_replica_and_one_of_all_has_all_their_machines(
    make_run: Make, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", replicas=3, steps=60)
    log = run / "events" / "replica-2.jsonl"
    first, rest = log.read_text().split("\n", 1)
    head = json.loads(first)
    head["machine"] |= {"cores": 64, "gpu": None}
    log.write_text(f"{json.dumps(head)}\n{rest}")
    text = text_of(run)
    assert "the thin one is the training loss of replica 0, smoothed" in text
    assert "<th>cores</th><td><code>2; 64</code>" in text and "<th>gpu</th><td><code>–</code>" in text
    for replica in (0, 1):
        (run / "events" / f"replica-{replica}.jsonl").unlink()
    assert "the thin one is the training loss of replica 2, smoothed" in text_of(run)
    titles = [view.layout["xaxis"]["title"]["text"] for view in loss_chart([RunRecord.load(run)]).views]
    assert titles[2] == "bytes sent by replica 2"


def test_a_run_that_was_resumed_has_a_true_reason_why_bytes_differ(make_run: Make, tmp_path: Path) -> None:
    """A checkpoint holds the ledger, so that of the last session has the bytes of all."""
    run = make_run(tmp_path / "run", replicas=1, steps=200, killed_at=150)
    ledger = {"sent": {"packet": {"1": COUNT}}, "received": {}}
    assert "They differ: a replica that was started again sends packets in flight" in ended_with(run, ledger)


COUNT = {"nbytes": 1_250_000, "messages": 7, "queued_seconds": 0.25, "transfer_seconds": 75.0}


def ended_with(run: Path, ledger: object) -> str:
    log = run / "events" / "replica-0.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"end"' not in line[:20]]
    lines.append(json.dumps({"event": "end", "seconds": 99.0, "step": 60, "summary": {"ledger": ledger}}))
    log.write_text("\n".join(lines) + "\n")
    return text_of(run)


def test_the_ledger_is_shown_by_purpose_and_peer(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replicas=1, steps=60)
    assert "No ledger here" in text_of(run)
    ledger = {"sent": {"packet": {"1": COUNT}, "vote": {"2": COUNT}}, "received": {"packet": {"1": COUNT}}}
    text = ended_with(run, ledger)
    row = re.search(r"<tr><th>replica 0</th><td>packet</td><td>1</td>(.*?)</tr>", text)
    assert row and re.findall(r">([^<>]+)</td>", row[1]) == [
        *("1.25 MB", "7", "250 ms", "1 min 15 s", "1.25 MB", "7", "1 min 15 s"),
    ]  # fmt: skip
    foreseen = RunRecord.load(run).replicas[0].nbytes_sent
    assert f"1,250,000 bytes counted; the departures of the log foresaw {foreseen:,}" in text
    assert "They differ: " in text


def test_a_fragment_s_bytes_are_those_of_a_replica_to_all_others_in_a_round(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replicas=3, steps=60)
    text = text_of(run)
    table = text[text.index('id="section-fragments"') :]
    of = RunRecord.load(run).replicas[0]
    assert ">sent a round</th>" in table and ">a packet</th>" not in table
    assert text_of_nbytes(of.sent[0] / of.departed[0]) in table[: table.index("</table>")]


def test_bytes_that_no_departure_tells_of_are_named_beside_the_charts_without_them(
    make_run: Make, tmp_path: Path
) -> None:
    """Such as the answers of a syncer, of which the charts of bytes show nothing."""
    run = make_run(tmp_path / "run", replicas=2, steps=60)
    (run / "events" / "replica-1.jsonl").unlink()
    drawn = RunRecord.load(run).replicas[0].nbytes_sent
    text = ended_with(run, {"sent": {"packet": {"1": COUNT | {"nbytes": drawn}}}})
    assert "that all replicas sent" not in text
    text = ended_with(run, {"sent": {"packet": {"1": COUNT | {"nbytes": 4 * drawn}}}})
    said = f"Without {text_of_nbytes(3 * drawn)} of the {text_of_nbytes(4 * drawn)} that all replicas sent"
    assert text.count(said) == 2 and "what a server answers" in text[text.index("They differ") :]


@pytest.mark.parametrize("odd", [7, [], {"sent": 3}, {"sent": {"packet": []}}, {"sent": {"packet": {"1": "x"}}}])
def test_a_malformed_ledger_is_ignored(make_run: Make, tmp_path: Path, odd: object) -> None:
    assert "No ledger here" in ended_with(make_run(tmp_path / "run", replicas=1, steps=60), odd)


def test_seconds_of_a_real_link_are_unknown(tmp_path: Path, write_events: Any, start: Any) -> None:
    write_events(tmp_path / "events" / "replica-0.jsonl", [start(0, 1, link=None)])
    text = ended_with(tmp_path, {"sent": {"packet": {HOSTILE: COUNT | {"nbytes": HOSTILE}}}})
    row = re.search(r"<td>packet</td>(.*?)</tr>", text)
    assert row and row[1].count('<td class="n">–</td>') == 2 and "<img" not in text


@pytest.fixture
def hostile(make_run: Make, tmp_path: Path, write_events: Any) -> Path:
    """A run in which every text contains HTML and a script."""
    run = make_run(tmp_path / "a<b>&'\"", replicas=1, steps=60)
    log = run / "events" / "replica-0.jsonl"
    first, *rest = log.read_text().splitlines()
    head = json.loads(first)
    head |= {"strategy": HOSTILE, "carrier": HOSTILE, "machine": {HOSTILE: HOSTILE}, "link": HOSTILE}
    head["fragments"] = [{"name": HOSTILE, "numel": 5}] * 4
    log.write_text("\n".join([json.dumps(head), *rest]) + "\n")
    warning = {"event": "warning", "seconds": 12.0, "step": 60, "message": HOSTILE}
    stop = {"event": "stop", "seconds": 12.0, "step": 60, "reason": HOSTILE}
    write_events(
        log, [warning, stop, {"event": "end", "seconds": 12.0, "step": 60, "summary": {"provenance": HOSTILE}}]
    )
    (run / "run.toml").write_text(f"{json.dumps(HOSTILE)} = {json.dumps(HOSTILE)}\n")
    return run


def test_text_from_files_is_escaped(hostile: Path, tmp_path: Path) -> None:
    page = write_report([RunRecord.load(hostile)] * 2, tmp_path / "report.html").read_text()
    assert "<img" not in own_text(page) and "pwned" in own_text(page)
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL):
        assert "<" not in data
        json.loads(data)
    assert "<b>" not in json.dumps(loss_chart([RunRecord.load(hostile)] * 2).views[0].data)


def test_a_log_of_many_fragments_gives_a_small_page(make_run: Make, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", replicas=1, steps=20)
    log = run / "events" / "replica-0.jsonl"
    first, *rest = log.read_text().splitlines()
    start = json.loads(first) | {"fragments": [{"name": "x", "numel": 1}] * 100_000}
    log.write_text("\n".join([json.dumps(start), *rest]) + "\n")
    assert write_report([RunRecord.load(run)], tmp_path / "report.html").stat().st_size < 10_000_000


def test_long_runs_are_thinned_outside_the_window_shown_first(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RunRecord.load(make_run(tmp_path / "run", steps=3000))
    monkeypatch.setattr(timeline, "BARS", 700)
    chart = timeline_chart(record)
    (view,) = chart.views
    assert sum(len(trace["x"]) for trace in view.data) < 1500 < 2 * 3000
    assert any("Thinned" in remark for remark in chart.remarks)
    begin, end = typical_window(record)
    steps = next(trace for trace in view.data if trace["name"] == "inner steps")
    inside = [text for text, base in zip(steps["customdata"], steps["base"]) if begin <= base <= end]
    assert len(inside) > 30 and not any("joined" in text for text in inside)
    # the joined bars still cover the first and the last second
    assert min(steps["base"]) == pytest.approx(min(r.begin[0] for r in record.replicas), abs=1e-3)
    reach = max(base + width for base, width in zip(steps["base"], steps["x"]))
    assert reach == pytest.approx(max(r.seconds[-1] for r in record.replicas), abs=1e-3)


def test_bars_are_joined_only_within_a_row_and_outside_the_window() -> None:
    begin = np.tile(np.arange(100.0), 2)
    thinned = joined(Bars(np.repeat([0, 1], 100), begin, begin + 0.9, str), (40.0, 50.0), 60)
    assert sum(bar.count for bar in thinned) == 200
    assert len(thinned) <= 60 and {bar.row for bar in thinned} == {0, 1}
    outside = [bar for bar in thinned if bar.count > 1]
    assert all(bar.end < 40 or bar.begin > 50 for bar in outside)


def test_link_use_adds_up_to_the_bytes_sent(make_run: Make, tmp_path: Path) -> None:
    record = RunRecord.load(make_run(tmp_path / "run", steps=200, rate=1e7))
    view = link_chart(record, typical_window(record)).views[0]
    x, y = view.data[0]["x"], view.data[0]["y"]
    nbytes = sum(share * (right - left) for share, left, right in zip(y, x, x[1:])) * 1e7 / 8
    flown = record.replicas[0].flights.nbytes.sum()  # also those after the last step
    assert nbytes == pytest.approx(flown, rel=0.01)
    assert max(y) <= 1.001


def test_unlike_links_are_shown_as_such_and_each_replica_s_use_as_a_share_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "virtual"
    uneven = ["--links", "100mbit", "50mbit", "--step-seconds", "0.1", "--steps", "60", "--strategy", "local_sgd"]
    assert main(["simulate", "run", *uneven, "--out", str(run)]) == 0
    record = RunRecord.load(run)
    assert [replica.nbytes_sent for replica in record.replicas] == [record.replicas[0].nbytes_sent] * 2
    for replica, rate, trace in zip(
        record.replicas, (1e8, 5e7), link_chart(record, typical_window(record)).views[0].data
    ):
        x, share = trace["x"], trace["y"]
        used = sum(of * (right - left) for of, left, right in zip(share, x, x[1:])) * rate / 8
        assert used == pytest.approx(replica.nbytes_sent, rel=0.01)
    text = own_text((run / "report.html").read_text())
    assert "link 50.0 Mbit/s to 100 Mbit/s" in text and "Link capacity 50.0 Mbit/s to 100 Mbit/s." in text


def test_a_browser_draws_the_page(make_run: Make, tmp_path: Path, hostile: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine: chromium, chromium-browser or google-chrome is needed in the PATH")
    folders = [make_run(tmp_path / "run", steps=150, killed_at=120), hostile]
    page = write_report([RunRecord.load(one) for one in folders], tmp_path / "report.html")
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom"),
    ]
    done = subprocess.run([browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=900, check=True)
    dom = done.stdout
    body = re.search(r"<body[^>]*>", dom)
    assert body is not None
    charts = 1 + 5 * len(folders)
    assert f'data-charts="{charts}"' in body[0], body[0]
    assert "data-errors" not in body[0] and "data-pwned" not in body[0], body[0]
    assert len(re.findall(r'<svg class="main-svg"', dom)) >= charts
    assert len(re.findall(r'<g class="point"', dom)) > 100  # bars of the timelines


def test_a_page_that_does_not_fit_on_the_disk_leaves_no_file(
    tmp_path: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    folder = make_run(tmp_path / "run", steps=20)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DataError, match=r"No space left on device.*Free some space"):
        write_report([RunRecord.load(folder)], tmp_path / "page.html")
    assert not list(tmp_path.glob("page*"))
