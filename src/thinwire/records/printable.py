"""Escapes untrusted text for a terminal."""

from __future__ import annotations

LONGEST = 4000  # most characters of one text


def printable(text: object, most: int = LONGEST) -> str:
    """`text` on one line of at most `most` characters: what a terminal would obey, or not show, is spelled out.

    >>> print(printable("a\\x1b[31mb\\nc"))
    a\\x1b[31mb\\nc
    """
    said = str(text)
    kept = said[:most]
    if not kept.isprintable():
        kept = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return kept if len(said) <= most else f"{kept}… ({len(said) - most:,} characters more)"


def printable_lines(text: object, most: int = LONGEST) -> str:
    """The same for text of several lines, each bounded by itself."""
    return "\n".join(printable(line, most) for line in str(text).split("\n"))
