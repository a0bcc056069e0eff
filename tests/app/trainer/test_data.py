"""The corpus: split, cached, and read in an order that is a pure function."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thinwire.app.jobs.base import Share
from thinwire.app.trainer import data
from thinwire.app.trainer.data import Corpus
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.text_job import TextJob
from thinwire.app.trainer.texts import Source
from thinwire.app.trainer.tokens import BPE
from thinwire.errors import ConfigurationError, DataError
from thinwire.rng import derive


def left_in(cache: Path) -> list[str]:
    """Returns the files of the cache without lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sixty files of 200 bytes, each of a pair of letters that no other file has."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"{i:02}" * 100)
    return folder


@pytest.fixture
def corpus(text: Path, tmp_path: Path) -> Corpus:
    return Corpus.open([text], cache=tmp_path / "cache", held_out_share=0.1)


@pytest.fixture
def counted(tmp_path: Path) -> Corpus:
    """One file whose n-th pair of bytes is n, so a window shows its position."""
    path = tmp_path / "count.bin"
    path.write_text("".join(chr(0x800 + n) for n in range(2000)))  # three bytes each
    return Corpus.open([path], cache=tmp_path / "cache")


def windows_read(corpus: Corpus, replica: int, replicas: int, steps: range, batch: int, sequence: int) -> list[bytes]:
    rows = []
    for step in steps:
        tokens, targets = corpus.batch(3, replica, replicas, step, batch, sequence)
        assert tokens.shape == targets.shape == (batch, sequence)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        rows += [row.to(torch.uint8).numpy().tobytes() for row in torch.cat((tokens, targets[:, -1:]), 1)]
    return rows


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_an_epoch_of_all_replicas_reads_every_window_once(counted: Corpus, replicas: int) -> None:
    sequence = 10
    total = counted.windows(sequence)
    flat = counted.tokens[: counted.manifest.training_tokens].tobytes()
    everything = [flat[i * sequence : i * sequence + sequence + 1] for i in range(total)]
    assert len(set(everything)) == total  # all windows differ, so counting them is sufficient
    shares = []
    for replica in range(replicas):
        own = len(range(replica, total, replicas))
        first = windows_read(counted, replica, replicas, range(own), 1, sequence)
        second = windows_read(counted, replica, replicas, range(own, 2 * own), 1, sequence)
        assert set(first) == set(second) and first != second  # the same windows, in another order
        shares += first
    assert sorted(shares) == sorted(everything)  # disjoint and complete


def test_batches_cross_epochs_whatever_their_size(counted: Corpus) -> None:
    one = windows_read(counted, 1, 3, range(450), 1, 10)  # more than two epochs of 190
    assert windows_read(counted, 1, 3, range(10), 45, 10) == one


def test_a_batch_is_a_pure_function_of_seed_replica_and_step(counted: Corpus) -> None:
    reference = counted.batch(0, 0, 2, 5, 4, 16)
    counted.batch(0, 0, 2, 9, 4, 16)
    assert all(torch.equal(a, b) for a, b in zip(counted.batch(0, 0, 2, 5, 4, 16), reference))
    for seed, replica, step in ((1, 0, 5), (0, 1, 5), (0, 0, 6)):
        assert not torch.equal(counted.batch(seed, replica, 2, step, 4, 16)[0], reference[0])


