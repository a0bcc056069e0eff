"""`thinwire plan`, and its further commands."""

from thinwire.cli.plan.command import Options, main

__all__ = ["Options", "main"]
