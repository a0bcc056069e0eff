"""Who may publish through a hub, and publishers that lie, flood or are cut off: followers get complete versions of named members alone."""

from __future__ import annotations

import hashlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from group_laws import Exchange
from hub_process import HubProcess
from raw_member import RawMember, admitted
from raw_publisher import Version, offered, publish, sent, served, wanted
from secure_groups import run_secure

from thinwire.app.records.uploaded import LIST_NBYTES, UploadedVersions
from thinwire.net import Hub, upload
from thinwire.net.frames import CHUNK_NBYTES
from thinwire.net.keys import Authority, Credentials
from thinwire.net.state import HubState

MOST = 8 << 20


@pytest.fixture(autouse=True)
def unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return Version.made(tmp_path_factory.mktemp("version") / "oslo", 7)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Version:
    return Version.made(tmp_path_factory.mktemp("older") / "oslo", 3)


@pytest.fixture
def store(tmp_path: Path) -> UploadedVersions:
    return UploadedVersions(tmp_path / "hub", ["oslo", "lima"], MOST)


@pytest.fixture
def hub(tmp_path: Path, audit, store: UploadedVersions) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", say=audit, publishers=store) as hub:
        yield hub


@pytest.fixture
def oslo(hub: Hub, tmp_path: Path) -> Iterator[RawMember]:
    with RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path / "keys")) as member:
        yield member


