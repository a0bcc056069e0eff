"""`thinwire plan topology`: the comparison of graphs, the edges of a round, and a graph within a budget of links."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from thinwire.app.cli import main


def test_graphs_are_compared_by_degree_bytes_and_eigenvalue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "topology", "--replicas", "7", "--model", "nano", "--json"]) == 0
    told = capsys.readouterr()
    rows = {row["topology"]: row for row in json.loads(told.out.splitlines()[-1])["rows"]}
    assert "RandomPairs()" not in rows and "RandomRegular(degree=3)" not in rows  # seven replicas are odd
    ring, complete = rows["Ring()"], rows["Complete()"]
    assert (ring["neighbours"], complete["neighbours"]) == ("2", "6") and complete["second"] == 0
    assert complete["sent_nbytes"] == 3 * ring["sent_nbytes"] and ring["link_nbytes"] == complete["link_nbytes"]
    assert "predicted" in told.err


def test_a_round_of_several_gossip_steps_gains_as_much_as_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    def ring(strategy: str) -> dict[str, float]:
        given = ["ring", "--replicas", "8", "--model", "nano", "--links", "50mbit", "--strategy", strategy, "--json"]
        assert main(["plan", "topology", *given]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]

    one, four = ring("dfedsam"), ring("dfedsam_mgs")
    assert four["second"] == pytest.approx(one["second"] ** 4) and four["gap"] == pytest.approx(1 - four["second"])
    assert four["halving"] == pytest.approx(one["halving"] / 4)
    assert four["halving_seconds"] == pytest.approx(one["halving_seconds"])


def test_explain_prints_the_edges_of_a_round(capsys: pytest.CaptureFixture[str]) -> None:
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
        (["--replicas", "0"], "--replicas 0: 1 to 4096 are needed"),
        (["--replicas", "-3", "--links", "50mbit"], "--replicas -3: 1 to 4096 are needed"),
        (["--replicas", "100000"], "--replicas 100000: 1 to 4096 are needed"),
        (["--degree", "3"], "give --links links.toml too"),
        (["--out", "x.json"], "give both"),
        (["--links", "50mbit", "--degree", "1"], "2 to 7 neighbours are needed. With one neighbour each only two"),
        (["--links", "50mbit", "--degree", "0", "--replicas", "1"], "at least 2 replicas are needed"),
        (["--links", "50mbit", "--degree", "1", "--replicas", "1"], "at least 2 replicas are needed"),
        (["--plot", "x.pdf"], "ends with .svg, .html or .png"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "topology", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_picture_is_xml_whatever_the_names_of_the_replicas_hold(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "links.toml").write_text(
        'names = ["a\\u001b[31m", "<b>"]\n[[link]]\nbetween = ["a\\u001b[31m", "<b>"]\nalone = "5mbit"\n'
    )
    given = ["ring", "--model", "nano", "--links", str(tmp_path / "links.toml"), "--plot", str(tmp_path / "a.svg")]
    assert main(["plan", "topology", *given]) == 0
    texts = [node.text for node in ElementTree.parse(tmp_path / "a.svg").iter() if node.text]
    assert r"a\x1b[31m" in texts and "<b>" in texts and "\x1b" not in capsys.readouterr().out


def test_the_best_graph_within_a_budget_halves_distances_faster_than_a_ring(
    tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb reads links.toml and writes a file of edges, which it reads again, two pictures and the rates of meetings."""
    links = "".join(
        f'[[link]]\nbetween = ["s{a}", "s{b}"]\nalone = "{100 if (a < 4) == (b < 4) else 5}mbit,5ms"\n'
        for a in range(6)
        for b in range(a)
    )
    (tmp_path / "links.toml").write_text(f"names = {[f's{i}' for i in range(6)]}\n{links}")
    given = ["plan", "topology", "--model", "nano", "--plot", str(tmp_path / "a.svg"), "--rates", "--explain", "--json"]
    given += ["--links", str(tmp_path / "links.toml"), "--degree", "3", "--out", str(tmp_path / "edges.json"), "ring"]
    assert main(given) == 0
    told = capsys.readouterr()
    best, ring = json.loads(told.out.splitlines()[-1])["rows"]
    assert best["topology"] == "best of degree 3" and best["halving_seconds"] < ring["halving_seconds"]
    assert best["meetings"] <= best["meetings_even"] + 1e-6
    assert ring["meetings"] == pytest.approx(ring["meetings_even"], rel=1e-5)
    picture = (tmp_path / "a.svg").read_text()
    assert "0 -> 1 (" in told.err and "<svg" in picture and ">s5<" in picture
    again = [str(tmp_path / "edges.json"), "--replicas", "6", "--model", "nano", "--plot", str(tmp_path / "b.html")]
    assert main(["plan", "topology", *again]) == 0
    assert "edges.json" in capsys.readouterr().out and "plotly" in (tmp_path / "b.html").read_text().lower()


@pytest.mark.parametrize(("strategy", "says"), [("difco", "did you mean diloco?"), ("diloco", "takes no topology")])
def test_a_strategy_that_is_not_one_of_gossip_is_refused(strategy: str, says: str, capsys) -> None:
    """No graph suits it; the table would have no rows."""
    assert main(["plan", "topology", "--strategy", strategy]) == 2
    assert says in capsys.readouterr().err
