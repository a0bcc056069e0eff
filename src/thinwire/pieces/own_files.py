"""The user's own files: a job (`--job my_job.py`), and pieces (`my_file.py:Mine(3)` in any text of a piece).

A program imports the files that it names. A command imports a file if its own arguments name it, or if this user has trained with it on
this machine before (trust.py); a file that only a run file names is refused, unless `--trust` is given. Text from a peer, a packet
or a record imports nothing.

A run file keeps `/whole/path/my_file.py@DIGEST:Mine(3)` with the BLAKE2b of the content, and a file with other content is refused. The
file may import installed packages, but not files beside it.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from thinwire import trust
from thinwire.errors import ConfigurationError
from thinwire.files import contents
from thinwire.pieces.piece import DIGEST_OF_FILE

__path__: list[str] = []  # the user's files are modules below this one

_TRUSTED = "__thinwire_trusted__"
_UNNAMED = re.compile(r"\W")
_ONE_AT_A_TIME = threading.RLock()  # for imports of replicas in threads
_PATH = r"""(?P<path>[^\s'"(),=:@\[\]{}]+\.py)(?:@(?P<digest>[0-9a-f]{32}))?"""
_QUOTED = r"""(?P<quote>['"])(?P<spaced>[^'"\n]+\.py)(?:@(?P<mark>[0-9a-f]{32}))?(?P=quote)"""
_FILE = re.compile(r"(?P<path>.+\.py)(?:@(?P<digest>[0-9a-f]{32}))?")
_NAMED = re.compile(
    rf"""(?:{_PATH}|{_QUOTED}):(?P<name>[A-Za-z_]\w*)|(?P<text>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""", re.DOTALL
)


def waits(texts: Iterable[str | None]) -> bool:
    """Whether texts of pieces stay unread, because a command that only reads need not import the files that they name."""
    command = trust.command()
    return command is not None and command.reads and any(map(names_files, texts))


def names_files(text: str | None) -> bool:
    """Whether the text of a piece names a file of the user's own."""
    return text is not None and replace_paths(text, lambda path, digest, name: "") != text


def remember() -> None:
    """Trust the own files that this process has imported from now on: called when a command begins to train with them."""
    trust.remember([line for module in list(sys.modules.values()) if (line := vars(module).get(_TRUSTED))])


def _check_trust(path: Path, digest: str) -> None:
    """Raise `ConfigurationError` for a file that only a run file names, unless this user has trained with it."""
    command = trust.command()
    if command is None or "--trust" in command.arguments or path in _named_by(command):
        return
    if _trusted(path, digest) in trust.remembered():
        return
    todo = (
        "This command runs only code with which you have trained on this machine."
        if command.reads
        else "Read it, then add --trust to run it; or name it on the command line."
    )
    raise ConfigurationError(
        f"{path} is code that a run file names, and you have not trained with it on this machine: it may be a stranger's. {todo}"
    )


@cache
def _named_by(command: trust.Command) -> frozenset[Path]:
    """The own files that a command line names: jobs, and pieces in any argument."""
    named = set[Path]()

    def note(path: Path, digest: str | None, name: str) -> str:
        named.add(command.folder / path)
        return name

    for before, argument in zip(("", *command.arguments), command.arguments):
        replace_paths(argument, note)
        job = argument if before == "--job" else argument.removeprefix("--job=")
        if job != argument or before == "--job":
            named |= {command.folder / found["path"] for found in [_FILE.fullmatch(job)] if found}
    return frozenset(named)


def _trusted(path: Path, digest: str) -> str:
    """The line of the store for a file. With its path, because a file may read others beside it."""
    return f"{digest} {str(path)!r}"


def replace_paths(text: str, change: Callable[[Path, str | None, str], str]) -> str:
    """`text` in which each `path.py:name` outside string literals is replaced by `change(path, digest, name)`."""

    def each(found: re.Match[str]) -> str:
        if found["text"] is not None:
            return found[0]
        return change(Path(found["path"] or found["spaced"]), found["digest"] or found["mark"], found["name"])

    return _NAMED.sub(each, text)


def pin(text: str) -> str:
    """`text` with each of the user's own files written as its whole path and digest. Raises `ConfigurationError`."""

    def whole(path: Path, digest: str | None, name: str) -> str:
        where = f"{path.absolute()}@{digest or _digest(_read(path))}"
        return f"{where}:{name}" if re.fullmatch(_PATH, where) else f'"{where}":{name}'

    return replace_paths(text, whole)


def shorten(text: str) -> str:
    """`text` for people: each of the user's own files is written as its name alone."""
    return replace_paths(text, lambda path, digest, name: f"{path.name}:{name}")


def pinned_file(text: str) -> str:
    """`path.py` as /whole/path.py@DIGEST; an existing digest stays. Raises `ConfigurationError`."""
    path, digest = taken_apart(text)
    return f"{path.absolute()}@{digest or _digest(_read(path))}"


def taken_apart(text: str) -> tuple[Path, str | None]:
    """Path and digest of `path.py` or `path.py@DIGEST`. Raises `ConfigurationError`."""
    found = _FILE.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r}: a path that ends in .py is needed; give the path of your file.")
    return Path(found["path"]), found["digest"]


def file_of(text: str) -> ModuleType:
    """The module of `path.py` or `path.py@DIGEST`, imported once for each content. Raises `ConfigurationError`."""
    path, digest = taken_apart(text)
    return _imported(path.absolute(), digest)


def resolve(text: str) -> tuple[str, dict[str, Callable[..., Any]]]:
    """`text` with a plain name instead of each `path.py:name`, and the objects of these names."""
    names: dict[str, Callable[..., Any]] = {}

    def each(path: Path, digest: str | None, name: str) -> str:
        names[f"own_{len(names)}_{name}"] = load(path, digest, name)
        return list(names)[-1]

    return replace_paths(text, each), names


def load(path: Path, digest: str | None, name: str) -> Any:
    """`name` in the file at `path`, which is imported once for each content. Raises `ConfigurationError`."""
    module = _imported(path.absolute(), digest)
    made = None if name.startswith("_") else getattr(module, name, None)
    if not callable(made):
        own = [
            n
            for n, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and n[0] != "_"
        ]
        raise ConfigurationError(
            f"{path} has no piece {name!r}; it has {', '.join(own) or 'none'}. Write {path.name}:NAME(...) with one of these."
        )
    if lacks := sorted(getattr(made, "__abstractmethods__", ())):
        kinds = ", ".join(
            base.__name__ for base in made.__mro__[1:] if getattr(base, "_is_protocol", False) and base is not Protocol
        )
        raise ConfigurationError(
            f"{path}: {name} lacks {', '.join(lacks)}, which a {kinds} needs; add what is missing."
        )
    return made


def _imported(path: Path, digest: str | None) -> ModuleType:
    with _ONE_AT_A_TIME:  # a module is in sys.modules before all of its names are
        if digest is not None and (known := sys.modules.get(_name(path, digest))):
            _check_trust(path, digest)
            return known
        if digest is not None and not path.exists() and (moved := _moved.get(digest, path)) != path:
            return _imported(moved, digest)
        source = _read(path)
        found = _digest(source)
        if digest not in (None, found):
            raise ConfigurationError(
                f"{path} has changed since this run began: its digest was {digest} and is {found}. Restore the file, or start a new run "
                "in another --out."
            )
        _check_trust(path, found)
        _moved.setdefault(found, path)
        return sys.modules.get(_name(path, found)) or _executed(_name(path, found), path, source)


# where files that were imported are, by their digest: a run file that was moved with them names their former paths
_moved: dict[str, Path] = {}


def _executed(name: str, path: Path, source: bytes) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, _Source(path, source), origin=str(path))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)  # a file finds the data beside it by this name
    setattr(module, DIGEST_OF_FILE, _digest(source))
    setattr(module, _TRUSTED, _trusted(path, _digest(source)))
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        del sys.modules[name]
        raise ConfigurationError(f"{path} cannot be imported ({type(error).__name__}: {error}); correct it.") from error
    return module


