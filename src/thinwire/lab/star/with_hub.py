"""A group with one more member than replicas: a hub that averages their packets."""

from __future__ import annotations

from thinwire.comm.group import Messages, Sized, Transfer, WrappedGroup


class WithHub(WrappedGroup):
    """The replicas of a group whose last member is a hub: `size` counts the replicas, and the hub's rank is `size`.

    >>> from thinwire import run_threads
    >>> run_threads(3, lambda group: (WithHub(group).rank, WithHub(group).size))
    [(0, 2), (1, 2), (2, 2)]
    """

    @property
    def size(self) -> int:
        return self.group.size - 1

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`; the hub is a peer, too."""
        return self.group.post(tag, send, recv, purpose, sized)