def test_ranks_of_a_replica_read_the_rows_of_its_batch(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    job, read = TextJob(Run.of(text=(str(text),), batch=6, sequence=8), None), []

    def model(*tokens_and_targets: Tensor) -> SimpleNamespace:
        read.append(torch.stack(tokens_and_targets, 1))
        return SimpleNamespace(loss=torch.zeros(()))

    for shard, shards in ((0, 1), (0, 3), (1, 3), (2, 3)):
        job.begin(Share(0, 0, 2), shard, shards)
        job.loss(cast(nn.Module, model), 3, torch.device("cpu"))
    assert torch.equal(torch.cat(read[1:]), read[0])
    with pytest.raises(ConfigurationError, match=r"batch=6 on a replica of 4 ranks: .* multiple of 4"):
        job.begin(Share(0, 0, 2), 0, 4)


@pytest.mark.parametrize(
    "change",
    [{"replica": 2}, {"replica": -1}, {"step": -1}, {"batch": 0}, {"sequence": 0}],
)
def test_an_invalid_batch_size_is_refused(counted: Corpus, change: dict[str, int]) -> None:
    right = {"seed": 0, "replica": 0, "replicas": 2, "step": 0, "batch": 4, "sequence": 8}
    with pytest.raises(ConfigurationError, match=r".+: .+\. .+"):
        counted.batch(**(right | change))


def test_a_sequence_longer_than_the_text_is_refused(counted: Corpus) -> None:
    with pytest.raises(DataError, match="shorter sequence"):
        counted.batch(0, 0, 1, 0, 1, 6000)
    with pytest.raises(DataError, match="each needs a window"):
        counted.batch(0, 1, 2, 0, 1, 4000)
    with pytest.raises(DataError, match="held-out tokens"):
        counted.held_out(1, 600, 1)


def test_held_out_files_are_whole_and_never_trained_on(corpus: Corpus) -> None:
    manifest = corpus.manifest
    assert manifest.split == "files" and corpus.describe()["held out"] == f"{manifest.held_out_files} whole files"
    assert 1 < manifest.held_out_files < 15
    cut = manifest.training_tokens
    training, held_out = (part.tobytes().split(b"\0")[:-1] for part in (corpus.tokens[:cut], corpus.tokens[cut:]))
    assert (len(training), len(held_out)) == (60 - manifest.held_out_files, manifest.held_out_files)
    assert sorted(training + held_out) == [f"{i:02}".encode() * 100 for i in range(60)]


def test_the_split_does_not_depend_on_the_folder(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    text.rename(tmp_path / "moved")
    moved = Corpus.open([tmp_path / "moved"], cache=tmp_path / "other", held_out_share=0.1)
    assert moved.folder.name != corpus.folder.name
    assert moved.fingerprint == corpus.fingerprint


def test_a_file_that_is_given_twice_is_read_once(text: Path, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(text)
    every = [text, text / "07.txt", text / ".." / "text", tmp_path / "link"]
    again = Corpus.open(every, cache=tmp_path / "cache", held_out_share=0.1)
    assert np.array_equal(again.tokens, corpus.tokens) and again.windows(8) == corpus.windows(8)


@pytest.mark.parametrize("part", ["held out", "training"])
def test_text_is_held_out_if_all_files_of_a_part_are_skipped(
    text: Path, corpus: Corpus, tmp_path: Path, part: str
) -> None:
    for file in text.iterdir():
        if (derive(0, f"held out {file.name}") < 0.1 * 2**63) == (part == "held out"):
            file.write_bytes("é".encode("latin-1") * 200)
    again = Corpus.open([text], cache=tmp_path / "other", held_out_share=0.1)
    manifest = again.manifest
    assert manifest.split == "tail" and manifest.held_out_files == 0 < len(manifest.skipped)
    assert manifest.tokens - manifest.training_tokens == manifest.tokens // 10 > 0


def test_a_file_that_cannot_be_read_is_named(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find", lambda *_, **__: [Source(tmp_path / "gone.txt", "gone.txt", 9, 0)])
    with pytest.raises(DataError, match=r"gone\.txt: No such file or directory; a file that can be read is needed"):
        Corpus.open([text], cache=tmp_path / "cache")


def test_a_column_is_of_the_records_beside_plain_text(tmp_path: Path) -> None:
    """As in many folders of data, which have a README; a column that no file can have is refused."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/README.md").write_text("thin wires\n" * 100)
    with pytest.raises(DataError, match=r"column='body': .*README.md is read as plain text; .jsonl, .* have columns"):
        Corpus.open([tmp_path / "text"], cache=tmp_path / "cache", column="body")
    (tmp_path / "text/a.jsonl").write_text(json.dumps({"body": "thick wires"}) + "\n")
    corpus = Corpus.open([tmp_path / "text"], cache=tmp_path / "cache", column="body")
    assert corpus.manifest.nbytes == 100 * len("thin wires\n") + len("thick wires") + 2  # and the ends of two documents


def test_a_single_file_holds_out_its_end(counted: Corpus) -> None:
    assert counted.manifest.tokens == 6001
    assert counted.manifest.training_tokens == 6001 - 300
    assert counted.describe()["held out"] == "the end of the text"


def test_held_out_batches_spread_evenly_and_never_change(counted: Corpus) -> None:
    flat = torch.from_numpy(counted.tokens[counted.manifest.training_tokens :].astype(np.int64))
    assert len(flat) == 300
    everything = counted.held_out(most=99, sequence=16, batch=3)  # it has 18 windows
    assert torch.equal(torch.cat([tokens for tokens, _ in everything]).flatten(), flat[: 18 * 16])
    assert torch.equal(torch.cat([targets for _, targets in everything]).flatten(), flat[1 : 18 * 16 + 1])
    few = counted.held_out(most=6, sequence=16, batch=4)
    assert [len(tokens) for tokens, _ in few] == [4, 2]
    assert torch.equal(torch.cat([tokens for tokens, _ in few])[:, 0], flat[0 : 18 * 16 : 3 * 16])
    for batch in (1, 5, 99):
        same = counted.held_out(most=6, sequence=16, batch=batch)
        assert all(torch.equal(torch.cat(a), torch.cat(b)) for a, b in zip(zip(*few), zip(*same)))


def test_a_corpus_opened_again_reads_its_cache(corpus: Corpus, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_prepare", None)
    again = Corpus.open([text], cache=corpus.folder.parent, held_out_share=0.1)
    assert again.folder == corpus.folder and again.fingerprint == corpus.fingerprint


def test_changed_sources_are_tokenised_anew(corpus: Corpus, text: Path) -> None:
    (text / "00.txt").write_text("!!" * 100)  # of the same size
    os.utime(text / "00.txt", ns=(1, 1))
    changed = Corpus.open([text], cache=corpus.folder.parent, held_out_share=0.1)
    assert changed.fingerprint != corpus.fingerprint and b"!!" in changed.tokens.tobytes()


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest", "foreign manifest", "absent"])
def test_a_damaged_cache_is_rebuilt(corpus: Corpus, text: Path, damage: str) -> None:
    tokens, manifest = corpus.folder / "tokens.bin", corpus.folder / "manifest.json"
    whole = tokens.read_bytes()
    if damage == "flip":
        tokens.write_bytes(whole[:777] + bytes([whole[777] ^ 1]) + whole[778:])
    elif damage == "cut":
        tokens.write_bytes(whole[:-1])
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "foreign manifest":
        manifest.write_text(json.dumps({"format": 99}))
    else:
        tokens.unlink()
    again = Corpus.open([text], cache=corpus.folder.parent, held_out_share=0.1)
    assert again.tokens.tobytes() == whole
    assert left_in(corpus.folder.parent) == [corpus.folder.name]


def test_one_of_many_processes_prepares_the_corpus(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, looked, made, prepare, load = threading.Barrier(4), set[int](), [], data._prepare, data._load

    def slowly(*arguments: object) -> Corpus:
        made.append(threading.get_ident())
        return prepare(*arguments)  # type: ignore[arg-type]

    def all_look_first(*arguments: object) -> Corpus | None:
        found = load(*arguments)  # type: ignore[arg-type]
        if threading.get_ident() not in looked:  # no thread continues before all have seen that there is no file
            looked.add(threading.get_ident())
            together.wait(600)
        return found

    monkeypatch.setattr(data, "_prepare", slowly)
    monkeypatch.setattr(data, "_load", all_look_first)
    opened: list[Corpus] = []
    threads = [
        threading.Thread(target=lambda: opened.append(Corpus.open([text], cache=tmp_path / "cache"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len({corpus.fingerprint for corpus in opened}) == 1 and len(opened) == 4
    assert left_in(tmp_path / "cache") == [opened[0].folder.name]


def test_a_failed_preparation_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{broken')
    with pytest.raises(DataError, match=r"a.jsonl:2"):
        Corpus.open([tmp_path / "a.jsonl"], cache=tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_files_that_are_not_utf8_are_skipped_and_counted(text: Path, tmp_path: Path) -> None:
    (text / "latin.txt").write_bytes(b"good " * 100_000 + "é".encode("latin-1"))  # found after pieces have been written
    (text / "empty.txt").write_text("")
    corpus = Corpus.open([text], cache=tmp_path / "cache")
    assert corpus.describe()["skipped files (not UTF-8)"] == 1
    assert b"good" not in corpus.tokens.tobytes() and corpus.manifest.nbytes == corpus.manifest.tokens


def test_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"\(files found: 1, not UTF-8: 1, the others empty\); .*\. Give other files"):
        Corpus.open([tmp_path], cache=tmp_path / "cache")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text"):
        Corpus.open([tmp_path / "a.txt"], cache=tmp_path / "cache")
    with pytest.raises(DataError, match="Check the path"):
        Corpus.open([tmp_path / "absent"])
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="empty"):
        Corpus.open([tmp_path / "a.jsonl"], cache=tmp_path / "cache")
    with pytest.raises(ConfigurationError, match="held_out_share=0"):
        Corpus.open([tmp_path], held_out_share=0)
    with pytest.raises(DataError, match=r"cache .* must be writable"):
        Corpus.open([tmp_path / "a.jsonl"], cache=tmp_path / "a.jsonl")


def test_bpe_is_trained_once_and_kept_with_the_tokens(text: Path, tmp_path: Path) -> None:
    corpus = Corpus.open([text], BPE(300), cache=tmp_path / "cache")
    assert corpus.tokens.dtype == np.uint16 and 257 < corpus.vocabulary <= 300
    assert corpus.bytes_per_token > 1.5 and int(corpus.tokens.max()) < corpus.vocabulary
    assert corpus.tokenizer.decode(corpus.tokens[:20]).startswith("0" * 2)
    again = Corpus.open([text], BPE(300), cache=tmp_path / "cache")
    assert again.tokenizer == corpus.tokenizer and again.fingerprint == corpus.fingerprint
    # the file alone serves another text
    shared = Corpus.open([text / "07.txt"], BPE.load(corpus.folder / "tokenizer.json"), cache=tmp_path / "cache")
    assert shared.tokenizer.fingerprint == corpus.tokenizer.fingerprint
    # a tokenizer that changed after the tokens were made is detected
    (corpus.folder / "tokenizer.json").write_bytes(
        BPE(280).train(["abc"], tmp_path / "t.json").file.read_bytes()  # type: ignore[union-attr]
    )
    assert Corpus.open([text], BPE(300), cache=tmp_path / "cache").fingerprint == corpus.fingerprint


def test_writing_and_reading_hold_little_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "large.txt").write_text(("some words in a line\n" * 5000) * 200)  # 21 MB
    tracemalloc.start()
    corpus = Corpus.open([tmp_path / "large.txt"], cache=tmp_path / "cache")
    corpus.batch(0, 0, 1, 0, 4, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6
    assert isinstance(corpus.tokens, np.memmap)


def test_the_standard_library_is_a_large_enough_text(tmp_path: Path) -> None:
    corpus = Corpus.open(cache=tmp_path)
    assert corpus.manifest.split == "files" and len(corpus.manifest.skipped) < 5
    assert 5e6 < corpus.manifest.training_tokens < 3e7
    assert 0.01 < 1 - corpus.manifest.training_tokens / corpus.manifest.tokens < 0.15
    assert "import" in corpus.tokenizer.decode(corpus.tokens[:20_000])
