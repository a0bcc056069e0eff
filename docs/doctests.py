"""Examples in docstrings, `>>> ...` with what they print, shown as code in the API reference. mkdocs.yml names this file."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"(?:^>>> .*\n(?:(?!\s*$).+\n?)*\n?(?=>>> |\s|$))+", re.MULTILINE)


class Doctests(Extension):
    """Puts a fence around each example, before the docstring is read as Markdown."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n\n", obj.docstring.value
            )
