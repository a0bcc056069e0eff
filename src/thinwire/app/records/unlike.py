"""Runs whose replicas have a model each: what every one of them says at its end."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.app.records.replica_record import ReplicaRecord


def unlike(replicas: Sequence[ReplicaRecord]) -> bool:
    """Whether every replica has trained and evaluated a model of its own, by what they said."""
    ends = [replica.end["summary"] for replica in replicas if replica.end]
    return bool(ends) and all(end.get("eval_of") == "each" for end in ends)


def losses_of_each(replicas: Sequence[ReplicaRecord]) -> dict[str, object]:
    """The evaluation loss of each replica, by its name and model."""
    losses: dict[str, object] = {}
    for replica in replicas:
        run = replica.start["run"]
        model = run.get("model") if isinstance(run, dict) else None
        if replica.end:
            losses[f"{replica.called} ({model})"] = replica.end["summary"].get("eval_loss")
    return losses
