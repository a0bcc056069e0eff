"""Names that a refusal offers: the nearest one, and a list that stays short."""

from __future__ import annotations

import difflib
from collections.abc import Collection

MOST_LISTED = 12  # names that a message lists in full
SHOWN = 8  # names of a longer list that it shows


def nearest(name: str, known: Collection[str]) -> str:
    """A question whether the user meant the nearest of the `known` names; empty if none is near.

    >>> nearest("dilco", ["diloco", "qsr"])
    ' (did you mean diloco?)'
    """
    lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" (did you mean {lower[near[0]]}?)" if near else ""


def listed(names: Collection[str], where: str = "") -> str:
    """The names with commas. A long list is cut: the first names, the number of the others, and the command `where` that lists all.

    >>> listed(["a", "b"], "thinwire docs")
    'a, b'
    >>> listed([str(number) for number in range(46)], "thinwire docs pieces")
    '0, 1, 2, 3, 4, 5, 6, 7 and 38 more (`thinwire docs pieces`)'
    """
    shown = list(names)
    if len(shown) <= MOST_LISTED:
        return ", ".join(shown)
    told = f" (`{where}`)" if where else ""
    return f"{', '.join(shown[:SHOWN])} and {len(shown) - SHOWN} more{told}"