def _name(path: Path, digest: str) -> str:
    """The name of the module. Two paths with the same content are two modules. It holds the path, because a worker that a loader starts by spawn
    or forkserver imports the module of the dataset's class by its name.
    """
    return ".".join([__name__, f"{_UNNAMED.sub('_', path.stem)}@{digest}@{os.fsencode(path).hex()}"])


def _read(path: Path) -> bytes:
    try:
        return contents(path).encode()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as a Python file ({error}); check the path, which is relative to the current folder. "
            "If a run was moved, give the new one, such as --job NEW_PATH: its content is compared."
        ) from None


def _digest(source: bytes) -> str:
    return hashlib.blake2b(source, digest_size=16).hexdigest()


class _Source(importlib.abc.SourceLoader):
    """Runs the bytes whose digest was computed, without a cache of compiled code, and without reading the file again."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self._source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: Any) -> bytes:
        return self._source


class _Workers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the user's files in a worker process, by the path and the digest in their names."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        known = name.startswith(f"{__name__}.") and name.count("@") == 2
        return importlib.util.spec_from_loader(name, self) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        _, digest, path = spec.name.split("@")
        try:
            return _imported(Path(os.fsdecode(bytes.fromhex(path))), digest)
        except (ConfigurationError, ValueError) as error:
            raise ImportError(str(error)) from error

    def exec_module(self, module: ModuleType) -> None:
        return  # it was executed


sys.meta_path.append(_Workers())
