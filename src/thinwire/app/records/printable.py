"""Text for a terminal: untrusted text is escaped."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

LONGEST_TEXT = 4000  # most characters of one text


def printable(text: object, most: int = LONGEST_TEXT) -> str:
    """`text` on one line of at most `most` characters: what a terminal would obey, or not show, is spelled out.

    >>> print(printable("a\\x1b[31mb\\nc"))
    a\\x1b[31mb\\nc
    """
    said = str(text)
    kept = said[:most]
    if not kept.isprintable():
        kept = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return kept if len(said) <= most else f"{kept}… ({len(said) - most:,} characters more)"


def printable_lines(text: object, most: int = LONGEST_TEXT) -> str:
    """The same for text of several lines, each bounded by itself."""
    return "\n".join(printable(line, most) for line in str(text).split("\n"))


def reason(error: Exception) -> str:
    """The message of an error, without the numbers that Python puts before the words of the system."""
    return re.sub(r"\[Errno -?\d+\] ", "", str(error))


def quoted(path: Path | str) -> str:
    """A path or another word of a command that a person copies into a shell. It is in quotes if it needs them.

    >>> quoted(Path("runs/first")), quoted(Path("my runs/first"))
    ('runs/first', "'my runs/first'")
    """
    return shlex.quote(str(path))