def files(folder: Path) -> dict[str, int]:
    """The files of all publishers, and their sizes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_a_named_member_publishes_for_followers(hub, oslo, version, tmp_path):
    publish(oslo, version)
    assert served(hub.invite(), tmp_path) == version.listed
    assert publish(oslo, version) == []  # the hub has it


@pytest.mark.parametrize("who", ["kyoto", "follower-kyoto", "oslo"])
def test_members_that_the_owner_has_not_named_are_refused(who, hub, audit, version, tmp_path):
    """A plain member, a follower, and a publisher that was revoked; each leaves one line, and no file."""
    own = admitted(hub.invite(), who, tmp_path / "keys")
    why = {"kyoto": "kyoto is no publisher of this hub", "oslo": "oslo is revoked"}.get(who, "receives only")
    if who == "oslo":
        state = HubState(tmp_path / "hub")
        state.revoke("oslo")
        state.close()
    with RawMember(hub.invite(), own) as member:
        with pytest.raises(grpc.RpcError) as refused:
            publish(member, version)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED and why in refused.value.details()
    audit.wait("refused 127.0.0.1:", f"{who}.member.thinwire", why)
    assert files(tmp_path / "hub/published") == {}


def test_a_stranger_cannot_publish(hub, version, tmp_path):
    with RawMember(hub.invite(), Credentials(b"", b"", Authority(tmp_path / "hub").pem)) as member:
        with pytest.raises(grpc.RpcError) as refused:
            publish(member, version)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert files(tmp_path / "hub/published") == {}


def test_nobody_may_publish_at_a_hub_that_names_nobody(tmp_path, version):
    with Hub(tmp_path / "hub") as hub, RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path)) as member:
        with pytest.raises(grpc.RpcError, match="thinwire hub --publishers oslo"):
            publish(member, version)
    assert not (tmp_path / "hub/published").exists()


def with_name(path: str) -> Callable[[Version], Version]:
    return lambda version: version.with_layout(
        lambda layout: layout["files"].update({path: layout["files"].pop("empty.txt")})
    )


def named(**resource_: object) -> Callable[[Version], Version]:
    """A list whose full copy is named so."""
    return lambda version: version.changed(lambda said: said["fragments"][0]["full"]["patch"].update(resource_))


def with_two_sizes(version: Version) -> Version:
    return version.with_layout(lambda layout: layout["files"].update(again={**layout["rest"], "nbytes": 5}))


LISTS: dict[str, tuple[Callable[[Version], Version], str]] = {
    "no JSON": (lambda version: Version(b"[" * 100_000), "cannot be read"),
    "an object whose name is a path": (named(digest="../../authority.key"), "is no SHA-256"),
    "a file whose name is a path": (with_name("../authority.key"), "is no file name"),
    "a file whose name is absolute": (with_name("/etc/passwd"), "is no file name"),
    "more bytes than a version may have": (named(nbytes=MOST), f"and this hub takes {MOST} of a publisher"),
    "a number of bytes below zero": (named(nbytes=-5), "is no number of bytes"),
    "files of more bytes than a version may have": (
        lambda version: version.with_layout(lambda layout: layout["rest"].update(nbytes=MOST)),
        f"and this hub takes {MOST} of a publisher",
    ),
    "a layout that is too long to read": (
        lambda version: version.changed(lambda said: said["layout"].update(nbytes=LIST_NBYTES + 1)),
        f"a layout of {LIST_NBYTES + 1} bytes is named",
    ),
    "an object with two sizes": (with_two_sizes, "has another size"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LISTS)
def test_lists_that_lie_are_refused(kind, hub, oslo, audit, older, version, tmp_path):
    """The audit log has the reason, and followers stay at the version before."""
    spoil, why = LISTS[kind]
    publish(oslo, older)
    with pytest.raises(grpc.RpcError) as refused:
        publish(oslo, spoil(version))
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED)
    assert why in refused.value.details()
    audit.wait("refused frames of 127.0.0.1:", "oslo.member.thinwire", why)
    assert served(hub.invite(), tmp_path) == older.listed
    publish(oslo, version)
    assert served(hub.invite(), tmp_path) == version.listed


def flipped(chunk: bytes) -> bytes:
    return bytes([chunk[0] ^ 1]) + chunk[1:] if chunk else chunk


CHUNKS: dict[str, tuple[Callable[[bytes], bytes], grpc.StatusCode, str]] = {
    "a changed bit": (flipped, grpc.StatusCode.ABORTED, "does not match its digest"),
    "a byte too many": (lambda chunk: chunk + b"\0", grpc.StatusCode.INVALID_ARGUMENT, "were wanted of object"),
    "a byte too few": (lambda chunk: chunk[:-1], grpc.StatusCode.INVALID_ARGUMENT, "were wanted of object"),
    "nothing": (lambda chunk: b"", grpc.StatusCode.INVALID_ARGUMENT, "a chunk of 0 bytes came"),
    "a long message": (lambda chunk: bytes(1 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
}


@pytest.mark.parametrize("of", ["the list", "an object"])
@pytest.mark.parametrize("kind", CHUNKS)
def test_chunks_that_lie_are_refused(kind, of, hub, oslo, audit, older, version, tmp_path):
    """Nothing of a wrong object stays on the disk, and the honest version is taken afterwards."""
    spoil, code, why = CHUNKS[kind]
    publish(oslo, older)
    target = version.digest if of == "the list" else version.largest
    with pytest.raises(grpc.RpcError) as refused:
        sent(oslo.publishing(), version, lambda digest, _, chunk: spoil(chunk) if digest == target else chunk)
    assert refused.value.code() is code and why in refused.value.details()
    if why:
        audit.wait(why)
    assert served(hub.invite(), tmp_path) == older.listed
    publish(oslo, version)
    assert served(hub.invite(), tmp_path) == version.listed
    kept = files(tmp_path / "hub/published/oslo/objects")
    assert set(kept) == older.objects.keys() | version.objects.keys()
    for name in kept:
        data = (tmp_path / "hub/published/oslo/objects" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == name


@pytest.mark.parametrize("nbytes", [LIST_NBYTES + 1, (1 << 64) - 1])
def test_a_list_too_long_is_refused_before_it_is_sent(nbytes, hub, oslo, version):
    stream = oslo.publishing()
    offered(stream, version, nbytes)
    code, why = stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT and f"a hub takes {LIST_NBYTES} at most" in why


def test_an_offer_of_another_length_is_refused(hub, oslo):
    stream = oslo.publishing()
    stream.raw(bytes(41))
    code, why = stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "the offer of a version has 41 bytes" in why


def begun(member: RawMember, version: Version, chunks: int) -> str:
    """Sends `chunks` chunks of the largest object and is cut off. Returns the object."""
    stream = member.publishing()
    offered(stream, version)
    while (want := wanted(stream)) != (version.largest, chunks * CHUNK_NBYTES):
        assert want
        whole = version.listed if want[0] == version.digest else version.objects[want[0]]
        stream.raw(whole[want[1] : want[1] + CHUNK_NBYTES])
    stream.call.cancel()
    return version.largest


def test_a_cut_upload_continues_where_it_was(hub, oslo, version, tmp_path):
    whole = begun(oslo, version, 2)
    asked = [offset for digest, offset in publish(oslo, version) if digest == whole]
    assert asked[0] == 2 * CHUNK_NBYTES and served(hub.invite(), tmp_path) == version.listed


def test_a_cut_upload_continues_what_only_its_layout_names(hub, oslo, version, tmp_path):
    """Weights that are not exchanged, and the files beside the model."""
    large = bytes(len(version.objects[version.largest]) + 3 * CHUNK_NBYTES)
    named = {"digest": hashlib.sha256(large).hexdigest(), "nbytes": len(large)}
    version = version.with_layout(lambda layout: layout["files"].update({"tokenizer.json": named}))
    version.objects[named["digest"]] = large
    whole = begun(oslo, version, 2)
    asked = publish(oslo, version)
    assert next(offset for digest, offset in asked if digest == whole) == 2 * CHUNK_NBYTES and whole == named["digest"]
    assert served(hub.invite(), tmp_path) == version.listed


def test_a_killed_hub_continues_an_upload_and_serves_what_it_had(tmp_path, older, version):
    hub = HubProcess(tmp_path / "hub", "--publishers", "oslo")
    try:
        token = hub.invite(2)
        own = admitted(token, "oslo", tmp_path / "keys")
        with RawMember(token, own) as member:
            publish(member, older)
            whole = begun(member, version, 2)
            hub.kill()
        hub.restart()
        assert served(token, tmp_path) == older.listed
        with RawMember(token, own) as member:
            asked = [offset for digest, offset in publish(member, version) if digest == whole]
        assert asked[0] == 2 * CHUNK_NBYTES and served(token, tmp_path) == version.listed
    finally:
        hub.close()


def test_a_full_disk_leaves_the_version_before(tmp_path, older, version):
    """The hub may write no file of more than 100 kB, until it may again."""
    hub = HubProcess(tmp_path / "hub", "--publishers", "oslo")
    try:
        token = hub.invite(2)
        with RawMember(token, admitted(token, "oslo", tmp_path / "keys")) as member:
            publish(member, older)
            before = resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            with pytest.raises(grpc.RpcError) as refused:
                publish(member, version)
            assert refused.value.code() is grpc.StatusCode.ABORTED and "too large" in refused.value.details()
            assert served(token, tmp_path) == older.listed
            assert version.largest not in str(files(tmp_path / "hub/published"))
            resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, before)
            publish(member, version)
            assert served(token, tmp_path) == version.listed
    finally:
        hub.close()


def test_a_member_revoked_during_its_upload_is_refused_and_not_served(hub, oslo, audit, older, version, tmp_path):
    publish(oslo, older)
    token = hub.invite()
    assert served(token, tmp_path) == older.listed

    def revoke(digest: str, offset: int, chunk: bytes) -> bytes:
        if (digest, offset) == (version.largest, CHUNK_NBYTES):
            state = HubState(tmp_path / "hub")
            state.revoke("oslo")
            state.close()
        return chunk

    with pytest.raises(grpc.RpcError) as refused:
        sent(oslo.publishing(), version, revoke)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED and "oslo is revoked" in refused.value.details()
    while served(token, tmp_path) is not None:  # the hub looks for changes of its members every half second
        threading.Event().wait(0.05)


def test_another_upload_of_a_member_ends_the_first(hub, oslo, older, version, tmp_path):
    """As after a silent loss of the link: the first stream is still open at the hub."""
    first = oslo.publishing()
    offered(first, older)
    want = wanted(first)
    publish(oslo, version)
    assert want == (older.digest, 0)
    first.raw(older.listed)
    assert "has begun another upload" in first.refusal()[1]
    assert served(hub.invite(), tmp_path) == version.listed


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_flood_of_versions_takes_bounded_memory_and_disk(tmp_path, version):
    """A publisher offers versions with long lists, and leaves each unfinished. A group's rounds go on meanwhile."""
    hub = HubProcess(tmp_path / "hub", "--publishers", "oslo")
    try:
        token = hub.invite(4)
        own = admitted(token, "oslo", tmp_path / "keys")
        with RawMember(token, own) as member:
            publish(member, version)
            before = resident(hub.process.pid)
            kept = sum(files(tmp_path / "hub/published").values())

            def flood() -> None:
                for number in range(6):
                    other = version.with_layout(lambda layout, number=number: layout["metadata"].update(n=str(number)))
                    long = other.changed(lambda said: said.update(filler="x" * (LIST_NBYTES - 100_000)))
                    stream = member.publishing()
                    offered(stream, long)
                    while (want := wanted(stream)) and want[0] == long.digest:
                        stream.raw(long.listed[want[1] : want[1] + CHUNK_NBYTES])
                    assert want  # the layout, which does not come
                    stream.call.cancel()

            flooding = threading.Thread(target=flood)
            flooding.start()
            run_secure(
                token, 2, lambda group: [Exchange(group, 1, what, 300_000).check() for what in range(6)], tmp_path
            )
            flooding.join()
            assert sum(files(tmp_path / "hub/published").values()) < kept + MOST
            assert resident(hub.process.pid) - before < 200 << 20
            assert served(token, tmp_path) == version.listed
    finally:
        hub.close()


def test_publishers_are_named_by_names_of_replicas(tmp_path, capsys):
    from thinwire.app.cli import main

    for names, why in ((["follower-oslo"], "a follower receives only"), (["../oslo"], "small letters, digits")):
        assert main(["hub", "--out", str(tmp_path / "hub"), "--publishers", *names]) == 2
        assert why in capsys.readouterr().err
    given = ["--publishers", "oslo", "--published", str(tmp_path)]
    assert main(["hub", "--out", str(tmp_path / "hub"), *given]) == 2 and "one source" in capsys.readouterr().err
    given = ["--publishers", "oslo", "--publish-bytes", "0"]
    assert main(["hub", "--out", str(tmp_path / "hub"), *given]) == 2 and "positive" in capsys.readouterr().err
