"""The command line: one file per command."""

from startrail.cli.app import main

__all__ = ["main"]
