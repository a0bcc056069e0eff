"""A follower of a run of `thinwire train --publish` gets each version as an ordinary model folder, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from thinwire.app.cli import main
from thinwire.app.records.published import (
    NOTHING,
    Change,
    FragmentVersion,
    Layout,
    Publication,
    PublishedFolder,
    Resource,
    Store,
)
from thinwire.app.trainer.follow import STATES, WeightsFollower
from thinwire.app.trainer.publish import Publisher
from thinwire.app.trainer.run import Run
from thinwire.errors import DataError, PacketError
from thinwire.pieces.partition import Fragment

SMALL = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]
ROUNDS = ["--strategy", "streaming_diloco", "--every", "4", "--fragments", "2", "--delay", "1", "--codec", "E3M0(32)"]


class Watched:
    """A publisher whose versions one follower takes one by one, and another takes every fourth."""

    def __init__(self, run: Path, patch: pytest.MonkeyPatch) -> None:
        self.each, self.fourth = (
            WeightsFollower(PublishedFolder(run), run.parent / name) for name in ("each", "fourth")
        )
        self.seen: list[Any] = []
        self.exact: list[bool] = []

        def published(publisher: Publisher, step: int, anchors: list[torch.Tensor], over: bool = False) -> None:
            values = [anchor.bfloat16() for anchor in anchors]
            publisher._publish(step, values, over)  # called directly, because its thread may skip a version
            self.seen.append(self.each.update())
            due = torch.cat([value.view(torch.int16) for value in values]).sort()[0]
            here = load_file(run.parent / "each" / "model.safetensors").values()
            assert {value.dtype for value in here} == {torch.bfloat16}
            self.exact.append(torch.equal(torch.cat([v.view(torch.int16).flatten() for v in here]).sort()[0], due))
            if len(self.seen) % 4 == 1:
                self.fourth.update()

        patch.setattr(Publisher, "offer", published)


def test_a_follower_gets_each_published_version_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i}\n" for i in range(3000)))
    watched = Watched(tmp_path / "run", monkeypatch)
    asked = [
        "train",
        *SMALL,
        *ROUNDS,
        "--steps",
        "16",
        "--text",
        "text.txt",
        "--publish",
        "--out",
        "run",
        "--seed",
        "3",
    ]
    assert main(asked) == 0
    assert all(watched.exact) and len(watched.exact) >= 4
    first, *later = watched.seen
    assert first.first and first.copied == first.fragments == 3
    assert not any(one.first or one.copied for one in later) and later[-1].over and later[-1].step == 16
    assert max(one.nbytes for one in later) < 0.8 * later[-1].full_nbytes

    # the last version equals what export writes in bf16, loads as a model for further training, and equals the other folder
    capsys.readouterr()
    assert main(["follow", "run", "--out", "live", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"] == 1 and told["newest"]["first"] and told["newest"]["over"]
    assert main(["export", "run", "--to", "safetensors", "--out", "exported"]) == 0
    whole, live = load_file("exported/model.safetensors"), load_file("live/model.safetensors")
    assert whole.keys() == live.keys() and all(torch.equal(live[name], whole[name].bfloat16()) for name in whole)
    assert (
        main(
            ["train", *SMALL, "--steps", "1", "--text", "text.txt", "--model", "live/model.safetensors", "--out", "on"]
        )
        == 0
    )

    # a restarted follower continues from its folder: it fetches only the list and the layout
    capsys.readouterr()
    assert main(["follow", "run", "--out", "live", "--once", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["newest"]
    assert again["copied"] == 0 and again["nbytes"] < 0.1 * again["full_nbytes"]
    assert Path("live").is_symlink() and main(["follow", "run", "--out", "exported"]) == 2
    assert main(["follow", "exported"]) == 2


def test_weights_are_not_copied_while_the_version_before_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, publish, steps, may_publish = Publisher.offer, Publisher._publish, list[int](), threading.Event()

    def offered(publisher: Publisher, step: int, anchors: list[torch.Tensor], over: bool = False) -> None:
        steps.append(step)
        offer(publisher, step, anchors, over)
        if over:
            assert not publisher.idle
            may_publish.set()

    def published(publisher: Publisher, step: int, values: list[torch.Tensor], over: bool) -> None:
        may_publish.wait()
        publish(publisher, step, values, over)

    monkeypatch.setattr(Publisher, "offer", offered)
    monkeypatch.setattr(Publisher, "_publish", published)
    assert main(["train", *SMALL, *ROUNDS, "--steps", "16", "--publish", "--out", str(tmp_path / "run")]) == 0
    assert steps == [0, 16]
    found = WeightsFollower(PublishedFolder(tmp_path / "run"), tmp_path / "live").update()
    assert found is not None and found.over and found.step == 16


def test_following_a_run_that_publishes_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow = ["follow", str(tmp_path), "--out", str(tmp_path / "live")]
    only = "and only recipes with rounds of deltas, without LoRA, can"
    for settings, why in (
        ({}, "it was started without --publish. Resume it with --publish."),
        ({"strategy": "data_parallel"}, f"strategy=data_parallel, lora=None, {only}"),
        ({"strategy": "decoupled_diloco"}, f"strategy=decoupled_diloco, lora=None, {only}"),
        ({"lora": 4}, f"strategy=streaming_sign, lora=4, {only}"),
    ):
        Run.of(steps=3, **settings).save(tmp_path / "run.toml")
        assert main(follow) == 2
        assert f"publishes nothing: {why}" in capsys.readouterr().err


def test_following_a_run_that_has_ended_without_publishing_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["follow", str(trained), "--out", str(tmp_path / "live")]) == 2
    assert f"without --publish, and has ended. Its model is in {trained}." in capsys.readouterr().err


def test_a_follower_rejects_wrong_digests_and_resumes_after_a_cut(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "live"
    model = torch.nn.Linear(300, 10)
    fragment = Fragment("all", tuple(model.named_parameters()))
    failed: list[str] = []
    publisher = Publisher(
        run / "published" / "replica-0",
        [fragment],
        lambda folder: save_file(model.state_dict(), folder / "model.safetensors"),
        failed.append,
    )
    flat = torch.cat([value.detach().flatten() for _, value in fragment.parameters])
    publisher.offer(0, [flat])
    publisher.close()
    source = PublishedFolder(run)
    (object_,) = [p for p in (run / "published/replica-0/objects").iterdir() if p.stat().st_size > 3000]
    good = object_.read_bytes()
    object_.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    follower = WeightsFollower(source, out)
    with pytest.raises(PacketError, match="does not match its announced digest"):
        follower.update()
    assert not out.exists()
    object_.write_bytes(good[:1000])
    with pytest.raises(PacketError):
        follower.update()
    object_.write_bytes(b"\0" * 1000 + good[1000:])  # its first part is already here
    found = WeightsFollower(source, out).update()
    assert found is not None and found.nbytes < len(good) - 1000 + 6000
    here = load_file(out / "model.safetensors")
    assert np.array_equal(
        torch.cat([here["weight"].flatten(), here["bias"]]).view(torch.int16), flat.bfloat16().view(torch.int16)
    )
    assert not failed


def test_a_size_that_is_only_announced_makes_a_follower_allocate_nothing(tmp_path: Path) -> None:
    """The full copy of a fragment is fetched first, because its size bounds that of the fragment."""
    store = Store(tmp_path / "run/published/oslo")
    layout = store.put(Layout((), store.put(save({})), {}, {}).written())
    full = Change(NOTHING, "a" * 64, Resource("b" * 64, 1 << 40))
    fragment = FragmentVersion("a" * 64, 1 << 47, full, ())
    (store.folder / "list.json").write_bytes(Publication(1, 1, False, layout, (fragment,)).written())
    with pytest.raises(DataError, match=r"object bbbbbbbbbbbb of .* is gone"):
        WeightsFollower(PublishedFolder(tmp_path / "run"), tmp_path / "live").update()


def published(run: Path, version: int, fragments: int) -> list[Path]:
    """Publishes a version of a model whose `fragments` are one tensor each. Returns the objects of these, in order."""
    flats = [torch.randn(2000, generator=torch.Generator().manual_seed(10 * version + i)) for i in range(fragments)]
    model = torch.nn.ParameterList([torch.nn.Parameter(flat) for flat in flats])
    parts = [Fragment(name, ((name, parameter),)) for name, parameter in model.named_parameters()]
    publisher = Publisher(
        run / "published/oslo", parts, lambda folder: save_file(model.state_dict(), folder / "model.safetensors"), print
    )
    publisher.offer(version, flats, version > 1)
    publisher.close()
    listed = Publication.read((run / "published/oslo/list.json").read_bytes())
    return [run / "published/oslo/objects" / one.full.patch.digest for one in listed.fragments]


def test_a_fragment_that_has_arrived_before_a_cut_is_not_fetched_again(tmp_path: Path) -> None:
    """Over a link that is cut often, a follower of a large model would never have all of a version."""
    objects = published(tmp_path / "run", 1, 3)
    last = objects[-1].read_bytes()
    objects[-1].write_bytes(last[:1000])
    follower = WeightsFollower(PublishedFolder(tmp_path / "run"), tmp_path / "live")
    with pytest.raises(PacketError):
        follower.update()
    for one in objects[:-1]:
        one.unlink()
    objects[-1].write_bytes(last)
    found = follower.update()
    assert found is not None and (found.copied, found.fragments) == (3, 3)


def test_parts_of_a_version_that_was_replaced_while_it_arrived_do_not_stay(tmp_path: Path) -> None:
    (cut,) = published(tmp_path / "run", 1, 1)
    cut.write_bytes(cut.read_bytes()[:1000])
    follower = WeightsFollower(PublishedFolder(tmp_path / "run"), tmp_path / "live")
    with pytest.raises(PacketError):
        follower.update()
    assert [one.name for one in (tmp_path / ".live.versions/parts").iterdir()] == [cut.name]
    published(tmp_path / "run", 2, 1)
    assert follower.update() is not None
    assert not list((tmp_path / ".live.versions/parts").iterdir())


def test_a_follower_whose_disk_is_full_keeps_nothing_of_a_version_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tmp_path / "run", 2, 1)
    Run.of(publish=True).save(tmp_path / "run/run.toml")
    room, tries = tmp_path / ".live.versions", list[list[str]]()
    (room / "draft").mkdir(parents=True)  # of a process that was killed
    write = Path.write_text

    def fills(path: Path, text: str) -> int:
        if path.name == STATES and len(tries) < 4:
            tries.append(sorted(one.name for one in path.parent.iterdir()))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", fills)
    follow = ["follow", str(tmp_path / "run"), "--out", str(tmp_path / "live"), "--every", "0"]
    assert main([*follow, "--once"]) == 1
    assert "No space left on device" in capsys.readouterr().err and [one.name for one in room.iterdir()] == ["parts"]
    assert main(follow) == 0
    told = capsys.readouterr().out
    assert told.count("live stays as it is: No space left on device; make room there") == 1 and "version 1" in told
    assert tries == [["model.safetensors"]] * 4 and (tmp_path / "live/model.safetensors").exists()
