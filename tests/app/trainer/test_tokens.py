"""Files become text, text becomes tokens, and back."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.app.trainer.texts import CHUNK_CHARACTERS, PassedOver, Source, find, pieces, standard_library
from thinwire.app.trainer.tokens import BPE, Bytes, dtype_of
from thinwire.errors import ConfigurationError, DataError

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


ROWS = [{"text": "the quick brown fox"}, {"text": None}, {"text": "a lazy dog"}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


def _arrow(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra thinwire[parquet] is not installed")
    table = arrow.Table.from_pylist(ROWS)
    if path.suffix == ".arrow":  # as `datasets` saves it
        with arrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".feather":
        pytest.importorskip("pyarrow.feather").write_feather(table, str(path))
    else:
        column = table["text"].dictionary_encode()  # as pandas writes a column of categories
        pytest.importorskip("pyarrow.parquet").write_table(table.set_column(0, "text", column), path)


def _zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra thinwire[zstd] is not installed")
    middle = len(LINES) // 2
    return zstandard.compress(data[:middle]) + zstandard.compress(data[middle:])  # two frames, as pzstd writes them


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda path: path.write_text(LINES)),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES.encode()))),
        ("a.ndjson.zst", lambda path: path.write_bytes(_zstd(LINES.encode()))),
        ("a.json.xz", lambda path: path.write_bytes(lzma.compress(LINES.encode()))),
        ("a.json", lambda path: path.write_text(json.dumps(ROWS, indent=1))),
        ("a.csv", lambda path: path.write_text('id,text\r\n1,the quick brown fox\r\n2,\r\n3,"a lazy dog"\r\n')),
        ("a.tsv.bz2", lambda path: path.write_bytes(bz2.compress(b"text\tid\nthe quick brown fox\t1\n\t2\na lazy dog\t3\n"))),
        ("a.parquet", _arrow),
        ("a.arrow", _arrow),
        ("a.feather", _arrow),
    ],
)  # fmt: skip
def test_records_of_every_format_are_documents_and_null_is_an_empty_text(
    name: str, write: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path / name)
    (source,) = find([tmp_path])
    assert list(pieces(source, "text")) == ["the quick brown fox", None, None, "a lazy dog", None]


def test_values_of_json_may_cross_the_limits_of_what_is_read_at_a_time(tmp_path: Path) -> None:
    rows = [{"text": f"{number} " * 50_000} for number in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert "".join(piece or "" for piece in read(tmp_path / "a.json")) == "".join(row["text"] for row in rows)
    (tmp_path / "a.json").write_text(json.dumps(rows)[:-1])
    with pytest.raises(DataError, match=r"a.json, record 10 is not JSON"):
        read(tmp_path / "a.json")


def test_text_in_utf16_needs_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("thin wires", encoding="utf-16")
    assert read(tmp_path / "a.txt") == ["thin wires", None]
    (tmp_path / "a.txt").write_bytes("thin wires".encode("utf-16-le"))
    with pytest.raises(UnicodeDecodeError):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_a_damaged_shard_in_a_folder_is_named_as_damaged(name: str, tmp_path: Path) -> None:
    """Also one whose records are looked at before it is taken for text."""
    (tmp_path / "b.txt").write_text("thin wires")
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "thin wires"}\n')[:12])
    with pytest.raises(DataError, match=rf"{name}.* a whole compressed file is needed"):
        list(itertools.chain.from_iterable(pieces(source, "text") for source in find([tmp_path])))


def test_folders_that_may_not_be_listed_or_entered_are_named() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as top:  # root may do anything, and nobody may enter pytest's folders
        Path(top).chmod(0o755)
        (Path(top) / "a.txt").write_text("thin wires")
        for name, mode in (("closed", 0), ("listed", 0o444)):
            (Path(top) / name).mkdir()
            (Path(top) / name / "b.txt").write_text("b")
            (Path(top) / name).chmod(mode)
        passed_over = PassedOver()
        try:
            if user == 0:
                os.seteuid(65534)
            assert [source.name for source in find([top], passed_over=passed_over)] == ["a.txt"]
        finally:
            os.seteuid(user)
            for name in ("closed", "listed"):
                (Path(top) / name).chmod(0o700)
    assert passed_over == {
        "folder that cannot be read (Permission denied)": [Path(top) / "closed"],
        "Permission denied": [Path(top) / "listed/b.txt"],
    }


def test_what_is_not_read_in_a_folder_is_named(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_text("b")
    (text / "below").mkdir(parents=True)
    (text / "linked").symlink_to(other)
    (text / "below/circle").symlink_to(text)
    for name in ("a.txt", ".hidden", "page.html", "shards.tar.gz", "Makefile"):
        (text / name).write_text("a")
    (text / "settings.json").write_text('{"steps": 3}')
    (text / "table.csv").write_text("id,body\n7,thin\n")
    (text / "gone.txt").symlink_to("nowhere")
    os.mkfifo(text / "pipe.txt")
    Path(os.fsdecode(os.fsencode(text) + b"/caf\xe9.txt")).write_text("c")
    passed_over = PassedOver()
    assert [source.name for source in find([text], passed_over=passed_over)] == [
        "a.txt",
        "caf\\xe9.txt",
        "linked/b.txt",
    ]
    named = {path.name: reason for reason, paths in passed_over.items() for path in paths}
    assert named == {
        ".hidden": "hidden",
        "page.html": ".html",
        "shards.tar.gz": ".tar.gz",
        "Makefile": "no suffix",
        "settings.json": ".json without text under 'text'",
        "table.csv": ".csv without text under 'text'",
        "gone.txt": "link that leads nowhere (No such file or directory)",
        "pipe.txt": "pipe, socket or device",
    }
