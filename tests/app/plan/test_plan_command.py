"""The command that `thinwire plan` prints, what it takes from a run file, and what it refuses in one line before it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.plan.machine import Machine
from thinwire.app.trainer.run import Run

Plan = Callable[..., Any]
RANKS = "torchrun --standalone --nproc_per_node {} -m thinwire train plan.toml --out runs/planned"


@pytest.mark.parametrize(
    ("run", "given", "command"),
    [
        ({"link": "50mbit,30ms"}, "--replicas 2 --methods data_parallel", "thinwire train plan.toml"),
        ({"link": "50mbit,30ms"}, "--replicas 2 --ranks 2 --methods data_parallel", RANKS.format(4)),
        ({}, "--replicas 1 --ranks 2 --methods diloco", RANKS.format(2)),
        ({}, "--replicas 1 --methods diloco", "thinwire train plan.toml"),
        (  # torchrun starts no elastic run, and none over a hub
            {"carrier": "elastic"},
            "--replicas 3 --methods streaming_sign",
            "thinwire lighthouse --host HOST --secret run.secret, and on each machine: thinwire train plan.toml "
            "--lighthouse HOST:29510 --secret run.secret --name NAME --out runs/planned",
        ),
        (
            {"carrier": "secure-elastic"},
            "--replicas 3 --methods streaming_sign",
            "thinwire hub --elastic --listen 0.0.0.0:29530 --address HOST --uses 3, and on each machine: "
            "thinwire join TOKEN plan.toml --name NAME",
        ),
    ],
)
def test_the_printed_command_starts_all_ranks_on_the_carrier_of_the_run(
    run: dict[str, str], given: str, command: str, plan: Plan
) -> None:
    Run.of(model="nano", **run).save(Path("run.toml"))
    link = "100gbit,1us" if "carrier" in run else "1gbit,1ms"
    code, out, _ = plan(f"{link} machine.toml --run run.toml --tokens 1m {given}")
    assert code == 0 and f"to train: {command}\n" in out
    if "carrier" in run:
        code, _, err = plan(f"{link} machine.toml --run run.toml --tokens 1m {given} --ranks 2")
        assert code == 2 and f"--ranks 2 with carrier='{run['carrier']}'" in err


def test_each_rank_of_a_replica_reads_equally_many_sequences(plan: Plan) -> None:
    """`thinwire train` refuses another batch."""
    for ranks, batch in ((1, 19), (8, 16)):
        given = f"--batch-tokens {2 * 19 * 128} --ranks {ranks} --methods streaming_sign"
        assert plan(f"1gbit,1ms machine.toml --model nano --tokens 1m {given}")[0] == 0
        data = Run.load(Path("plan.toml")).data
        assert data.batch * data.accumulate == batch and data.batch % ranks == 0


def test_a_run_file_with_slow_machines_and_a_link_of_its_own_is_planned(plan: Plan) -> None:
    """machine.toml says how fast machines are; a link that the figures do not count is a warning."""
    Run.of(model="nano", slow=(1, 2), link="5mbit,30ms", uplink="1gbit").save(Path("run.toml"))
    given = "--run run.toml --replicas 3 --tokens 1m --json --methods streaming_sign"
    warnings = plan(f"1gbit,1ms machine.toml {given}").facts["warnings"]
    assert Run.load(Path("plan.toml")).placement.slow == ()
    assert [text for text in warnings if "stays" in text] == [
        "link-stays: the run file keeps link = 5mbit,30ms, and these figures do not count it"
    ]


def test_a_run_file_with_its_own_strategy_gets_a_new_plan(plan: Plan) -> None:
    Run.of(strategy="Strategy(schedule=Every(5))", model="nano", lr=0.003).save(Path("old.toml"))
    facts = plan("50mbit machine.toml --replicas 1 --run old.toml --tokens 1 --json").facts
    assert {row["replicas"] for row in facts["settings"]} == {1} and facts["refused"] == []
    assert Run.load(Path("plan.toml")).optimizer.lr == 0.003


def test_a_name_with_a_line_break_stays_in_the_comment_of_the_run_file(plan: Plan) -> None:
    Path("links.toml").write_text(
        'names = ["a\\nseed = 7", "b"]\n[[link]]\nbetween = ["a\\nseed = 7", "b"]\nalone = "1gbit"\n'
    )
    assert plan("links.toml machine.toml --model nano --tokens 1m")[0] == 0
    assert Run.load(Path("plan.toml")).seed == 0 and "a\\nseed = 7" in Path("plan.toml").read_text()


def test_less_memory_than_the_libraries_need_is_refused(plan: Plan) -> None:
    Machine("m", 16 * 10**9, 1e11, base_nbytes=540_000_000).save(Path("m.toml"))
    asked = "50mbit,30ms m.toml --model mini --methods diloco"
    code, _, err = plan(f"{asked} --memory 530MB")
    assert code == 2 and "no setting of mini fits" in err
    settings = plan(f"{asked} --memory 2GB --json").facts["settings"]
    assert all(540e6 < setting["memory_nbytes"] < 2e9 for setting in settings)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("50mbit", "no machine was given"),
        ("nothing.toml machine.toml", "nothing.toml cannot be read"),
        ("50 machine.toml", "the link '50' was given"),
        ("0mbit machine.toml", "a positive rate is needed"),
        ("50mbit nothing.toml", "nothing.toml cannot be read"),
        ("50mbit machine.toml --deadline soon", "'soon' was given; a time is needed"),
        ("50mbit machine.toml --replicas 0", "at least 1 is needed"),
        (f"50mbit machine.toml --replicas 1{11 * '0'}", "1 to 1024 are needed"),
        ("50mbit machine.toml --model 2b", "model='2b': one of"),
        ("50mbit machine.toml --top 0", "at least 1 row"),
        (f"50mbit machine.toml --tokenizer bpe:1{20 * '0'}", "at most 16,777,216"),
        ("50mbit machine.toml --model nano --ranks 2 --levels 0", "of at least 1 rank"),
        ("50mbit machine.toml --model nano --ranks 2 --levels -2", "of at least 1 rank"),
        ("50mbit machine.toml --levels 2", "give --ranks, above 1, too"),
        ("50mbit machine.toml --degrees 2,8,8", "give --ranks, above 1, too"),
        *(
            (f"50mbit machine.toml --{option} {{}}", says)
            for option, says in {
                "memory": "'' was given; a size is needed",
                "deadline": "'' was given; a time is needed",
                "tokens": "'' was given; a count is needed",
                "batch-tokens": "'' was given; a count is needed",
                "ranks 4 --degrees": "degrees '': three whole numbers",
            }.items()
        ),
        # before a machine is read
        ("50mbit nothing.toml --ranks 8 --degrees 2,3,6", "nested groups are needed"),
        ("50mbit nothing.toml --ranks 8 --degrees 2,8,16", "a multiple of s_o"),
        ("50mbit nothing.toml --ranks 8 --levels 3", "each level one of the level"),
        ("50mbit nothing.toml --out file/plan.toml", "file: Not a directory"),
        ("50mbit nothing.toml --out folder", "folder: the name of a file is needed"),
        ("50mbit nothing.toml --frontier file/f.svg", "file: Not a directory"),
        ("50mbit nothing.toml --rates new/r.svg --frontier new/r.svg", "one file holds one picture"),
        ("50mbit nothing.toml --frontier f.pdf", "a name that ends with .svg, .html or .png is needed"),
        ("50mbit nothing.toml --rates f", "a name that ends with .svg, .html or .png is needed"),
    ],
)
def test_wrong_arguments_are_an_error_of_one_line_and_write_nothing(given: str, says: str, plan: Plan) -> None:
    Path("file").touch()
    Path("folder").mkdir()
    empty = [""] if given.endswith("{}") else []
    code, _, err = plan(given.removesuffix("{}"), *empty)
    assert code in (1, 2) and says in err and err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["file", "folder", "machine.toml"]
