"""A group of some of the replicas of another group."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.comm.group import Group, Messages, Sized, Transfer, WrappedGroup


class PartGroup(WrappedGroup):
    """The replicas `members` of a group, this one among them; their ranks are their places in `members`.

    It belongs to the group that carries it: `close` does nothing.

    Args:
        group: carries the messages.
        members: ranks in `group`.

    >>> from thinwire import run_threads
    >>> run_threads(3, lambda group: PartGroup(group, (2, 0)).rank if group.rank != 1 else None)
    [1, None, 0]
    """

    def __init__(self, group: Group, members: Sequence[int]) -> None:
        super().__init__(group)
        self.members = tuple(members)

    @property
    def rank(self) -> int:
        return self.members.index(self.group.rank)

    @property
    def size(self) -> int:
        return len(self.members)

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`; peers are places in `members`."""
        sent, received = ({self.members[peer]: one for peer, one in those.items()} for those in (send, recv))
        return self.group.post(tag, sent, received, purpose, sized)

    def close(self) -> None:
        """Do nothing: the group of all replicas stays open."""
