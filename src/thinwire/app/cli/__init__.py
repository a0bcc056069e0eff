"""The `thinwire` command: one verb, one file."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from textwrap import fill

from thinwire.app.cli.signals import handled
from thinwire.app.cli.streams import outliving_their_reader
from thinwire.app.records.printable import printable_lines, reason
from thinwire.choices import listed, nearest
from thinwire.errors import JobError, ThinwireError
from thinwire.trust import commanded
from thinwire.version import __version__

VERBS = {
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
    "branch": "train an expert for a domain from a run's model, into an ensemble",
    "simulate": "simulate runs on given links and machines, without training",
    "probe": "measure links and machines, for plan",
    "plan": "rank settings for given links and machines, with reasons, and write the best one's run file",
    "lighthouse": "start the server at which the replicas of an elastic run find each other",
    "hub": "start the server that replicas on networks of others dial: mutual TLS, and a token to join",
    "join": "train as one replica of a run that meets at a hub, by its token",
    "doctor": "check this machine and a set-up",
    "docs": "show a page of the documentation",
}

# these import no file that a run folder names
READING = ("report", "top", "checkpoints", "sample", "follow", "export", "evaluate")

_USAGE = "\n".join(
    [
        "thinwire: train one model on many replicas joined by thin links",
        "",
        "usage: thinwire VERB [options]      (thinwire VERB --help shows the options)",
        "",
        *(fill(text, 79, initial_indent=f"  {verb:<13}", subsequent_indent=" " * 15) for verb, text in VERBS.items()),
        "",
        "Every verb takes --json: progress goes to stderr, stdout ends with one JSON.",
    ]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb of the `thinwire` command.

    Args:
        arguments: the verb and its options; None: those of this process.

    Returns:
        The exit code: 0; 2, the command line is wrong, or names what is not there; 3, the training has diverged; 1, anything else that
        failed; 128 + the number of the signal that stopped it (130 after Ctrl-C).

    >>> import contextlib, io
    >>> with contextlib.redirect_stdout(io.StringIO()) as printed:
    ...     code = main(["--version"])
    >>> code, printed.getvalue().strip() == __version__
    (0, True)
    """
    with outliving_their_reader():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        said = f"{verb!r} is no verb{nearest(verb, VERBS)}; there are {listed(VERBS)}. `thinwire --help` explains them."
        print(f"thinwire: {printable_lines(said)}", file=sys.stderr)
        return 2
    try:
        # SIGTERM and SIGHUP (a closed terminal) end a verb like Ctrl-C, so that it cleans up; one that trains has its own handler
        with (
            handled(_end, signal.SIGTERM, signal.SIGHUP),
            commanded(rest, reads=verb in READING),
        ):
            return int(importlib.import_module(f"thinwire.app.cli.{verb}").main(rest))
    except JobError as error:  # an error in the user's own file: only its line is shown
        print(printable_lines(str(error)), file=sys.stderr)
        return 1
    except ThinwireError as error:
        print(printable_lines(f"thinwire {verb}: {reason(error)}"), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except OSError as error:  # a full disk, a missing folder
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        what += ", and a folder is needed" if isinstance(error, FileExistsError) else ""
        said = f"thinwire {verb}: {what}. Check the path, its permissions and the free space."
        print(printable_lines(said), file=sys.stderr)
        return 2 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 1
    except KeyboardInterrupt as stop:
        print(f"thinwire {verb}: interrupted", file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)
