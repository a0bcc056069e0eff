"""Everything Thinwire raises on purpose.

    ThinwireError
    ├── ConfigurationError (ValueError)   a combination that cannot work; raised when it is made
    ├── ModelError                        a model or optimizer that cannot be served
    ├── DataError                         text that is empty or unreadable
    │   └── MissingError (ValueError)     a path was given, and what is needed is not there
    ├── JobError                          a fault in a job file of the user's own
    ├── CheckpointError                   a checkpoint that is damaged, foreign or absent
    ├── PacketError                       bytes from a peer that are not the expected packet
    ├── NonFiniteError                    NaN or infinity in a delta; refused before it reaches an anchor
    └── PeerError                         the fault lies between replicas
        ├── DisagreementError             replicas differ in model, strategy or protocols
        ├── EndedError                    the run has ended without this replica
        └── LinkError                     a peer is gone, or a message did not come in time
            └── UndecidedError            what the members of a view decided cannot be learnt

Every message says what was given, what is needed and what to do.
"""

from __future__ import annotations


class ThinwireError(Exception):
    """The base class of all errors that Thinwire raises on purpose."""


class ConfigurationError(ThinwireError, ValueError):
    """A combination of settings that cannot work. It is raised when the object is made, not when it runs."""


class ModelError(ThinwireError):
    """A model or optimizer that cannot be trained."""


class DataError(ThinwireError):
    """Text that is missing, empty or unreadable."""


class MissingError(DataError, ValueError):
    """A path was given, and what is needed is not there: the caller's mistake, like a wrong setting."""


class JobError(ThinwireError):
    """A fault in the user's job file: its path, its line and Python's error, or the missing part."""


class CheckpointError(ThinwireError):
    """A checkpoint that is damaged, foreign or absent."""


class PacketError(ThinwireError):
    """Bytes from a peer that are not the expected packet. `peer` is the rank of that replica, if it is known."""

    peer: int | None = None


class NonFiniteError(ThinwireError):
    """NaN or infinity in a delta."""


class PeerError(ThinwireError):
    """The base class of errors between replicas. `advice`, the end of the message, is for a run that ends with it; `cause` is what is before."""

    advice = ""

    @property
    def cause(self) -> str:
        return str(self).removesuffix(self.advice).rstrip()


class DisagreementError(PeerError):
    """Replicas differ in model or strategy, or speak no common protocol."""


class EndedError(PeerError):
    """The run has ended without this replica, and no member that is there keeps its final state."""


class LinkError(PeerError):
    """A peer was lost, or a message was late. `peer` is the rank of that replica, if it is known."""

    peer: int | None = None


class UndecidedError(LinkError):
    """What the members of a view decided cannot be learnt: it may be yes, it may be no."""
