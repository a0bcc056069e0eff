"""Versions: the range of protocols that a release states, and when releases may work together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import version
from thinwire.version import Protocols, common, named, newest_of_both, unlike_releases

ranges = st.tuples(st.integers(0, 5), st.integers(0, 3)).map(lambda two: Protocols(two[0], sum(two), "0.1.0"))


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), st.from_regex(r"\A[A-Za-z0-9.+_-]{1,24}\Z"))
def test_a_stated_range_is_read_again(oldest: int, newest: int, release: str) -> None:
    stated = Protocols(oldest, newest, release)
    if named(release) == release:
        assert Protocols.parse(str(stated)) == stated


@pytest.mark.parametrize(
    "text",
    ["", "1 to 2", "1 to 2 (Thinwire )", "-1 to 2 (Thinwire 1)", "1 to 2 (Thinwire 1) ", "1 to 2 (Thinwire a b)",
     f"1 to 2 (Thinwire {'1' * 25})", f"1 to {'2' * 10} (Thinwire 1)", "a to b (Thinwire 1)"],
)  # fmt: skip
def test_what_is_no_range_is_not_read(text: str) -> None:
    assert Protocols.parse(text) is None


@given(st.lists(ranges, min_size=1, max_size=4))
def test_releases_work_together_if_one_protocol_is_in_all_ranges(stated: list[Protocols]) -> None:
    both = [number for number in range(10) if all(number in one for one in stated)]
    assert common(stated) == bool(both) and not common([*stated, None])
    if len(stated) == 2:
        assert newest_of_both(*stated) == (max(both) if both else None)


def test_unlike_releases_are_named_with_what_to_do() -> None:
    assert unlike_releases("1", "1", "here") == ""
    told = unlike_releases("", "2 to 2 (Thinwire 0.1.0)", "on replica 0")
    assert told.startswith("; ") and "none there" in told and "2 to 2 (Thinwire 0.1.0) on replica 0" in told
    assert told.endswith("Install one version on all")


def test_trees_of_a_version_that_is_not_out_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all their code, and the names of its files; a version that is out has its name alone."""
    monkeypatch.setattr(version, "__version__", "0.3.0.dev0")
    monkeypatch.setattr(version, "__file__", str(tmp_path / "version.py"))
    names = []
    for file, text in (("a.py", "1"), ("a.py", "2"), ("deep/b.py", "1"), ("notes.txt", "1"), (None, "")):
        if file:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
        version._digest_of_code.cache_clear()
        names.append(named("0.3.0.dev0"))
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    version._digest_of_code.cache_clear()
    names.append(named("0.3.0.dev0"))
    version._digest_of_code.cache_clear()
    assert len(set(names)) == 4 and names[2] == names[3] == names[4]
    assert all(len(name) == len("0.3.0.dev0+12345678") and name.startswith("0.3.0.dev0+") for name in names)
    assert named("0.2.0") == "0.2.0" and named("0.2.0.dev0") == "0.2.0.dev0"
