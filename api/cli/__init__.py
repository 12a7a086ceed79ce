"""The `overwinter` command. Only `serve` ever imports torch, and not before it has its settings."""

from api.cli.app import main

__all__ = ["main"]
