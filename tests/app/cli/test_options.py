"""Options of the verbs: what is unknown, missing or no value is refused in one line; the help says what happens without an option."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest

from thinwire.app.cli import main, options


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hub", "--lisen", "x"], "thinwire hub: --lisen is no option (did you mean --listen?); `thinwire hub --help`"),
        (["train", "--stepz=3"], "--stepz is no option (did you mean --steps?); `thinwire train --help` lists"),
        (["train", "-steps", "3"], "-steps is no option (did you mean --steps?)"),
        (["plan", "fit", "runs.csv", "--zzz"], "--zzz is no option; `thinwire plan fit --help` lists the options."),
        (["hub", "run", "oslo", "lyon"], "'lyon' is one argument too many; `thinwire hub --help` lists what it takes."),
        (["probe", "--no-jsn"], "--no-jsn is no option (did you mean --no-json?)"),
        (["train", "--steps"], "--steps was given without a value; a whole number is needed. `thinwire train --help`"),
        (["train", "--steps", "--seed", "1"], "--steps was given without a value; a whole number is needed."),
        (["compare", "--replicas", "x"], "thinwire compare: --replicas x: a whole number is needed. `thinwire compare"),
        (["compare", "--lr=fast"], "--lr fast: a number is needed."),
        (["train", "--out", ""], "--out '': a file or folder is needed. `thinwire train --help`"),
        (["report", ""], "thinwire report: '': files or folders are needed."),
        (["train", "--slow", "1", "x"], "--slow 1 x: numbers are needed."),
        (["train", "--precision", "fb16"], "--precision fb16 (did you mean bf16?): one of auto, fp32, bf16 is needed."),
        (["train", "--anchors", "gpu"], "--anchors gpu: one of host, device, disk is needed."),
        (
            ["hub", "rum"],
            "thinwire hub: 'rum' (did you mean run?): one of run, list, invite, revoke, rotate is needed.",
        ),
        (["sample", "runs/x", "--tokens", "-5"], "thinwire sample: --tokens -5: 1 to 1,000,000 are needed."),
        (
            ["sample", "runs/x", "--seed", "1" + 20 * "0"],
            "seed=100000000000000000000: a whole number is needed, below 2**63.",
        ),
        (["join"], "thinwire join: TOKEN is missing: The join token that thinwire hub printed;"),
        (["join", "tw1.x"], "thinwire join: --name is missing: This replica's own name: small letters, digits and"),
        (
            ["sample", "--temperature", "2"],
            "thinwire sample: PATH is missing: The run folder, or an ensemble's. `thinwire sample --help`",
        ),
    ],
)
def test_words_that_do_not_fit_are_refused_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize("page", ["methods/diloco", "diloco", "docs/methods/diloco.md#equations"])
def test_a_page_is_found_by_its_name_and_as_links_write_it(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", page]) == 0
    assert capsys.readouterr().out.startswith("# diloco")


def test_a_value_may_begin_with_a_hyphen_and_words_after_two_hyphens_are_no_options() -> None:
    from thinwire.app.cli.sample import Options

    asked = options.ask(Options, "thinwire sample", ["runs/first", "--temperature", "-1", "--", "--x"], "")
    assert (asked.temperature, asked.prompt) == (-1.0, "--x")


def test_a_list_leaves_the_last_word_to_an_argument_that_is_needed() -> None:
    from thinwire.app.cli.evaluate import Options

    asked = options.ask(Options, "thinwire evaluate", ["--text", "a.txt", "b.txt", "runs/first"], "")
    assert (asked.text, str(asked.run)) == (("a.txt", "b.txt"), "runs/first")


@pytest.mark.parametrize("verb", ["hub", "join", "doctor", "probe", "lighthouse", "train"])
def test_the_help_says_what_happens_without_an_option(verb: str) -> None:
    """The text of each option without a default value names what is used in its place, or says when it is needed."""
    kind = import_module(f"thinwire.app.cli.{verb}").Options
    helps = options._helps(kind)
    silent = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default in (None, "", ())
        and not any(word in helps[field.name] for word in ("Default: ", "ithout it", "Needed with", "Only for"))
    ]
    assert not silent


def test_the_help_shows_no_unset_default(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("hub", "join", "doctor", "probe"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = capsys.readouterr().out
        assert "unset" not in shown and "(default: )" not in shown and "(default: '')" not in shown
        assert "--json" in shown and "(default: False)" in shown


def test_the_help_of_resume_names_its_own_usage_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    assert capsys.readouterr().out.startswith("usage: thinwire resume RUN [options]")
