"""Versions as a publisher has them, and a publisher with a valid key that sends arbitrary bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_member import RawMember, RawStream
from safetensors.torch import save_file
from torch import nn

from thinwire.app.trainer.publish import Publisher
from thinwire.net import PublishedAtHub, Token
from thinwire.net.frames import CHUNK_NBYTES
from thinwire.net.upload import HubUploader
from thinwire.pieces.partition import Fragment

Spoil = Callable[[str, int, bytes], bytes]


def publisher(
    folder: Path,
    model: nn.Module,
    make_uploader: Callable[[], HubUploader] | None = None,
    failed: Callable[[str], object] = pytest.fail,
) -> Publisher:
    """A publisher of a model of one fragment, and of a file beside it that is empty."""
    fragment = Fragment("all", tuple(model.named_parameters()))

    def write(draft: Path) -> None:
        save_file(model.state_dict(), draft / "model.safetensors")
        (draft / "empty.txt").touch()

    return Publisher(folder, [fragment], write, failed, make_uploader)


def flat(model: nn.Module) -> torch.Tensor:
    """The values of its one fragment."""
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@dataclass
class Version:
    """A list, and the objects that it names, by their SHA-256."""

    listed: bytes
    objects: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def made(cls, folder: Path, step: int, width: int = 600) -> Version:
        """A version of several chunks, made by a real publisher in `folder`."""
        model = nn.Linear(width, width)
        made = publisher(folder, model)
        made.offer(step, [flat(model)])
        made.close()
        objects = {path.name: path.read_bytes() for path in (folder / "objects").iterdir()}
        return cls((folder / "list.json").read_bytes(), objects)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.listed).hexdigest()

    @property
    def largest(self) -> str:
        """The SHA-256 of its largest object."""
        return max(self.objects, key=lambda name: len(self.objects[name]))

    def changed(self, change: Callable[[dict[str, Any]], object]) -> Version:
        """The version with a changed list."""
        said = json.loads(self.listed)
        change(said)
        return Version(json.dumps(said).encode(), self.objects)

    def with_layout(self, change: Callable[[dict[str, Any]], object]) -> Version:
        """The version with a changed layout."""
        said = json.loads(self.listed)
        layout = json.loads(self.objects[said["layout"]["digest"]])
        change(layout)
        text = json.dumps(layout).encode()
        digest = hashlib.sha256(text).hexdigest()
        said["layout"] = {"digest": digest, "nbytes": len(text)}
        return Version(json.dumps(said).encode(), self.objects | {digest: text})


def offered(stream: RawStream, version: Version, nbytes: int | None = None) -> None:
    """Offers the version."""
    size = len(version.listed) if nbytes is None else nbytes
    stream.raw(struct.pack("<32sQ", bytes.fromhex(version.digest), size))


def wanted(stream: RawStream) -> tuple[str, int] | None:
    """The object and the offset that the hub asks for; None at the end of the version."""
    said = next(stream.call)
    if len(said) == 32:
        return None
    digest, offset = struct.unpack("<32sQ", said)
    return digest.hex(), offset


def sent(
    stream: RawStream, version: Version, spoil: Spoil = lambda digest, offset, chunk: chunk
) -> list[tuple[str, int]]:
    """Sends the version, each chunk as `spoil` changes it. Returns what the hub has asked for. Raises `grpc.RpcError`."""
    offered(stream, version)
    asked = []
    while (want := wanted(stream)) is not None:
        asked.append(want)
        whole = version.listed if want[0] == version.digest else version.objects[want[0]]
        stream.raw(spoil(*want, whole[want[1] : want[1] + CHUNK_NBYTES]))
    return asked


def publish(member: RawMember, version: Version) -> list[tuple[str, int]]:
    """Sends an honest version. Returns what the hub has asked for."""
    return sent(member.publishing(), version)


def served(token: Token, folder: Path) -> bytes | None:
    """The list that a follower gets from the hub."""
    with PublishedAtHub(str(token), "follower-kyoto", folder) as origin:
        return origin.newest()
