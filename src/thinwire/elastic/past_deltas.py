"""Deltas that a replica sent before and must not send again: the history that another member brings may have counted them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from thinwire.elastic.global_state import GlobalState

Record = Mapping[int, tuple[int, tuple[str, ...], str]]  # `GlobalState.counted`


class PastDeltas:
    """By fragment, the rounds that may have counted what this replica still holds as its own progress:

    - those since its checkpoint, if it resumed from one, until a delta of its present life counts;
    - the one whose decision it never learned, and which was not in the history of those whom it met then.

    >>> past = PastDeltas([0, 1], since=7)
    >>> past.counted_in(GlobalState([], [], round=9, counted={8: (0, ("oslo",), "")}), {}, "oslo", 0)
    True
    """

    def __init__(self, fragments: Iterable[int] = (), since: int = 0) -> None:
        self._since = dict.fromkeys(fragments, since)
        self._doubted: dict[int, int] = {}

    def doubted(self, fragment: int, number: int) -> None:
        """Round `number` is not in the history that was met, so its delta is sent again."""
        self._doubted[fragment] = number

    def forget(self, fragment: int) -> None:
        """A delta of `fragment` has counted, or this replica's progress in it was dropped."""
        self._since.pop(fragment, None)

    def counted_in(
        self, agreed: GlobalState, known: Record, name: str, fragment: int, own: Collection[int] = ()
    ) -> bool:
        """Whether the history `agreed` counted such a delta of `name`. `known` is the record before it, and `own` has rounds that counted
        deltas of the present life.
        """
        since, number = self._since.get(fragment), self._doubted.get(fragment, -1)
        return agreed.counted_unlike(known, number, name, fragment) or (
            since is not None and agreed.counted_since(since, name, fragment, own)
        )
