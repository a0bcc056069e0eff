"""Published weights: patches are lossless and bounded; manifests and layouts from others are validated."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thinwire.app.records.patches import apply_patch, encode_patch
from thinwire.app.records.published import NOTHING, Change, FragmentVersion, Layout, Publication, Resource
from thinwire.errors import PacketError

ANY = "ab" * 32
OTHER = "cd" * 32
THIRD = "ef" * 32


def test_patches_are_lossless_and_small_if_little_changes() -> None:
    chance = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16)  # includes NaN, infinities, both zeros, denormals
    for old, new in [(every, chance.permutation(every)), (every, every), (every, np.roll(every, 1)), (every[:0],) * 2]:
        assert np.array_equal(apply_patch(old, encode_patch(old, new)), new)
    some = every.copy()
    some[chance.choice(len(some), 600, replace=False)] += 1  # changes the last bit of one value in a hundred
    assert len(encode_patch(every, some)) < 0.02 * every.nbytes


def test_a_malformed_patch_is_refused() -> None:
    old = np.zeros(1000, np.uint16)
    good = encode_patch(old, old + np.uint16(3))
    long = encode_patch(np.zeros(1 << 20, np.uint16), np.zeros(1 << 20, np.uint16))
    for bad in (b"", good[:3], good[:-1], good + b"x", long, b"\xff" * 40):
        with pytest.raises(PacketError):
            apply_patch(old, bad)


def test_the_cheapest_way_to_a_version_is_chosen_and_bad_manifests_are_refused() -> None:
    steps = tuple(
        Change(a, b, Resource(ANY, size))
        for a, b, size in [(ANY, OTHER, 60), (OTHER, THIRD, 30), (THIRD, "1" * 64, 30)]
    )
    full = Change(NOTHING, OTHER, Resource(ANY, 100))
    one = FragmentVersion("1" * 64, 160, full, steps)
    assert one.way_from(OTHER) == list(steps[1:]) and one.way_from("1" * 64) == []
    assert one.way_from(None) == [full, *steps[1:]] == one.way_from("2" * 64)
    assert one.way_from(ANY) == list(steps)  # 120 bytes of patches; a full copy and the patches after it take 160
    read = Publication(3, 9, False, Resource(ANY, 5), (one,))
    assert Publication.read(read.written()) == read
    for wrong in (
        {"step": -1},
        {"layout": {"digest": "../../etc/passwd", "nbytes": 1}},
        {"fragments": 7},
    ):
        with pytest.raises(PacketError):
            Publication.read(json.dumps(json.loads(read.written()) | wrong))
    torn = FragmentVersion(one.state, 100, full, steps[::-1])
    with pytest.raises(PacketError, match="do not follow"):
        Publication.read(Publication(3, 9, False, Resource(ANY, 5), (torn,)).written())
    with pytest.raises(PacketError):
        Publication.read("[" * 100_000)
    layout = {"places": [], "rest": {"digest": ANY, "nbytes": 1}, "metadata": {}, "files": {}}
    assert Layout.read(json.dumps(layout)).files == {}
    for name in ("../run.toml", "/etc/passwd", ".hidden", "a/b"):
        with pytest.raises(PacketError):
            Layout.read(json.dumps(layout | {"files": {name: {"digest": ANY, "nbytes": 1}}}))
