"""What a replica that resumed must not send again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from thinwire.elastic.global_state import GlobalState


class Resumed:
    """Knows from which round's checkpoint the progress in each fragment is, until a delta of it counts in this life.

    The replica may have sent this progress before it was killed, and a member that comes later may bring a history in which it was counted.

    >>> Resumed([0, 1], 7).counted_in(GlobalState([], [], round=9, counted={8: (0, ("oslo",), "")}), "oslo", 0)
    True
    """

    def __init__(self, fragments: Iterable[int] = (), number: int = 0) -> None:
        self._since = dict.fromkeys(fragments, number)

    def forget(self, fragment: int) -> None:
        """A delta of `fragment` has counted, or its progress was dropped."""
        self._since.pop(fragment, None)

    def counted_in(self, agreed: GlobalState, name: str, fragment: int, own: Collection[int] = ()) -> bool:
        """Whether a round since the checkpoint, other than those of this life (`own`), counted a delta of `name` of this fragment."""
        since = self._since.get(fragment)
        return since is not None and agreed.counted_since(since, name, fragment, own)
