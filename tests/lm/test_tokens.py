"""Files become text, text becomes tokens, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigurationError, DataError
from thinwire.lm.tokens import (
    BPE,
    CHUNK_CHARACTERS,
    Bytes,
    Source,
    dtype_of,
    find,
    pieces,
    standard_library,
)

TEXTS = ["the lowest of the low", "newer, newest and new", "naïve café 日本語 🙂"] * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> BPE:
    return BPE(290).train(TEXTS, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokens = Bytes().encode(text)
    assert tokens.dtype == np.uint8 and tokens.tobytes() == text.encode()
    assert Bytes().decode(tokens) == text


@given(st.text())
def test_bpe_round_trips_any_text(trained: BPE, text: str) -> None:
    if "<|end|>" not in text:
        tokens = trained.encode(text)
        assert trained.decode(tokens) == text
        assert len(tokens) == 0 or tokens.max() < trained.vocabulary


def test_bpe_merges_what_is_frequent(trained: BPE) -> None:
    assert trained.vocabulary == 290
    assert len(trained.encode("lowest newest")) < len("lowest newest") / 2
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 1.5
    assert len(Bytes().encode(TEXTS[2])) == len(TEXTS[2].encode())
    assert trained.encode("low").tolist() == trained.encode(b"low").tolist()


def test_tokenizer_training_is_deterministic_and_needs_one_file(trained: BPE, tmp_path: Path) -> None:
    again = BPE(290).train(TEXTS, tmp_path / "again.json")
    assert again.fingerprint == trained.fingerprint
    assert BPE(300).train(TEXTS, tmp_path / "other.json").fingerprint != trained.fingerprint
    loaded = BPE.load(tmp_path / "again.json")
    assert loaded == again and loaded.encode("lowest").tolist() == trained.encode("lowest").tolist()


def test_a_small_text_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    assert 257 < BPE(5000).train(["aaaa bbbb"], tmp_path / "t.json").vocabulary < 300


def test_broken_utf8_from_a_model_is_readable(trained: BPE) -> None:
    assert Bytes().decode([104, 195]) == "h\ufffd"
    assert trained.decode([0]) == ""


def test_tokens_are_stored_in_the_narrowest_width() -> None:
    assert [dtype_of(n).itemsize for n in (256, 257, 65_536, 65_537)] == [1, 2, 2, 4]


def test_invalid_tokenizer_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least 257"):
        BPE(256)
    with pytest.raises(ConfigurationError, match="at most 16,777,216"):
        BPE(10**20)
    with pytest.raises(ConfigurationError, match="untrained"):
        BPE(300).encode("text")
    with pytest.raises(DataError, match="an empty name"):
        list(find([""]))
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "absent.json"):
        with pytest.raises(DataError, match="train it again"):
            BPE.load(tmp_path / name)
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "foreign.json"))
    with pytest.raises(DataError, match=r"<\|end\|>"):
        BPE.load(tmp_path / "foreign.json")


def read(path: Path, column: str = "text") -> list[str | None]:
    return list(pieces(Source(path, path.name, path.stat().st_size, 0), column))


def test_folders_are_searched_in_order_and_files_taken_by_name(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "b/1.md", "c.py", "b/skip.bin", ".hidden/x.txt", "b/.x.txt", "Z.TXT"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [source.name for source in find([tmp_path])] == ["Z.TXT", "a.txt", "b/1.md", "b/2.txt", "c.py"]
    assert [source.name for source in find([tmp_path], without={"b"})] == ["Z.TXT", "a.txt", "c.py"]
    assert [source.name for source in find([tmp_path / "b/skip.bin"])] == ["skip.bin"]
    with pytest.raises(DataError, match=r"nowhere: .*\. Check the path"):
        list(find([tmp_path / "nowhere"]))


def test_a_file_of_text_comes_back_whole_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    text = "".join(f"line {i} ü\r\n" for i in range(60_000)) + "x" * (3 * CHUNK_CHARACTERS)
    (tmp_path / "long.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # with a byte order mark
    *found, last = read(tmp_path / "long.txt")
    assert last is None and "".join(piece or "" for piece in found) == text
    assert len(found) > 3 and max(len(piece or "") for piece in found) <= 2 * CHUNK_CHARACTERS
    assert (found[0] or "").endswith("\n")


def test_a_column_of_a_table_that_is_read_as_plain_text_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("id,body\n" + "7,thin wires\n" * 100)
    with pytest.raises(DataError, match=r"column='body': .*a.csv is read as plain text; only .jsonl and .parquet have"):
        read(table, "body")
    assert read(table) == [table.read_text(), None]


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "id": 1}\n\n{"text": "t\\u00fc\\ud800"}\n')
    assert read(path) == ["one", None, "tü?", None]
    with pytest.raises(DataError, match=r"column='body': .*a.jsonl:1 has no text in it; it has text, id\. Give"):
        read(path, "body")
    path.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a.jsonl:2 is not JSON"):
        read(path)
    path.write_text(json.dumps(["text"]))
    with pytest.raises(DataError, match="it has none, but a list"):
        read(path)


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra thinwire[parquet] is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(3000)] + [None]
    parquet.write_table(arrow.table({"text": texts, "id": range(3001)}), path, row_group_size=700)
    found = read(path)
    assert [piece for piece in found if piece] == texts[:-1] and found.count(None) == 3001
    for column in ("body", "id"):
        with pytest.raises(DataError, match=rf"column='{column}': .*it has text \(string\), id \(int64\)\. Give"):
            read(path, column)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="Download it again"):
        read(path)


def test_the_standard_library_is_sources_alone() -> None:
    sources = list(standard_library())
    names = {source.name for source in sources}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not any("site-packages" in name or "/test/" in f"/{name}" or not name.endswith(".py") for name in names)
    assert 5e6 < sum(source.nbytes for source in sources) < 30e6
    assert [source.name for source in sources] == sorted(names)
