"""Docstrings as the API reference wants them: examples as code, one parameter a line. mkdocs.yml names this file."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"(?:^>>> .*\n(?:(?!\s*$).+\n?)*\n?(?=>>> |\s|$))+", re.MULTILINE)
_SHARED = re.compile(r"^    (\w+(?:, \w+)+): (.*)$", re.MULTILINE)


class Docstrings(Extension):
    """Changes each docstring before it is read as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = apart(fenced(obj.docstring.value))


def fenced(text: str) -> str:
    """With a fence around each example, `>>> ...` and what it prints."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n\n", text)


def apart(text: str) -> str:
    """With a line for each parameter of `Args:`, where several share one, as in `    rank, size: ...`."""
    before, args, section = text.partition("\nArgs:\n")
    lines, blank, after = section.partition("\n\n")
    split = _SHARED.sub(lambda found: "\n".join(f"    {name}: {found[2]}" for name in found[1].split(", ")), lines)
    return before + args + split + blank + after
