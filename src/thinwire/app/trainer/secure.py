"""A replica of a fixed group that meets at a hub, and the run file that the hub sends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.app.records.run_file import read_run_file
from thinwire.app.trainer.launch import Stop, train_here
from thinwire.app.trainer.model import SIZES
from thinwire.app.trainer.place import Place
from thinwire.app.trainer.run import OF_PIECES, Run
from thinwire.comm import Group, parse_link
from thinwire.errors import ConfigurationError, LinkError
from thinwire.net import SecureGroup, join
from thinwire.net.frames import with_reducer
from thinwire.net.state import REDUCER
from thinwire.pieces.own_files import shorten
from thinwire.registered import setting

_CORRECT = (
    "have it corrected and the hub started again with --run-file, or give each replica a run file of its own: thinwire join TOKEN run.toml "
    "--name NAME."
)


def train_member(run: Run, folder: Path, group: SecureGroup, resume: bool, stop: Stop) -> dict[str, Any]:
    """Train as one replica of a complete group, with its own `folder`."""
    own = replicas_of(run, group)
    return train_here(run, Place(own, folder, resume, stop=stop, alone=True, uploader=group.uploader))


def join_for(
    run: Run, token: str, name: str, keys: Path, word: str, timeout: float,
    say: Callable[[str], object] = lambda state: None,
) -> SecureGroup:  # fmt: skip
    """Join the hub of `token` for `run`, and wait for the other replicas, which send the same `word`. `say` is called with each new state
    of the wait.
    """
    link = parse_link(run.placement.uplink)
    size, rate = run.placement.replicas, link.bits_per_second if link else None
    if not run.needs_hub:
        group = join(token, name, size, keys, word, timeout, rate, say=say, warn=_unsaid)
    else:
        group = join(token, name, size + 1, keys, with_reducer(word), timeout, rate, 0, say, _unsaid)
        if group.names[-1] != REDUCER:  # whose name the hub gives to its own reducer alone
            group.close()
            raise LinkError(
                f"{group.names[-1]} has taken the place of the hub's reducer; revoke it: thinwire hub revoke NAME."
            )
    group.use_timeout(run.placement.timeout)
    return group


def _unsaid(text: str) -> None:
    """The command says who is away, beside its progress."""


def replicas_of(run: Run, group: SecureGroup) -> Group:
    """The group of the replicas alone, without the hub's reducer."""
    return setting("reduce").WithHub(group) if run.needs_hub else group


def run_of_hub(path: Path, elastic: bool) -> Run:
    """The run of a run file that a hub sends to its members. It must not name files of their machines, because then another machine would
    decide which files are read or run there. Raises `ConfigurationError`, at the hub and at a member.
    """
    try:
        settings, _ = read_run_file(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the hub's run file cannot be read ({error}); {_CORRECT}") from None
    tokenizer = str(settings.get("tokenizer") or "bytes")
    named = [name for name in ("text", "job") if settings.get(name)]
    named += ["model"] if str(settings.get("model", "nano")) not in SIZES else []
    models = settings.get("models") or []
    named += ["models"] if not isinstance(models, list) or not set(map(str, models)) <= SIZES.keys() else []
    named += [] if tokenizer == "bytes" or tokenizer.removeprefix("bpe:").isdigit() else ["tokenizer"]
    for name in OF_PIECES:
        text = str(settings.get(name) or "")
        if ".py" in text or shorten(text) != text:
            named.append(name)
    if named:
        raise ConfigurationError(
            f"the hub's run file names files or models in {', '.join(named)}, and a hub may name none on the machines of its "
            f"members; {_CORRECT}"
        )
    try:
        return Run.load(path).changed(carrier="secure-elastic" if elastic else "secure")
    except ConfigurationError as error:
        why = str(error).removeprefix(f"{path}: ").removesuffix(".")
        raise ConfigurationError(f"the hub's run file is refused ({why}); {_CORRECT}") from None
