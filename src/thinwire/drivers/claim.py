"""A group carries one Replica at a time: packets do not name their Replica, so those of two would mix."""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakValueDictionary, finalize, ref

from thinwire.comm.group import ElasticGroup, Group, WrappedGroup
from thinwire.errors import ConfigurationError

# By the id of the carrier, which its claim keeps alive.
_claims: WeakValueDictionary[int, GroupClaim] = WeakValueDictionary()

# By its id: a carrier whose Replica was dropped. What that one still waits for would take the messages to the next one.
_dropped: WeakValueDictionary[int, Group] = WeakValueDictionary()


class GroupClaim:
    """A Replica's claim on the carrier below `group`, from `take` to `release`. Raises `ConfigurationError` if another one has it."""

    def __init__(self, group: Group | ElasticGroup) -> None:
        if not isinstance(group, (Group, ElasticGroup)):
            raise ConfigurationError(
                f"group: a {type(group).__name__} was given; this replica's Group or Membership is needed (docs/own-loop.md)."
            )
        while isinstance(group, WrappedGroup):
            group = group.group
        self._carrier, self._held = group, False
        self._drop: finalize[..., GroupClaim] | None = None
        if _dropped.get(id(group)) is group:
            raise ConfigurationError(
                "this group has had a Replica or a GradientHook that was neither finished nor closed, and some of its messages are still open. "
                "Make another group on all replicas; next time call finish() or close() before you drop one."
            )
        before = _claims.get(id(group))
        if before and before._held:
            raise ConfigurationError(
                "this group has a Replica or a GradientHook that has not finished, or was closed with rounds in flight, and their packets would "
                "mix. Finish it, or make a group for each; one Replica takes both models as one module, with their optimizers in a list."
            )

    def take(self) -> None:
        """Called when the Replica is complete: one that failed has no claim."""
        self._held = True
        _claims[id(self._carrier)] = self
        if isinstance(self._carrier, Group) and self._carrier.size > 1:
            with suppress(TypeError):  # a carrier of which there are no weak references
                ref(self._carrier)
                self._drop = finalize(self, _dropped.__setitem__, id(self._carrier), self._carrier)
                self._drop.atexit = False

    def release(self, over: bool) -> None:
        """Called at the end; the claim stays if rounds are not `over`, because their packets may still arrive."""
        self._held &= not over
        if self._drop:
            self._drop.detach()
