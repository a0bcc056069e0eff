"""The verbs of the `thinwire` command, by name: the app's own, and those that packages add by the entry points `thinwire.verbs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from thinwire import registered


@dataclass(frozen=True)
class Verb:
    """A verb, of which nothing is loaded before it runs.

    Args:
        about: what it does, for `thinwire --help`.
        module: the module whose `main(arguments)` runs it and returns the exit code.
        reads: it only reads, and imports no file that a run folder names.
    """

    about: str
    module: str
    reads: bool = False

    def load(self) -> Any:
        """The module."""
        return import_module(self.module)


OWN = {
    name: Verb(
        about,
        f"thinwire.app.cli.{name}",
        name in ("report", "top", "checkpoints", "sample", "follow", "export", "evaluate"),
    )
    for name, about in {
        "train": "train one model on several replicas: a language model (without arguments: the demo), or a job of your own",
        "resume": "resume a run by its folder, also with another number of replicas",
        "new": "write a job file of your own to begin with: any model, any data",
        "compare": "train with several strategies on the same tokens and seeds, and print one table",
        "report": "draw one page for one or more runs",
        "top": "all replicas of a run on one screen",
        "checkpoints": "list, verify and prune the checkpoints of a run",
        "sample": "continue a text with a run's model, or an ensemble",
        "follow": "keep a model folder at a run's newest agreed weights",
        "export": "write a run's model for transformers, or as a file",
        "evaluate": "the loss of a run's model, or of an ensemble and each of its experts, on text",
        "probe": "measure links and machines, for plan",
        "plan": "rank settings for given links and machines, with reasons, and write the best one's run file",
        "lighthouse": "start the server at which the replicas of an elastic run find each other",
        "hub": "start the server that replicas on networks of others dial: mutual TLS, and a token to join",
        "join": "train as one replica of a run that meets at a hub, by its token",
        "doctor": "check this machine and a set-up",
        "docs": "show a page of the documentation",
    }.items()
}


def verbs() -> Mapping[str, Verb]:
    """All verbs; those of plan are named "plan.VERB"."""
    return OWN | {point.name: registered.load(point) for point in registered.points(registered.VERBS)}


def verb(name: str) -> Verb | None:
    """The verb `name`; None: there is none."""
    return OWN.get(name) or verbs().get(name)
